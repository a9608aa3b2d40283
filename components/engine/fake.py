"""The torch-free runner: a model whose next token is a function of every KV slot the sequence refers to.

It writes what each token and position imply into the slots it is given, reads the whole context
back through the block table, and hashes what it finds. A wrong block, a stale block or a lost
transfer changes the text. `fake_generate` is the same function without any KV, for comparison.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from components.engine.runner import Batch, Done, Ints, KVRegion, Launched, Sampled, SampleRow
from components.messages import KVLayout, Sampling, TokenLogprobs
from components.options import FakeEngine

NUM_KV_HEADS = 2
NUM_LAYERS = 2
HEAD_DIM = 2
FIRST_TOKEN = 256  # smaller ids may be special tokens of a tokenizer

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_VALUES = (NUM_KV_HEADS, NUM_LAYERS, 2, HEAD_DIM)

Words = npt.NDArray[np.uint32]

_PLACES: Words = (np.arange(NUM_KV_HEADS * NUM_LAYERS * 2, dtype=np.uint32) * 0x02000326 + 1).reshape(*_VALUES[:3], 1)
"""A distinct odd factor for each head, layer, and K or V."""


class FakeRunner:
    """Serves at a set speed: a step takes `speed.step_ms` plus `speed.token_ms` per computed token."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_model_len: int = 8_192,
        vocab_size: int = 49_152,
        speed: FakeEngine | None = None,
        model: str = "fake",
        is_overlapping: bool = False,
    ) -> None:
        self.layout = KVLayout(
            model=model,
            dtype="float32",
            block_size=block_size,
            num_layers=NUM_LAYERS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            head_start=0,
            head_stop=NUM_KV_HEADS,
        )
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.is_overlapping = is_overlapping
        self._speed = speed or FakeEngine()
        self._last: Ints = np.empty(0, np.int32)  # the tokens of the step launched last
        self._free_s = 0.0  # when the last step launched is over
        # (block, kv_head, layer, K/V, token, head_dim), as 32-bit words; the last block is the transfers'
        shape = (NUM_KV_HEADS, NUM_LAYERS, 2, block_size, HEAD_DIM)
        self.memory: Words = np.zeros((num_blocks + 1, *shape), np.uint32)

    @property
    def region(self) -> KVRegion:
        """Where the blocks lie."""
        return KVRegion(self.memory.ctypes.data, len(self.memory), self.memory[0].nbytes, "DRAM")

    def execute(self, batch: Batch) -> Sampled:
        """Writes the new tokens' slots, then reads each sampled sequence's context back."""
        return self._start(batch).wait()

    def launch(self, batch: Batch) -> Launched:
        """The same; if steps overlap, the time of the step passes afterwards."""
        return self._start(batch) if self.is_overlapping else Done(self.execute(batch))

    def _start(self, batch: Batch) -> _Step:
        duration_s = (self._speed.step_ms + self._speed.token_ms * len(batch.input_ids)) / 1e3
        self._free_s = max(self._free_s, time.monotonic()) + duration_s
        blocks, offsets = np.divmod(batch.slot_mapping, self.layout.block_size)
        self.memory[blocks, ..., offsets, :] = _slots(self._inputs(batch), batch.positions)
        tokens = [self._choose(batch, row) for row in batch.samples]
        logprobs = tuple(_logprobs(row.sampling, t) for row, t in zip(batch.samples, tokens, strict=True))
        self._last = np.array(tokens, np.int32)
        return _Step(Sampled(self._last, logprobs), self._free_s)

    def _inputs(self, batch: Batch) -> Ints:
        if batch.feeds is None:
            return batch.input_ids
        inputs = batch.input_ids.copy()
        fed = batch.feeds >= 0
        inputs[fed] = self._last[batch.feeds[fed]]
        return inputs

    def close(self) -> None:
        """Nothing to free before the runner itself is gone."""

    def _choose(self, batch: Batch, row: SampleRow) -> int:
        length = int(batch.seq_lens[row.row])
        slots = self.memory[batch.table(row.row)]  # (blocks, heads, layers, 2, block_size, dim)
        by_token = slots.transpose(0, 4, 1, 2, 3, 5).reshape(-1, *_VALUES)[:length]
        return _next_token(_digest(by_token), row.sampling, row.position, self.vocab_size, banned=row.banned)


class _Step(msgspec.Struct, frozen=True):
    sampled: Sampled
    over_s: float

    def wait(self) -> Sampled:
        time.sleep(max(0.0, self.over_s - time.monotonic()))
        return self.sampled


def fake_generate(
    prompt: Sequence[int],
    num_tokens: int,
    sampling: Sampling,
    *,
    vocab_size: int = 49_152,
    stop_token_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
) -> list[int]:
    """The tokens a `FakeRunner` must generate after `prompt` (output of earlier attempts included)."""
    tokens = list(prompt)
    for index in range(num_tokens):
        positions = np.arange(len(tokens), dtype=np.int32)
        digest = _digest(_slots(np.array(tokens, np.int32), positions))
        banned = stop_token_ids if index < min_tokens else ()
        tokens.append(_next_token(digest, sampling, len(tokens), vocab_size, banned=banned))
        if tokens[-1] in stop_token_ids:
            break
    return tokens[len(prompt) :]


def _slots(tokens: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]) -> Words:
    """What the slots of these tokens hold: (tokens, kv_head, layer, K/V, head_dim), different in every place."""
    words = np.stack((tokens, positions), axis=-1).astype(np.uint32)  # (tokens, head_dim)
    return words[:, None, None, None, :] * _PLACES + _PLACES


def _digest(slots: Words) -> int:
    """A number that depends on every word of a context's slots and on its position."""
    by_token = (slots * _PLACES[::-1, ::-1, ::-1]).reshape(len(slots), -1).sum(axis=1, dtype=np.uint32)
    weights = np.arange(1, 2 * len(slots), 2, dtype=np.uint32) * np.uint32(0x85EBCA6B)
    mixed = (by_token ^ (by_token >> np.uint32(15))) * weights
    return int(mixed.sum(dtype=np.uint64))


def _next_token(digest: int, sampling: Sampling, position: int, vocab_size: int, *, banned: tuple[int, ...]) -> int:
    state = _mix(digest)
    if sampling.temperature > 0:
        state = _mix(state ^ _mix(sampling.seed ^ _mix(position)))
    first = min(FIRST_TOKEN, vocab_size // 2)
    while (token := first + state % (vocab_size - first)) in banned:
        state = _mix(state)
    return token


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _logprobs(sampling: Sampling, token: int) -> TokenLogprobs | None:
    if sampling.logprobs is None:
        return None
    top = tuple(max(0, token - i) for i in range(sampling.logprobs))
    return TokenLogprobs(-0.5, top, tuple(-0.5 - i for i in range(len(top))))
