"""How scattered the blocks are that a pool hands out once it has been in use for long, and what handing out takes.

    python tests/bench/bench_pool.py [--turns 1000] [--seed 0]

Simulated prompts, most of them with one of 400 prefixes by Zipf's law, come and go in any order on pools that are
full of cached blocks. Once as on a prefill worker, which holds a prompt for a while, and once as on a decode
worker, whose sequences grow. Each without and with eviction ahead (`components/kv/pool.py`); counted is the second
half of all prompts. A "piece" is a run of neighbours: what one copy of a transfer can carry. Times are of the CPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from itertools import count, pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec
import results

from components.kv.pool import EVICTED_AHEAD, BlockPool
from components.messages import BLOCK_HASH_BYTES

NUM_PREFIXES = 400
SHARED = 0.6
ROOT = bytes(BLOCK_HASH_BYTES)


class Load(msgspec.Struct, frozen=True):
    """A worker: blocks of its pool and of a prompt at least and at most, sequences at once, whether these grow."""

    name: str
    num_blocks: int
    prompt: tuple[int, int]
    at_once: int
    grows: bool


LOADS = (
    Load("prefill, 25,000 blocks", 25_000, (62, 500), 12, grows=False),
    Load("decode, 25,000 blocks", 25_000, (62, 500), 40, grows=True),
    Load("decode, 8,000 blocks", 8_000, (12, 250), 24, grows=True),
)


class Sequence(msgspec.Struct):
    """One that holds blocks; it ends when nothing is left to grow."""

    blocks: list[int]
    left: int


class Worker:
    """A pool under a load."""

    def __init__(self, load: Load, *, evicted_ahead: float, seed: int) -> None:
        self.load = load
        self.num_hits = self.num_asked = 0
        self.given: list[list[int]] = []
        self.seconds: list[float] = []
        self._pool = BlockPool(load.num_blocks, evicted_ahead=evicted_ahead)
        self._random = random.Random(seed)
        self._numbers = count(1)
        self._prefixes = [self._keys(self._random.randint(20, 200)) for _ in range(NUM_PREFIXES)]
        self._weights = [1 / place for place in range(1, NUM_PREFIXES + 1)]
        self._live: list[Sequence] = []

    def turn(self) -> None:
        """Fills up, grows some, ends some."""
        while len(self._live) < self.load.at_once and self._begin():
            pass
        for sequence in self._live:
            if sequence.left and self._random.random() < 0.3 and self._pool.num_free:
                sequence.left -= self.load.grows
                sequence.blocks += self._pool.allocate(1, after=sequence.blocks[-1]) if self.load.grows else []
        ended = [s for s in self._live if not s.left and (self.load.grows or self._random.random() < 0.5)]
        self._live = [s for s in self._live if s not in ended]
        for sequence in ended:
            self._pool.free(sequence.blocks)
        self._pool.take_events()

    def figures(self) -> dict[str, float]:
        """Of the second half."""
        half = len(self.given) // 2
        given, microseconds = self.given[half:], [s * 1e6 for s in self.seconds[half:]]
        pieces = sum(1 + sum(b != a + 1 for a, b in pairwise(blocks)) for blocks in given)
        return {
            "prompts": len(given),
            "blocks_a_piece": round(sum(map(len, given)) / pieces, 1),
            "hit_rate": round(self.num_hits / self.num_asked, 4),
            "us_a_prompt_p50": round(statistics.median(microseconds), 1),
            "us_a_prompt_mean": round(statistics.fmean(microseconds), 1),
            "us_a_prompt_p99": round(sorted(microseconds)[int(0.99 * len(microseconds))], 1),
        }

    def _keys(self, number: int) -> list[bytes]:
        return [next(self._numbers).to_bytes(BLOCK_HASH_BYTES, "big") for _ in range(number)]

    def _begin(self) -> bool:
        """Admits a prompt if there is room for it, and enters its blocks at once."""
        pool, length = self._pool, self._random.randint(*self.load.prompt)
        is_shared = self._random.random() < SHARED
        keys = self._random.choices(self._prefixes, self._weights)[0][:length] if is_shared else []
        keys = [*keys, *self._keys(length - len(keys))]
        cached = pool.lookup(keys)[: length - 1]
        missing = length - len(cached)
        grown = self._random.randint(2, 32) if self.load.grows else 0
        if length + grown + len(self._live) > pool.num_free:
            return False
        pool.pin(cached)
        began_s = time.thread_time()
        blocks = pool.allocate(missing, after=cached[-1] if cached else None)
        self.seconds.append(time.thread_time() - began_s)
        self.given.append(blocks)
        self.num_hits += len(cached)
        self.num_asked += length
        for place, block in enumerate(blocks, len(cached)):
            pool.enter(block, parent=keys[place - 1] if place else ROOT, units=[keys[place]])
        self._live.append(Sequence(cached + blocks, grown))
        return True


def main() -> None:
    """Prints the table and leaves the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows = []
    for load in LOADS:
        for evicted_ahead in (0.0, EVICTED_AHEAD):
            worker = Worker(load, evicted_ahead=evicted_ahead, seed=arguments.seed)
            for _ in range(arguments.turns):
                worker.turn()
            rows.append({"load": load.name, "evicted_ahead": evicted_ahead, **worker.figures()})
            sys.stdout.write("  ".join(f"{name} {value}" for name, value in rows[-1].items()) + "\n")
    results.write("pool", {"command": " ".join(sys.argv), "rows": rows})


if __name__ == "__main__":
    main()
