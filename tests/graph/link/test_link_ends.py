"""However a side ends, each call and each stream ends exactly once."""

import asyncio
import subprocess
import sys
import textwrap

import pytest

from graph.component import Peer
from graph.errors import NoPeer, PeerLost, RequestCancelled


def holding(streams, cancelled):
    """A handler that keeps its streams open and books their cancels."""

    def hold(ask, stream):
        streams.append(stream)
        stream.on_cancel(lambda: cancelled.append(stream.id))

    return hold


def run_script(script, address):
    """A real process that gets `address` as its argument."""
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), address])


def kill(process):
    """SIGKILL: no chance to say anything."""
    process.kill()
    process.wait()


@pytest.mark.parametrize("boot", [None, "2"], ids=["gone", "restarted"])
def test_calls_end_at_once_when_the_registry_loses_their_peer(site, ending, until, boot):
    async def body():
        streams = []
        server = site.server(holding(streams, []))
        links, client = site.caller(server)
        got = ending()
        client.open(site.Ask(), peer="server/0", timeout_s=60, on_item=got.on_item, on_end=got.on_end)
        iterated = client.open(site.Ask(), peer="server/0", timeout_s=60)
        await until(lambda: len(streams) == 2)
        links.set_peers([] if boot is None else [site.peer(server, boot=boot)])
        assert isinstance(await got.wait(), PeerLost)
        with pytest.raises(PeerLost, match="server/0"):
            await anext(aiter(iterated))
        assert len(got.ends) == 1

    site.run(body)


def test_streams_end_when_the_registry_loses_their_caller(site, until):
    async def body():
        streams, cancelled = [], []
        server = site.server(holding(streams, cancelled))
        _, client = site.caller(server)
        caller = Peer("caller/0", "1", "nowhere")
        server.set_peers([caller])
        call = client.open(site.Ask(), peer="server/0", timeout_s=60)
        await until(lambda: streams)
        server.set_peers([])
        assert len(cancelled) == 1
        with pytest.raises(PeerLost):  # it was not dead after all, so it is told
            await anext(aiter(call))

    site.run(body)


def test_a_new_start_of_a_caller_cancels_the_streams_of_the_old(site, until):
    async def body():
        streams, cancelled = [], []
        server = site.server(holding(streams, cancelled))
        _, old = site.caller(server, boot="1")
        _, other = site.caller(server, id="caller/1")
        old.open(site.Ask(), peer="server/0", timeout_s=60)
        other.open(site.Ask(), peer="server/0", timeout_s=60)
        await until(lambda: len(streams) == 2)
        _, new = site.caller(server, boot="2")
        new.open(site.Ask(), peer="server/0", timeout_s=60)
        await until(lambda: len(streams) == 3)
        assert len(cancelled) == 1
        assert {stream.peer for stream in streams[:2] if stream.is_closed} == {"caller/0"}
        assert not streams[2].is_closed

    site.run(body)


def test_closing_the_server_ends_both_sides(site, ending, until):
    async def body():
        streams, cancelled = [], []
        server = site.server(holding(streams, cancelled))
        _, client = site.caller(server)
        got = ending()
        client.open(site.Ask(), peer="server/0", timeout_s=60, on_item=got.on_item, on_end=got.on_end)
        await until(lambda: streams)
        await server.close()
        await server.close()
        assert isinstance(await got.wait(), RequestCancelled)
        assert len(cancelled) == 1
        with pytest.raises(PeerLost, match="has stopped"):
            await client.call(site.Ask(), peer="server/0", timeout_s=60)

    site.run(body)


def test_ends_sent_just_before_closing_arrive(site, until):
    async def body():
        streams = []
        server = site.server(holding(streams, []))
        _, client = site.caller(server)
        call = client.open(site.Ask(), peer="server/0", timeout_s=60)
        await until(lambda: streams)
        streams[0].end(site.Tell(1))
        await server.close()
        assert [tell async for tell in call] == [site.Tell(1)]

    site.run(body)


def test_closing_the_server_ends_running_handlers(site, until):
    async def body():
        ended = []

        async def wait_for_ever(ask, stream):
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(stream.is_closed)

        server = site.server(wait_for_ever)
        _, client = site.caller(server)
        waiting = asyncio.ensure_future(client.call(site.Ask(), peer="server/0", timeout_s=60))
        await asyncio.sleep(0.1)
        await server.close()
        assert ended == [True]
        with pytest.raises(RequestCancelled):
            await waiting

    site.run(body)


def test_closing_the_caller_ends_both_sides(site, ending, until):
    async def body():
        streams, cancelled = [], []
        links, client = site.caller(site.server(holding(streams, cancelled)))
        got = ending()
        client.open(site.Ask(), peer="server/0", timeout_s=60, on_item=got.on_item, on_end=got.on_end)
        await until(lambda: streams)
        await links.close()
        assert isinstance(await got.wait(), PeerLost)
        await until(lambda: cancelled)
        with pytest.raises(NoPeer):
            client.open(site.Ask(), peer="server/0", timeout_s=60)

    site.run(body)


