"""Calls and streams behave alike on every transport."""

import asyncio
import socket
import time

import pytest

from graph.component import Peer
from graph.errors import (
    DeadlineExceeded,
    NoPeer,
    PeerFault,
    ProtocolFault,
    Refused,
    RequestCancelled,
)


def test_items_arrive_in_order_and_then_the_end(site):
    def count(ask, stream):
        for number in range(ask.number):
            stream.send(site.Tell(number))
        stream.end()

    async def body():
        _, client = site.caller(site.server(count))
        for num_items in (0, 1, 10_000):
            call = client.open(site.Ask(num_items), peer="server/0", timeout_s=5)
            assert [tell.number async for tell in call] == list(range(num_items))

    site.run(body)


def test_the_end_may_carry_the_last_item(site):
    async def body():
        _, client = site.caller(site.server(lambda ask, stream: stream.end(site.Tell(7))))
        assert await client.call(site.Ask(), peer="server/0", timeout_s=5) == site.Tell(7)
        assert [tell async for tell in client.open(site.Ask(), peer="server/0", timeout_s=5)] == [site.Tell(7)]

    site.run(body)


def test_large_bodies_pass_both_ways(site):
    async def body():
        _, client = site.caller(site.server(lambda ask, stream: stream.end(site.Tell(0, ask.body))))
        body = bytes(range(256)) * 4096  # 1 MiB
        calls = [client.call(site.Ask(body=body), peer="server/0", timeout_s=5) for _ in range(8)]
        assert all(tell.body == body for tell in await asyncio.gather(*calls))

    site.run(body)


def test_a_thousand_streams_at_once_keep_apart(site):
    async def echo(ask, stream):
        for _ in range(3):
            await asyncio.sleep(0)
            stream.send(site.Tell(ask.number))
        stream.end()

    async def body():
        _, client = site.caller(site.server(echo))

        async def one(number):
            call = client.open(site.Ask(number), peer="server/0", timeout_s=10)
            return [tell.number async for tell in call]

        replies = await asyncio.gather(*(one(number) for number in range(1000)))
        assert replies == [[number] * 3 for number in range(1000)]

    site.run(body)


def test_pushed_replies_come_without_a_queue(site, ending):
    def two(ask, stream):
        stream.send(site.Tell(1))
        stream.end(site.Tell(2))

    async def body():
        _, client = site.caller(site.server(two))
        got = ending()
        call = client.open(site.Ask(), peer="server/0", timeout_s=5, on_item=got.on_item, on_end=got.on_end)
        assert await got.wait() is None
        assert got.items == [site.Tell(1), site.Tell(2)]
        call.cancel()
        await asyncio.sleep(0.01)
        assert got.ends == [None]
        with pytest.raises(TypeError):
            aiter(call)

    site.run(body)


def test_call_wants_exactly_one_reply(site):
    def answer(ask, stream):
        for _ in range(ask.number):
            stream.send(site.Tell(0))
        stream.end()

    async def body():
        _, client = site.caller(site.server(answer))
        assert await client.call(site.Ask(1), peer="server/0", timeout_s=5) == site.Tell(0)
        for num_replies in (0, 2):
            with pytest.raises(ProtocolFault, match=f"{num_replies} replies"):
                await client.call(site.Ask(num_replies), peer="server/0", timeout_s=5)

    site.run(body)


def test_a_refusal_arrives_as_it_was_raised(site):
    def refuse(ask, stream):
        raise Refused("too long", code="context_length_exceeded", retry_after_s=2.5)

    async def body():
        _, client = site.caller(site.server(refuse))
        with pytest.raises(Refused, match="too long") as caught:
            await client.call(site.Ask(), peer="server/0", timeout_s=5)
        assert (caught.value.code, caught.value.retry_after_s) == ("context_length_exceeded", 2.5)

    site.run(body)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_that_fails_says_so_without_its_secrets(site, caplog, is_async):
    def fail(ask, stream):
        raise ValueError("the secret")

    async def fail_later(ask, stream):
        fail(ask, stream)

    async def body():
        _, client = site.caller(site.server(fail_later if is_async else fail))
        with pytest.raises(PeerFault) as caught:
            await client.call(site.Ask(), peer="server/0", timeout_s=5)
        assert "secret" not in str(caught.value)
        assert "server/0" in str(caught.value)

    site.run(body)
    assert "the secret" in caplog.text


def test_silence_ends_in_a_deadline_that_names_edge_and_peer(site, until):
    async def body():
        cancelled = []
        server = site.server(lambda ask, stream: stream.on_cancel(lambda: cancelled.append(stream.id)))
        _, client = site.caller(server)
        call = client.open(site.Ask(), peer="server/0", timeout_s=0.05)
        with pytest.raises(DeadlineExceeded, match=r"caller/0.asks >> server.answers: .*server/0 within 0.05 s"):
            await anext(aiter(call))
        await until(lambda: cancelled)
        assert len(cancelled) == 1

    site.run(body)


def test_each_reply_moves_the_deadline(site):
    async def slow(ask, stream):
        for number in range(6):
            await asyncio.sleep(0.05)
            stream.send(site.Tell(number))
        stream.end()

    async def body():
        _, client = site.caller(site.server(slow))
        call = client.open(site.Ask(), peer="server/0", timeout_s=0.25)
        assert len([tell async for tell in call]) == 6

    site.run(body)


