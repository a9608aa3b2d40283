"""The bare engine on the CPU against transformers, in one run: 128 tokens in, 128 out, 16 requests.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive python tests/bench/bench_engine_cpu.py [--quick | --rounds 3]

The jobs take turns, so that a disturbance hits all of them, and each job's best round counts. The
floor says what this machine could do at most: weights read once a step at its memory bandwidth, or
multiplied at its measured float32 rate, whichever takes longer.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import results
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from components.engine.engine import Engine, EngineConfig
from components.engine.outputs import Ended, EngineRequest, StepReport, StepTokens
from components.engine.torch_runner import TorchRunner
from components.messages import Sampling, Stopping
from components.model_cache import resolve_model
from components.options import DEFAULT_MODEL, WorkerOptions

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 128
_GREEDY = Sampling(temperature=0.0)


class OurEngine:
    """The product's engine with nothing around it."""

    def __init__(self, model: str, dtype: str, threads: int, max_num_seqs: int = 64) -> None:
        options = WorkerOptions(model=model, dtype=dtype, device="cpu", kv_memory_mb=512)
        self.runner = TorchRunner(options, num_threads=threads)
        config = EngineConfig(
            hash_unit=16,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=256,
            max_waiting=1_000,
            enable_prefix_caching=False,
        )
        self._reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
        self._engine = Engine(self.runner, config, self._reports.put)
        self._engine.start()
        self._requests = 0

    def run(self, prompts: list[list[int]]) -> float:
        """Generates for all prompts at once; output tokens per second."""
        start = time.perf_counter()
        for prompt in prompts:
            self._requests += 1
            self._engine.submit(
                EngineRequest(
                    id=str(self._requests),
                    tokens=prompt,
                    num_prompt_tokens=len(prompt),
                    sampling=_GREEDY,
                    stopping=Stopping(max_tokens=OUTPUT_TOKENS),
                )
            )
        self._await_tokens(len(prompts) * OUTPUT_TOKENS)
        return len(prompts) * OUTPUT_TOKENS / (time.perf_counter() - start)

    def _await_tokens(self, count: int) -> None:
        while count > 0:
            for output in self._reports.get(timeout=300).outputs:
                if isinstance(output, Ended):
                    raise output.error
                if isinstance(output, StepTokens):
                    count -= len(output.tokens)

    def stop(self) -> None:
        """Ends the engine's thread, which frees the model."""
        self._engine.stop()


class Transformers:
    """The peer, loaded once for `generate` and once for continuous batching."""

    def __init__(self, model: str, dtype: torch.dtype) -> None:
        folder = resolve_model(model)
        self._plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._batching = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
        self._config = GenerationConfig(
            max_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
        )

    def one_by_one(self, prompts: list[list[int]]) -> float:
        """`generate` for one prompt after another; output tokens per second."""
        start = time.perf_counter()
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = self._plain.generate(ids, attention_mask=torch.ones_like(ids), generation_config=self._config)
            assert out.shape[1] == len(prompt) + OUTPUT_TOKENS
        return len(prompts) * OUTPUT_TOKENS / (time.perf_counter() - start)

    def static_batch(self, prompts: list[list[int]]) -> float:
        """`generate` for all prompts, which are equally long, as one batch."""
        start = time.perf_counter()
        ids = torch.tensor(prompts)
        self._plain.generate(ids, attention_mask=torch.ones_like(ids), generation_config=self._config)
        return len(prompts) * OUTPUT_TOKENS / (time.perf_counter() - start)

    def continuous(self, prompts: list[list[int]]) -> float:
        """`generate_batch`, transformers' continuous batching."""
        start = time.perf_counter()
        outputs = self._batching.generate_batch(prompts, generation_config=self._config, progress_bar=False)
        seconds = time.perf_counter() - start
        count = sum(len(output.generated_tokens) for output in outputs.values())
        if count != len(prompts) * OUTPUT_TOKENS:  # its own thread failed, or it left requests out
            raise RuntimeError(f"generate_batch gave {count} of {len(prompts) * OUTPUT_TOKENS} tokens")
        return count / seconds


