"""A router with fake links, as its processors and workers see it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from components.kv.hashing import chain_hashes, root_hash
from components.messages import Load, Placement, PlacementRequest, WorkerSnapshot
from components.router import Router, RouterOptions
from graph import LinkError, Message, Peer

UNIT = 16


def make_hashes(prompt: int, num_blocks: int, *, shared: int = 0) -> bytes:
    """The block hashes of a prompt; the first `shared` blocks are common to all."""
    blocks = [0] * shared + [prompt + 1] * (num_blocks - shared)
    tokens = b"".join(block.to_bytes(4, "little") * UNIT for block in blocks)
    return b"".join(chain_hashes(tokens, UNIT, parent=root_hash()))


class FakeStream:
    """Keeps what the router sends; `close` is the caller's going away."""

    def __init__(self, number: int) -> None:
        self.id = f"stream-{number}"
        self.peer = "processor/0"
        self.is_closed = False
        self.sent: list[Message] = []
        self.error: LinkError | None = None
        self._callbacks: list[Callable[[], None]] = []

    def send(self, item: Message) -> None:
        self.sent.append(item)

    def end(self, item: Message) -> None:
        self.sent.append(item)
        self.is_closed = True

    def fail(self, error: LinkError) -> None:
        self.error = error
        self.is_closed = True

    def on_cancel(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def close(self) -> None:
        for callback in self._callbacks:
            callback()


class FakeContext:
    """Hands over the router's handler and subscription."""

    def __init__(self) -> None:
        self.boot = "boot-1"
        self.loop = asyncio.get_running_loop()
        self.metrics = CollectorRegistry()
        self.handler: Any = None
        self.subscription: Any = None

    def serve(self, port: object, handler: Any) -> None:
        self.handler = handler

    def subscribe(self, port: object, subscription: Any) -> None:
        self.subscription = subscription


class Bench:
    """A started router, with helpers that read like the traffic."""

    def __init__(self) -> None:
        self.context = FakeContext()
        self._streams = 0

    async def start(self, policy: Any = "least_busy", **options: Any) -> Bench:
        await Router(RouterOptions(policy=policy, **options)).start(self.context)  # type: ignore[arg-type]
        return self

    def worker(
        self, id: str, role: Any = "worker", *, boot: str = "b1", load: Load | None = None, hashes: bytes = b""
    ) -> Peer:
        """A worker becomes known, with the blocks of one chain in its cache."""
        peer = Peer(id, f"{id}-{boot}", "ipc://")
        parents = bytes(16) + hashes[:-16] if hashes else b""
        snapshot = WorkerSnapshot(role, UNIT, load or Load(blocks_total=1_000), hashes, parents)
        self.context.subscription.on_snapshot(peer, snapshot)
        return peer

    def tell(self, peer: Peer, event: Message) -> None:
        """A worker publishes an event."""
        self.context.subscription.on_event(peer, event)

    def open(self, id: str = "r", **fields: Any) -> FakeStream:
        """A processor asks; whatever the answer."""
        self._streams += 1
        stream = FakeStream(self._streams)
        if "hashes" in fields:
            fields.setdefault("num_tokens", len(fields["hashes"]) // 16 * UNIT + 1)
        fields = {"hashes": b"", "num_tokens": 10, "max_tokens": 5} | fields
        self.context.handler(PlacementRequest(id=id, **fields), stream)
        return stream

    def ask(self, id: str = "r", **fields: Any) -> tuple[Placement, FakeStream]:
        """A processor asks and is answered at once."""
        stream = self.open(id, **fields)
        [placement] = stream.sent
        assert isinstance(placement, Placement)
        return placement, stream

    def metric(self, name: str, **labels: str) -> float | None:
        return self.context.metrics.get_sample_value(name, labels)
