"""Decode steps as CUDA graphs, one for each of a few batch sizes.

A graph reads the step's numbers from fixed places of one device buffer, takes fed tokens from those the
step before chose, runs the decoder, and leaves logits and the largest one's token behind. Batches are
padded to the next size with sequences of one token in a spare block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from components.engine.attention import KVPool
from components.engine.decode_attention import DecodeTables
from components.engine.fused_cuda import CudaDecoder
from components.engine.runner import Batch
from components.engine.sampling_kernels import argmax
from components.engine.staging import Staging

_FIELDS = 4  # ids, feeds, positions, slots: each `max_batch` long; then cu_blocks and the blocks


def bucket_sizes(max_batch: int) -> list[int]:
    """The batch sizes that are captured, in rising order."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_batch + 1, 32)]
    return [*[size for size in sizes if size < max_batch], max_batch]


def pack(batch: Batch, bucket: int, max_batch: int, *, block_size: int, spare_block: int) -> npt.NDArray[np.int32]:
    """The numbers of a decode step as the graphs read them."""
    count = batch.num_sequences
    sizes = np.ones(bucket, np.int32)
    sizes[:count] = [len(table) for table in batch.block_tables]
    cu_blocks = np.zeros(bucket + 1, np.int32)
    np.cumsum(sizes, out=cu_blocks[1:])
    head = _FIELDS * max_batch
    values = np.zeros(head + max_batch + 1 + int(cu_blocks[-1]), np.int32)
    fields = values[:head].reshape(_FIELDS, max_batch)
    fields[1], fields[3] = -1, spare_block * block_size
    fields[0, :count] = batch.input_ids
    if batch.feeds is not None:
        fields[1, :count] = batch.feeds
    fields[2, :count] = batch.positions
    fields[3, :count] = batch.slot_mapping
    values[head : head + bucket + 1] = cu_blocks
    blocks = values[head + max_batch + 1 :]
    np.concatenate(batch.block_tables, out=blocks[: cu_blocks[count]])
    blocks[cu_blocks[count] :] = spare_block
    return values


class DecodeGraphs:
    """All captured batch sizes of one decoder."""

    def __init__(self, decoder: CudaDecoder, pool: KVPool, *, max_batch: int, vocab_size: int, max_blocks: int) -> None:
        """`max_blocks` bounds the block tables of a step together; the pool's last block is the spare one."""
        self._decoder = decoder
        self._max_batch = max_batch
        self._block_size = pool.layout.block_size
        self._spare_block = pool.num_blocks
        device = pool.blocks.device
        self._staging = Staging(_FIELDS * max_batch + max_batch + 1 + max_blocks, torch.int32, device)
        self.logits = torch.empty((max_batch, vocab_size), dtype=pool.blocks.dtype, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self, last_tokens: torch.Tensor, on_progress: Callable[[str], None]) -> None:
        """Captures all sizes, the largest first, whose memory the others share. `last_tokens`: see `run`."""
        memory = None
        sizes = bucket_sizes(self._max_batch)
        for number, size in enumerate(reversed(sizes), 1):
            on_progress(f"capturing decode steps: {number} of {len(sizes)}")
            self._send(_idle_batch(size, self._spare_block, self._block_size), size)
            self._forward(size, last_tokens)  # compiles kernels
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                self._forward(size, last_tokens)
            memory = memory or graph.pool()
            self._graphs[size] = graph

    def can_run(self, batch: Batch) -> bool:
        """Whether the batch is a decode step that fits a graph: one token for each sequence, each choosing the next."""
        count = batch.num_sequences
        is_decode = len(batch.input_ids) == count == len(batch.samples) and count <= self._max_batch
        room = len(self._staging) - (_FIELDS + 1) * self._max_batch - 1
        return is_decode and sum(map(len, batch.block_tables)) + self._max_batch <= room

    def run(self, batch: Batch) -> torch.Tensor:
        """Launches the step. Returns its logits, (sequences, vocabulary), good until the next one.

        The largest logits' tokens are in `last_tokens` afterwards, and those that were there before are
        what `feeds` points to.
        """
        size = next(size for size in bucket_sizes(self._max_batch) if size >= batch.num_sequences)
        self._send(batch, size)
        self._graphs[size].replay()
        return self.logits[: batch.num_sequences]

    def _send(self, batch: Batch, size: int) -> None:
        self._staging.send(
            pack(batch, size, self._max_batch, block_size=self._block_size, spare_block=self._spare_block)
        )

    def _forward(self, size: int, last_tokens: torch.Tensor) -> None:
        buffer, head = self._staging.device_buffer, _FIELDS * self._max_batch
        ids, feeds, positions, slots = buffer[:head].view(_FIELDS, self._max_batch)[:, :size]
        cu_blocks, blocks = buffer[head : head + size + 1], buffer[head + self._max_batch + 1 :]
        fed = torch.where(feeds >= 0, last_tokens[feeds.clamp_min(0)], ids)
        hidden = self._decoder.decode(fed, DecodeTables(positions, slots, cu_blocks, blocks))
        self._decoder.logits(hidden, out=self.logits[:size])
        argmax(self.logits[:size], last_tokens[:size])


def _idle_batch(size: int, block: int, block_size: int) -> Batch:
    """A step of sequences with one token each, all in one block."""
    return Batch(
        input_ids=np.zeros(size, np.int32),
        positions=np.zeros(size, np.int32),
        cu_seqlens_q=np.arange(size + 1, dtype=np.int32),
        seq_lens=np.ones(size, np.int32),
        block_tables=tuple(np.array([block], np.int32) for _ in range(size)),
        slot_mapping=np.full(size, block * block_size, np.int64),
        samples=(),
    )
