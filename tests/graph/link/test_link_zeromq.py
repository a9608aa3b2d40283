"""The ZeroMQ transport: addresses, strangers, and what it costs to be idle."""

import asyncio
import resource
import socket

import pytest

from graph.component import Peer
from graph.errors import DeclarationError, LaunchError, PeerLost
from graph.link import ZeroMQ
from graph.link.codec import Batch, Hello, Kind


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://*:5555", "tcp://192.0.2.1:5555", "tcp://example.com:80"])
def test_plain_tcp_off_loopback_is_refused_at_both_ends(ipc, address):
    async def body():
        transport = ZeroMQ()
        with pytest.raises(DeclarationError, match="requires CURVE"):
            transport.listen(address, lambda line, data: None, lambda: None)
        with pytest.raises(DeclarationError, match="requires CURVE"):
            transport.dial(address, lambda data: None, lambda: None)
        await transport.close()

    ipc.run(body)


@pytest.mark.parametrize("address", ["inproc://x", "udp://127.0.0.1:1", "nonsense"])
def test_other_schemes_are_refused(ipc, address):
    async def body():
        transport = ZeroMQ()
        with pytest.raises(DeclarationError, match="use ipc://PATH or tcp://"):
            transport.listen(address, lambda line, data: None, lambda: None)
        await transport.close()

    ipc.run(body)


def test_an_address_that_cannot_be_bound_says_why(ipc):
    async def body():
        for address in ("ipc:///nonexistent/folder/x", "ipc:///tmp/" + "x" * 200):
            with pytest.raises(LaunchError, match="cannot listen at"):
                ipc.links("server/0", listen=address)

    ipc.run(body)


def test_closing_leaves_no_socket_file(ipc, folder):
    async def body():
        server = ipc.server()
        assert list(folder.iterdir())
        await server.close()
        assert not list(folder.iterdir())

    ipc.run(body)


def batch(*frames):
    """One wire message."""
    gathered = Batch()
    for frame in frames:
        gathered.add(frame)
    return gathered.seal()


class Stranger:
    """Somebody at the socket who sends whole wire messages of its own making."""

    def __init__(self, address):
        self.received = []
        self.transport = ZeroMQ()
        self.dialer = self.transport.dial(address, self.received.append, lambda: None)

    async def close(self):
        self.dialer.close(0)
        await self.transport.close()


def test_garbage_from_strangers_harms_nobody(ipc, until):
    async def body():
        server = ipc.server(lambda ask, stream: stream.end(ipc.Tell(ask.number)))
        _, client = ipc.caller(server)
        await client.call(ipc.Ask(), peer="server/0", timeout_s=5)
        stranger = Stranger(server.address)
        for data in (b"", b"garbage", b"\x80\x04\x95pickle", b"\xdd\xff\xff\xff\xff", bytes(100_000)):
            stranger.dialer.send(bytearray(data))
        stranger.dialer.send(batch((0, Kind.HELLO, 17)))
        await until(lambda: server.traffic.num_faults >= 6)
        assert await client.call(ipc.Ask(1), peer="server/0", timeout_s=5) == ipc.Tell(1)
        await stranger.close()

    ipc.run(body)


def test_frames_of_unknown_kind_end_their_stream_alone(ipc, until):
    async def body():
        streams = []
        server = ipc.server(lambda ask, stream: streams.append(stream))
        caller = Stranger(server.address)
        caller.dialer.send(batch((0, Kind.HELLO, Hello("caller/0", "1")), (1, Kind.REQUEST, ipc.Ask(), "answers")))
        caller.dialer.send(batch((2, 99, None), (2, Kind.CANCEL, None)))
        await until(lambda: caller.received)
        assert b"unknown kind 99" in caller.received[0]
        assert not streams[0].is_closed
        caller.dialer.send(bytearray(b"broken"))
        await until(lambda: streams[0].is_closed)
        await caller.close()

    ipc.run(body)


def test_a_request_without_hello_is_not_served(ipc, until):
    async def body():
        asked = []
        server = ipc.server(lambda ask, stream: asked.append(ask))
        stranger = Stranger(server.address)
        stranger.dialer.send(batch((1, Kind.REQUEST, ipc.Ask(), "answers")))
        await until(lambda: stranger.received)
        assert b"does not know this line" in stranger.received[0]
        assert asked == []
        await stranger.close()

    ipc.run(body)


def test_bytes_that_are_not_zeromq_are_ignored(folder, until):
    async def body():
        transport, received = ZeroMQ(), []
        listener = transport.listen("tcp://127.0.0.1:0", lambda line, data: received.append(data), lambda: None)
        port = int(listener.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            dialer = transport.dial(listener.address, lambda data: None, lambda: None)
            dialer.send(bytearray(b"whole"))
            await until(lambda: received)
        assert received == [b"whole"]
        await transport.close()

    asyncio.run(body())


def test_a_broken_answer_ends_all_calls_of_the_line(ipc, until):
    async def body():
        transport, lines = ZeroMQ(), []
        listener = transport.listen(ipc.address("server"), lambda line, data: lines.append(line), lambda: None)
        links = ipc.links("caller/0")
        client = links.client(ipc.Ports.asks, {"server": "answers"})
        links.set_peers([ipc.peer(listener)])
        call = client.open(ipc.Ask(), peer="server/0", timeout_s=5)
        await until(lambda: lines)
        listener.send(lines[0], bytearray(b"broken"))
        with pytest.raises(Exception, match="not a batch of frames"):
            await anext(aiter(call))
        await transport.close()

    ipc.run(body)


def test_a_line_that_was_cut_greets_anew(ipc, until):
    async def body():
        streams = []

        def answer(ask, stream):
            streams.append(stream)
            if ask.number:
                stream.end(ipc.Tell(ask.number))

        server = ipc.server(answer)
        _, client = ipc.caller(server)
        held = client.open(ipc.Ask(0), peer="server/0", timeout_s=5)
        await until(lambda: streams)
        server.set_peers([Peer("caller/0", "1", "anywhere")])
        server.set_peers([])
        with pytest.raises(PeerLost):
            await anext(aiter(held))
        assert await client.call(ipc.Ask(1), peer="server/0", timeout_s=5) == ipc.Tell(1)

    ipc.run(body)


def test_idle_links_use_no_cpu(ipc, until):
    async def body():
        server = ipc.server(lambda ask, stream: stream.end(ipc.Tell(1)))
        _, client = ipc.caller(server)
        await client.call(ipc.Ask(), peer="server/0", timeout_s=30)
        before = resource.getrusage(resource.RUSAGE_SELF)
        await asyncio.sleep(1)
        after = resource.getrusage(resource.RUSAGE_SELF)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.01

    ipc.run(body)
