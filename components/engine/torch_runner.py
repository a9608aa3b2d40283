"""The torch runner: a transformers model over paged KV blocks, one flattened forward a step.

The tokens of all sequences go through the model as one row without padding, mask or cache object;
attention, registered with transformers under our own name, finds the step's plan among the keyword
arguments that the model hands down to it. Logits are computed for the sampled rows alone.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from components.engine.attention import KVPool, PagedStep, SdpaAttention, Shape
from components.engine.collective import Ranks
from components.engine.fuse import fuse_layers, pack_weights, should_pack
from components.engine.loading import ATTENTION, fingerprint, kv_layout, load_config, load_model, resolve_dtype
from components.engine.memory import num_pool_blocks
from components.engine.parallel import Place
from components.engine.ranges import Share
from components.engine.runner import Batch, Done, KVRegion, Launched, Runner, Sampled
from components.engine.sampling import sample
from components.engine.shard import own_share, shard_model
from components.engine.threads import mean_weights, step_threads
from components.messages import KVLayout
from components.model_cache import resolve_model
from components.options import WorkerOptions
from graph import LaunchError

log = logging.getLogger(__name__)

_MIB = 1 << 20
_MALLOPT_KEEP = ((-3, 32 * _MIB), (-1, 1 << 30), (-2, 64 * _MIB))  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD


class TorchRunner:
    """Executes steps of one model on one device. Made and used on the engine's thread."""

    def __init__(
        self,
        options: WorkerOptions,
        *,
        num_threads: int | None = None,
        on_progress: Callable[[str], None] | None = None,
        place: Place | None = None,
        gpu_share: float = 1.0,
        loaded: Loaded | None = None,
    ) -> None:
        """Loads the model unless it is given, and makes the pool.

        With `place`, it is this rank's part of both, together with the other ranks.

        Raises `LaunchError` with what to change.
        """
        loaded = loaded or load(
            options, num_threads=num_threads, on_progress=on_progress, place=place, gpu_share=gpu_share
        )
        self._model, self.model_config, self._ranks = loaded.model, loaded.config, loaded.ranks
        self.vocab_size: int = loaded.config.vocab_size
        self.max_model_len = loaded.max_model_len
        self.layout = loaded.layout
        num_blocks = num_pool_blocks(options, self.layout, loaded.device, gpu_share=loaded.gpu_share)
        self.num_blocks = num_blocks if self._ranks is None else self._ranks.least(num_blocks)
        self._pool = KVPool(self.layout, self.num_blocks, loaded.device)
        self._attention = SdpaAttention(self._pool)
        self._device = loaded.device
        self._weights = mean_weights(self._model.base_model)
        self._threads = torch.get_num_threads()
        if loaded.device.type == "cpu":
            _keep_freed_memory()

    @property
    def region(self) -> KVRegion:
        """Where the blocks lie."""
        return self._pool.region

    is_overlapping = False

    def launch(self, batch: Batch) -> Launched:
        """Runs the step at once."""
        return Done(self.execute(batch))

    def execute(self, batch: Batch) -> Sampled:
        """Runs one step; returns, or raises, when all KV of the step is written."""
        if self._device.type == "cpu" and self._threads > 1:
            torch.set_num_threads(step_threads(len(batch.input_ids), self._weights, self._threads))
        try:
            return self._run(batch)
        finally:
            if self._device.type == "cuda":  # a step that samples nothing, or fails, has waited for no kernel
                torch.cuda.current_stream(self._device).synchronize()

    @torch.inference_mode()
    def _run(self, batch: Batch) -> Sampled:
        step = self._attention.plan(batch)
        inputs = {
            "input_ids": self._row(batch.input_ids),
            "position_ids": self._row(batch.positions),
            "use_cache": False,
            "paged_step": step,
        }
        if not batch.samples:
            self._model.base_model(**inputs)
            return Sampled(np.empty(0, np.int32), ())
        last = batch.cu_seqlens_q[[row.row + 1 for row in batch.samples]] - 1
        kept = torch.from_numpy(last.astype(np.int64)).to(self._device)
        logits = self._model(**inputs, logits_to_keep=kept).logits[0]
        return sample(logits, batch.samples)

    def close(self) -> None:
        """Frees the model and the pool."""
        del self._model, self._attention, self._pool
        if self._ranks is not None:
            self._ranks.close()

    def _row(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)[None]