def test_a_busy_loop_does_not_make_replies_late(ipc):
    async def body():
        _, client = ipc.caller(ipc.server(lambda ask, stream: stream.end(ipc.Tell(1))))
        await client.call(ipc.Ask(), peer="server/0", timeout_s=5)
        waiting = asyncio.ensure_future(client.call(ipc.Ask(), peer="server/0", timeout_s=0.2))
        await asyncio.sleep(0.05)
        asyncio.get_running_loop().call_soon(time.sleep, 0.3)
        assert await waiting == ipc.Tell(1)

    ipc.run(body)


def test_cancel_reaches_the_server_once_and_ends_the_call(site, ending, until):
    async def body():
        streams, cancelled = [], []

        def hold(ask, stream):
            streams.append(stream)
            stream.on_cancel(lambda: cancelled.append(stream.peer))

        _, client = site.caller(site.server(hold))
        got = ending()
        call = client.open(site.Ask(), peer="server/0", timeout_s=5, on_item=got.on_item, on_end=got.on_end)
        await until(lambda: streams)
        call.cancel()
        call.cancel()
        assert isinstance(await got.wait(), RequestCancelled)
        await until(lambda: cancelled)
        stream = streams[0]
        assert stream.is_closed
        stream.send(site.Tell(1))
        stream.end(site.Tell(2))
        stream.fail(Refused("no"))
        stream.on_cancel(lambda: cancelled.append("late"))
        await asyncio.sleep(0.02)
        assert cancelled == ["caller/0", "late"]
        assert (got.items, len(got.ends)) == ([], 1)

    site.run(body)


def test_cancel_before_the_request_has_left(site, until):
    async def body():
        cancelled = []
        server = site.server(lambda ask, stream: stream.on_cancel(lambda: cancelled.append(1)))
        _, client = site.caller(server)
        call = client.open(site.Ask(), peer="server/0", timeout_s=5)
        call.cancel()
        with pytest.raises(RequestCancelled):
            await anext(aiter(call))
        await until(lambda: cancelled)

    site.run(body)


def test_on_cancel_is_not_called_after_a_good_end(site):
    async def body():
        cancelled = []

        def answer(ask, stream):
            stream.on_cancel(lambda: cancelled.append(1))
            stream.end(site.Tell(1))

        links, client = site.caller(site.server(answer))
        await client.call(site.Ask(), peer="server/0", timeout_s=5)
        await links.close()
        await asyncio.sleep(0.02)
        assert cancelled == []

    site.run(body)


def test_bytes_of_the_wrong_type_end_their_stream_alone(site):
    async def body():
        links, client = site.caller(site.server(lambda ask, stream: stream.end(site.Tell(ask.number))))
        wrong = links.client(site.Ports.wrong_asks, {"server": "answers"})
        good = client.call(site.Ask(5), peer="server/0", timeout_s=5)
        bad = wrong.call(site.Tell(1), peer="server/0", timeout_s=5)
        results = await asyncio.gather(good, bad, return_exceptions=True)
        assert results[0] == site.Tell(5)
        assert isinstance(results[1], ProtocolFault)

    site.run(body)


def test_a_reply_of_the_wrong_type_ends_the_call_and_the_stream(site, until):
    async def body():
        cancelled = []

        def answer(ask, stream):
            stream.on_cancel(lambda: cancelled.append(1))
            stream.send(site.Ask())

        _, client = site.caller(site.server(answer))
        with pytest.raises(ProtocolFault):
            await client.call(site.Ask(), peer="server/0", timeout_s=5)
        await until(lambda: cancelled)

    site.run(body)


def test_unknown_peers_and_ports_are_refused(site):
    async def body():
        links, client = site.caller(site.server())
        with pytest.raises(NoPeer, match="server/9"):
            client.open(site.Ask(), peer="server/9", timeout_s=1)
        with pytest.raises(NoPeer, match="does not serve a port 'answers'"):
            await client.call(site.Ask(), peer="server/0", timeout_s=5)
        unlinked = links.client(site.Ports.asks, {})
        assert not unlinked.is_linked
        with pytest.raises(NoPeer):
            unlinked.open(site.Ask(), peer="server/0", timeout_s=1)

    site.run(body)


def test_a_call_may_come_before_the_server_listens(site):
    async def body():
        if site.kind == "tcp":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        else:
            address = site.address("server")
        links = site.links("caller/0")
        client = links.client(site.Ports.asks, {"server": "answers"})
        links.set_peers([Peer("server/0", "1", address)])
        early = asyncio.ensure_future(client.call(site.Ask(3), peer="server/0", timeout_s=5))
        await asyncio.sleep(0.05)
        late = site.links("server/0", listen=address)
        late.serve(site.Ports.answers, lambda ask, stream: stream.end(site.Tell(ask.number)))
        assert await early == site.Tell(3)

    site.run(body)


def test_a_turn_of_the_loop_is_one_wire_message(site, until):
    async def body():
        streams = []
        server = site.server(lambda ask, stream: streams.append(stream))
        caller, client = site.caller(server)
        calls = [client.open(site.Ask(), peer="server/0", timeout_s=5) for _ in range(256)]
        await until(lambda: len(streams) == 256)
        assert (caller.traffic.num_sent, server.traffic.num_sent) == (1, 0)
        for step in range(3):
            for stream in streams:
                stream.send(site.Tell(step))
            for call in calls:
                assert await anext(aiter(call)) == site.Tell(step)
        assert server.traffic.num_sent == 3

    site.run(body)
