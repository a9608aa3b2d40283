"""The router's index under faults, over real links: lost events, restarts of workers and of the router itself.

What a worker holds and what the router credits it with are compared from outside, by explanations and metrics.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CollectorRegistry

from components.kv.hashing import chain_hashes, root_hash
from components.messages import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Explanation,
    Load,
    LoadChanged,
    Placement,
    PlacementRequest,
    WorkerEvents,
    WorkerSnapshot,
)
from components.router import Router, RouterOptions
from graph import Calls, LinkError, Peer, Publishes
from graph.link import InProcess, Links

UNIT = 16
WITHIN_S = 1.0
CHAINS = [
    chain_hashes(bytes([number]) * UNIT * 4 * 12, UNIT, parent=root_hash()) for number in range(6)
]  # 6 prompts of 12 blocks


class Ports:
    """What a worker publishes, and what a processor asks."""

    events = Publishes(WorkerEvents, WorkerSnapshot)
    placement = Calls(PlacementRequest, (Placement, Explanation))


class FakeWorker:
    """A prefix cache and the events about it."""

    def __init__(self, site: Site, index: int, life: int) -> None:
        self.peer = Peer(f"worker/{index}", f"boot-{index}-{life}", f"worker-{index}-{life}")
        self.links = Links(self.peer.id, self.peer.boot, transport=site.transport, listen=self.peer.address)
        self.held: dict[bytes, bytes] = {}  # hash -> parent
        self.publisher: Any = self.links.publisher(Ports.events, self._snapshot)

    def store(self, chain: list[bytes], count: int) -> None:
        """The first `count` blocks of a chain become cached."""
        fresh = [i for i in range(count) if chain[i] not in self.held]
        for i in fresh:
            parent = chain[i - 1] if i else root_hash()
            self.held[chain[i]] = parent
            self.publisher.publish(BlocksStored(parent, chain[i]))

    def drop(self, hashes: list[bytes]) -> None:
        """These blocks are evicted."""
        gone = [hash for hash in hashes if self.held.pop(hash, None) is not None]
        if gone:
            self.publisher.publish(BlocksRemoved(b"".join(gone)))

    def clear(self) -> None:
        """The whole cache goes."""
        self.held.clear()
        self.publisher.publish(BlocksCleared())

    def prefix(self, chain: list[bytes]) -> int:
        """How many of a chain's first blocks it holds."""
        return next((i for i, hash in enumerate(chain) if hash not in self.held), len(chain))

    def _snapshot(self) -> WorkerSnapshot:
        hashes, parents = b"".join(self.held), b"".join(self.held.values())
        return WorkerSnapshot("worker", UNIT, Load(blocks_total=1_000), hashes, parents)


class RunningRouter:
    """A router behind links."""

    def __init__(self, site: Site, life: int) -> None:
        self.boot, self.loop, self.metrics = f"router-{life}", asyncio.get_running_loop(), CollectorRegistry()
        self.peer = Peer("router/0", self.boot, f"router-{life}")
        self.links = Links(self.peer.id, self.boot, transport=site.transport, listen=self.peer.address)

    async def start(self) -> None:
        await Router(RouterOptions(policy="kv", hash_unit=UNIT)).start(self)  # type: ignore[arg-type]

    def serve(self, port: Any, handler: Any) -> None:
        self.links.serve(port, handler)

    def subscribe(self, port: Any, subscription: Any) -> None:
        self.links.subscribe(port, subscription, {"worker": "events"})


class Site:
    """Three workers, a router and a processor, on one in-process transport."""

    def __init__(self) -> None:
        self.transport = InProcess()
        self.lives = 0
        self.workers = [FakeWorker(self, index, 0) for index in range(3)]
        self.processor = Links("processor/0", "boot", transport=self.transport)
        self.client = self.processor.client(Ports.placement, {"router": "placement"})
        self.router: RunningRouter

    async def start_router(self) -> None:
        self.lives += 1
        self.router = RunningRouter(self, self.lives)
        await self.router.start()
        self.tell_all()

    def tell_all(self) -> None:
        """The registry's word."""
        self.router.links.set_peers([worker.peer for worker in self.workers])
        self.processor.set_peers([self.router.peer])

    async def restart_worker(self, index: int) -> None:
        """Same name, another process, an empty cache."""
        await self.workers[index].links.close()
        self.lives += 1
        self.workers[index] = FakeWorker(self, index, self.lives)
        self.tell_all()

    async def credited(self, chain: list[bytes]) -> dict[str, int]:
        """What the router believes of each worker."""
        request = PlacementRequest("x", b"".join(chain), len(chain) * UNIT + 1, 1, is_explained=True)
        told = await self.client.call(request, peer="router/0", timeout_s=5)
        return {worker.worker: worker.cached_blocks for worker in told.workers}

    async def equals_truth(self) -> bool:
        """Whether the router credits every worker with exactly what it holds."""
        for chain in CHAINS:
            if await self.credited(chain) != {worker.peer.id: worker.prefix(chain) for worker in self.workers}:
                return False
        counts = [
            self.router.metrics.get_sample_value("headrace_router_worker_blocks", {"worker": worker.peer.id})
            for worker in self.workers
        ]
        return counts == [len(worker.held) for worker in self.workers]

    async def assert_mended(self) -> None:
        """Fails unless the index equals the truth within a second."""
        deadline = time.monotonic() + WITHIN_S
        while not await self.equals_truth():
            assert time.monotonic() < deadline, "the index differs from what the workers hold"
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        for links in (self.processor, self.router.links, *(worker.links for worker in self.workers)):
            await links.close()


