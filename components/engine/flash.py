"""Paged attention of any step, on the KV layout as it is: block-major, head-outermost, strided per layer.

Prompts' chunks go through FlashInfer's prefill kernel (FA3 on Hopper), planned once a step for each kind of layer. It
takes 128 queries at a time, so that a decode among them would cost as much as these: a step's leading decodes go
through a kernel of our own, which needs no plan (`decode_attention.py`), and with nothing behind them FlashInfer is
not called. Large chunks have their keys and values gathered side by side first: Hopper's copy engine then feeds FA3,
which takes 9 to 18 % less than from blocks, copy included (H200; tests/gpu/results/engine.md). FlashInfer's
kernels are compiled at first use and kept in its cache folder. Imported on CUDA hosts only.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from components.engine.attention import KVPool, Shape

if TYPE_CHECKING:  # imports triton, whose absence `obstacle` tells
    from components.engine.decode_attention import DecodeAttention, DecodeTables

_WORKSPACE_BYTES = 512 << 20
_PLAN_BYTES = 8 << 20
_HEAD_DIMS = (64, 128, 256)
_MOST_PER_QUERY = 16  # keys of a step that gathers them, for each of its queries
LEAST_GATHERED_QUERIES = 1024
"""Of a step that gathers keys and values."""
MOST_GATHERED = 65_536
"""Keys of such a step."""

_Key = tuple[float, int | None, float | None]
_Attend = Callable[[int, torch.Tensor, torch.Tensor], object]  # of a layer: with queries, into the last


def obstacle(dtype: torch.dtype, head_dim: int, *, has_sinks: bool = False) -> str | None:
    """Why FlashInfer cannot serve this model here; None if it can."""
    if has_sinks:
        return "the model's attention has sinks"
    for package in ("flashinfer", "triton"):
        if find_spec(package) is None:
            return f"{package} is not installed (headrace[cuda])"
    if shutil.which("nvcc") is None and find_spec("flashinfer_jit_cache") is None:
        return "nvcc is not on the PATH"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashInfer has no kernels for {str(dtype).removeprefix('torch.')}"
    if head_dim not in _HEAD_DIMS:
        return f"FlashInfer has no kernels for heads of {head_dim}"
    return None


def module_arguments(
    dtype: torch.dtype, head_dim: int, *, has_window: bool, is_capped: bool = False
) -> tuple[Any, ...]:
    """What FlashInfer asks of a prefill module, behind the back end's name."""
    return (dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, has_window, is_capped, False)


def has_copy_engine(device: torch.device) -> bool:
    """Whether the GPU has one that FlashInfer's kernels use."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def should_gather(num_queries: int, num_keys: int) -> bool:
    """Whether a copy engine makes it worth while to copy a step's keys and values side by side."""
    return num_queries >= LEAST_GATHERED_QUERIES and num_keys <= min(MOST_GATHERED, num_queries * _MOST_PER_QUERY)


class Tables(msgspec.Struct, frozen=True):
    """A step's chunks for FlashInfer: how many new tokens, which blocks, how full the last one is."""

    cu_seqlens_q: torch.Tensor  # (S + 1,) of int32 on the host
    cu_blocks: torch.Tensor  # (S + 1,) of int32 on the host
    last_lengths: torch.Tensor  # (S,) of int32 on the host
    blocks: torch.Tensor  # (cu_blocks[-1],) of int32 on the device
    side_by_side: SideBySide | None = None  # unless they are read where they are


class SideBySide(msgspec.Struct, frozen=True):
    """Where the tokens of chunks, and of what is before them, go to be read in one piece."""

    places: torch.Tensor  # (cu_blocks[-1] + 1,) of int32 on the device: see `split.places`
    cu_seqlens: torch.Tensor  # (S + 1,) of int32 on the host


