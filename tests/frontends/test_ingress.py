"""The ingress on a real socket, in front of processors that are plain functions."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
import uvloop
from frontend_fakes import FakeClient, FakeContext, listening_socket, until

from frontends.http_server import max_connections
from frontends.ingress import FrontendOptions, OpenAIFrontend
from frontends.messages import HttpBody, HttpHead
from graph import Health, Overloaded

SSE_HEAD = HttpHead(200, (("content-type", "text/event-stream"),))


class Served:
    """A running ingress."""

    def __init__(self, frontend: OpenAIFrontend, context: FakeContext, client: FakeClient, address: tuple[str, int]):
        self.frontend = frontend
        self.context = context
        self.processors = client
        self.address = address
        self.http = httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}", timeout=10, trust_env=False)


def serve(test: Callable[[Served], Awaitable[None]], **options: Any) -> None:
    """Runs `test` against an ingress without processors; the test adds them."""

    async def main() -> None:
        client = FakeClient()
        listener = listening_socket()
        context = FakeContext(listener=listener, requests=client)
        frontend = OpenAIFrontend(FrontendOptions(**options))
        served = Served(frontend, context, client, listener.getsockname())
        supervisors_copy = listener.dup()
        await frontend.start(context)
        try:
            await test(served)
        finally:
            await served.http.aclose()
            await frontend.stop()
            supervisors_copy.close()

    uvloop.run(asyncio.wait_for(main(), 30))


def echo(request: Any, stream: Any) -> None:
    """A processor that tells what it was sent."""
    told = {"method": request.method, "path": request.path, "query": request.query, "body": request.body.decode()}
    body = json.dumps(told).encode()
    stream.send(HttpHead(200, (("content-type", "application/json"), ("content-length", str(len(body))))))
    stream.end(HttpBody(body))


def silent(request: Any, stream: Any) -> None:
    """A processor that never answers."""


async def connect(served: Served, sent: bytes) -> socket.socket:
    """A raw connection that has sent `sent`."""
    client = socket.socket()
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(client, served.address)
        await loop.sock_sendall(client, sent)
    except OSError:
        client.close()
        raise
    return client


async def read_all(client: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while piece := await loop.sock_recv(client, 65536):
        data += piece
    client.close()
    return data


def test_forwards_method_path_query_and_raw_body() -> None:
    async def test(served: Served) -> None:
        served.processors.serve("processor/0", echo)
        reply = await served.http.post("/v1/x/y?a=b", content=b'{"not json')
        assert reply.status_code == 200
        assert reply.json() == {"method": "POST", "path": "/v1/x/y", "query": "a=b", "body": '{"not json'}
        assert len(reply.headers["x-request-id"]) == 24

    serve(test)


def test_request_id_is_kept_when_sane_and_minted_when_not() -> None:
    async def test(served: Served) -> None:
        served.processors.serve("processor/0", echo)
        kept = await served.http.post("/x", headers={"x-request-id": "job-17"})
        assert kept.headers["x-request-id"] == "job-17"
        minted = await served.http.post("/x", headers={"x-request-id": "a b<c>"})
        assert minted.headers["x-request-id"] != "a b<c>"
        own = await served.http.get("/live", headers={"x-request-id": "job-18"})
        assert own.headers["x-request-id"] == "job-18"

    serve(test)


def test_health_tells_the_graphs_state() -> None:
    async def test(served: Served) -> None:
        assert (await served.http.get("/health")).json()["status"] == "ready"
        served.context.state = Health("degraded", ("decode.prefill: none",))
        degraded = await served.http.get("/health")
        assert (degraded.status_code, degraded.json()["missing"]) == (200, ["decode.prefill: none"])
        assert "retry-after" not in degraded.headers
        served.context.state = Health("down")
        down = await served.http.get("/health")
        assert (down.status_code, down.headers["retry-after"]) == (503, "1")
        assert (await served.http.get("/live")).status_code == 200
        refused = await served.http.post("/health")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
        assert "error" in refused.json()
        assert (await served.http.get("/metrics")).text == "# no metrics\n"

    serve(test)


def test_no_processor_is_503_within_two_seconds() -> None:
    async def test(served: Served) -> None:
        started = asyncio.get_running_loop().time()
        reply = await served.http.post("/v1/completions", content=b"{}")
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "1"
        assert reply.json()["error"]["code"] == "no_processor"
        assert asyncio.get_running_loop().time() - started < 2

    serve(test)


def test_waits_for_a_processor_that_comes_up() -> None:
    async def test(served: Served) -> None:
        asyncio.get_running_loop().call_later(0.2, served.processors.serve, "processor/0", echo)
        assert (await served.http.post("/x")).status_code == 200

    serve(test)


def test_body_over_the_limit_is_413_without_reading_it() -> None:
    async def test(served: Served) -> None:
        served.processors.serve("processor/0", echo)
        exact = await served.http.post("/x", content=b"a" * 2**20)
        assert exact.status_code == 200
        over = await served.http.post("/x", content=b"a" * (2**20 + 1))
        assert (over.status_code, over.json()["error"]["code"]) == (413, "body_too_large")
        client = await connect(served, b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 50000000\r\n\r\n")
        assert b"413" in (await read_all(client)).split(b"\r\n")[0]

        async def chunks() -> Any:
            for _ in range(3):
                yield b"a" * 2**19

        chunked = await served.http.post("/x", content=chunks())
        assert chunked.status_code == 413

    serve(test, max_body_mb=1)


def test_stalled_upload_is_408() -> None:
    async def test(served: Served) -> None:
        served.processors.serve("processor/0", echo)
        client = await connect(served, b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc")
        reply = await read_all(client)
        assert b"408" in reply.split(b"\r\n")[0]
        assert b'"error"' in reply

    serve(test, body_timeout_s=0.2)


def test_huge_head_and_garbage_are_refused_in_json() -> None:
    async def test(served: Served) -> None:
        head = await connect(served, b"GET /x HTTP/1.1\r\nhost: x\r\nbig: " + b"a" * 65536 + b"\r\n\r\n")
        assert b"431" in (await read_all(head)).split(b"\r\n")[0]
        endless = await connect(served, b"GET /x HTTP/1.1\r\nbig: " + b"a" * 40_000)
        assert b"431" in (await read_all(endless)).split(b"\r\n")[0]
        garbage = await read_all(await connect(served, b"\x00\x01garbage\r\n\r\n"))
        assert b"400" in garbage.split(b"\r\n")[0]
        assert b"x-request-id" in garbage
        assert b'"invalid_http"' in garbage

    serve(test)


def test_least_busy_processor_gets_the_next_request() -> None:
    async def test(served: Served) -> None:
        for i in range(3):
            served.processors.serve(f"processor/{i}", silent)
        clients = [await connect(served, b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n") for _ in range(9)]
        await until(lambda: len(served.processors.opened) == 9)
        peers = [peer for peer, _ in served.processors.opened]
        assert sorted(peers) == sorted([f"processor/{i}" for i in range(3)] * 3)
        for client in clients:
            client.close()
        await until(lambda: not served.processors.calls)

    serve(test)


def test_client_that_leaves_cancels_before_and_after_the_head() -> None:
    async def test(served: Served) -> None:
        def start(request: Any, stream: Any) -> None:
            if request.path == "/stream":
                stream.send(SSE_HEAD)
                stream.send(HttpBody(b"data: 1\n\n"))

        served.processors.serve("processor/0", start)
        for path in (b"/silent", b"/stream"):
            for linger in (struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)):  # RST, FIN
                client = await connect(served, b"POST " + path + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
                await until(lambda: len(served.processors.calls) == 1)
                (call,) = served.processors.calls
                if path == b"/stream":
                    await asyncio.get_running_loop().sock_recv(client, 100)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                client.close()
                await until(lambda: not served.processors.calls, timeout_s=0.5)
                assert call.was_cancelled

    serve(test)


def test_another_processor_takes_over_before_the_first_byte() -> None:
    async def test(served: Served) -> None:
        def head_only(request: Any, stream: Any) -> None:
            stream.send(SSE_HEAD)

        served.processors.serve("processor/0", head_only)
        reply = asyncio.create_task(served.http.post("/x", content=b"{}"))
        await until(lambda: len(served.processors.calls) == 1)
        served.processors.serve("processor/1", echo)
        served.processors.kill("processor/0")
        assert (await reply).status_code == 200
        assert [peer for peer, _ in served.processors.opened] == ["processor/0", "processor/1"]

    serve(test)


def test_death_after_the_first_byte_ends_in_an_error_event() -> None:
    async def test(served: Served) -> None:
        def start(request: Any, stream: Any) -> None:
            stream.send(SSE_HEAD)
            stream.send(HttpBody(b"data: 1\n\n"))

        served.processors.serve("processor/0", start)
        served.processors.serve("processor/1", echo)
        async with served.http.stream("POST", "/x") as reply:
            pieces = reply.aiter_bytes()
            assert await anext(pieces) == b"data: 1\n\n"
            served.processors.kill("processor/0")
            rest = b"".join([piece async for piece in pieces])
        event = json.loads(rest.removeprefix(b"data: "))
        assert event["error"]["code"] == "peer_lost"
        assert b"[DONE]" not in rest
        assert len(served.processors.opened) == 1

    serve(test)


def test_overloaded_processor_is_429_with_retry_after() -> None:
    async def test(served: Served) -> None:
        served.processors.serve("processor/0", lambda request, stream: stream.fail(Overloaded("full", retry_after_s=3)))
        reply = await served.http.post("/x")
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "3")

    serve(test)


def test_a_fault_of_the_ingress_is_500_in_json(caplog: pytest.LogCaptureFixture) -> None:
    async def test(served: Served) -> None:
        def broken(request: Any, stream: Any) -> None:
            raise RuntimeError("secret detail")

        served.processors.serve("processor/0", broken)
        reply = await served.http.post("/x")
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
        assert "secret" not in reply.text
        assert "secret detail" in caplog.text

    serve(test)


def test_slow_reader_is_cut_and_others_go_on() -> None:
    async def test(served: Served) -> None:
        def flood(request: Any, stream: Any) -> None:
            stream.send(SSE_HEAD)

            async def pump() -> None:
                while not stream.is_closed:
                    stream.send(HttpBody(b"x" * 65536))
                    await asyncio.sleep(0)

            served.context.spawn(pump(), name="pump")

        def serve_one(request: Any, stream: Any) -> None:
            (flood if request.path == "/flood" else echo)(request, stream)

        served.processors.serve("processor/0", serve_one)
        client = await connect(served, b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: len(served.processors.opened) == 1)
        assert (await served.http.get("/x")).status_code == 200
        await until(lambda: not served.processors.calls, timeout_s=10)
        client.close()

    serve(test)


def test_stalled_reader_is_cut_when_nothing_more_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontends.http_exchange.WRITE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("frontends.http_exchange.MAX_BACKLOG_BYTES", 2**30)

    async def test(served: Served) -> None:
        def flood(request: Any, stream: Any) -> None:
            stream.send(SSE_HEAD)
            for i in range(2):
                asyncio.get_running_loop().call_later(0.05 * i, stream.send, HttpBody(b"x" * 2**24))
            asyncio.get_running_loop().call_later(0.2, stream.send, HttpBody(b"x"))

        served.processors.serve("processor/0", flood)
        client = await connect(served, b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: len(served.processors.calls) == 1)
        await until(lambda: not served.processors.calls)
        client.close()

    serve(test)


def test_pieces_of_one_turn_leave_as_one_write() -> None:
    async def test(served: Served) -> None:
        def burst(request: Any, stream: Any) -> None:
            stream.send(SSE_HEAD)
            for i in range(5):
                stream.send(HttpBody(b"%d" % i))
            stream.end()

        served.processors.serve("processor/0", burst)
        client = await connect(served, b"GET /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        reply = await read_all(client)
        assert b"\r\n\r\n5\r\n01234\r\n0\r\n\r\n" in reply

    serve(test)


def test_500_streams_at_once() -> None:
    async def test(served: Served) -> None:
        waiting: list[Any] = []

        def start(request: Any, stream: Any) -> None:
            stream.send(SSE_HEAD)
            stream.send(HttpBody(request.body))
            waiting.append(stream)

        for i in range(2):
            served.processors.serve(f"processor/{i}", start)
        clients = []
        for i in range(500):
            sent = b"POST /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 4\r\n\r\n%04d" % i
            clients.append(await connect(served, sent))
        await until(lambda: len(waiting) == 500)
        for stream in waiting:
            for _ in range(3):
                stream.send(HttpBody(b"."))
            stream.end()
        replies = await asyncio.gather(*map(read_all, clients))
        for i, reply in enumerate(replies):
            body = reply.partition(b"\r\n\r\n")[2]
            assert b"%04d" % i in body
            assert body.endswith(b"0\r\n\r\n")
        assert not served.processors.calls

    serve(test)


def test_drain_finishes_the_running_and_accepts_no_more() -> None:
    async def test(served: Served) -> None:
        open_streams: list[Any] = []
        served.processors.serve("processor/0", lambda request, stream: open_streams.append((request, stream)))
        reply = asyncio.create_task(served.http.post("/x", content=b"late"))
        await until(lambda: len(open_streams) == 1)
        draining = asyncio.create_task(served.frontend.drain())
        await asyncio.sleep(0.05)
        assert not draining.done()
        echo(*open_streams[0])
        assert (await reply).json()["body"] == "late"
        await draining
        late = await connect(served, b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")  # waits in the shared listener's queue
        with late, pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.get_running_loop().sock_recv(late, 100), 0.1)

    serve(test)


# --- the limit of open files


@pytest.mark.parametrize(("file_limit", "most"), [(1_024, 896), (65_536, 57_344), (256, 192), (40, 1)])
def test_an_eighth_of_the_files_is_kept_back(file_limit: int, most: int) -> None:
    assert max_connections(file_limit) == most


def test_connections_beyond_the_limit_are_told_to_come_again() -> None:
    async def test(served: Served) -> None:
        served.processors.serve("processor/0", silent)
        served.frontend._server._most = 2  # type: ignore[union-attr]
        request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
        served_ones = [await connect(served, request) for _ in range(2)]
        await until(lambda: len(served.frontend._gateway._exchanges) == 2)  # type: ignore[union-attr]

        refused = await read_all(await connect(served, request))  # the connection ends behind the reply
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in refused.lower()
        assert b'"code":"too_many_connections"' in refused.replace(b" ", b"")

        live = await read_all(await connect(served, b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"))
        assert live.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nconnection: close\r\n" in live.lower()

        for client in served_ones:
            client.close()
        await until(lambda: served.frontend._server.num_connections == 0)  # type: ignore[union-attr]
        assert (await served.http.get("/live")).status_code == 200

    serve(test)
