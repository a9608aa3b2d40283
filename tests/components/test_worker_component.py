"""The aggregated worker over in-process links: streams, refusals, cancels, events, canary, metrics, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from components import serving
from components.engine.fake import fake_generate
from components.engine.outputs import EngineRequest
from components.engine.runner import Batch, Sampled
from components.kv.hashing import chain_hashes, root_hash
from components.messages import (
    BLOCK_HASH_BYTES,
    BlocksRemoved,
    BlocksStored,
    GenerateRequest,
    Load,
    LoadChanged,
    Sampling,
    Stopping,
    TokenChunk,
    WorkerEvents,
    WorkerSnapshot,
    pack_ids,
    unpack_ids,
)
from components.options import FakeEngine, WorkerOptions
from components.worker import Worker
from graph import Calls, LinkError, PeerFault, Refused, RequestCancelled, Subscribes
from graph.component import Peer
from graph.link import InProcess, Links

WAIT_S = 10.0
GREEDY = Sampling(temperature=0.0)


class Ports:
    """The processor's and the router's end."""

    tokens = Calls(GenerateRequest, TokenChunk)
    events = Subscribes(WorkerEvents, WorkerSnapshot)


class WorkerContext:
    """What the SDK would hand the worker."""

    id, boot, num_cores, tp, listener = "worker/0", "b1", 1, 1, None
    graph, run_dir, gpu_share = "test", Path("/nonexistent"), 1.0

    def __init__(self, links: Links) -> None:
        self.links = links
        self.metrics = CollectorRegistry()
        self.loop = asyncio.get_running_loop()
        self.failures: list[BaseException | None] = []
        self.facts: dict[str, int] = {}

    def serve(self, port: Any, handler: Any, *, max_streams: int = 100_000) -> None:
        self.links.serve(port, handler, max_streams=max_streams)

    def publisher(self, port: Any, snapshot: Any) -> Any:
        return self.links.publisher(port, snapshot)

    def progress(self, doing: str, fraction: float | None = None) -> None:
        pass

    def announce(self, **facts: int) -> None:
        self.facts |= facts

    def spawn(self, work: Any, *, name: str) -> asyncio.Task[None]:
        task = self.loop.create_task(work, name=name)
        task.add_done_callback(lambda task: self.failures.append(task.exception()))
        return task

    def metric(self, name: str) -> float | None:
        return self.metrics.get_sample_value(f"headrace_{name}")


class Mirror:
    """What a router knows of the worker."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self.parents: dict[bytes, bytes] = {}  # of the last snapshot
        self.load = Load()

    def on_snapshot(self, peer: Peer, snapshot: WorkerSnapshot) -> None:
        self.hashes, self.load = set(split(snapshot.hashes)), snapshot.load
        self.parents = dict(zip(split(snapshot.hashes), split(snapshot.parents), strict=True))

    def on_event(self, peer: Peer, event: Any) -> None:
        match event:
            case BlocksStored():
                self.hashes.update(split(event.hashes))
            case BlocksRemoved():
                self.hashes.difference_update(split(event.hashes))
            case LoadChanged():
                self.load = event.load

    def on_lost(self, peer: Peer) -> None:
        self.hashes.clear()


