"""What the engine's thread does on the host in a step of decode, on a runner that costs nothing.

    python tests/bench/bench_bookkeeping.py [--sequences 1,64,256,512] [--steps 200] [--kinds greedy,drawn]

Microseconds a step, in all and for each part, of the CPU, so that others on the machine do not count, and of the clock:
from one step's report to the next one's, with a consumer that reads them in a thread of its own. `device` is what the
CUDA runner does on the host for such a batch before its graph runs, without the calls of CUDA.
"""

from __future__ import annotations

import argparse
import queue
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import results
import torch

from components.engine import engine as engine_module
from components.engine.draw_settings import DrawSettings
from components.engine.engine import Engine, EngineConfig
from components.engine.fake import FakeRunner
from components.engine.outputs import Ended, EngineRequest, StepReport, StepTokens
from components.engine.packing import bucket_sizes, is_packable, pack, packed_size
from components.engine.runner import Batch, Done, Launched, Sampled
from components.engine.sampling import adjust
from components.engine.staging import Staging
from components.messages import Sampling, Stopping

PROMPT_TOKENS = 128
BLOCK_SIZE = 16
MAX_SEQS = 512
VOCAB_SIZE = 1_024
KINDS = {"greedy": Sampling(temperature=0.0), "drawn": Sampling(temperature=0.8, top_p=0.95, seed=1)}
WARM_UP = 20
PARTS = ("schedule", "apply", "assemble", "device", "launched", "landed", "load")


class HostRunner(FakeRunner):
    """Chooses the same token always, after what the CUDA runner's host side does with a step."""

    def __init__(self) -> None:
        super().__init__(num_blocks=8, block_size=BLOCK_SIZE, is_overlapping=True)
        self.num_blocks = 40_000  # nothing is written
        self._staging = Staging(packed_size(MAX_SEQS, self.num_blocks), torch.int32, torch.device("cpu"))
        self._settings = DrawSettings((), VOCAB_SIZE)
        self._logits = torch.zeros(MAX_SEQS, 1)

    def launch(self, batch: Batch) -> Launched:
        """Prepares a step, and has it done."""
        if is_packable(batch, MAX_SEQS, len(self._staging)):
            size = next(size for size in bucket_sizes(MAX_SEQS) if size >= batch.num_sequences)
            self._staging.send(pack(batch, size, MAX_SEQS, block_size=BLOCK_SIZE, spare_block=self.num_blocks))
        rows = batch.samples
        adjust(self._logits[: len(rows)], rows)
        samplings = [row.sampling for row in rows]
        if samplings != self._settings.samplings:
            self._settings = DrawSettings(samplings, VOCAB_SIZE)
        if len(self._settings):
            self._settings.at(rows)
        return Done(Sampled(np.full(len(rows), 300, np.int32), (None,) * len(rows)))


class Clock:
    """CPU time of the parts of a step, by the name of the part."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.is_on = False

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, with its time noted."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return call(*args, **kwargs)
            began_s = time.thread_time()
            result = call(*args, **kwargs)
            self.seconds[name] += time.thread_time() - began_s
            return result

        return run


class Bench:
    """An engine whose parts are timed, and a consumer."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._reports: queue.SimpleQueue[tuple[float, float, StepReport]] = queue.SimpleQueue()
        config = EngineConfig(
            hash_unit=BLOCK_SIZE, max_num_seqs=MAX_SEQS, max_num_batched_tokens=8_192, max_waiting=1_000,
            enable_prefix_caching=False,
        )  # fmt: skip
        runner, timed = HostRunner(), self.clock.timed
        runner.launch = timed("device", runner.launch)  # type: ignore[method-assign]
        self.engine = engine = Engine(runner, config, self._tell)
        book: Any = engine._book
        for name in PARTS:
            owner = book if hasattr(book, name) else engine_module
            if hasattr(owner, name):
                setattr(owner, name, timed(name, getattr(owner, name)))
        self._number = 0
        engine.start()

    def _tell(self, report: StepReport) -> None:
        self._reports.put((time.perf_counter(), time.thread_time(), report))

    def round(self, count: int, sampling: Sampling, num_steps: int) -> dict[str, float]:
        """Microseconds of a step of so many sequences."""
        for _ in range(count):
            self._number += 1
            self.engine.submit(
                EngineRequest(
                    id=str(self._number),
                    tokens=[300 + self._number % 512] * PROMPT_TOKENS,
                    num_prompt_tokens=PROMPT_TOKENS,
                    sampling=sampling,
                    stopping=Stopping(max_tokens=num_steps + 2 * WARM_UP, stop_token_ids=(2, 3)),
                )
            )
        left, seen = count, []
        while left:
            at_s, cpu_s, report = self._reports.get(timeout=120)
            if report.stats and report.stats.num_sequences == report.stats.num_tokens == count:
                seen.append((at_s, cpu_s, time.thread_time()))
                if len(seen) == WARM_UP:
                    self.clock.seconds.clear()
                self.clock.is_on = WARM_UP <= len(seen) < WARM_UP + num_steps
            for output in report.outputs:
                assert not isinstance(output, Ended), output.error
                if isinstance(output, StepTokens) and output.finish:
                    left -= 1
        steps = np.diff(np.array(seen)[WARM_UP : WARM_UP + num_steps], axis=0) * 1e6
        parts = {name: self.clock.seconds[name] / num_steps * 1e6 for name in PARTS}
        wall, engine, consumer = (float(x) for x in np.median(steps, axis=0))
        each = (engine + consumer) / count
        return {"wall": wall, "engine": engine, "consumer": consumer, "each": each, **parts}


def main() -> None:
    """Prints the table and leaves the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="1,64,256,512")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    bench, rows = Bench(), []
    for kind in arguments.kinds.split(","):
        for count in map(int, arguments.sequences.split(",")):
            found = bench.round(count, KINDS[kind], arguments.steps)
            rows.append({"kind": kind, "sequences": count, **{name: round(us, 1) for name, us in found.items()}})
            if len(rows) == 1:
                sys.stdout.write(" ".join(f"{name:>9}" for name in rows[0]) + "\n")
            sys.stdout.write(" ".join(f"{value:>9}" for value in rows[-1].values()) + "\n")
    bench.engine.stop()
    results.write("bookkeeping", {"command": " ".join(sys.argv), "rows": rows})


if __name__ == "__main__":
    main()
