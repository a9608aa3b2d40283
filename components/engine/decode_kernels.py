"""The Triton kernel for attention of decode steps: one new token for each sequence, over the blocks of its table.

It takes the joined projections as the product leaves them: scales, norms and rotates the new token's query and key,
and writes key and value into their slot. Or, `IS_WRITTEN`, it takes queries that are ready, of a token whose key and
value lie in the pool already. A program attends for one KV head of one sequence over a part of its tokens, which it
looks up (`work_kernels.py`). The last program of a head to end joins the parts. Imported on CUDA hosts only;
TRITON_INTERPRET=1 runs it on the CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from components.engine.layer_kernels import rotated, scale_of, scaled
from components.engine.work_kernels import NUMBERS

_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)  # below all scores, and unlike -inf equal to itself in a difference


@triton.jit(do_not_specialize=["layer"])
def decode_kernel(
    qkv, bias, source, pool, out, sums, marks, arrived, work, cos, sin, slots, blocks, q_norm, k_norm, norm_eps, eps,
    layer, scaling, size: tl.constexpr, SIZE_BLOCK: tl.constexpr, NUM_LAYERS: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, IS_SCALED: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    IS_WRITTEN: tl.constexpr,
):  # fmt: skip
    head, record = tl.program_id(0), work + tl.program_id(1) * NUMBERS
    sequence, position, first_block = tl.load(record).to(tl.int64), tl.load(record + 1), tl.load(record + 2)
    first_tile, stop, base = tl.load(record + 3), tl.load(record + 4), tl.load(record + 7)
    part, num_parts = tl.load(record + 5), tl.load(record + 6)
    if sequence >= 0:
        dims = tl.zeros([ROWS, DIM], tl.int32) + tl.arange(0, DIM)[None, :]
        first_value = (head * GROUP + tl.minimum(tl.arange(0, ROWS), GROUP - 1)[:, None]) * DIM
        if IS_WRITTEN:
            queries = tl.load(qkv + sequence * (GROUP * KV_HEADS * DIM) + first_value + dims)
        else:
            scale = 1.0 if IS_SCALED else scale_of(source + sequence * size, size, eps, SIZE_BLOCK)
            token = qkv + sequence * ((GROUP + 2) * KV_HEADS * DIM)
            angles = (cos + position.to(tl.int64) * (DIM // 2), sin + position.to(tl.int64) * (DIM // 2))
            queries = rotated(
                token + first_value, scale, bias + first_value, q_norm, angles, norm_eps, dims, DIM, BIAS, NORM
            )
        queries = queries.to(pool.dtype.element_ty)
        best, total, mixed = _over_blocks(
            queries, pool, blocks + first_block, first_tile * TOKENS, stop, position, head, layer, scaling, NUM_LAYERS,
            KV_HEADS, ROWS, DIM, BLOCK, TOKENS, WINDOW, CAP,
        )  # fmt: skip
        if not IS_WRITTEN:  # noqa: SIM102 - a constant, and what the other mode lacks is not compiled
            if part == num_parts - 1:  # the new token, which no block needs to be read for
                key, value = _write_newest(
                    token, bias, scale, pool, k_norm, angles, norm_eps, tl.load(slots + sequence), head, layer,
                    NUM_LAYERS, KV_HEADS, GROUP, DIM, BLOCK, BIAS, NORM,
                )  # fmt: skip
                products = queries.to(tl.float32) * key.to(tl.float32)[None, :]
                best, faded, weight = _weighed(best, _capped(tl.sum(products, axis=1), scaling, CAP))
                mixed = mixed * faded[:, None] + weight[:, None] * value.to(tl.float32)[None, :]
                total = total * faded + weight
        place = sequence * KV_HEADS + head
        ends = out + place * GROUP * DIM
        if num_parts == 1:
            _store(ends, mixed, total, GROUP, ROWS, DIM)
        else:
            kept = base.to(tl.int64) * KV_HEADS + head  # the first part's, and of the next one KV_HEADS behind
            _leave(sums, marks, kept + part * KV_HEADS, mixed, best, total, ROWS, DIM)
            if tl.atomic_add(arrived + place, 1, sem="acq_rel") == num_parts - 1:
                tl.store(arrived + place, 0)
                _join(sums, marks, ends, kept, num_parts, KV_HEADS, GROUP, ROWS, DIM)


@triton.jit
def _over_blocks(
    queries, pool, table, first, stop, position, head, layer, scaling, NUM_LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Attends over tokens [first, stop): highest scores, sums of weights, and weighted sums of values."""
    best = tl.full([ROWS], _LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    across = tl.arange(0, DIM)
    for start in range(first, stop, TOKENS):
        at = start + tl.arange(0, TOKENS)
        block = tl.load(table + at // BLOCK, mask=at < stop, other=0)
        piece = _piece(block, head, layer, at % BLOCK, NUM_LAYERS, KV_HEADS, BLOCK)
        keys = tl.load(pool + piece[None, :] * DIM + across[:, None], mask=(at < stop)[None, :], other=0.0)
        values = pool + (piece + BLOCK)[:, None] * DIM + across[None, :]
        scores = _capped(tl.dot(queries, keys), scaling, CAP)
        is_seen = (at < stop) & (at > position - WINDOW) if WINDOW > 0 else at < stop
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        values = tl.load(values, mask=(at < stop)[:, None], other=0.0)
        best, faded = _raised(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - best[:, None])
        mixed = tl.dot(weights.to(values.dtype), values, mixed * faded[:, None])
        total = total * faded + tl.sum(weights, axis=1)
    return best, total, mixed


@triton.jit
def _write_newest(
    token, bias, scale, pool, k_norm, angles, norm_eps, slot, head, layer, NUM_LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Puts the new token's key and value into its slot, and returns them."""
    dims = tl.arange(0, DIM)
    piece = _piece(slot // BLOCK, head, layer, slot % BLOCK, NUM_LAYERS, KV_HEADS, BLOCK)
    of_key, of_value = (GROUP * KV_HEADS + head) * DIM, ((GROUP + 1) * KV_HEADS + head) * DIM
    key = rotated(token + of_key, scale, bias + of_key, k_norm, angles, norm_eps, dims, DIM, BIAS, NORM)
    value = scaled(token + of_value, scale, bias + of_value, dims, BIAS)
    key, value = key.to(pool.dtype.element_ty), value.to(pool.dtype.element_ty)
    tl.store(pool + piece * DIM + dims, key)
    tl.store(pool + (piece + BLOCK) * DIM + dims, value)
    return key, value


@triton.jit
def _piece(block, head, layer, place, NUM_LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """The key's number among all keys and values of a pool; its value is a block's length behind."""
    return ((block.to(tl.int64) * KV_HEADS + head) * NUM_LAYERS + layer) * 2 * BLOCK + place


@triton.jit
def _capped(scores, scaling, CAP: tl.constexpr):
    """Scores to the base of 2."""
    scores *= scaling
    if CAP > 0:
        scores = CAP * (1.0 - 2.0 / (tl.exp(2.0 * scores / CAP) + 1.0))
    return scores * _LOG2_E


@triton.jit
def _raised(best, other):
    """The larger score, and what remains of weights that were relative to the first one."""
    highest = tl.maximum(best, other)
    return highest, tl.exp2(best - highest)


@triton.jit
def _weighed(best, score):
    """The larger score, what remains of weights relative to `best`, and the weight of `score`."""
    highest, faded = _raised(best, score)
    return highest, faded, tl.exp2(score - highest)


@triton.jit
def _store(ends, mixed, total, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None]
    places = ends + rows * DIM + tl.arange(0, DIM)[None, :]
    tl.store(places, (mixed / total[:, None]).to(ends.dtype.element_ty), mask=rows < GROUP)


@triton.jit
def _leave(sums, marks, part, mixed, best, total, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Keeps what a part has found, all of it before the program counts as arrived."""
    kept = part * ROWS + tl.arange(0, ROWS)
    tl.store(sums + kept[:, None] * DIM + tl.arange(0, DIM)[None, :], mixed)
    tl.store(marks + kept * 2, best)
    tl.store(marks + kept * 2 + 1, total)
    tl.debug_barrier()


@triton.jit
def _join(
    sums, marks, ends, first, num_parts, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """The softmax over all parts from those of each."""
    best = tl.full([ROWS], _LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    for part in range(num_parts):
        kept = (first + part * KV_HEADS) * ROWS + tl.arange(0, ROWS)
        mark = tl.load(marks + kept * 2, cache_modifier=".cg")
        best, faded = _raised(best, mark)
        factor = tl.exp2(mark - best)
        total = total * faded + tl.load(marks + kept * 2 + 1, cache_modifier=".cg") * factor
        added = tl.load(sums + kept[:, None] * DIM + tl.arange(0, DIM)[None, :], cache_modifier=".cg")
        mixed = mixed * faded[:, None] + added * factor[:, None]
    _store(ends, mixed, total, GROUP, ROWS, DIM)
