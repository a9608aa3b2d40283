"""A prefill and a decode worker in one process: fake engines, in-process links, the memory agent."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from components.decode import DecodeOptions, DecodeWorker
from components.engine.fake import fake_generate
from components.messages import (
    GenerateRequest,
    LeaseRelease,
    PrefillDone,
    PrefillProgress,
    Sampling,
    Stopping,
    TokenChunk,
    pack_ids,
    unpack_ids,
)
from components.options import CacheTransceiverConfig, DisaggOptions, FakeEngine
from components.prefill import PrefillWorker
from components.transfer.memory import Faults, MemoryAgent
from graph import Calls
from graph.component import Peer
from graph.link import InProcess, Links

GREEDY = Sampling(temperature=0.0)
CHUNK = 32


class Processor:
    """The caller's port."""

    tokens = Calls(GenerateRequest, TokenChunk)


Processor.tokens.name = "tokens"


class PairContext:
    """A `Context` over in-process links."""

    def __init__(self, links, id, boot, targets):
        self.id, self.boot, self.graph = id, boot, "test"
        self.run_dir, self.num_cores, self.tp, self.listener = Path("/nonexistent"), 1, 1, None
        self.gpu_share = 1.0
        self.metrics = CollectorRegistry()
        self.loop = asyncio.get_running_loop()
        self.links = links
        self.tasks = set()
        self.notices = []
        self._targets = targets

    def serve(self, port, handler, *, max_streams=100_000):
        self.links.serve(port, handler, max_streams=max_streams)

    def client(self, port):
        return self.links.client(port, self._targets)

    def publisher(self, port, snapshot):
        return self.links.publisher(port, snapshot)

    def progress(self, doing, fraction=None):
        pass

    def announce(self, **facts):
        pass

    def notice(self, text):
        self.notices.append(text)

    def spawn(self, work, *, name):
        task = self.loop.create_task(work, name=name)
        self.tasks.add(task)
        return task

    def metric(self, name, **labels):
        return self.metrics.get_sample_value(f"headrace_{name}", labels) or 0.0


class Decode(DecodeWorker):
    """A decode worker whose agent can misbehave."""

    faults = None

    def make_agent(self, region):
        self.faults = self.faults or Faults()
        return MemoryAgent(region, self.faults)


class Prefill(PrefillWorker):
    """A prefill worker that loses messages on demand: `loses` counts them by type."""

    def __init__(self, options):
        super().__init__(options)
        self.loses = {}
        self.seen = []

    def make_agent(self, region):
        return MemoryAgent(region)

    def _handle(self, request, stream):
        self.seen.append(request)
        if not self.is_lost(request):
            super()._handle(request, LossyStream(self, stream))

    def is_lost(self, message):
        kind = type(message)
        self.loses[kind] = self.loses.get(kind, 0) - 1
        return self.loses[kind] >= 0


class LossyStream:
    """Loses the announcements its worker says are lost."""

    def __init__(self, worker, stream):
        self._worker, self._stream = worker, stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def send(self, item):
        if not (isinstance(item, PrefillProgress) and self._worker.is_lost(item)):
            self._stream.send(item)

    def end(self, item=None):
        if not (isinstance(item, PrefillDone) and self._worker.is_lost(item)):
            self._stream.end(item)


