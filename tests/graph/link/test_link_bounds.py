"""Every queue of a link is bounded, and says so when it is full."""

import asyncio

import pytest

from graph.component import Peer
from graph.errors import Overloaded
from graph.link import Limits


async def drain(replies):
    """Consumes what is left."""
    async for _ in replies:
        pass


def test_a_server_takes_max_streams_and_not_one_more(site, until):
    async def body():
        streams = []
        server = site.server(lambda ask, stream: streams.append(stream), max_streams=2)
        _, client = site.caller(server)
        held = [client.open(site.Ask(), peer="server/0", timeout_s=5) for _ in range(2)]
        with pytest.raises(Overloaded, match="2 open requests") as caught:
            await client.call(site.Ask(), peer="server/0", timeout_s=5)
        assert caught.value.retry_after_s is not None
        held[0].cancel()
        await until(lambda: streams[0].is_closed)
        again = asyncio.ensure_future(client.call(site.Ask(), peer="server/0", timeout_s=5))
        await until(lambda: len(streams) == 3)
        streams[2].end(site.Tell(9))
        assert await again == site.Tell(9)

    site.run(body)


@pytest.mark.parametrize("limits", [Limits(inbox_items=10), Limits(inbox_bytes=10_000)], ids=["items", "bytes"])
def test_a_slow_consumer_loses_its_call_and_frees_the_server(site, until, limits):
    async def body():
        cancelled = []

        def flood(ask, stream):
            stream.on_cancel(lambda: cancelled.append(1))
            for number in range(ask.number):
                stream.send(site.Tell(number, bytes(1000)))

        _, client = site.caller(site.server(flood), limits=limits)
        call = client.open(site.Ask(100), peer="server/0", timeout_s=5)
        await until(lambda: cancelled)
        replies = aiter(call)
        got = [(await anext(replies)).number for _ in range(9)]
        assert got == list(range(9))
        with pytest.raises(Overloaded, match="not consumed fast enough"):
            await drain(replies)
        assert len(cancelled) == 1

    site.run(body)


def test_an_inbox_takes_exactly_its_bound(site):
    def count(ask, stream):
        for number in range(ask.number):
            stream.send(site.Tell(number))
        stream.end()

    async def body():
        _, client = site.caller(site.server(count), limits=Limits(inbox_items=10))
        call = client.open(site.Ask(10), peer="server/0", timeout_s=5)
        await asyncio.sleep(0.05)
        assert len([tell async for tell in call]) == 10

    site.run(body)


def test_requests_to_a_peer_that_takes_nothing_are_refused_when_the_backlog_is_full(site):
    async def body():
        links = site.links("caller/0", limits=Limits(backlog_bytes=1 << 20))
        client = links.client(site.Ports.asks, {"server": "answers"})
        address = "tcp://127.0.0.1:9" if site.kind == "tcp" else site.address("nobody")
        links.set_peers([Peer("server/0", "1", address)])
        big = site.Ask(0, bytes(1 << 20))
        calls = [client.open(big, peer="server/0", timeout_s=60) for _ in range(40)]
        with pytest.raises(Overloaded, match="bytes behind"):
            await anext(aiter(calls[-1]))

    site.run(body)


def test_a_caller_that_stops_reading_loses_its_streams_not_the_servers_memory(ipc, until):
    import threading

    async def body():
        streams, cancelled = [], []

        def hold(ask, stream):
            streams.append(stream)
            stream.on_cancel(lambda: cancelled.append(1))

        server = ipc.server(hold, limits=Limits(backlog_bytes=4 << 20))
        ends, resume = [], threading.Event()

        def hang():
            async def call():
                links = ipc.links("caller/0")
                client = links.client(ipc.Ports.asks, {"server": "answers"})
                links.set_peers([ipc.peer(server)])
                open_calls = [client.open(ipc.Ask(), peer="server/0", timeout_s=60) for _ in range(2)]
                await until(lambda: len(streams) == 2)
                resume.wait(10)  # the whole loop hangs
                for one in open_calls:
                    try:
                        await drain(aiter(one))
                    except Overloaded as error:
                        ends.append(error)
                await links.close()

            asyncio.run(call())

        thread = asyncio.ensure_future(asyncio.to_thread(hang))
        await until(lambda: len(streams) == 2)
        while not cancelled:
            streams[0].send(ipc.Tell(0, bytes(1 << 20)))
            await asyncio.sleep(0)
        assert len(cancelled) == 2
        resume.set()
        await thread
        assert len(ends) == 2

    ipc.run(body)
