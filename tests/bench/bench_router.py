"""The router's own speed: decisions, placements and block events through one process, and memory per block.

    python tests/bench/bench_router.py [--blocks 1000000] [--workers 64] [--prompt-tokens 8192] [--seconds 3]

First the candidates for the index beside each other on the same blocks, then the router behind real links.
Walls are clocked around each decision; `cpu` is the thread's own time, which a busy machine does not stretch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from components.messages import BlocksStored, Load, Placement, PlacementRequest, WorkerEvents, WorkerSnapshot
from components.router import Router, RouterOptions
from components.routing.index import BlockIndex, block_keys
from graph import LinkError, Peer
from graph.link import Links, ZeroMQ
from graph.ports import Calls, Publishes

UNIT = 16
EVENT_BLOCKS = 16
ROOT = bytes(16)
Walk = Callable[[bytes], object]


def make_chains(num_blocks: int, length: int, seed: int = 0) -> list[bytes]:
    """Packed hashes of so many blocks, in chains of `length`."""
    rng = random.Random(seed)
    return [rng.randbytes(16 * length) for _ in range(num_blocks // length)]


def resident_bytes() -> int:
    """This process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# --- the candidates: each takes all chains (chain i is worker i % W's), and returns its look-up


def runs(chains: Sequence[bytes], workers: int) -> Walk:
    """The router's own: runs of chained blocks."""
    index = BlockIndex(1 << 30)
    for number, chain in enumerate(chains):
        keys = block_keys(chain)
        for start in range(0, len(keys), EVENT_BLOCKS):
            index.store(f"w{number % workers}", keys[start - 1] if start else None, keys[start : start + EVENT_BLOCKS])
    return lambda hashes: index.overlaps(block_keys(hashes))


def masks(chains: Sequence[bytes], workers: int) -> Walk:
    """One dictionary from a block to a bit mask of its workers; a prompt is followed block by block."""
    table: dict[int, int] = {}
    for number, chain in enumerate(chains):
        bit = 1 << number % workers
        for key in block_keys(chain):
            table[key] = table.get(key, 0) | bit

    def walk(hashes: bytes) -> list[tuple[int, int]]:
        live, stops = (1 << workers) - 1, []
        for depth, mask in enumerate(map(table.get, block_keys(hashes), repeat(0))):
            left = live & mask
            if left != live:
                stops.append((live ^ left, depth))
                live = left
                if not live:
                    break
        return stops

    return walk


def sets(chains: Sequence[bytes], workers: int) -> Walk:
    """One dictionary from a block's hash to the set of its workers."""
    table: dict[bytes, set[int]] = {}
    for number, chain in enumerate(chains):
        for start in range(0, len(chain), 16):
            table.setdefault(chain[start : start + 16], set()).add(number % workers)

    def walk(hashes: bytes) -> set[int]:
        live: set[int] | None = None
        for start in range(0, len(hashes), 16):
            holders = table.get(hashes[start : start + 16], set())
            live = holders if live is None else live & holders
            if not live:
                break
        return live or set()

    return walk


def set_per_worker(chains: Sequence[bytes], workers: int) -> Walk:
    """A set of blocks for each worker, and a prompt followed in each."""
    tables: list[set[int]] = [set() for _ in range(workers)]
    for number, chain in enumerate(chains):
        tables[number % workers].update(array("Q", chain)[::2])

    def walk(hashes: bytes) -> list[int]:
        keys, depths = block_keys(hashes), []
        for table in tables:
            depth = 0
            while depth < len(keys) and keys[depth] in table:
                depth += 1
            depths.append(depth)
        return depths

    return walk


CANDIDATES = {"runs": runs, "masks": masks, "sets": sets, "set per worker": set_per_worker}


def compare(name: str, num_blocks: int, workers: int, length: int) -> str:
    """One candidate's line; run in a process of its own, so that its memory is its own."""
    chains = make_chains(num_blocks, length)
    before, began_s = resident_bytes(), time.thread_time()
    walk = CANDIDATES[name](chains, workers)
    build_s, grown = time.thread_time() - began_s, resident_bytes() - before
    rng, times = random.Random(1), []
    for _ in range(3_000):
        hashes = chains[rng.randrange(len(chains))] + rng.randbytes(16 * 12)
        began_s = time.thread_time()
        walk(hashes)
        times.append(time.thread_time() - began_s)
    return (
        f"| {name} | {grown / num_blocks:.0f} B | {build_s / num_blocks * 1e6:.2f} us "
        f"| {percentile(times, 0.5) * 1e6:.0f} / {percentile(times, 0.99) * 1e6:.0f} us |"
    )


