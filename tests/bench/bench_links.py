"""Links between two processes: round trip, calls/s, streamed items/s, CPU time per item.

    python tests/bench/bench_links.py [--address ipc:///tmp/x | tcp://127.0.0.1:5999] [--uvloop]

One process serves, this one calls. The streamed case is an engine's: each of 256 open streams gets one
item per step, so each step is one wire message. CPU times are of the whole process, I/O thread included.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from graph import Message
from graph.component import Peer, Stream
from graph.link import Links, ZeroMQ
from graph.ports import Calls, Serves


class Echo(Message, frozen=True):
    """Asks for itself."""

    body: bytes = b""


class Generate(Message, frozen=True):
    """Asks for one item per step, as soon as `num_streams` of them are open."""

    num_steps: int
    num_streams: int


class Chunk(Message, frozen=True):
    """What an engine sends per step and sequence."""

    start: int
    tokens: bytes
    finish: str | None = None


class Used(Message, frozen=True):
    """Asks for, and tells, the server's CPU seconds so far."""

    cpu_s: float = 0.0


class Ports:
    """Both ends."""

    calls = Calls((Echo, Generate, Used), (Echo, Chunk, Used))
    serves = Serves((Echo, Generate, Used), (Echo, Chunk, Used))


class BenchServer:
    """Answers echoes at once, and steps all generating streams together."""

    def __init__(self) -> None:
        self._waiting: list[Stream] = []
        self._steppers: set[asyncio.Task[None]] = set()

    def handle(self, request: Any, stream: Stream) -> None:
        """The handler of the one port."""
        if isinstance(request, Used):
            stream.end(Used(time.process_time()))
        elif isinstance(request, Echo):
            stream.end(request)
        else:
            self._waiting.append(stream)
            if len(self._waiting) == request.num_streams:
                streams, self._waiting = self._waiting, []
                task = asyncio.ensure_future(self._step(streams, request.num_steps))
                self._steppers.add(task)
                task.add_done_callback(self._steppers.discard)

    async def _step(self, streams: list[Stream], num_steps: int) -> None:
        for step in range(num_steps):
            for stream in streams:
                stream.send(Chunk(step, b"\x01\x02\x00\x00"))
            await asyncio.sleep(0)
        for stream in streams:
            stream.end()


async def serve(address: str) -> None:
    """The server process; ends when its standard input does."""
    links = Links("server/0", "1", transport=ZeroMQ(), listen=address)
    links.serve(Ports.serves, BenchServer().handle)
    await asyncio.to_thread(sys.stdin.read)
    await links.close()


class Caller:
    """The calling process's half of each measurement."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._client = links.client(Ports.calls, {"server": "serves"})

    async def call(self, request: Message) -> Any:
        """One request with one reply."""
        return await self._client.call(request, peer="server/0", timeout_s=30)

    async def cpu(self) -> tuple[float, float]:
        """CPU seconds of the server and of this process."""
        used = await self.call(Used())
        return used.cpu_s, time.process_time()

    async def round_trips(self, num_calls: int) -> list[tuple[str, str]]:
        """One call after the other."""
        times = []
        for _ in range(num_calls):
            start = time.perf_counter()
            await self.call(Echo(b"x" * 100))
            times.append((time.perf_counter() - start) * 1e6)
        times.sort()
        return [
            ("round trip, p1", f"{times[len(times) // 100]:.0f} us"),  # what it takes when nobody else runs
            ("round trip, p50", f"{times[len(times) // 2]:.0f} us"),
            ("round trip, p99", f"{times[len(times) * 99 // 100]:.0f} us"),
        ]

    async def pipelined(self, num_calls: int, num_open: int) -> list[tuple[str, str]]:
        """`num_open` calls at any time."""

        async def some() -> None:
            for _ in range(num_calls // num_open):
                await self.call(Echo(b"x" * 100))

        before, start = await self.cpu(), time.perf_counter()
        await asyncio.gather(*(some() for _ in range(num_open)))
        seconds, after = time.perf_counter() - start, await self.cpu()
        return [
            (f"calls/s, {num_open} at a time", f"{num_calls / seconds:,.0f}"),
            *per_item("call", before, after, num_calls),
        ]

    async def streamed(self, num_streams: int, num_steps: int) -> list[tuple[str, str]]:
        """`num_streams` streams, one item of each per wire message."""
        num_items, num_ended, done = 0, 0, asyncio.Event()

        def on_item(item: Any) -> None:
            nonlocal num_items
            num_items += 1

        def on_end(error: Exception | None) -> None:
            nonlocal num_ended
            assert error is None, error
            num_ended += 1
            if num_ended == num_streams:
                done.set()

        before, received, start = await self.cpu(), self._links.traffic.num_received, time.perf_counter()
        for _ in range(num_streams):
            request = Generate(num_steps, num_streams)
            self._client.open(request, peer="server/0", timeout_s=30, on_item=on_item, on_end=on_end)
        await done.wait()
        seconds, after = time.perf_counter() - start, await self.cpu()
        assert num_items == num_streams * num_steps
        num_messages = self._links.traffic.num_received - received
        return [
            (f"items/s, {num_streams} streams", f"{num_items / seconds:,.0f}"),
            ("items per wire message", f"{num_items / num_messages:.0f}"),
            *per_item("item", before, after, num_items),
        ]

    async def idle(self, seconds: float) -> list[tuple[str, str]]:
        """Nothing happens."""
        before = await self.cpu()
        await asyncio.sleep(seconds)
        after = await self.cpu()
        used = [(a - b) / seconds * 100 for a, b in zip(after, before, strict=True)]
        return [("idle, server / caller", f"{used[0]:.2f} % / {used[1]:.2f} % of a core")]


def per_item(
    what: str, before: tuple[float, float], after: tuple[float, float], num_items: int
) -> list[tuple[str, str]]:
    """CPU microseconds per item on both sides."""
    server, caller = ((a - b) / num_items * 1e6 for a, b in zip(after, before, strict=True))
    return [(f"CPU per {what}, server / caller", f"{server:.2f} us / {caller:.2f} us")]


async def measure(address: str, scale: int) -> list[tuple[str, str]]:
    """All rows of the table."""
    links = Links("caller/0", "1", transport=ZeroMQ())
    links.set_peers([Peer("server/0", "1", address)])
    caller = Caller(links)
    await caller.call(Echo())
    rows = [
        *await caller.round_trips(500 * scale),
        *await caller.pipelined(2000 * scale, 64),
        *await caller.streamed(256, 100 * scale),
        *await caller.streamed(1, 500 * scale),
        *await caller.idle(1.0),
    ]
    await links.close()
    return rows


def main() -> None:
    """Runs both processes and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address")
    parser.add_argument("--uvloop", action="store_true")
    parser.add_argument("--scale", type=int, default=10)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    run = uvloop.run if args.uvloop else asyncio.run
    if args.serve:
        run(serve(args.address))
        return
    with tempfile.TemporaryDirectory() as folder:
        address = args.address or f"ipc://{Path(folder) / 'server'}"
        command = [sys.executable, __file__, "--serve", "--address", address, *(["--uvloop"] * args.uvloop)]
        server = subprocess.Popen(command, stdin=subprocess.PIPE)
        try:
            rows = run(measure(address, args.scale))
        finally:
            server.communicate(timeout=10)
    width = max(len(name) for name, _ in rows)
    sys.stdout.write(f"{address.partition(':')[0]}, {'uvloop' if args.uvloop else 'asyncio'}\n")
    sys.stdout.writelines(f"  {name:<{width}}  {value}\n" for name, value in rows)


if __name__ == "__main__":
    main()