class FlashAttention:
    """The back end of one pool. Each kind of layer copies its plans from two pinned buffers in turn.

    Two, as two steps may be under way; its own, as a step plans all kinds before the first plan's copy has begun.
    """

    def __init__(self, pool: KVPool, num_query_heads: int, decodes: DecodeAttention) -> None:
        self.pool = pool
        self.decodes = decodes
        device = pool.blocks.device
        self._num_query_heads = num_query_heads
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._pinned: dict[tuple[str, _Key], list[torch.Tensor]] = {}
        self._wrappers: dict[tuple[str, _Key], Any] = {}

    def turn(self) -> None:
        """Takes the other pinned buffers; called once for each step."""
        for buffers in self._pinned.values():
            buffers.reverse()

    def compile(self, windows: set[bool]) -> None:
        """Compiles the kernels of layers with and without a sliding window, all at once."""
        from flashinfer.prefill import get_batch_prefill_module
        from flashinfer.utils import determine_attention_backend

        dtype, dim = self.pool.blocks.dtype, self.pool.layout.head_dim
        chunks = determine_attention_backend(self.pool.blocks.device, 0, False, False, dtype, dtype)
        kinds = [(chunks, window) for window in windows]
        with ThreadPoolExecutor(len(kinds)) as workers:
            made = [
                workers.submit(get_batch_prefill_module, backend, *module_arguments(dtype, dim, has_window=window))
                for backend, window in kinds
            ]
        for module in made:
            module.result()

    def plan_chunks(self, key: _Key, tables: Tables) -> _Attend:
        """Plans a step for a kind of layer."""
        if tables.side_by_side is not None:
            return self._plan_gathered(key, tables, tables.side_by_side)
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        wrapper = self._wrapper(BatchPrefillWithPagedKVCacheWrapper, "HND", key)
        lengths = (tables.cu_seqlens_q, tables.cu_blocks, tables.blocks, tables.last_lengths)
        heads = (self._num_query_heads, self._num_kv_heads, self.pool.layout.head_dim)
        wrapper.plan(*lengths, *heads, self.pool.layout.block_size, causal=True, **self._settings(key))
        blocks = self.pool.blocks

        def attend(layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
            wrapper.run(queries, (blocks[:, :, layer, 0], blocks[:, :, layer, 1]), out=out)

        return attend

    def _plan_gathered(self, key: _Key, tables: Tables, side_by_side: SideBySide) -> _Attend:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        from components.engine.gather_kernels import gather

        wrapper = self._wrapper(BatchPrefillWithRaggedKVCacheWrapper, "NHD", key)
        heads = (self._num_query_heads, self._num_kv_heads, self.pool.layout.head_dim)
        lengths = (tables.cu_seqlens_q, side_by_side.cu_seqlens)
        wrapper.plan(*lengths, *heads, causal=True, **self._settings(key))
        blocks = self.pool.blocks
        size = (int(side_by_side.cu_seqlens[-1]), *heads[1:])

        def attend(layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
            keys, values = (torch.empty(size, dtype=blocks.dtype, device=blocks.device) for _ in range(2))
            gather(blocks, layer, tables.blocks, side_by_side.places, (keys, values))
            wrapper.run(queries, keys, values, out=out)

        return attend

    def _wrapper(self, kind: type[Any], layout: str, key: _Key) -> Any:
        """The wrapper of a kind of layer, about to copy its plan from the buffer whose turn it is."""
        name = (kind.__name__, key)
        if name not in self._wrappers:
            self._wrappers[name] = kind(self._workspace, layout)
            self._pinned[name] = [torch.empty(_PLAN_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        wrapper = self._wrappers[name]
        wrapper._pin_memory_int_workspace_buffer = self._pinned[name][0]
        return wrapper

    @property
    def _num_kv_heads(self) -> int:
        return self.pool.layout.head_stop - self.pool.layout.head_start

    def _settings(self, key: _Key) -> dict[str, Any]:
        scaling, window, softcap = key
        return {
            "sm_scale": scaling,
            "window_left": -1 if window is None else window - 1,  # keys before the query's own
            "logits_soft_cap": softcap,
            "q_data_type": self.pool.blocks.dtype,
            "kv_data_type": self.pool.blocks.dtype,
        }


def layer_key(shape: Shape) -> _Key:
    """What tells kinds of layers apart. Sinks are refused: the caller must not use this back end for them."""
    assert shape.sinks is None, "attention sinks need the SDPA back end"
    return (shape.scaling, shape.sliding_window, shape.softcap)


class FlashStep:
    """One step; a `PagedStep`. Its decodes come first, then its chunks."""

    def __init__(
        self, attention: FlashAttention, slots: torch.Tensor, decodes: DecodeTables, chunks: Tables | None
    ) -> None:
        """`slots` (tokens,) on the device; `decodes` may be none, `chunks` is None without any."""
        self._attention = attention
        self._decodes, self._chunks = decodes, chunks
        self._planned: dict[_Key, _Attend] = {}
        self._slots = slots
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts the new tokens' keys and values into their slots."""
        if self._places is None:  # models with kernels of their own write otherwise
            slots, block_size = self._slots.long(), self._attention.pool.layout.block_size
            self._places = slots // block_size, slots % block_size
        block, offset = self._places
        kv = self._attention.pool.blocks[:, :, layer]  # (blocks, heads, K and V, block_size, head_dim)
        kv[block, :, 0, offset] = keys
        kv[block, :, 1, offset] = values

    def attend(self, layer: int, queries: torch.Tensor, shape: Shape, out: torch.Tensor | None = None) -> torch.Tensor:
        """Attends with queries, (tokens, query_heads, head_dim), over what is written; into `out` if it is given."""
        key, queries = layer_key(shape), queries.contiguous()
        attended = torch.empty_like(queries) if out is None else out
        if count := len(self._decodes.positions):
            self._attention.decodes.attend_written(layer, queries[:count], shape, self._decodes, attended[:count])
        if self._chunks is not None:
            if key not in self._planned:
                self._planned[key] = self._attention.plan_chunks(key, self._chunks)
            self._planned[key](layer, queries[count:], attended[count:])
        return attended
