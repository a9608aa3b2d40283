"""The engine of a served worker with nothing around it: the same options, requests handed over in this process.

python tests/gpu/bare.py --options JSON [--streams 64,256]     prints one JSON object
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import random
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec

from components.engine.build import build_engine
from components.engine.outputs import Ended, EngineRequest, StepReport, StepTokens
from components.messages import Sampling, Stopping
from components.options import WorkerOptions

SINGLE_ROUNDS = 20
REST_S = 0.01  # about what lies between two requests that a served engine gets one after the other
_TIMEOUT_S = 120


class BareEngine:
    """One engine, and bursts of requests through it."""

    def __init__(self, options: WorkerOptions) -> None:
        self._reports: queue.SimpleQueue[tuple[float, StepReport]] = queue.SimpleQueue()
        context: Any = SimpleNamespace(num_cores=len(os.sched_getaffinity(0)), tp=1, gpu_share=1.0, progress=_progress)
        began_s = time.monotonic()
        self._engine = build_engine(options, context, lambda report: self._reports.put((time.perf_counter(), report)))
        self._engine.start()
        self.start_s = time.monotonic() - began_s
        self._vocab_size = self._engine.runner.vocab_size
        self._numbers = itertools.count()
        self._random = random.Random(0)

    def burst(self, count: int, num_in: int, num_out: int) -> tuple[float, float]:
        """Hands over so many requests at once: seconds until the first token of any, and until all are done."""
        prompts = [[self._random.randrange(256, self._vocab_size) for _ in range(num_in)] for _ in range(count)]
        began_s = time.perf_counter()
        for prompt in prompts:
            self._engine.submit(
                EngineRequest(
                    id=str(next(self._numbers)),
                    tokens=prompt,
                    num_prompt_tokens=num_in,
                    sampling=Sampling(temperature=0.0),
                    stopping=Stopping(max_tokens=num_out),
                )
            )
        left, first_s, at_s = count, None, began_s
        while left:
            at_s, report = self._reports.get(timeout=_TIMEOUT_S)
            for output in report.outputs:
                if isinstance(output, Ended):
                    raise output.error
                if isinstance(output, StepTokens):
                    first_s = first_s or at_s - began_s
                    left -= output.finish is not None
        assert first_s is not None
        return first_s, at_s - began_s

    def stop(self) -> None:
        """Ends the engine's thread."""
        self._engine.stop()


def _single_ttft_ms(engine: BareEngine, num_in: int, *, rest_s: float) -> float:
    """The median of one request after the other; after a rest, the host's caches have forgotten the engine."""
    firsts = []
    for _ in range(SINGLE_ROUNDS):
        time.sleep(rest_s)
        firsts.append(engine.burst(1, num_in, 8)[0])
    return statistics.median(firsts) * 1e3


def _progress(doing: str, fraction: float | None = None) -> None:
    sys.stderr.write(f"{doing}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--options", required=True, help="the worker's options as JSON")
    parser.add_argument("--streams", default="64,256")
    parser.add_argument("--tokens-in", type=int, default=128)
    parser.add_argument("--tokens-out", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    engine = BareEngine(msgspec.convert(json.loads(args.options), WorkerOptions))
    found: dict[str, Any] = {"start_s": engine.start_s, "tokens_per_s": {}}
    engine.burst(1, args.tokens_in, 8)
    found["ttft_ms"] = _single_ttft_ms(engine, args.tokens_in, rest_s=0.0)
    found["rested_ttft_ms"] = _single_ttft_ms(engine, args.tokens_in, rest_s=REST_S)
    for count in map(int, args.streams.split(",")):
        engine.burst(count, args.tokens_in, 8)
        seconds = [engine.burst(count, args.tokens_in, args.tokens_out)[1] for _ in range(args.rounds)]
        found["tokens_per_s"][str(count)] = [count * args.tokens_out / s for s in seconds]
    engine.stop()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
