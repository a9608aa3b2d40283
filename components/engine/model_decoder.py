"""Decode steps of a model that transformers runs itself, for graphs. Imported on CUDA hosts only."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from components.engine.decode_attention import DecodeTables
from components.engine.flash import FlashAttention, FlashStep


class ModelDecoder:
    """A transformers model over one pool; a `graphs.Decoder`."""

    def __init__(self, model: PreTrainedModel, attention: FlashAttention) -> None:
        self._model: Any = model
        self._attention = attention

    def decode_into(self, ids: torch.Tensor, step: DecodeTables, logits: torch.Tensor) -> None:
        """The model's forward on one flattened row, as any step of it, with decodes alone, which need no plan."""
        found = self._model(
            input_ids=ids[None],
            position_ids=step.positions.long()[None],
            use_cache=False,
            paged_step=FlashStep(self._attention, step.slots, step, None),
        ).logits[0]
        if found.dtype is not logits.dtype:
            raise RuntimeError(f"the model's logits are {found.dtype}")  # what it is served with without graphs
        logits.copy_(found)
