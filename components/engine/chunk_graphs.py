"""Steps of few tokens as CUDA graphs between their attentions, for some numbers of tokens.

Launching a step kernel by kernel takes the host some 10 ms, whatever its size; a short prompt's multiplications take
less. What lies between two layers' attentions depends on nothing but the number of tokens and is captured once;
attention, which depends on the sequences' lengths, is planned and launched each time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from components.engine.flash import FlashStep
from components.engine.fused_cuda import CudaDecoder
from components.engine.layer_kernels import fed_ids
from components.engine.packing import FIELDS

_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512)


def chunk_sizes(max_tokens: int) -> list[int]:
    """The numbers of tokens that are captured, in rising order."""
    return [size for size in _SIZES if size <= max_tokens]


class ChunkGraphs:
    """All captured sizes of one decoder."""

    def __init__(self, decoder: CudaDecoder, buffer: torch.Tensor, max_tokens: int) -> None:
        """`buffer`, int32 on the device, has each step's fields at its beginning."""
        self._decoder = decoder
        self._buffer = buffer
        self.sizes = chunk_sizes(max_tokens)
        self._parts: dict[int, list[torch.cuda.CUDAGraph]] = {}
        like = decoder.embed(torch.zeros(self.sizes[-1] if self.sizes else 0, dtype=torch.int64, device=buffer.device))
        self._residual = torch.zeros_like(like)
        heads, dim = decoder.query_shape
        self._queries = torch.zeros((len(like), heads, dim), dtype=like.dtype, device=like.device)
        self._attended = torch.zeros_like(self._queries)

    def size_for(self, num_tokens: int) -> int | None:
        """The least captured size that holds so many tokens."""
        return next((size for size in self.sizes if size >= num_tokens), None)

    def capture(self, last_tokens: torch.Tensor, on_progress: Callable[[str], None]) -> None:
        """Captures all sizes, the largest first, whose memory the others share."""
        memory = None
        for number, size in enumerate(reversed(self.sizes), 1):
            on_progress(f"capturing short prompts: {number} of {len(self.sizes)}")
            self._parts[size] = []
            for part in range(len(self._decoder.layers) + 1):
                if part < 2 or part == len(self._decoder.layers):  # compiles kernels and has cuBLAS choose
                    self._run_part(size, part, last_tokens)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory):
                    self._run_part(size, part, last_tokens)
                memory = memory or graph.pool()
                self._parts[size].append(graph)

    def run(self, size: int, num_tokens: int, step: FlashStep) -> torch.Tensor:
        """Hidden states before the last norm, (num_tokens, hidden), of the step whose fields are in the buffer."""
        first, *others = self._parts[size]
        first.replay()
        queries, attended = self._queries[:num_tokens], self._attended[:num_tokens]
        for layer, graph in zip(self._decoder.layers, others, strict=True):
            step.attend(layer.index, queries, layer.shape, attended)
            graph.replay()
        return self._residual[:num_tokens]

    def _run_part(self, size: int, part: int, last_tokens: torch.Tensor) -> None:
        """What lies in front of a layer's attention and behind the one before."""
        ids, feeds, positions, slots = self._buffer[: FIELDS * size].view(FIELDS, size)
        residual = self._residual[:size]
        if part == 0:
            residual.copy_(self._decoder.embed(fed_ids(ids, feeds, last_tokens)))
        else:
            self._decoder.after_attention(part - 1, residual, self._attended[:size])
        if part < len(self._decoder.layers):
            self._decoder.before_attention(part, residual, positions, slots, queries=self._queries[:size])


def pad(fields: tuple[npt.NDArray[np.int32], ...], size: int, spare_slot: int) -> npt.NDArray[np.int32]:
    """ids, feeds, positions and slots with tokens added that are written where nobody reads: (4 * size,)."""
    padded = np.zeros((FIELDS, size), np.int32)
    padded[1], padded[3] = -1, spare_slot
    padded[:, : len(fields[0])] = fields
    return padded.reshape(-1)