class Pair:
    """The two workers, their contexts, and a caller."""

    def __init__(self, shared, prefill, decode):
        self.shared = shared
        self.prefill, self.decode = prefill, decode
        self.number = 0
        self.live = {}

    async def start(self, *, with_prefill=True):
        self.decode_context = self.context("decode/0", {"prefill": "requests"})
        await self.decode.start(self.decode_context)
        if with_prefill:
            await self.start_prefill()
        self.caller = Links("processor/0", "p", transport=self.shared, listen="processor/0")
        self.client = self.caller.client(Processor.tokens, {"decode": "requests"})
        self.appear("decode/0")

    async def start_prefill(self, boot="1", *, is_usable=True):
        self.prefill_context = self.context("prefill/0", {}, boot)
        await self.prefill.start(self.prefill_context)
        self.appear("prefill/0", boot)
        peers = self.decode._requests._peers
        await until(lambda: peers is None or peers.usable(None) or not is_usable)

    def context(self, id, targets, boot="1"):
        links = Links(id, boot, transport=self.shared, listen=f"{id}-{boot}")
        return PairContext(links, id, f"{id}-{boot}", targets)

    def appear(self, id, boot="1"):
        self.live[id] = Peer(id, boot, f"{id}-{boot}")
        self.tell()

    def vanish(self, id):
        del self.live[id]
        self.tell()

    def tell(self):
        for links in (self.decode_context.links, getattr(self, "caller", None)):
            if links is not None:
                links.set_peers(self.live.values())

    async def stop(self):
        await self.decode.stop()
        if hasattr(self, "prefill_context"):
            await self.prefill.stop()
        contexts = [self.decode_context, *([self.prefill_context] if hasattr(self, "prefill_context") else [])]
        for context in contexts:
            await asyncio.gather(*context.tasks)
            await context.links.close()
        await self.caller.close()

    def request(self, prompt, max_tokens=5, *, prefill="prefill/0", **more):
        self.number += 1
        stopping = Stopping(max_tokens=max_tokens, stop_token_ids=more.pop("stop_token_ids", ()))
        sampling = more.pop("sampling", GREEDY)
        return GenerateRequest(
            f"r{self.number}", pack_ids(prompt), len(prompt), sampling, stopping, prefill=prefill, timing=True, **more
        )

    async def generate(self, prompt, max_tokens=5, **more):
        """The tokens, and the last chunk's timing with the first chunk's cached tokens."""
        return await self.collect(self.open(self.request(prompt, max_tokens, **more)))

    def open(self, request):
        return self.client.open(request, peer="decode/0", timeout_s=20)

    async def collect(self, call):
        chunks = [chunk async for chunk in call]
        tokens = [token for chunk in chunks for token in unpack_ids(chunk.tokens)]
        return Answer(tokens, chunks)

    @property
    def engines(self):
        return self.decode._serving.engine, self.prefill._serving.engine

    def used_blocks(self):
        """Blocks held by sequences, on decode and on prefill, quarantined ones included."""
        return tuple(pool.num_used + pool.num_quarantined for pool in (self.engines[0]._pool, self.engines[1]._pool))

    async def until_clean(self):
        """Waits until both pools are free again and nothing is remembered of any request."""
        requests = self.decode._requests
        await until(
            lambda: (
                self.used_blocks() == (0, 0)
                and not requests._walks
                and not requests._puller.num_active
                and requests._puller._budget.is_idle
                and not self.prefill._prompts._prompts
                and not self.prefill._prompts._leases
            )
        )

    def releases(self):
        return [message for message in self.prefill.seen if isinstance(message, LeaseRelease)]


class Answer:
    """What came of a request."""

    def __init__(self, tokens, chunks):
        self.tokens, self.chunks = tokens, chunks
        self.timing = chunks[-1].timing
        self.finish = chunks[-1].finish
        self.cached_tokens = chunks[0].cached_tokens

    @property
    def events(self):
        return [name for name, _ in self.timing.timeline]


@asynccontextmanager
async def pair(
    *,
    lease_ms=2_000,
    timeout_ms=20_000,
    block_sizes=(16, 16),
    blocks=(256, 256),
    step_ms=0.2,
    started=True,
    has_decode_cache=True,
    **options,
):
    """A running pair. `block_sizes` and `blocks` are (prefill, decode); `options` go to both workers."""
    config = CacheTransceiverConfig(backend="memory", kv_lease_ms=lease_ms, kv_transfer_timeout_ms=timeout_ms)
    both = {
        "engine": "fake",
        "model": "fake",
        "fake": FakeEngine(step_ms=step_ms),
        "cache_transceiver_config": config,
        "hash_unit": min(block_sizes),
        "max_num_batched_tokens": CHUNK,
    } | options
    decode_only = {k: both.pop(k) for k in ("max_local_prefill_length",) if k in both}
    decode_only |= {"enable_prefix_caching": has_decode_cache}
    prefill = Prefill(DisaggOptions(block_size=block_sizes[0], num_blocks=blocks[0], **both))
    decode = Decode(DecodeOptions(block_size=block_sizes[1], num_blocks=blocks[1], **(both | decode_only)))
    made = Pair(InProcess(), prefill, decode)
    await made.start(with_prefill=started)
    try:
        yield made
    finally:
        await made.stop()


def oracle(prompt, max_tokens=5, sampling=GREEDY, **more):
    return fake_generate(prompt, max_tokens, sampling, **more)


def make_prompt(length, seed=1):
    return [(seed * 7_919 + i * 104_729) % 40_000 + 300 for i in range(length)]


async def until(condition, timeout_s=8.0):
    """Waits until `condition()` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.003)


logging.getLogger("components").setLevel(logging.CRITICAL)
