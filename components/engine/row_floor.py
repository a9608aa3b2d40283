"""Floors of rows of bfloat16 logits by a CUDA kernel, `row_floor.cu`, compiled at start for the device at hand.

A floor is the smallest logit that min_p, top_k and top_p let pass. The kernel counts in a block's shared memory how
often each value occurs from the row's best downwards, so that memory says how far down values are told apart: on an
H200 (227 kB a block) to the last, on an A100 (163 kB) to 2^24 below the best at least, where no weight is left. A block
of less than 157 kB (99 kB on consumer GPUs) would not always reach below zero. There, and where cuda.core is missing or
cannot compile, `make_row_floor` gives None, and rows of bfloat16 go through the slower kernel of `wide_floor.py`, whose
floors are `order32`. So do tensors on the CPU.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from components.engine.draw_settings import COLUMNS

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cu")
_THREADS = 1024  # of a block; 512 take half as long again
_FIXED_BYTES = 12 * _THREADS + 16  # of a block's shared memory, beside its counts
_BIN_BYTES = 4
_ALL_BINS = 53_248  # all values from the best downwards, while it is below 2^33
_FEWEST_BINS = 37_000  # the last one is 2^18 below the best at least, wherever that is


def num_bins(shared_bytes: int) -> int | None:
    """Values that a block with so much shared memory can count from a row's best downwards; None if too few."""
    bins = min(_ALL_BINS, (shared_bytes - _FIXED_BYTES) // _BIN_BYTES)
    return bins if bins >= _FEWEST_BINS else None


def make_row_floor(device: torch.device) -> RowFloor | None:
    """The kernel for a device; None, with the reason in the log, where rows must do without.

    Called once by each sampler, before the worker is ready; compiling takes about 0.2 s.
    """
    if device.type != "cuda":
        return None
    shared_bytes: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    bins = num_bins(shared_bytes)
    reason = f"its blocks have {shared_bytes} bytes of shared memory"
    if bins is not None:
        try:
            return RowFloor(device, bins)
        except ImportError:
            reason = "cuda.core is not installed (headrace[cuda])"
        except Exception as error:  # NVRTC missing, or of another CUDA than the driver: draws are right without it
            reason = "row_floor.cu cannot be compiled: " + str(error).partition("\n")[0]
    log.warning("draws with top_k or top_p are slower than they could be on %s: %s", device, reason)
    return None


class RowFloor:
    """The compiled kernel and what its launches have in common. Made and used on the engine's thread."""

    def __init__(self, device: torch.device, bins: int) -> None:
        """Compiles; raises `ImportError` without cuda.core, and cuda.core's errors."""
        from cuda.bindings import driver
        from cuda.core import Device, LaunchConfig, Program, ProgramOptions, Stream, launch

        index = device.index if device.index is not None else torch.cuda.current_device()
        core_device = Device(index)
        core_device.set_current()
        macros = [("BINS", str(bins)), ("THREADS", str(_THREADS)), ("COLUMNS", str(COLUMNS))]
        options = ProgramOptions(name=_SOURCE.name, arch=f"sm_{core_device.arch}", std="c++17", define_macro=macros)
        self._kernel = Program(_SOURCE.read_text(), "c++", options).compile("cubin").get_kernel("find_floors")
        self._shared_bytes = _FIXED_BYTES + _BIN_BYTES * bins
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(
            attribute, self._shared_bytes, self._kernel.handle, driver.CUdevice(index)
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"a block cannot have {self._shared_bytes} bytes of shared memory: {status.name}")
        self._index = index
        self._launch, self._make_config, self._wrap_stream = launch, LaunchConfig, Stream.from_handle
        self._streams: dict[int, Any] = {}  # torch's, by handle: those of its pools, which it never frees
        self._configs: dict[int, Any] = {}  # by rows

    def find(self, logits: torch.Tensor, settings: torch.Tensor, tokens: torch.Tensor, floors: torch.Tensor) -> None:
        """Queues the floors of the rows that `settings` name on torch's current stream, as upper halves of `order32`.

        `logits` (rows, vocabulary) of bfloat16; `settings` (drawn, COLUMNS) as `draw_settings.py` makes them; `tokens`
        (rows,) of int64: the largest logits' places; `floors` (at least drawn,) of int64: 0 where everything passes.
        """
        num_rows = len(settings)
        config = self._configs.get(num_rows)
        if config is None:
            config = self._make_config(grid=num_rows, block=_THREADS, shmem_size=self._shared_bytes)
            self._configs[num_rows] = config
        given = (logits.data_ptr(), logits.stride(0), settings.data_ptr(), tokens.data_ptr(), floors.data_ptr())
        self._launch(self._stream(), config, self._kernel, *given, np.int32(logits.shape[1]))

    def _stream(self) -> Any:
        handle = torch.cuda.current_stream(self._index).cuda_stream
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = self._wrap_stream(handle)
        return stream
