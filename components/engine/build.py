"""Makes the engine that a worker's options describe."""

from __future__ import annotations

import logging
from collections.abc import Callable

from components.engine.engine import Engine, EngineConfig
from components.engine.fake import FakeRunner
from components.engine.outputs import StepReport
from components.engine.parallel import Others, ParallelRunner, Place
from components.engine.runner import GPU_BATCHED_TOKENS, Runner
from components.options import WorkerOptions
from graph import Context, LaunchError

log = logging.getLogger(__name__)

FAKE_NUM_BLOCKS = 4_096
FAKE_MAX_MODEL_LEN = 8_192
_CPU_BATCHED_TOKENS = 256  # a chunk of 0.4 to 0.8 s of the default model on one core


def build_engine(
    options: WorkerOptions, context: Context, on_report: Callable[[StepReport], None], others: Others | None = None
) -> Engine:
    """Loads the model and makes the engine, not yet started; blocks for as long as loading takes.

    `others` are the replica's further ranks, if it has any: they load at the same time.
    """
    runner = make_runner(
        options,
        num_threads=max(1, context.num_cores // context.tp),
        on_progress=context.progress,
        place=None if others is None else others.place,
        gpu_share=context.gpu_share,
    )
    if others is not None:
        runner = ParallelRunner(runner, others)
    batched_tokens = options.max_num_batched_tokens
    if batched_tokens is None:
        batched_tokens = GPU_BATCHED_TOKENS if runner.region.memory == "VRAM" else _CPU_BATCHED_TOKENS
    # Decodes leave at least half of a step to prompts, so that these get on however many sequences run.
    max_num_seqs = min(options.max_num_seqs, max(1, batched_tokens // 2))
    if max_num_seqs < options.max_num_seqs:
        log.info("steps of %d tokens hold %d of max_num_seqs=%d", batched_tokens, max_num_seqs, options.max_num_seqs)
    budget_ms = options.itl_budget_ms
    if budget_ms is None and runner.region.memory == "VRAM":
        budget_ms = options.gpu_itl_budget_ms
    config = EngineConfig(
        hash_unit=options.hash_unit or options.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched_tokens,
        max_waiting=options.max_waiting,
        enable_prefix_caching=options.enable_prefix_caching,
        itl_budget_s=budget_ms / 1e3 if budget_ms else None,
    )
    return Engine(runner, config, on_report)


def make_runner(
    options: WorkerOptions,
    *,
    num_threads: int,
    on_progress: Callable[[str], None],
    place: Place | None = None,
    gpu_share: float = 1.0,
) -> Runner:
    """The runner that the options describe; with `place`, that of one rank. `gpu_share` is its part of a GPU."""
    if options.engine == "fake":
        if place is not None:
            raise LaunchError("engine 'fake' has no ranks to divide its work among; set tp=1")
        return FakeRunner(
            num_blocks=options.num_blocks or FAKE_NUM_BLOCKS,
            block_size=options.block_size,
            max_model_len=options.max_model_len or FAKE_MAX_MODEL_LEN,
            speed=options.fake,
            model=options.model,
        )
    from components.engine.torch_runner import make_torch_runner  # imports torch

    return make_torch_runner(
        options, num_threads=num_threads, on_progress=on_progress, place=place, gpu_share=gpu_share
    )
