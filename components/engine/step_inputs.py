"""What a step that is no captured decode step has on the device: its tokens' fields, and tables for its attention.

All of it is copied at once. Imported on CUDA hosts only.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from components.engine.chunk_graphs import pad
from components.engine.decode_attention import DecodeTables
from components.engine.flash import (
    MOST_GATHERED,
    FlashAttention,
    FlashStep,
    SideBySide,
    Tables,
    has_copy_engine,
    should_gather,
)
from components.engine.packing import FIELDS
from components.engine.runner import Batch, Ints
from components.engine.split import Split, places, split
from components.engine.staging import Staging

_ALIGNED = 4  # fields begin at multiples of 16 bytes, for which Triton compiles kernels of their own


class StepInputs(msgspec.Struct, frozen=True):
    """A step of T tokens, all int32 on the device."""

    given: torch.Tensor  # (T,): ids
    fed: torch.Tensor  # (T,): where the step before has put the id, or -1
    positions: torch.Tensor  # (T,)
    slots: torch.Tensor  # (T,)
    kept: torch.Tensor  # (R,): the tokens whose logits are wanted
    step: FlashStep


class Inputs:
    """Copies one step after the other; `buffer` has each step's fields at its beginning."""

    def __init__(self, attention: FlashAttention, max_tokens: int, max_sequences: int, max_blocks: int) -> None:
        self._attention = attention
        blocks, layout = attention.pool.blocks, attention.pool.layout
        self._block_size, self._device = layout.block_size, blocks.device
        self._spare_slot = attention.pool.num_blocks * layout.block_size
        room = FIELDS * (max_tokens + _ALIGNED) + 2 * (max_sequences + _ALIGNED) + max_blocks
        self._staging = Staging(room + MOST_GATHERED // layout.block_size + 1, torch.int32, self._device)
        self._can_gather = has_copy_engine(self._device)
        self.buffer = self._staging.device_buffer

    def send(self, batch: Batch, size: int | None) -> StepInputs:
        """The step's inputs; with a `size` the buffer has so many tokens, of which nobody reads what others write."""
        count, parts = len(batch.input_ids), split(batch, self._block_size)
        side_by_side = self._side_by_side(parts)
        pieces = self._pieces(batch, size or _aligned(count), parts, side_by_side)
        sent = self._staging.send(np.concatenate(pieces).astype(np.int32, copy=False))
        fields, cu_blocks, blocks, sent_places, kept = torch.split(sent, [len(piece) for piece in pieces])
        given, fed, positions, slots = fields.view(FIELDS, -1)[:, :count]
        decodes = DecodeTables(positions[: parts.num_decodes], slots[: parts.num_decodes], cu_blocks, blocks)
        chunks = None
        if parts.num_chunks:
            gathered = None
            if len(side_by_side):
                gathered = SideBySide(sent_places, torch.from_numpy(side_by_side[parts.cu_blocks]))
            chunks = Tables(
                torch.from_numpy(parts.cu_seqlens_q),
                torch.from_numpy(parts.cu_blocks),
                torch.from_numpy(parts.last_lengths),
                blocks[int(batch.cu_blocks[parts.num_decodes]) :],
                gathered,
            )
        return StepInputs(given, fed, positions, slots, kept, FlashStep(self._attention, slots, decodes, chunks))

    def _side_by_side(self, parts: Split) -> Ints:
        """The places of the chunks' blocks if their keys and values are to be gathered; else nothing."""
        num_keys = int(parts.cu_blocks[-1]) * self._block_size
        is_better = self._can_gather and should_gather(int(parts.cu_seqlens_q[-1]), num_keys)
        return places(parts, self._block_size) if is_better else np.empty(0, np.int32)

    def _pieces(self, batch: Batch, size: int, parts: Split, side_by_side: Ints) -> tuple[Ints, ...]:
        """Fields (4 * size,), the decodes' cu_blocks, all blocks, their places, and the tokens whose logits are wanted.

        What Triton's kernels care for the alignment of comes first.
        """
        feeds = batch.feeds if batch.feeds is not None else np.full(len(batch.input_ids), -1, np.int32)
        fields = (batch.input_ids, feeds, batch.positions, batch.slot_mapping.astype(np.int32))
        cu_blocks = np.zeros(_aligned(parts.num_decodes + 1), np.int32)
        cu_blocks[: parts.num_decodes + 1] = batch.cu_blocks[: parts.num_decodes + 1]
        kept = batch.cu_seqlens_q[[row.row + 1 for row in batch.samples]] - 1
        return pad(fields, size, self._spare_slot), cu_blocks, batch.blocks, side_by_side, kept


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
