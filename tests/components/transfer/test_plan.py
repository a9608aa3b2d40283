"""The planner: against a copy element by element, and what it promises about the number of pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.engine.ranges import share_heads
from components.kv.layout import block_bytes
from components.messages import KVLayout
from components.transfer.plan import LayoutMismatch, Side, cover, plan, route, whole_blocks


def make_layout(block_size=4, heads=(0, 3), num_kv_heads=3, **changes):
    fields = {"model": "m", "dtype": "float16", "num_layers": 2, "head_dim": 3} | changes
    return KVLayout(block_size=block_size, num_kv_heads=num_kv_heads, head_start=heads[0], head_stop=heads[1], **fields)


def make_region(layout, num_blocks, *, fill=None):
    shape = (num_blocks, layout.head_stop - layout.head_start, layout.num_layers, 2, layout.block_size, layout.head_dim)
    region = np.zeros(shape, np.uint16)
    if fill is not None:
        region[...] = np.arange(fill, fill + region.size, dtype=np.uint64).reshape(shape).astype(np.uint16)
    return region


def naive_copy(way, source_region, source, target_region, target, start, stop):  # noqa: PLR0917
    for token in range(start, stop):
        block, offset = divmod(token - source.first_token, way.source.block_size)
        to_block, to_offset = divmod(token - target.first_token, way.target.block_size)
        for head in range(way.head_start, way.head_stop):
            for layer in range(way.source.num_layers):
                for kv in (0, 1):
                    value = source_region[source.block_ids[block], head - way.source.head_start, layer, kv, offset]
                    at = (target.block_ids[to_block], head - way.target.head_start, layer, kv, to_offset)
                    target_region[at] = value


def planned_copy(pieces, source_region, target_region):
    source, target = source_region.view(np.uint8).reshape(-1), target_region.view(np.uint8).reshape(-1)
    for at, to, size in zip(pieces.source, pieces.target, pieces.sizes, strict=True):
        target[to : to + size] = source[at : at + size]


@st.composite
def transfers(draw):
    heads = draw(st.integers(1, 3))
    sizes = draw(st.sampled_from([(4, 4), (2, 4), (4, 2), (1, 4), (8, 2), (1, 1)]))
    ranges = []
    for _ in range(2):
        start = draw(st.integers(0, heads - 1))
        ranges.append((start, draw(st.integers(start + 1, heads))))
    if max(ranges[0][0], ranges[1][0]) >= min(ranges[0][1], ranges[1][1]):
        ranges[1] = ranges[0]
    layouts = [make_layout(size, r, heads, num_layers=draw(st.just(2))) for size, r in zip(sizes, ranges, strict=True)]
    start = draw(st.integers(0, 17))
    stop = draw(st.integers(start, start + 17))
    sides = []
    for layout in layouts:
        first = start // layout.block_size * layout.block_size
        count = -(-(stop - first) // layout.block_size)
        sides.append(Side(draw(st.permutations(range(count + 1)))[:count], first))
    return layouts, sides, start, stop


@settings(max_examples=200, deadline=None)
@given(transfers())
def test_the_plan_moves_exactly_what_a_naive_copy_moves(case):
    (source_layout, target_layout), (source, target), start, stop = case
    way = route(source_layout, target_layout)
    region = make_region(source_layout, len(source.block_ids) + 1, fill=1)
    expected = make_region(target_layout, len(target.block_ids) + 1)
    actual = expected.copy()

    naive_copy(way, region, source, expected, target, start, stop)
    planned_copy(plan(way, source, target, start=start, stop=stop), region, actual)

    assert np.array_equal(actual, expected)


@st.composite
def teams(draw):
    """Two tensor-parallel workers of one model, of any degrees and block sizes."""
    num_kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    sizes = draw(st.sampled_from([(4, 4), (2, 4), (4, 2), (1, 4), (8, 2)]))
    sides = []
    for size in sizes:
        shares = share_heads(num_kv_heads * group, num_kv_heads, draw(st.integers(1, num_kv_heads * group)))
        sides.append([make_layout(size, (s.kv_start, s.kv_stop), num_kv_heads) for s in shares])
    return *sides, draw(st.integers(1, 20))


@settings(max_examples=150, deadline=None)
@given(teams())
def test_any_degree_to_any_degree_gives_every_rank_its_heads(case):
    sources, targets, num_tokens = case
    whole = make_region(make_layout(sources[0].block_size, (0, n := sources[0].num_kv_heads), n), 20, fill=1)
    regions = [np.ascontiguousarray(whole[:, s.head_start : s.head_stop]) for s in sources]
    source, target = (Side(range(20)[::-1], 0) for _ in range(2))
    everything = make_layout(targets[0].block_size, (0, n), n)
    wanted = make_region(everything, 20)
    way = route(make_layout(sources[0].block_size, (0, n), n), everything)
    naive_copy(way, whole, source, wanted, target, 0, num_tokens)

    for layout in targets:
        got = make_region(layout, 20)
        for index, part in cover(sources, layout):
            pieces = plan(part, source, target, start=0, stop=num_tokens)
            planned_copy(pieces, regions[index], got)
            if part.is_blockwise and num_tokens % layout.block_size == 0:
                assert pieces.count == num_tokens // layout.block_size, "one descriptor per block and pair of ranks"
        assert np.array_equal(got, wanted[:, layout.head_start : layout.head_stop])


def test_equal_block_sizes_give_one_piece_per_block():
    layout = make_layout()

    pieces = plan(route(layout, layout), Side([5, 2, 7], 8), Side([0, 3], 12), start=12, stop=20)

    assert pieces.count == 2
    assert pieces.num_bytes == 2 * block_bytes(layout)
    assert [ids.tolist() for ids in pieces.blocks] == [[2, 7], [0, 3]]


def test_a_part_of_the_heads_is_one_piece_per_block_as_well():
    way = route(make_layout(heads=(0, 3)), make_layout(heads=(1, 3)))

    pieces = plan(way, Side([1, 2], 0), Side([0, 1], 0), start=0, stop=8)

    assert pieces.count == 2
    assert pieces.sizes.tolist() == [block_bytes(way.target)] * 2
    assert pieces.source[0] == block_bytes(way.source) + block_bytes(way.source) // 3  # block 1, head 1


def test_unequal_block_sizes_give_a_piece_per_run_head_layer_and_plane():
    way = route(make_layout(2), make_layout(4))

    pieces = plan(way, Side([0, 1], 0), Side([0], 0), start=0, stop=4)

    assert pieces.count == 2 * 3 * 2 * 2
    assert pieces.blocks is None


def test_pieces_that_follow_each_other_on_both_sides_are_merged():
    layout = make_layout()

    pieces = plan(route(layout, layout), Side([0, 1], 0), Side([0, 1], 0), start=2, stop=8)

    assert pieces.count == 3 * 2 * 2  # block 0 from token 2 on by plane; block 1 follows the last plane


def test_an_empty_range_has_no_pieces():
    layout = make_layout()

    assert plan(route(layout, layout), Side([], 0), Side([], 0), start=4, stop=4).count == 0


def test_the_last_block_is_rounded_up_only_where_it_saves_pieces():
    assert whole_blocks(route(make_layout(), make_layout()), 9) == 12
    assert whole_blocks(route(make_layout(), make_layout()), 8) == 8
    assert whole_blocks(route(make_layout(2), make_layout(4)), 9) == 9


def test_tokens_outside_the_blocks_are_an_error():
    layout = make_layout()

    with pytest.raises(ValueError, match="do not lie in 1 block from"):
        plan(route(layout, layout), Side([0], 0), Side([0, 1], 0), start=0, stop=8)


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "x"), ("dtype", "float32"), ("num_layers", 7), ("head_dim", 8), ("version", 2), ("num_kv_heads", 5)],
)
def test_a_mismatch_names_the_field_and_both_values(field, value):
    source = make_layout()
    target = make_layout(**{field: value})

    with pytest.raises(LayoutMismatch) as fault:
        route(source, target)

    assert field in str(fault.value)
    assert repr(value) in str(fault.value)
    assert repr(getattr(source, field)) in str(fault.value)


def test_block_sizes_must_be_multiples():
    with pytest.raises(LayoutMismatch, match="block_size is 6 at the source and 4 at the target"):
        route(make_layout(6), make_layout(4))


def test_ranks_without_a_common_head_have_no_route():
    with pytest.raises(LayoutMismatch, match="no KV head in common"):
        route(make_layout(heads=(0, 1)), make_layout(heads=(2, 3)))


def test_cover_reads_each_head_once_from_uneven_and_replicated_ranks():
    sources = [make_layout(heads=(0, 2)), make_layout(heads=(0, 2)), make_layout(heads=(2, 3))]

    routes = cover(sources, make_layout(heads=(0, 3)))

    assert [(i, r.head_start, r.head_stop) for i, r in routes] == [(0, 0, 2), (2, 2, 3)]


def test_cover_names_a_head_nobody_holds():
    with pytest.raises(LayoutMismatch, match="KV head 2 of 3"):
        cover([make_layout(heads=(0, 2))], make_layout(heads=(0, 3)))
