"""Decode steps as CUDA graphs, one for each of a few batch sizes.

A graph reads the step's numbers from fixed places of one device buffer, takes fed tokens from those the
step before chose, runs the decoder, and leaves logits and the largest one's token behind; see `packing.py`.
Our own decoders are made to be captured; whether another can be is tried first (`obstacle`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from components.engine.attention import KVPool
from components.engine.decode_attention import DecodeTables
from components.engine.layer_kernels import fed_ids
from components.engine.packing import FIELDS, bucket_sizes, is_packable, pack, packed_size
from components.engine.runner import Batch
from components.engine.sampling_kernels import argmax
from components.engine.staging import Staging


class Decoder(Protocol):
    """A model's decode steps."""

    def decode_into(self, ids: torch.Tensor, step: DecodeTables, logits: torch.Tensor) -> None:
        """Computes one new token for each sequence, `ids` (S,): its keys and values into their slots, and `logits`.

        These are (S, vocabulary), in the pool's dtype.
        """


class DecodeGraphs:
    """All captured batch sizes of one decoder."""

    def __init__(self, decoder: Decoder, pool: KVPool, *, max_batch: int, vocab_size: int, max_blocks: int) -> None:
        """`max_blocks` bounds the block tables of a step together; the pool's block `num_blocks` is the spare one."""
        self._decoder = decoder
        self._max_batch = max_batch
        self._sizes = bucket_sizes(max_batch)
        self._block_size = pool.layout.block_size
        self._spare_block = pool.num_blocks
        device = pool.blocks.device
        self._staging = Staging(packed_size(max_batch, max_blocks + max_batch), torch.int32, device)
        self.logits = torch.empty((max_batch, vocab_size), dtype=pool.blocks.dtype, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def obstacle(self, last_tokens: torch.Tensor) -> str | None:
        """Why the decoder cannot be captured; None if it can. Called before `capture`, with the same.

        A step in which the host waits for the GPU, to choose what to launch, would be captured as if that were
        always the same. Torch tells most such waits before anything is captured, and without harm.
        """
        try:
            for size in (self._sizes[-1], self._sizes[0]):
                self._send(_idle_batch(size, self._spare_block, self._block_size), size)
                self._forward(size, last_tokens)  # what happens only once may wait
                _without_waiting(lambda size=size: self._forward(size, last_tokens))  # type: ignore[misc]
            _try_capture(lambda: self._forward(self._sizes[0], last_tokens))
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return None

    def capture(self, last_tokens: torch.Tensor, on_progress: Callable[[str], None]) -> None:
        """Captures all sizes, the largest first, whose memory the others share. `last_tokens`: see `run`."""
        memory = None
        for number, size in enumerate(reversed(self._sizes), 1):
            on_progress(f"capturing decode steps: {number} of {len(self._sizes)}")
            self._send(_idle_batch(size, self._spare_block, self._block_size), size)
            self._forward(size, last_tokens)  # compiles kernels
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                self._forward(size, last_tokens)
            memory = memory or graph.pool()
            self._graphs[size] = graph

    def can_run(self, batch: Batch) -> bool:
        """Whether the batch is a decode step that fits a graph."""
        return is_packable(batch, self._max_batch, len(self._staging))

    def run(self, batch: Batch) -> torch.Tensor:
        """Launches the step. Returns its logits, (sequences, vocabulary), good until the next one.

        The largest logits' tokens are in `last_tokens` afterwards, and those that were there before are
        what `feeds` points to.
        """
        size = next(size for size in self._sizes if size >= batch.num_sequences)
        self._send(batch, size)
        self._graphs[size].replay()
        return self.logits[: batch.num_sequences]

    def _send(self, batch: Batch, size: int) -> None:
        self._staging.send(
            pack(batch, size, self._max_batch, block_size=self._block_size, spare_block=self._spare_block)
        )

    def _forward(self, size: int, last_tokens: torch.Tensor) -> None:
        buffer, head = self._staging.device_buffer, FIELDS * self._max_batch
        ids, feeds, positions, slots = buffer[:head].view(FIELDS, self._max_batch)[:, :size]
        cu_blocks, blocks = buffer[head : head + size + 1], buffer[head + self._max_batch + 1 :]
        fed = fed_ids(ids, feeds, last_tokens)
        self._decoder.decode_into(fed, DecodeTables(positions, slots, cu_blocks, blocks), self.logits[:size])
        argmax(self.logits[:size], last_tokens[:size])


def _without_waiting(run: Callable[[], None]) -> None:
    """Raises `RuntimeError` where torch notices that the host waits for the GPU."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not notice everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _try_capture(run: Callable[[], None]) -> None:
    """Captures and forgets. Raises `RuntimeError` where that fails, with everything as it was before.

    Where something spoiled the capture, torch's `capture_end` raises as well, and before it has ended what the capture
    began: its stream is still the current one, the allocator waits for the end of what uses its pool, and the generator
    takes what it draws for captured.
    """
    device = torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    before, pool, drawn = torch.cuda.current_stream(), torch.cuda.graph_pool_handle(), generator.get_state()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
            run()
    except RuntimeError as error:
        if torch.cuda.current_stream() == before:
            raise
        torch.cuda.set_stream(before)
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
        fresh = torch.Generator(before.device)
        fresh.set_state(drawn)
        generator.graphsafe_set_state(fresh)
        raise RuntimeError(str(error.__context__ or error)) from error


def _idle_batch(size: int, block: int, block_size: int) -> Batch:
    """A step of sequences with one token each, all in one block."""
    return Batch(
        input_ids=np.zeros(size, np.int32),
        positions=np.zeros(size, np.int32),
        cu_seqlens_q=np.arange(size + 1, dtype=np.int32),
        seq_lens=np.ones(size, np.int32),
        blocks=np.full(size, block, np.int32),
        cu_blocks=np.arange(size + 1, dtype=np.int32),
        slot_mapping=np.full(size, block * block_size, np.int64),
        samples=(),
    )
