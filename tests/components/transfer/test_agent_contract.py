"""The contract of a transfer agent, on the in-process one and on NIXL over shared memory."""

from __future__ import annotations

import importlib.util
import time

import numpy as np
import pytest

from components.kv.layout import block_bytes
from components.messages import KVLayout
from components.transfer.agent import LocalRegion, TransferError
from components.transfer.memory import Faults, MemoryAgent
from components.transfer.nixl import NixlAgent
from components.transfer.plan import Side, plan, route

HAS_NIXL = importlib.util.find_spec("nixl") is not None
NUM_BLOCKS = 8


def make_layout(block_size=4, heads=(0, 3)):
    return KVLayout("m", "float16", block_size, 2, 3, 8, *heads)


class Site:
    """An agent over a region of its own."""

    def __init__(self, make, layout, *, fill):
        self.layout = layout
        self.memory = np.zeros((NUM_BLOCKS, block_bytes(layout)), np.uint8)
        if fill:
            self.memory[...] = np.random.default_rng(fill).integers(0, 256, self.memory.shape, np.uint8)
        region = LocalRegion(layout, self.memory.ctypes.data, NUM_BLOCKS, block_bytes(layout))
        self.agent = make(region)


@pytest.fixture(
    scope="module",
    params=["memory", pytest.param("nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed"))],
)
def site(request):
    """Makes sites of one kind; all are closed with the module."""
    make_agent = MemoryAgent if request.param == "memory" else NixlAgent
    made = []

    def make(layout=None, *, fill=0):
        made.append(Site(make_agent, layout or make_layout(), fill=fill))
        return made[-1]

    yield make
    for each in reversed(made):
        each.agent.close()


@pytest.fixture(scope="module")
def joined(site):
    """A source full of bytes, and a target connected to it."""
    source, target = site(fill=1), site()
    target.agent.connect(source.agent.region, route(source.layout, target.layout))
    return source, target


def finish(agent, handle, *others):
    deadline = time.monotonic() + 5
    while (state := agent.poll(handle)) == "pending":
        assert time.monotonic() < deadline, "the READ does not end"
        for other in others:
            other.progress()
    return state


def test_whole_blocks_arrive_where_they_belong_and_nowhere_else(joined):
    source, target = joined
    target.memory[...] = 0
    pieces = plan(route(source.layout, target.layout), Side([5, 2, 7], 0), Side([1, 6, 3], 0), start=0, stop=12)

    state = finish(target.agent, target.agent.post(source.agent.name, pieces), source.agent)

    assert state == "done"
    assert np.array_equal(target.memory[[1, 6, 3]], source.memory[[5, 2, 7]])
    assert not target.memory[[0, 2, 4, 5, 7]].any()


def test_two_reads_at_once(joined):
    source, target = joined
    way = route(source.layout, target.layout)
    reads = [
        target.agent.post(source.agent.name, plan(way, Side([i], 0), Side([7 - i], 0), start=0, stop=4)) for i in (0, 1)
    ]

    assert [finish(target.agent, read, source.agent) for read in reads] == ["done", "done"]
    assert np.array_equal(target.memory[[7, 6]], source.memory[[0, 1]])


def test_parts_of_blocks_arrive_piece_by_piece(joined, site):
    source, _ = joined
    target = site(make_layout(block_size=8))
    way = route(source.layout, target.layout)
    target.agent.connect(source.agent.region, way)
    pieces = plan(way, Side([3, 1], 0), Side([2], 0), start=0, stop=8)

    assert finish(target.agent, target.agent.post(source.agent.name, pieces), source.agent) == "done"

    rows = target.memory[2].reshape(3, 2, 2, 8, 16)
    assert np.array_equal(rows[..., :4, :], source.memory[3].reshape(3, 2, 2, 4, 16))
    assert np.array_equal(rows[..., 4:, :], source.memory[1].reshape(3, 2, 2, 4, 16))


def test_a_range_of_heads_is_read_block_by_block(joined, site):
    source, _ = joined
    target = site(make_layout(heads=(1, 3)))
    way = route(source.layout, target.layout)
    target.agent.connect(source.agent.region, way)
    pieces = plan(way, Side([3, 1], 0), Side([2, 0], 0), start=0, stop=8)

    assert finish(target.agent, target.agent.post(source.agent.name, pieces), source.agent) == "done"

    third = block_bytes(source.layout) // 3
    assert np.array_equal(target.memory[[2, 0]], source.memory[[3, 1], third:])


def test_a_peer_that_is_not_connected_is_refused(joined):
    source, target = joined
    pieces = plan(route(source.layout, target.layout), Side([0], 0), Side([0], 0), start=0, stop=4)

    with pytest.raises(TransferError, match="not connected"):
        source.agent.post(target.agent.name, pieces)


def test_a_disconnected_peer_is_refused_and_disconnecting_again_is_harmless(site):
    source, target = site(fill=2), site()
    target.agent.connect(source.agent.region, route(source.layout, target.layout))

    target.agent.disconnect(source.agent.name)
    target.agent.disconnect(source.agent.name)

    pieces = plan(route(source.layout, target.layout), Side([0], 0), Side([0], 0), start=0, stop=4)
    with pytest.raises(TransferError):
        target.agent.post(source.agent.name, pieces)


def test_names_are_new_every_time(joined):
    source, target = joined

    assert source.agent.name != target.agent.name
    assert source.agent.region.agent == source.agent.name


def test_closing_twice_is_harmless(site):
    one = site()

    one.agent.close()
    one.agent.close()


def test_the_fake_lands_bytes_late_like_a_transport_that_cannot_cancel():
    now = [0.0]
    faults = Faults(delay_s=1.0)
    source = Site(MemoryAgent, make_layout(), fill=3)
    target = Site(lambda region: MemoryAgent(region, faults, clock=lambda: now[0]), make_layout(), fill=0)
    way = route(source.layout, target.layout)
    target.agent.connect(source.agent.region, way)
    handle = target.agent.post(source.agent.name, plan(way, Side([0], 0), Side([0], 0), start=0, stop=4))

    target.agent.disconnect(source.agent.name)
    assert target.agent.poll(handle) == "pending"
    assert not target.memory.any()
    now[0] = 1.0
    target.agent.progress()

    assert np.array_equal(target.memory[0], source.memory[0])
    assert target.agent.poll(handle) == "done"


def test_the_fake_refuses_another_process():
    source, target = Site(MemoryAgent, make_layout(), fill=3), Site(MemoryAgent, make_layout(), fill=0)
    stranger = type(source.agent.region)(0, "x", b"1", source.layout, 0, 8)

    with pytest.raises(TransferError, match="one process only"):
        target.agent.connect(stranger, route(source.layout, target.layout))


@pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed")
def test_an_unknown_transport_names_the_setting():
    layout = make_layout()
    memory = np.zeros(block_bytes(layout), np.uint8)

    with pytest.raises(TransferError, match=r"nixl_backend: NIXL has no transport 'BOGUS'; it has .*UCX"):
        NixlAgent(LocalRegion(layout, memory.ctypes.data, 1, memory.nbytes), transport="BOGUS")