def make_torch_runner(
    options: WorkerOptions,
    *,
    num_threads: int | None = None,
    on_progress: Callable[[str], None] | None = None,
    place: Place | None = None,
    gpu_share: float = 1.0,
) -> Runner:
    """The runner for the options' device: the CUDA runner where FlashInfer serves the model, else this one."""
    loaded = load(options, num_threads=num_threads, on_progress=on_progress, place=place, gpu_share=gpu_share)
    if loaded.device.type == "cuda":
        from components.engine.flash import obstacle

        dtype = getattr(torch, loaded.layout.dtype)
        has_sinks = any(name.endswith(".sinks") for name, _ in loaded.model.named_parameters())
        reason = obstacle(dtype, loaded.layout.head_dim, has_sinks=has_sinks)
        if options.attention == "sdpa":
            reason = "it is asked for"
        if place is not None:
            reason = "ranks run step by step"
        if reason is None:
            from components.engine.cuda_runner import CudaRunner  # imports triton

            return CudaRunner(loaded, options, on_progress=on_progress)
        log.warning("attention runs on torch's SDPA, without CUDA graphs: %s", reason)
    return TorchRunner(options, loaded=loaded)


class Loaded(msgspec.Struct, frozen=True):
    """A model ready to run, and what its engine must know of it."""

    model: PreTrainedModel
    config: PretrainedConfig
    layout: KVLayout
    device: torch.device
    max_model_len: int
    is_fused: bool
    ranks: Ranks | None
    gpu_share: float  # of its GPU's memory


def load(
    options: WorkerOptions,
    *,
    num_threads: int | None,
    on_progress: Callable[[str], None] | None,
    place: Place | None,
    gpu_share: float,
) -> Loaded:
    """Loads the model that the options describe, or a rank's part of it. Raises `LaunchError` with what to change."""
    report = on_progress or (lambda _: None)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    _register_attention()
    device = resolve_device(options.device, place)
    ranks = None if place is None else Ranks(place.rank, place.size, store=place.store, device=device)
    report(f"resolving {options.model}")
    folder = resolve_model(options.model)
    config = load_config(folder)
    dtype = resolve_dtype(options.dtype, config)
    report(f"loading {options.model}")
    model, is_fused = _load(folder, config, dtype, device, load_format=options.load_format, ranks=ranks)
    if should_pack(dtype, device):
        pack_weights(model)
    layout = kv_layout(config, fingerprint(folder, options.load_format), dtype, options.block_size)
    if ranks is not None:
        layout = _own_part(layout, own_share(config, ranks))
    max_model_len = _max_model_len(options, config.max_position_embeddings)
    return Loaded(model, config, layout, device, max_model_len, is_fused, ranks, gpu_share)


def _register_attention() -> None:
    """Without a mask function beside it, transformers makes no mask, and does not ask the GPU whether it needs one."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention_forward)


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_step: PagedStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface: query, key and value are (1, heads, tokens, head_dim)."""
    shape = Shape(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    layer: int = module.layer_idx  # type: ignore[assignment]
    paged_step.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    return paged_step.attend(layer, query[0].transpose(0, 1), shape)[None], None


def _keep_freed_memory() -> None:
    """Lets glibc's allocator keep what a step frees for the next step, and not give it back to the system.

    Fresh pages for every layer's tensors took 10 % of a step of 16 sequences, and up to a third where nothing is
    kept. Called after loading, whose large temporary tensors do go back. Other C libraries have no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _MALLOPT_KEEP:
            mallopt(parameter, value)


def _load(
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    load_format: str,
    ranks: Ranks | None,
) -> tuple[PreTrainedModel, bool]:
    """The model on the device, its layers fused if they can be; a rank's part is cut out before it gets there.

    Random weights depend on the device that draws them, so ranks draw on the GPU as well.
    """
    if ranks is None:
        model = load_model(folder, config, dtype, device, load_format)
    else:
        whole_on = device if load_format == "dummy" else torch.device("cpu")
        model = load_model(folder, config, dtype, whole_on, load_format)
        config = shard_model(model, config, ranks)
        model.to(device)  # type: ignore[arg-type]
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what the other ranks' parts took
    return model, fuse_layers(model, config)


def _own_part(layout: KVLayout, share: Share) -> KVLayout:
    return msgspec.structs.replace(layout, head_start=share.kv_start, head_stop=share.kv_stop)


def resolve_device(option: str, place: Place | None = None) -> torch.device:
    """The device that an option names; each rank of a replica has a GPU of its own."""
    device = _named_device(option)
    if device.type != "cuda" or place is None:
        return device
    if torch.cuda.device_count() < place.size:
        raise LaunchError(f"tp={place.size} needs as many GPUs and {torch.cuda.device_count()} are visible; set gpus=1")
    own = torch.device("cuda", place.rank)
    torch.cuda.set_device(own)
    return own


def _named_device(option: str) -> torch.device:
    if option == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(option)
    except RuntimeError as error:
        raise LaunchError(f"device {option!r} is unknown; it must be auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LaunchError("device 'cuda' is asked for and torch finds none; use --set NODE.device=cpu")
    return device


def _max_model_len(options: WorkerOptions, of_model: int) -> int:
    if options.max_model_len is None:
        return of_model
    if options.max_model_len > of_model:
        raise LaunchError(f"max_model_len is {options.max_model_len} and the model takes at most {of_model}")
    return options.max_model_len