# --- the decision


class Context:
    """What a router is given here: no links at all."""

    def __init__(self) -> None:
        self.boot = "bench"
        self.loop = asyncio.get_running_loop()
        self.metrics = CollectorRegistry()
        self.handler: Any
        self.subscription: Any

    def serve(self, port: object, handler: Any) -> None:
        """The router's handler."""
        self.handler = handler

    def subscribe(self, port: object, subscription: Any) -> None:
        """The router as a subscriber."""
        self.subscription = subscription


class Stream:
    """Takes one placement, and ends it."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.is_closed = False
        self.end: Callable[[], None]
        self.answered_s = self.answered_cpu_s = 0.0

    def send(self, item: object) -> None:
        """The placement."""
        self.answered_s, self.answered_cpu_s = time.perf_counter(), time.thread_time()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """As a stream's."""
        self.end = callback


async def decide(chains: Sequence[bytes], workers: int, num: int) -> dict[str, list[float]]:
    """Times of decisions by a full router, to the answer and to the end; a tenth of the prompts are known to all."""
    context = Context()
    await Router(RouterOptions(policy="kv", hash_unit=UNIT)).start(context)  # type: ignore[arg-type]
    for index in range(workers):
        peer = Peer(f"worker/{index}", f"boot-{index}", "")
        context.subscription.on_snapshot(peer, WorkerSnapshot("worker", UNIT, Load(blocks_total=100_000)))
        shared = chains[:10]
        for chain in (*shared, *chains[10 + index :: workers]):
            context.subscription.on_event(peer, BlocksStored(ROOT, chain))
    rng, times = random.Random(2), dict[str, list[float]]()
    for number in range(num):
        chain = chains[rng.randrange(10)] if number % 10 == 0 else chains[rng.randrange(len(chains))]
        hashes = chain + rng.randbytes(16 * 12)
        request = PlacementRequest(id=str(number), hashes=hashes, num_tokens=len(hashes), max_tokens=100)
        stream = Stream(str(number))
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        context.handler(request, stream)
        end_cpu_s, end_wall_s = time.thread_time(), time.perf_counter()
        times.setdefault("wall, to the answer", []).append(stream.answered_s - wall_s)
        times.setdefault("CPU, to the answer", []).append(stream.answered_cpu_s - cpu_s)
        times.setdefault("wall, with its booking", []).append(end_wall_s - wall_s)
        times.setdefault("CPU, with its booking", []).append(end_cpu_s - cpu_s)
        if number >= 200:  # so many requests are alive
            stream.end()
    return times


# --- through links: the router in a process of its own


class Asks:
    """The processor's port."""

    placement = Calls(PlacementRequest, Placement)


class Tells:
    """The workers' port."""

    events = Publishes(WorkerEvents, WorkerSnapshot)


async def serve(address: str, worker: str) -> None:
    """A router behind real links, until it is killed."""
    links = Links("router/0", "boot", transport=ZeroMQ(), listen=address)
    context = Context()
    await Router(RouterOptions(policy="kv", hash_unit=UNIT)).start(context)  # type: ignore[arg-type]
    links.serve(Router.placement, context.handler)
    links.subscribe(Router.events, context.subscription, {"worker": "events"})
    links.set_peers([Peer("worker/0", "boot", worker)])
    await asyncio.Event().wait()


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def through_links(chains: Sequence[bytes], seconds: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """(placements/s, CPU seconds of the router per s) and the same of block events, for 1,024-token prompts."""
    folder = tempfile.mkdtemp()
    router, own = f"ipc://{folder}/router", f"ipc://{folder}/worker"
    links = Links("worker/0", "boot", transport=ZeroMQ(), listen=own)
    publisher = links.publisher(Tells.events, lambda: WorkerSnapshot("worker", UNIT, Load(blocks_total=1 << 20)))
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, "--serve", router, own)
    try:
        client = links.client(Asks.placement, {"router": "placement"})
        links.set_peers([Peer("router/0", "boot", router)])
        for _ in range(200):
            try:
                await _ask(client, b"")
                break
            except LinkError:
                await asyncio.sleep(0.1)
        placed = await _place(client, chains, seconds, process.pid)
        stored = await _publish(client, publisher, chains, seconds, process.pid)
        return placed, stored
    finally:
        process.kill()
        await process.wait()
        await links.close()


