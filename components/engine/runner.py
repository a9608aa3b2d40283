"""The runner: what executes one step of the model. Torch-free; a runner's own module imports what it needs.

One step is a flattened batch: the new tokens of all its sequences one after another, no padding.
A runner writes the new tokens' KV into the slots it is given, attends over each sequence's block
table, and chooses a token for each row of `samples`.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from components.messages import KVLayout, Sampling, TokenLogprobs

Ints = npt.NDArray[np.int32]

GPU_BATCHED_TOKENS = 8_192
"""Tokens of a step on a GPU, unless the options say otherwise."""


class SampleRow(msgspec.Struct, frozen=True, gc=False):
    """One token to choose, from the logits of the last new token of sequence `row` of the batch.

    `position` is the chosen token's place in its sequence: with `sampling.seed` it keys the
    generator. `prompt` and `output` are the tokens so far, empty where no penalty needs them.
    `banned` may not be chosen. Where `is_plain`, no ban, bias or penalty changes the logits.
    """

    row: int
    sampling: Sampling
    position: int
    prompt: Ints
    output: Ints
    banned: tuple[int, ...] = ()
    is_plain: bool = False


class Batch(msgspec.Struct, frozen=True):
    """One step's work: S sequences with T new tokens in all."""

    input_ids: Ints  # (T,)
    positions: Ints  # (T,)
    cu_seqlens_q: Ints  # (S + 1,): sequence i's new tokens are [cu[i], cu[i + 1])
    seq_lens: Ints  # (S,): tokens with KV after this step, the new ones included
    blocks: Ints  # the sequences' block tables one after another, each covering its seq_len
    cu_blocks: Ints  # (S + 1,): sequence i's table is blocks [cu[i], cu[i + 1])
    slot_mapping: npt.NDArray[np.int64]  # (T,): block id * block_size + offset of each new token
    samples: tuple[SampleRow, ...]
    feeds: Ints | None = None  # (T,): whose token of the step before is the input, by sample; -1: `input_ids` says

    @property
    def num_sequences(self) -> int:
        return len(self.seq_lens)

    def table(self, sequence: int) -> Ints:
        """The blocks of one sequence."""
        return self.blocks[self.cu_blocks[sequence] : self.cu_blocks[sequence + 1]]


class Sampled(msgspec.Struct, frozen=True):
    """The chosen tokens, in the order of `Batch.samples`."""

    tokens: Ints  # (rows,)
    logprobs: tuple[TokenLogprobs | None, ...]  # (rows,)


class Done(msgspec.Struct, frozen=True):
    """A step that was over when it was launched."""

    sampled: Sampled

    def wait(self) -> Sampled:
        """What the step chose."""
        return self.sampled


class Launched(Protocol):
    """A step under way."""

    def wait(self) -> Sampled:
        """Returns when the tokens are chosen and all KV of the step is written; called once, in order of launching."""


class KVRegion(msgspec.Struct, frozen=True):
    """The KV pool's memory, for registration with a transport.

    It has more blocks than the pool: the last one belongs to no sequence, transfers test themselves on it.
    """

    address: int
    num_blocks: int
    block_bytes: int
    memory: str  # "DRAM" or "VRAM"
    device: int = 0


class Runner(Protocol):
    """Executes steps. Used by one thread, the engine's; `region` and the properties by any."""

    @property
    def layout(self) -> KVLayout:
        """Layout of this rank's blocks."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence the model takes."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def region(self) -> KVRegion:
        """Where the blocks lie."""

    @property
    def is_overlapping(self) -> bool:
        """Whether a step may be launched while the one before it runs, fed with its tokens."""

    def launch(self, batch: Batch) -> Launched:
        """Starts one step; steps run in the order of launching, at most two at a time.

        If it raises, nothing of the step is under way any more: its blocks may be lent to a transfer at once.
        """

    def execute(self, batch: Batch) -> Sampled:
        """Runs one step; returns when the tokens are chosen and all KV of the step is written."""

    def close(self) -> None:
        """Frees the model and the pool."""
