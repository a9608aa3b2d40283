"""A toy graph of torch-free components: a TCP door that asks a pool of greeters, who may misbehave on purpose."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from prometheus_client import Counter

from graph import (
    Calls,
    Component,
    Context,
    Graph,
    LaunchError,
    Listen,
    Message,
    Node,
    NodeView,
    NoPeer,
    Options,
    Serves,
    Stream,
)


class Greet(Message, frozen=True, array_like=True, tag=True):
    """Who is to be greeted; `$NAME` stands for a variable of the greeter's environment."""

    name: str


class Greeting(Message, frozen=True, array_like=True, tag=True):
    """The greeting, and the greeter's process."""

    text: str
    pid: int


class GreeterOptions(Options, frozen=True, kw_only=True):
    """How a greeter behaves."""

    word: str = "hello"
    start_s: float = 0.0
    drain_s: float = 0.0
    # "start": raises while it starts; "refuse": says why it cannot start; "signal": kills itself; "later": its
    # background work fails; "stuck": no work gets done; a path: raises as long as it exists
    fail: str = ""
    patience_s: float = 30.0


class Greeter(Component):
    """Greets; `block` stops its event loop."""

    Options = GreeterOptions
    compute = True
    requests = Serves(Greet, Greeting)

    async def start(self, context: Context) -> None:
        context.progress("putting on a smile", 0.5)
        if self.options.start_s:
            await asyncio.sleep(self.options.start_s)
        if self.options.fail == "start" or (self.options.fail and os.path.exists(self.options.fail)):  # noqa: ASYNC240
            raise RuntimeError("no smile found")
        if self.options.fail == "refuse":
            raise LaunchError("no smile to be had; set greeter.fail to nothing")
        if self.options.fail == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        self.greeted = Counter("headrace_greetings", "Greetings said.", registry=context.metrics)
        context.announce(letters=len(self.options.word))
        context.serve(self.requests, self.greet)
        if self.options.fail == "later":
            context.spawn(self.tire(), name="smiling")

    async def tire(self) -> None:
        await asyncio.sleep(0.2)
        raise RuntimeError("too tired to smile")

    async def alive(self) -> None:
        if self.options.fail == "stuck":
            await asyncio.Event().wait()

    @classmethod
    def patience_s(cls, node: NodeView) -> float:
        return float(node.options["patience_s"])

    async def drain(self) -> None:
        if self.options.drain_s:
            await asyncio.sleep(self.options.drain_s)

    def greet(self, request: Greet, stream: Stream) -> None:
        if request.name == "block":
            time.sleep(3600)
        self.greeted.inc()
        name = os.environ.get(request.name.removeprefix("$"), request.name)
        stream.end(Greeting(f"{self.options.word} {name}", os.getpid()))


class DoorOptions(Options, frozen=True, kw_only=True):
    """Where the door is."""

    host: str = "127.0.0.1"
    port: int = 0


class Door(Component):
    """Reads a line per connection and answers it: `metrics`, `health`, the greeters' `facts`, or greets a name."""

    Options = DoorOptions
    listens = Listen()
    greeters = Calls(Greet, Greeting)

    async def start(self, context: Context) -> None:
        self.context = context
        self.client = context.client(self.greeters)
        self.server = await asyncio.start_server(self.answer, sock=context.listener)

    async def stop(self) -> None:
        if hasattr(self, "server"):
            self.server.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = (await reader.readline()).decode().strip()
        if line == "metrics":
            writer.write(await self.context.collect_metrics(1.0))
        elif line == "health":
            writer.write(self.context.health().state.encode())
        elif line == "facts":
            writer.write(repr({peer.id: peer.facts for peer in self.client.peers.values()}).encode())
        else:
            writer.write((await self.greeting(line)).encode())
        writer.close()

    async def greeting(self, name: str) -> str:
        try:
            peer = await self.client.wait_peer(2.0)
            reply = await self.client.call(Greet(name), peer=peer.id, timeout_s=2.0)
        except NoPeer:
            return "nobody is there"
        return f"{reply.text} from {reply.pid}"


door = Node(Door)
greeter = Node(Greeter)
graph = Graph("toy", door.greeters >> greeter.requests)