class Scene:
    """A worker, and a caller who also follows its events."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("fake", FakeEngine(step_ms=0.2, token_ms=0))
        options.setdefault("num_blocks", 64)
        self.worker = Worker(WorkerOptions(engine="fake", **options))
        self.transport = InProcess()

    async def open(self) -> None:
        links = Links("worker/0", "b1", transport=self.transport, listen="worker")
        self.context = WorkerContext(links)
        await self.worker.start(self.context)  # type: ignore[arg-type]
        self.peer = Peer("worker/0", "b1", links.address)
        self.caller = Links("caller/0", "b2", transport=self.transport)
        self.client = self.caller.client(Ports.tokens, {"worker": "requests"})
        self.caller.set_peers([self.peer])
        await self.client.wait_peer(WAIT_S)

    async def close(self) -> None:
        await self.worker.stop()
        await self.caller.close()
        await self.context.links.close()

    def follow(self) -> Mirror:
        mirror = Mirror()
        self.caller.subscribe(Ports.events, mirror, {"worker": "events"})
        return mirror

    def ask(self, id: str, length: int, **fields: Any) -> Any:
        return self.client.open(make_request(id, length, **fields), peer="worker/0", timeout_s=WAIT_S)

    async def chunks(self, id: str, length: int, **fields: Any) -> list[TokenChunk]:
        return [chunk async for chunk in self.ask(id, length, **fields)]

    async def error(self, id: str, length: int, **fields: Any) -> LinkError:
        with pytest.raises(LinkError) as caught:
            await self.chunks(id, length, **fields)
        return caught.value


def make_request(id: str, length: int, *, max_tokens: int = 5, **fields: Any) -> GenerateRequest:
    return GenerateRequest(
        id=id,
        tokens=pack_ids(range(700, 700 + length)),
        num_prompt_tokens=length,
        sampling=fields.pop("sampling", GREEDY),
        stopping=Stopping(max_tokens=max_tokens),
        **fields,
    )


def split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + BLOCK_HASH_BYTES] for i in range(0, len(hashes), BLOCK_HASH_BYTES)]


def play(act: Callable[[Scene], Awaitable[None]], **options: Any) -> None:
    """Runs an act on a scene that is closed whatever happens."""

    async def main() -> None:
        scene = Scene(**options)
        await scene.open()
        try:
            await asyncio.wait_for(act(scene), WAIT_S)
        finally:
            await scene.close()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (the condition is seen from outside alone)
            await asyncio.sleep(0.002)


def text(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in unpack_ids(chunk.tokens)]


def test_streams_carry_the_right_tokens_the_cached_count_and_the_timing() -> None:
    async def act(scene: Scene) -> None:
        first = await scene.chunks("a", 40)
        second = await scene.chunks("b", 40, timing=True, sampling=Sampling(temperature=0.0, logprobs=2))
        assert text(first) == text(second) == fake_generate(range(700, 740), 5, GREEDY)
        assert [c.cached_tokens for c in first] == [0, None, None, None, None]
        assert second[0].cached_tokens == 32
        assert [c.finish for c in second] == [None, None, None, None, "length"]
        timing = second[-1].timing
        assert timing is not None
        assert (timing.worker, timing.mode, timing.cached_tokens) == ("worker/0", "local", 32)
        assert 0 <= timing.queue_ms <= timing.first_token_ms
        assert [len(c.logprobs[0].top_ids) for c in second if c.logprobs] == [2] * 5
        assert all(c.timing is None for c in [*first, *second[:-1]])

    play(act)


def test_the_first_token_has_left_before_the_next_step_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_MAX_YIELD_S", WAIT_S)

    async def act(scene: Scene) -> None:
        assert scene.worker._serving is not None
        runner, traffic = scene.worker._serving.engine.runner, scene.context.links.traffic
        execute, num_sent = runner.execute, list[int]()

        def watched(batch: Batch) -> Sampled:
            num_sent.append(traffic.num_sent)
            return execute(batch)

        monkeypatch.setattr(runner, "execute", watched)
        await scene.chunks("a", 40)
        assert num_sent[1] == num_sent[0] + 1

    play(act)


def test_many_streams_at_once_each_get_their_own_text() -> None:
    async def act(scene: Scene) -> None:
        results = await asyncio.gather(*(scene.chunks(str(i), 20 + i, max_tokens=60) for i in range(12)))
        for i, chunks in enumerate(results):
            assert text(chunks) == fake_generate(range(700, 720 + i), 60, GREEDY)
        assert scene.context.metric("preemptions_total") > 0

    play(act, num_blocks=12)


def test_what_can_never_fit_is_refused_and_so_is_a_live_id() -> None:
    async def act(scene: Scene) -> None:
        error = await scene.error("long", 64 * 16 + 1)
        assert isinstance(error, Refused)
        assert error.code == "context_length_exceeded"
        assert scene.context.facts == {"max_length": 64 * 16 + 1}  # the last token needs no room
        assert len(text(await scene.chunks("just", 64 * 16, max_tokens=9))) == 1
        call = scene.ask("twin", 20, max_tokens=900)
        await anext(aiter(call))
        assert (await scene.error("twin", 20)).code == "duplicate_request"
        call.cancel()

    play(act)


def test_a_caller_that_leaves_frees_the_blocks() -> None:
    async def act(scene: Scene) -> None:
        call = scene.ask("a", 40, max_tokens=900)
        await anext(aiter(call))
        assert scene.context.metric("kv_blocks_used") == 3
        call.cancel()
        await until(lambda: scene.context.metric("kv_blocks_used") == 0)
        assert scene.context.metric("requests_running") == 0
        await asyncio.wait_for(scene.worker.drain(), WAIT_S)

    play(act)


def test_events_tell_the_cache_and_the_load_from_any_moment_on() -> None:
    async def act(scene: Scene) -> None:
        await scene.chunks("a", 40)
        mirror = scene.follow()
        hashes = chain_hashes(pack_ids(range(700, 740)), 8, parent=root_hash())  # 5 units, 2 full blocks
        await until(lambda: mirror.hashes == set(hashes[:4]))
        await scene.chunks("b", 90)
        longer = chain_hashes(pack_ids(range(700, 790)), 8, parent=root_hash())
        await until(lambda: mirror.hashes >= set(longer[:10]) and mirror.load == Load(blocks_total=64))

    play(act, hash_unit=8)


def test_a_snapshot_tells_the_hash_before_each() -> None:
    async def act(scene: Scene) -> None:
        await scene.chunks("a", 70)
        mirror = scene.follow()
        hashes = chain_hashes(make_request("", 70).tokens, 16, parent=root_hash())[:4]
        await until(lambda: mirror.hashes >= set(hashes))
        assert [mirror.parents[hash] for hash in hashes] == [root_hash(), *hashes[:-1]]

    play(act)


def test_evicted_blocks_are_told() -> None:
    async def act(scene: Scene) -> None:
        mirror = scene.follow()
        for i in range(6):
            await scene.chunks(str(i), 60, cache_salt=str(i))
        await until(lambda: mirror.load.blocks_used == 0 and len(mirror.hashes) <= 8)
        assert set(chain_hashes(make_request("", 60).tokens, 16, parent=root_hash("5"))) <= mirror.hashes

    play(act, num_blocks=8)


def test_drain_waits_for_the_running_and_stop_cancels_them() -> None:
    async def act(scene: Scene) -> None:
        running = asyncio.create_task(scene.error("a", 20, max_tokens=900))
        await until(lambda: scene.context.metric("requests_running") == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scene.worker.drain(), 0.05)
        await scene.worker.stop()
        assert isinstance(await running, RequestCancelled)

    play(act)


@pytest.mark.parametrize("lack", ["blocks", "places"])
def test_the_canary_needs_no_room(lack: str) -> None:
    async def act(scene: Scene) -> None:
        engine = scene.worker._serving.engine  # type: ignore[union-attr]
        tokens = list(range(64 if lack == "blocks" else 20))
        mode: Any = "prefill" if lack == "blocks" else "remote"
        engine.submit(
            EngineRequest(
                id="a",
                tokens=tokens,
                num_prompt_tokens=len(tokens),
                sampling=GREEDY,
                stopping=Stopping(max_tokens=9),
                mode=mode,
            )
        )
        await until(
            lambda: scene.context.metric("kv_blocks_used") == 4 or scene.context.metric("requests_waiting") == 1
        )
        engine.reserve("a")
        await asyncio.wait_for(scene.worker.alive(), WAIT_S)
        await until(lambda: scene.context.metric("kv_blocks_used") == (4 if lack == "blocks" else 2))
        await asyncio.wait_for(scene.worker.alive(), WAIT_S)

    play(act, num_blocks=4, max_num_seqs=1)


def test_a_hanging_model_silences_the_canary() -> None:
    async def act(scene: Scene) -> None:
        engine = scene.worker._serving.engine  # type: ignore[union-attr]
        engine.runner._speed = FakeEngine(step_ms=300, token_ms=0)  # type: ignore[attr-defined]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scene.worker.alive(), 0.1)
        await asyncio.wait_for(scene.worker.alive(), WAIT_S)

    play(act)


def test_an_engine_that_gave_up_fails_its_streams_and_the_replica(caplog: pytest.LogCaptureFixture) -> None:
    async def act(scene: Scene) -> None:
        def execute(batch: Batch) -> None:
            raise MemoryError

        engine = scene.worker._serving.engine  # type: ignore[union-attr]
        engine.runner.execute = execute  # type: ignore[method-assign, assignment]
        assert isinstance(await scene.error("a", 20), PeerFault)
        assert isinstance(await scene.error("b", 20), PeerFault)
        await until(lambda: bool(scene.context.failures))
        assert isinstance(scene.context.failures[0], PeerFault)
        assert isinstance(await scene.error("c", 20), PeerFault)
        with pytest.raises(PeerFault):
            await scene.worker.alive()

    play(act)


def test_metrics_count_what_happened() -> None:
    async def act(scene: Scene) -> None:
        before = {
            n: scene.context.metric(f"engine_{n}_tokens_total") for n in ("prompt", "cached", "computed", "generated")
        }
        await scene.chunks("a", 40)
        await scene.chunks("b", 40)
        await until(lambda: scene.context.metric("kv_blocks_used") == 0)
        after = {n: scene.context.metric(f"engine_{n}_tokens_total") - before[n] for n in before}
        assert after == {"prompt": 80, "cached": 32, "computed": 40 + 4 + 8 + 4, "generated": 10}
        assert scene.context.metric("kv_blocks_total") == 64
        assert scene.context.metric("kv_blocks_cached") == 2
        assert scene.context.metric("step_seconds_count") == scene.context.metric("batch_size_count")

    play(act)
