"""The CUDA runner: FlashInfer attention, decode steps as CUDA graphs, sampling without waiting for the GPU.

Models that `fused_cuda.py` knows decode through graphs; all others run transformers' own forward, step by
step, on the same attention. A step is launched and waited for later: its tokens stay on the GPU, where the
next step finds them, and are copied to the host behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from components.engine.attention import KVPool
from components.engine.chunk_graphs import ChunkGraphs, pad
from components.engine.flash import FlashAttention, FlashStep, Tables
from components.engine.fused_cuda import CudaDecoder, can_decode
from components.engine.gpu_sampling import GpuSampler, LogprobCopy
from components.engine.graphs import DecodeGraphs
from components.engine.memory import num_pool_blocks
from components.engine.packing import FIELDS, most_blocks
from components.engine.runner import GPU_BATCHED_TOKENS, Batch, KVRegion, Launched, Sampled, SampleRow
from components.engine.staging import Staging
from components.engine.torch_runner import Loaded
from components.kv.layout import ITEM_BYTES
from components.messages import Sampling
from components.options import WorkerOptions

_MAX_GRAPH_BATCH = 512
_ALIGNED = 4  # fields begin at multiples of 16 bytes, for which Triton compiles kernels of their own
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
        reserved = _reserved_bytes(config, loaded.layout.dtype, max_tokens, options.max_num_seqs)
        self.num_blocks = num_pool_blocks(
            options, self.layout, device, gpu_share=loaded.gpu_share, reserved_bytes=reserved
        )
        self._pool = KVPool(self.layout, self.num_blocks, device, num_spare=1)
        self._attention = FlashAttention(self._pool, config.num_attention_heads)
        max_blocks = most_blocks(options.max_num_seqs, self.max_model_len, self.layout.block_size)
        room = FIELDS * (max_tokens + _ALIGNED) + options.max_num_seqs + max_blocks
        self._staging = Staging(room, torch.int32, device)
        self._sampler = GpuSampler(options.max_num_seqs, self.vocab_size, device)
        self._last_tokens = torch.zeros(options.max_num_seqs, dtype=torch.int64, device=device)
        self._results = [
            torch.zeros(options.max_num_seqs, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(2)
        ]
        self._decoder: CudaDecoder | None = None
        self._graphs: DecodeGraphs | None = None
        self._chunk_graphs: ChunkGraphs | None = None
        with torch.inference_mode():
            if loaded.is_fused and can_decode(loaded.model, config):
                max_batch = min(options.max_num_seqs, _MAX_GRAPH_BATCH)
                self._decoder = CudaDecoder(loaded.model, self._pool.blocks, self.max_model_len, max_batch)
                self._prepare_graphs(max_batch, max_tokens, max_blocks, report)
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
        del self._model, self._attention, self._pool
        torch.cuda.empty_cache()

    def _run_chunks(self, batch: Batch) -> torch.Tensor | None:
        """Any step, kernel by kernel; logits of the sampled rows, None without any."""
        count = len(batch.input_ids)
        kept = batch.cu_seqlens_q[[row.row + 1 for row in batch.samples]] - 1
        feeds = batch.feeds if batch.feeds is not None else np.full(count, -1, np.int32)
        fields = (batch.input_ids, feeds, batch.positions, batch.slot_mapping.astype(np.int32))
        size = self._chunk_graphs.size_for(count) if self._chunk_graphs is not None else None
        spare_slot = self._pool.num_blocks * self.layout.block_size
        head = pad(fields, size or -(-count // _ALIGNED) * _ALIGNED, spare_slot)
        sent = self._staging.send(np.concatenate((head, kept, batch.blocks)).astype(np.int32, copy=False))
        kept_rows, blocks = sent[len(head) : len(head) + len(kept)], sent[len(head) + len(kept) :]
        given, fed, positions, slots = sent[: len(head)].view(FIELDS, -1)[:, :count]
        step = self._attention.plan_chunks(self._tables(batch, blocks), slots)
        if self._chunk_graphs is not None and size is not None:
            return self._logits(self._chunk_graphs.run(size, count, step), kept_rows)
        ids = torch.where(fed >= 0, self._last_tokens[fed.clamp_min(0)], given)
        if self._decoder is None:
            return self._run_model(ids, positions, step, kept_rows)
        return self._logits(self._decoder.hidden(ids, positions, slots, step), kept_rows)

    def _logits(self, hidden: torch.Tensor, kept: torch.Tensor) -> torch.Tensor | None:
        assert self._decoder is not None
        return self._decoder.logits(self._decoder.norm(hidden[kept])) if len(kept) else None

    def _run_model(
        self, ids: torch.Tensor, positions: torch.Tensor, step: FlashStep, kept: torch.Tensor
    ) -> torch.Tensor | None:
        inputs: dict[str, Any] = {
            "input_ids": ids[None],
            "position_ids": positions.long()[None],
            "use_cache": False,
            "paged_step": step,
        }
        if not len(kept):
            self._model.base_model(**inputs)
            return None
        logits: torch.Tensor = self._model(**inputs, logits_to_keep=kept.long()).logits[0]
        return logits

    def _tables(self, batch: Batch, blocks: torch.Tensor) -> Tables:
        last_lengths = (batch.seq_lens - 1) % self.layout.block_size + 1
        ends = torch.from_numpy(last_lengths.astype(np.int32))
        return Tables(torch.from_numpy(batch.cu_seqlens_q), torch.from_numpy(batch.cu_blocks), ends, blocks)

    def _prepare_graphs(self, max_batch: int, max_tokens: int, max_blocks: int, report: Callable[[str], None]) -> None:
        assert self._decoder is not None
        report("compiling attention kernels")
        self._attention.compile({layer.shape.sliding_window is not None for layer in self._decoder.layers})
        self._graphs = DecodeGraphs(
            self._decoder, self._pool, max_batch=max_batch, vocab_size=self.vocab_size, max_blocks=max_blocks
        )
        self._graphs.capture(self._last_tokens, report)
        self._chunk_graphs = ChunkGraphs(self._decoder, self._staging.device_buffer, max_tokens)
        self._chunk_graphs.capture(self._last_tokens, report)

    def _warm_up(self, report: Callable[[str], None]) -> None:
        """Prompts with a draw of each kind, and one that no graph holds, so that no request waits for a compiler."""
        report("warming up")
        plain = Sampling(temperature=1.0, top_p=0.9, logprobs=1)
        biased = msgspec.structs.replace(plain, logit_bias=((0, 1.0),))  # whose logits become float32
        sizes = self._chunk_graphs.sizes if self._chunk_graphs is not None else []
        longest = min((sizes or [1])[-1] + 1, self._max_tokens, self.max_model_len)
        for num_tokens, sampling in ((2, plain), (2, biased), (longest, plain)):
            self.execute(_trial_batch(num_tokens, self._pool.num_blocks, self.layout.block_size, sampling))


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


def _trial_batch(num_tokens: int, block: int, block_size: int, sampling: Sampling) -> Batch:
    """A step of one prompt, all of it in one block."""
    empty, num_blocks = np.empty(0, np.int32), -(-num_tokens // block_size)
    return Batch(
        input_ids=np.zeros(num_tokens, np.int32),
        positions=np.arange(num_tokens, dtype=np.int32),
        cu_seqlens_q=np.array([0, num_tokens], np.int32),
        seq_lens=np.array([num_tokens], np.int32),
        blocks=np.full(num_blocks, block, np.int32),
        cu_blocks=np.array([0, num_blocks], np.int32),
        slot_mapping=np.arange(num_tokens, dtype=np.int64) % block_size + block * block_size,
        samples=(SampleRow(0, sampling, num_tokens, empty, empty),),
    )


def _reserved_bytes(config: Any, dtype: str, max_tokens: int, max_seqs: int) -> int:
    """Memory that steps need beside weights and pool: activations of the largest step, logits, workspaces."""
    wide: int = getattr(config, "intermediate_size", 4 * config.hidden_size)
    per_token = (6 * config.hidden_size + 4 * wide) * ITEM_BYTES[dtype]
    logits = max_seqs * config.vocab_size * (2 * ITEM_BYTES[dtype] + 8)
    return int(_FIXED_BYTES + max_tokens * per_token + logits)
