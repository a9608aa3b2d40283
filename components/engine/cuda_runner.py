"""The CUDA runner: attention by kernels, decode steps as CUDA graphs, sampling without waiting for the GPU.

Models that `fused_cuda.py` knows have kernels of their own around attention; all others run transformers' own
forward, whose decode steps are captured if they can be. A step is launched and waited for later: its tokens stay on
the GPU, where the next step finds them, and are copied to the host behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from components.engine.attention import KVPool
from components.engine.batch import cumulated
from components.engine.chunk_graphs import ChunkGraphs, chunk_sizes
from components.engine.decode_attention import FEW_SEQUENCES, DecodeAttention
from components.engine.flash import LEAST_GATHERED_QUERIES, MOST_GATHERED, FlashAttention, has_copy_engine
from components.engine.fused_cuda import CudaDecoder, can_decode
from components.engine.gpu_sampling import GpuSampler, LogprobCopy
from components.engine.graphs import DecodeGraphs
from components.engine.layer_kernels import fed_ids
from components.engine.memory import num_pool_blocks
from components.engine.model_decoder import ModelDecoder
from components.engine.packing import bucket_sizes, most_blocks
from components.engine.products import large_rows, make_products
from components.engine.runner import GPU_BATCHED_TOKENS, Batch, Ints, KVRegion, Launched, Sampled, SampleRow
from components.engine.step_inputs import Inputs, StepInputs
from components.engine.torch_runner import Loaded
from components.kv.layout import ITEM_BYTES
from components.messages import Sampling
from components.options import WorkerOptions

log = logging.getLogger(__name__)

_MAX_GRAPH_BATCH = 512
_FIXED_BYTES = 3 << 30  # FlashInfer's workspace, graphs, cuBLAS, fragmentation


class CudaRunner:
    """Executes steps of one model on one GPU. Two steps may be under way."""

    is_overlapping = True

    def __init__(
        self, loaded: Loaded, options: WorkerOptions, *, on_progress: Callable[[str], None] | None = None
    ) -> None:
        """Makes the pool, compiles kernels, captures the graphs."""
        report = on_progress or (lambda _: None)
        config = self.model_config = loaded.config
        device = self._device = loaded.device
        self._model = loaded.model
        self.layout, self.max_model_len = loaded.layout, loaded.max_model_len
        self.vocab_size: int = config.vocab_size
        max_tokens = self._max_tokens = options.max_num_batched_tokens or GPU_BATCHED_TOKENS
        reserved = _reserved_bytes(loaded, max_tokens, options.max_num_seqs)
        self.num_blocks = num_pool_blocks(
            options, self.layout, device, gpu_share=loaded.gpu_share, reserved_bytes=reserved
        )
        self._pool = KVPool(self.layout, self.num_blocks, device, num_spare=1)
        decodes = DecodeAttention(self._pool.blocks, config.num_attention_heads, options.max_num_seqs)
        self._attention = FlashAttention(self._pool, config.num_attention_heads, decodes)
        max_blocks = most_blocks(options.max_num_seqs, self.max_model_len, self.layout.block_size)
        self._inputs = Inputs(self._attention, max_tokens, options.max_num_seqs, max_blocks)
        self._sampler = GpuSampler(options.max_num_seqs, self.vocab_size, device)
        self._last_tokens = torch.zeros(options.max_num_seqs, dtype=torch.int64, device=device)
        self._results = [
            torch.zeros(options.max_num_seqs, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(2)
        ]
        self._decoder: CudaDecoder | None = None
        self._graphs: DecodeGraphs | None = None
        self._chunk_graphs: ChunkGraphs | None = None
        max_batch = min(options.max_num_seqs, _MAX_GRAPH_BATCH)
        with torch.inference_mode():
            if loaded.is_fused and can_decode(loaded.model, config):
                self._decoder = CudaDecoder(
                    loaded.model, self._pool.blocks, self.max_model_len, max_batch, make_products(device)
                )
            self._prepare_graphs(max_batch, max_blocks, report)
            self._warm_up(report)

    @property
    def region(self) -> KVRegion:
        """Where the blocks lie."""
        return self._pool.region

    def execute(self, batch: Batch) -> Sampled:
        """Runs one step to its end."""
        return self.launch(batch).wait()

    def launch(self, batch: Batch) -> Launched:
        """Queues one step on the GPU."""
        try:
            return self._launch(batch)
        except Exception:
            torch.cuda.synchronize(self._device)  # kernels that were queued before it failed write into its blocks
            raise

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> Launched:
        self._attention.turn()
        is_graph = self._graphs is not None and self._graphs.can_run(batch)
        logits = self._graphs.run(batch) if self._graphs is not None and is_graph else self._run_chunks(batch)
        rows = batch.samples
        if logits is None:
            return _Step(self._results[0][:0], None)
        tokens = self._last_tokens[: len(rows)]
        if not is_graph:
            torch.argmax(logits, dim=-1, out=tokens)
        self._sampler.draw(logits, rows, tokens)
        logprobs = LogprobCopy(logits, rows, tokens)
        self._results.reverse()
        host = self._results[0][: len(rows)]
        host.copy_(tokens, non_blocking=True)
        return _Step(host, logprobs)

    def close(self) -> None:
        """Frees the model, the graphs and the pool."""
        torch.cuda.synchronize(self._device)
        self._graphs = self._chunk_graphs = self._decoder = None
        del self._model, self._attention, self._inputs, self._pool
        torch.cuda.empty_cache()

    def _run_chunks(self, batch: Batch) -> torch.Tensor | None:
        """Any step, its attentions one by one; logits of the sampled rows, None without any."""
        count = len(batch.input_ids)
        size = self._chunk_graphs.size_for(count) if self._chunk_graphs is not None else None
        sent = self._inputs.send(batch, size)
        if self._chunk_graphs is not None and size is not None:
            return self._logits(self._chunk_graphs.run(size, count, sent.step), sent.kept)
        ids = fed_ids(sent.given, sent.fed, self._last_tokens)
        if self._decoder is None:
            return self._run_model(ids, sent)
        return self._logits(self._decoder.hidden(ids, sent.positions, sent.slots, sent.step), sent.kept)

    def _logits(self, hidden: torch.Tensor, kept: torch.Tensor) -> torch.Tensor | None:
        assert self._decoder is not None
        return self._decoder.logits(self._decoder.norm(hidden[kept])) if len(kept) else None

    def _run_model(self, ids: torch.Tensor, sent: StepInputs) -> torch.Tensor | None:
        inputs: dict[str, Any] = {
            "input_ids": ids[None],
            "position_ids": sent.positions.long()[None],
            "use_cache": False,
            "paged_step": sent.step,
        }
        if not len(sent.kept):
            self._model.base_model(**inputs)
            return None
        logits: torch.Tensor = self._model(**inputs, logits_to_keep=sent.kept.long()).logits[0]
        return logits

    def _prepare_graphs(self, max_batch: int, max_blocks: int, report: Callable[[str], None]) -> None:
        if self._decoder is not None:
            report("compiling attention kernels")
            self._attention.compile({layer.shape.sliding_window is not None for layer in self._decoder.layers})
            chunk_rows = [*chunk_sizes(self._max_tokens), *large_rows(self._max_tokens)]
            self._decoder.choose_products(bucket_sizes(max_batch), chunk_rows, report)
        decoder = self._decoder or ModelDecoder(self._model, self._attention)
        graphs = DecodeGraphs(
            decoder, self._pool, max_batch=max_batch, vocab_size=self.vocab_size, max_blocks=max_blocks
        )
        reason = graphs.obstacle(self._last_tokens) if self._decoder is None else None
        if reason is not None:
            log.warning("decode steps run without CUDA graphs: %s", reason)
            return
        graphs.capture(self._last_tokens, report)
        self._graphs = graphs
        if self._decoder is not None:
            self._chunk_graphs = ChunkGraphs(self._decoder, self._inputs.buffer, self._max_tokens)
            self._chunk_graphs.capture(self._last_tokens, report)

    def _warm_up(self, report: Callable[[str], None]) -> None:
        """Prompts with a draw of each kind, some that no graph holds, and few and many decodes beside one.

        So no request waits for a compiler.
        """
        report("warming up")
        plain = Sampling(temperature=1.0, top_p=0.9, logprobs=1)
        biased = msgspec.structs.replace(plain, logit_bias=((0, 1.0),))  # whose logits become float32
        sizes = self._chunk_graphs.sizes if self._chunk_graphs is not None else []
        trials = [(0, 2, plain), (0, 2, biased), (0, min((sizes or [1])[-1] + 1, self._max_tokens), plain)]
        trials += [(0, LEAST_GATHERED_QUERIES, plain)] if self._max_tokens >= LEAST_GATHERED_QUERIES else []
        most_decodes = min(len(self._last_tokens), self._max_tokens)
        trials += [(count, 2, plain) for count in (1, FEW_SEQUENCES) if count <= most_decodes]
        for num_decodes, num_tokens, sampling in trials:
            whole, rest = divmod(num_tokens, self.max_model_len)
            prompts = [self.max_model_len] * whole + [rest] * (rest > 0)
            lengths = np.array([1] * num_decodes + prompts, np.int32)
            self.execute(_trial_batch(lengths, self._pool.num_blocks, self.layout.block_size, sampling))


class _Step:
    """A step under way: its tokens arrive in pinned memory."""

    def __init__(self, tokens: torch.Tensor, logprobs: LogprobCopy | None) -> None:
        self._tokens = tokens
        self._logprobs = logprobs
        self._over = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._over.record()

    def wait(self) -> Sampled:
        """What the step chose, once it is over."""
        self._over.synchronize()
        return Sampled(self._tokens.numpy().astype(np.int32), self._logprobs.result() if self._logprobs else ())


def _trial_batch(lengths: Ints, block: int, block_size: int, sampling: Sampling) -> Batch:
    """A step of whole prompts, all of them in one block, of which the last chooses a token."""
    empty, num_blocks, cu_seqlens = np.empty(0, np.int32), -(-lengths // block_size), cumulated(lengths)
    positions = np.arange(cu_seqlens[-1], dtype=np.int32) - np.repeat(cu_seqlens[:-1], lengths)
    return Batch(
        input_ids=np.zeros_like(positions),
        positions=positions,
        cu_seqlens_q=cu_seqlens,
        seq_lens=lengths,
        blocks=np.full(num_blocks.sum(), block, np.int32),
        cu_blocks=cumulated(num_blocks),
        slot_mapping=positions.astype(np.int64) % block_size + block * block_size,
        samples=(SampleRow(len(lengths) - 1, sampling, int(lengths[-1]), empty, empty),),
    )


def _reserved_bytes(loaded: Loaded, max_tokens: int, max_seqs: int) -> int:
    """Memory that steps need beside weights and pool: activations of the largest step, logits, workspaces."""
    config, layout = loaded.config, loaded.layout
    item = ITEM_BYTES[layout.dtype]
    wide: int = getattr(config, "intermediate_size", 4 * config.hidden_size)
    per_token = (6 * config.hidden_size + 4 * wide) * item
    kv_heads = layout.head_stop - layout.head_start
    can_gather = max_tokens >= LEAST_GATHERED_QUERIES and has_copy_engine(loaded.device)
    gathered = 2 * MOST_GATHERED * kv_heads * layout.head_dim * item if can_gather else 0
    parts = 2 * DecodeAttention.scratch_bytes(max_seqs, config.num_attention_heads, kv_heads, layout.head_dim)
    copies = 2 if loaded.is_fused else 5  # graphs of transformers' forward keep what it makes logits of: those, caps
    logits = max_seqs * config.vocab_size * (copies * item + 8)
    return int(_FIXED_BYTES + max_tokens * per_token + gathered + parts + logits)