async def _ask(client: Any, hashes: bytes) -> None:
    """One placement, which the router makes after all that it was sent before."""
    call = client.open(PlacementRequest("x", hashes, len(hashes) + 1, 1), peer="router/0", timeout_s=60)
    try:
        await anext(aiter(call))
    finally:
        call.cancel()


async def _place(client: Any, chains: Sequence[bytes], seconds: float, pid: int) -> tuple[float, float]:
    done, alive = 0, 0
    hashes = [chain[: 64 * 16] for chain in chains]
    began_s, began_cpu = time.perf_counter(), cpu_s(pid)
    over = asyncio.Event()

    def ask() -> None:
        nonlocal alive
        alive += 1
        number = done + alive
        request = PlacementRequest(str(number), hashes[number % len(hashes)], 1_024, 100)
        call = client.open(
            request, peer="router/0", timeout_s=10, on_item=lambda item: took(call), on_end=lambda e: None
        )

    def took(call: Any) -> None:
        nonlocal done, alive
        done, alive = done + 1, alive - 1
        call.cancel()
        if time.perf_counter() - began_s < seconds:
            ask()
        elif not alive:
            over.set()

    for _ in range(64):
        ask()
    await over.wait()
    elapsed_s = time.perf_counter() - began_s
    return done / elapsed_s, (cpu_s(pid) - began_cpu) / done


async def _publish(
    client: Any, publisher: Any, chains: Sequence[bytes], seconds: float, pid: int
) -> tuple[float, float]:
    """Blocks are stored in events of `EVENT_BLOCKS`; a placement after each thousand shows that they were applied."""
    blocks, began_s, began_cpu = 0, time.perf_counter(), cpu_s(pid)
    for chain in chains:
        for start in range(0, len(chain), 16 * EVENT_BLOCKS):
            parent = chain[start - 16 : start] if start else ROOT
            hashes = chain[start : start + 16 * EVENT_BLOCKS]
            publisher.publish(BlocksStored(parent, hashes))
            blocks += len(hashes) // 16
        if blocks % 8_192 < len(chain) // 16:
            await _ask(client, chain)
        if time.perf_counter() - began_s > seconds:
            break
    await _ask(client, b"")
    return blocks / (time.perf_counter() - began_s), (cpu_s(pid) - began_cpu) / blocks


def main() -> None:
    """Prints three tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=8_192)
    parser.add_argument("--decisions", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--candidate", choices=CANDIDATES, help="used by itself: one line of the first table")
    parser.add_argument("--serve", nargs=2, metavar="ADDRESS", help="used by itself: a router behind links")
    args = parser.parse_args()
    length = args.prompt_tokens // UNIT
    out = sys.stdout.write
    if args.serve:
        uvloop.run(serve(*args.serve))
    elif args.candidate:
        out(compare(args.candidate, args.blocks, args.workers, length) + "\n")
    else:
        out(f"{args.workers} workers, {args.blocks} blocks, prompts of {args.prompt_tokens} tokens\n\n")
        out("| index | memory per block | store, CPU per block | look-up, CPU p50 / p99 |\n|---|---|---|---|\n")
        for name in CANDIDATES:
            command = [sys.executable, __file__, "--candidate", name, "--blocks", str(args.blocks)]
            out(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        chains = make_chains(args.blocks, length)
        decisions = uvloop.run(decide(chains, args.workers, args.decisions))
        out("\n| decision | p50 | p90 | p99 |\n|---|---|---|---|\n")
        for name, times in decisions.items():
            marks = " | ".join(f"{percentile(times, share) * 1e6:.0f} us" for share in (0.5, 0.9, 0.99))
            out(f"| {name} | {marks} |\n")
        placed, stored = uvloop.run(through_links(chains, args.seconds))
        out("\n| through links | per s | router's CPU each |\n|---|---|---|\n")
        out(f"| placements, prompts of 1,024 tokens | {placed[0]:,.0f} | {placed[1] * 1e6:.0f} us |\n")
        out(f"| block events, {EVENT_BLOCKS} blocks a message | {stored[0]:,.0f} | {stored[1] * 1e6:.2f} us |\n")


if __name__ == "__main__":
    main()