def run(body: Callable[[Site], Awaitable[None]]) -> None:
    """Runs a test with its site."""

    async def main() -> None:
        site = Site()
        await site.start_router()
        try:
            await body(site)
        finally:
            await site.close()

    asyncio.run(main())


def churn(workers: list[FakeWorker], rng: random.Random, rounds: int) -> None:
    """Random stores, evictions and, rarely, a cleared cache."""
    for _ in range(rounds):
        worker, chain = rng.choice(workers), rng.choice(CHAINS)
        move = rng.random()
        if move < 0.6:
            worker.store(chain, rng.randint(1, len(chain)))
        elif move < 0.97:
            worker.drop(chain[rng.randrange(len(chain)) :])
        else:
            worker.clear()


def test_lost_events_are_noticed_and_mended() -> None:
    async def body(site: Site) -> None:
        rng = random.Random(1)
        for _ in range(10):
            churn(site.workers, rng, 30)
            rng.choice(site.workers).publisher.drop_next(rng.randint(1, 5))
            churn(site.workers, rng, 10)
            await site.assert_mended()

    run(body)


def test_the_last_events_before_a_silence_are_mended_too() -> None:
    async def body(site: Site) -> None:
        await site.assert_mended()
        site.workers[0].publisher.drop_next(3)
        site.workers[0].store(CHAINS[0], 3)  # nothing is published after these
        await site.assert_mended()

    run(body)


def test_a_worker_that_comes_back_under_its_name_is_credited_with_what_it_holds_now() -> None:
    async def body(site: Site) -> None:
        churn(site.workers, random.Random(2), 60)
        site.workers[1].store(CHAINS[0], 12)
        await site.assert_mended()
        await site.restart_worker(1)
        assert (await site.credited(CHAINS[0])).get("worker/1", 0) == 0  # at once
        site.workers[1].store(CHAINS[1], 5)
        await site.assert_mended()

    run(body)


def test_a_new_router_learns_everything_from_snapshots() -> None:
    async def body(site: Site) -> None:
        churn(site.workers, random.Random(3), 100)
        site.workers[2].publisher.publish(LoadChanged(Load(running=3, blocks_total=1_000)))
        await site.router.links.close()
        await site.start_router()
        await site.assert_mended()

    run(body)


def test_a_worker_that_leaves_while_it_is_chosen_costs_only_its_own_placement() -> None:
    async def body(site: Site) -> None:
        site.workers[0].store(CHAINS[0], 12)
        await site.assert_mended()
        request = PlacementRequest("a", b"".join(CHAINS[0]), 12 * UNIT + 1, 1)
        call = site.client.open(request, peer="router/0", timeout_s=5)
        first = await anext(aiter(call))
        assert first.worker == "worker/0"
        site.router.links.set_peers([worker.peer for worker in site.workers[1:]])
        again = site.client.open(request, peer="router/0", timeout_s=5)
        second = await anext(aiter(again))
        assert second.worker != "worker/0"
        assert second.overlap_blocks == 0
        for open_call in (call, again):
            open_call.cancel()
        with_workers = await site.credited(CHAINS[0])
        assert set(with_workers) == {"worker/1", "worker/2"}
        for _ in range(100):
            if site.router.metrics.get_sample_value("headrace_router_live_placements") == 0:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("a placement lives on")

    run(body)


def test_a_router_that_dies_answers_its_callers_with_an_error_at_once() -> None:
    async def body(site: Site) -> None:
        await site.assert_mended()
        call = site.client.open(PlacementRequest("a", b"", 1, 1), peer="router/0", timeout_s=60)
        stream = aiter(call)
        await anext(stream)
        began_s = time.monotonic()
        await site.router.links.close()
        site.processor.set_peers([])
        try:
            await anext(stream)
        except LinkError:
            assert time.monotonic() - began_s < WITHIN_S
        else:
            raise AssertionError("the placement outlived its router")
        await site.start_router()

    run(body)