def make_prompts(count: int, vocab_size: int = 49_152) -> list[list[int]]:
    """Random prompts that share nothing."""
    random = np.random.default_rng(0)
    return random.integers(3, vocab_size - 3, (count, PROMPT_TOKENS)).tolist()


def bare_engine_tokens_per_s(
    *, num_requests: int, concurrency: int, dtype: str = "bfloat16", threads: int = 2
) -> float:
    """The engine alone with `concurrency` of `num_requests` running at once, after a warm-up."""
    engine = OurEngine(DEFAULT_MODEL, dtype, threads, max_num_seqs=concurrency)
    try:
        prompts = make_prompts(num_requests + 1)
        engine.run(prompts[num_requests:])
        return engine.run(prompts[:num_requests])
    finally:
        engine.stop()


def best_of(repeats: int, job: Callable[[], object]) -> float:
    """Seconds of the quickest of `repeats` runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        job()
        times.append(time.perf_counter() - start)
    return min(times)


def floor(runner: TorchRunner, batch: int) -> dict[str, float]:
    """What the machine allows: bandwidth, float32 rate, and the tokens per second that follow from them."""
    words, side = torch.ones(1 << 26), torch.randn(1_024, 1_024)
    gigabytes_per_s = words.numel() * 4 / best_of(5, words.sum) / 1e9
    gigaflops = 2 * 1_024**3 / best_of(5, lambda: side @ side) / 1e9
    config = runner.model_config
    per_layer = config.hidden_size * (
        2 * config.num_attention_heads * config.head_dim + 2 * config.num_key_value_heads * config.head_dim
    )
    per_layer += 3 * config.hidden_size * config.intermediate_size
    weights = per_layer * config.num_hidden_layers + config.hidden_size * config.vocab_size
    read_s, multiply_s = weights * 2 / gigabytes_per_s / 1e9, 2 * weights * batch / gigaflops / 1e9
    return {
        "bandwidth_gb_s": gigabytes_per_s,
        "float32_gflop_s": gigaflops,
        "read_ms": read_s * 1e3,
        "multiply_ms": multiply_s * 1e3,
        "tok_s": batch / max(read_s, multiply_s),
    }


def measure(jobs: dict[str, Callable[[], float]], rounds: int) -> tuple[dict[str, float], dict[str, str]]:
    """The best of each job in tokens per second, and why a job failed, which ends no other."""
    best: dict[str, float] = {}
    failures: dict[str, str] = {}
    for _ in range(rounds):
        for name, job in jobs.items():
            if name in failures:
                continue
            try:
                best[name] = max(best.get(name, 0.0), job())
            except Exception as error:  # whatever a peer ends in is a result of this run
                failures[name] = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"{name}: {failures.get(name) or f'{best[name]:.1f} tok/s'}\n")
    return best, failures


def main() -> None:
    """Runs the jobs in turn and writes the best of each, ratios and the floor as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--skip", nargs="*", default=[], help="jobs to leave out")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ours = OurEngine(arguments.model, arguments.dtype, arguments.threads)
    peer = Transformers(arguments.model, getattr(torch, arguments.dtype))
    prompts = make_prompts(arguments.batch)
    jobs: dict[str, Callable[[], float]] = {
        "engine": lambda: ours.run(prompts),
        "engine_one_by_one": lambda: ours.run(prompts[:1]),
        "generate_one_by_one": lambda: peer.one_by_one(prompts[:1]),
        "generate_static_batch": lambda: peer.static_batch(prompts),
        "generate_batch": lambda: peer.continuous(prompts),
    }

    def with_all_threads(job: Callable[[], float]) -> float:
        torch.set_num_threads(arguments.threads)  # the engine uses fewer in small steps
        return job()

    chosen = {name: partial(with_all_threads, job) for name, job in jobs.items() if name not in arguments.skip}
    best, failures = measure(chosen, 1 if arguments.quick else arguments.rounds)
    lowest = floor(ours.runner, arguments.batch)
    ours.stop()
    result = {
        "threads": arguments.threads,
        "dtype": arguments.dtype,
        "batch": arguments.batch,
        "tok_s": best,
        "failures": failures,
        "engine_over": {name: best["engine"] / best[name] for name in best if name.startswith("generate")},
        "floor": lowest,
    }
    results.write(f"engine_cpu_{arguments.dtype}", result)
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