def test_a_server_that_came_back_refuses_requests_meant_for_its_predecessor(site):
    async def body():
        server = site.server(lambda ask, stream: stream.end(site.Tell(1)), boot="2")
        links, client = site.caller(server)  # still believes in boot 1
        with pytest.raises(PeerLost, match="was restarted"):
            await client.call(site.Ask(), peer="server/0", timeout_s=60)
        links.set_peers([site.peer(server, boot="2")])
        assert await client.call(site.Ask(), peer="server/0", timeout_s=5) == site.Tell(1)

    site.run(body)


def test_an_empty_boot_reaches_whoever_is_there(site):
    async def body():
        server = site.server(lambda ask, stream: stream.end(site.Tell(1)), boot="2")
        links, client = site.caller()
        links.set_peers([site.peer(server, boot="")])
        assert await client.call(site.Ask(), peer="server/0", timeout_s=5) == site.Tell(1)

    site.run(body)


def test_draining_peers_are_not_listed_and_keep_their_calls(site, until):
    async def body():
        streams = []
        server = site.server(holding(streams, []))
        links, client = site.caller(server)
        seen = []
        client.on_change(lambda peers: seen.append(sorted(peers)))
        call = client.open(site.Ask(), peer="server/0", timeout_s=5)
        await until(lambda: streams)
        links.set_peers([site.peer(server, state="draining")])
        assert not client.peers
        streams[0].end(site.Tell(1))
        assert [tell async for tell in call] == [site.Tell(1)]
        late = client.open(site.Ask(), peer="server/0", timeout_s=5)
        await until(lambda: len(streams) == 2)
        late.cancel()
        assert seen == [["server/0"], []]

    site.run(body)


def test_waiting_for_a_peer(site):
    async def body():
        server = site.server()
        links, client = site.caller()
        with pytest.raises(NoPeer, match="no ready replica within"):
            await client.wait_peer(0.01)
        waiting = asyncio.ensure_future(client.wait_peer(5))
        await asyncio.sleep(0)
        links.set_peers([site.peer(server)])
        assert (await waiting).id == "server/0"
        assert (await client.wait_peer(0)).id == "server/0"

    site.run(body)


SERVER = """
    import asyncio, sys
    from graph import Message
    from graph.link import Links, ZeroMQ
    from graph.ports import Serves

    class Ask(Message, frozen=True):
        number: int = 0
        body: bytes = b""

    class Tell(Message, frozen=True):
        number: int

    class Ports:
        answers = Serves(Ask, Tell)

    async def main():
        links = Links("server/0", "1", transport=ZeroMQ(), listen=sys.argv[1])
        links.serve(Ports.answers, lambda ask, stream: stream.send(Tell(ask.number)))
        await asyncio.Event().wait()

    asyncio.run(main())
"""


def test_a_killed_peer_ends_its_calls_when_the_registry_says_so(ipc):
    async def body():
        address = ipc.address("server")
        process = run_script(SERVER, address)
        try:
            links = ipc.links("caller/0")
            client = links.client(ipc.Ports.asks, {"server": "answers"})
            links.set_peers([Peer("server/0", "1", address)])
            call = client.open(ipc.Ask(4), peer="server/0", timeout_s=15)
            replies = aiter(call)
            assert await anext(replies) == ipc.Tell(4)
        finally:
            kill(process)
        links.set_peers([])
        with pytest.raises(PeerLost):
            await anext(replies)

    ipc.run(body)


CALLER = """
    import asyncio, sys
    from graph import Message
    from graph.component import Peer
    from graph.link import Links, ZeroMQ
    from graph.ports import Calls

    class Ask(Message, frozen=True):
        number: int = 0

    class Tell(Message, frozen=True):
        number: int
        body: bytes = b""

    class Ports:
        asks = Calls(Ask, Tell)

    async def main():
        links = Links("caller/0", "1", transport=ZeroMQ())
        client = links.client(Ports.asks, {"server": "answers"})
        links.set_peers([Peer("server/0", "1", sys.argv[1])])
        client.open(Ask(), peer="server/0", timeout_s=60)
        await asyncio.Event().wait()

    asyncio.run(main())
"""


def test_a_killed_caller_is_noticed_by_the_next_reply(ipc, until):
    async def body():
        streams, cancelled = [], []
        server = ipc.server(holding(streams, cancelled))
        process = run_script(CALLER, server.address)
        try:
            await until(lambda: streams)
        finally:
            kill(process)

        def send_until_cancelled():
            streams[0].send(ipc.Tell(1))
            return cancelled

        await until(send_until_cancelled)
        assert len(cancelled) == 1

    ipc.run(body)
