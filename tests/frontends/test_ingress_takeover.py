"""A processor that dies after the first byte: another one goes on, and the ingress ends what nobody can finish."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from frontend_fakes import until
from test_ingress import SSE_HEAD, Served, serve

from frontends.messages import HttpBody, HttpRequest
from graph import LinkError, PeerFault, PeerLost, RequestCancelled

Handler = Callable[[HttpRequest, Any], None]


def telling(*events: str, fails: LinkError | None = None, ends: bool = False) -> Handler:
    """A processor that tells these events, each with itself as its trail."""

    def handle(request: HttpRequest, stream: Any) -> None:
        if not request.trail:
            stream.send(SSE_HEAD)
        for event in events:
            stream.send(HttpBody(f"data: {event}\n\n".encode(), event.encode()))
        if fails is not None:
            stream.fail(fails)
        elif ends:
            stream.end()

    return handle


async def read(served: Served, **fields: Any) -> str:
    async with served.http.stream("POST", "/x", **fields) as reply:
        return "".join([piece async for piece in reply.aiter_text()])


@pytest.mark.parametrize("error", [PeerLost("died"), RequestCancelled("stopping")])
def test_another_processor_gets_the_request_with_its_trail(error: LinkError) -> None:
    async def test(served: Served) -> None:
        served.processors.serve("processor/0", telling("a", "b", fails=error))
        served.processors.serve("processor/1", telling("c", ends=True))
        assert await read(served, content=b"body") == "data: a\n\ndata: b\n\ndata: c\n\n"
        (_, first), (_, second) = served.processors.opened
        assert (second.body, second.trail, second.attempt) == (b"body", b"ab", 1)
        assert (second.id, second.received_s, second.entropy) == (first.id, first.received_s, first.entropy)
        assert first.entropy
        assert (first.trail, first.attempt) == (b"", 0)

    serve(test)


def test_trails_of_several_processors_add_up() -> None:
    async def test(served: Served) -> None:
        served.processors.serve("processor/0", telling("a", fails=PeerLost("died")))
        served.processors.serve("processor/1", telling("b", fails=PeerLost("died")))
        served.processors.serve("processor/2", telling("c", ends=True))
        assert await read(served) == "data: a\n\ndata: b\n\ndata: c\n\n"
        assert served.processors.opened[2][1].trail == b"ab"

    serve(test)


def test_processors_that_bring_little_are_bounded_and_those_that_get_on_are_not() -> None:
    async def test(served: Served) -> None:
        for i in range(5):
            served.processors.serve(f"processor/{i}", telling("x", fails=PeerLost("died")))
        assert '"code":"peer_lost"' in await read(served)
        assert len(served.processors.opened) == 3
        for i in range(5):
            served.processors.remove(f"processor/{i}")
        many = [str(i) for i in range(8)]
        for i in range(5):
            served.processors.serve(
                f"processor/{i}", telling(*many, fails=None if i == 4 else PeerLost("died"), ends=True)
            )
        assert (await read(served)).count("data: ") == 5 * 8

    serve(test)


def test_a_fault_of_the_processor_is_not_tried_again() -> None:
    async def test(served: Served) -> None:
        served.processors.serve("processor/0", telling("a", fails=PeerFault("broken")))
        served.processors.serve("processor/1", telling("b", ends=True))
        assert '"code":"internal_error"' in await read(served)
        assert len(served.processors.opened) == 1

    serve(test)


def test_a_stream_waits_for_its_only_processor_to_come_back() -> None:
    async def test(served: Served) -> None:
        served.processors.serve("processor/0", telling("a"))
        reply = asyncio.create_task(read(served))
        await until(lambda: len(served.processors.calls) == 1)
        await asyncio.sleep(0.05)
        served.processors.kill("processor/0")
        await asyncio.sleep(1.2)  # longer than a fresh request waits
        served.processors.serve("processor/0", telling("b", ends=True))
        assert await reply == "data: a\n\ndata: b\n\n"

    serve(test)


def test_a_client_that_leaves_between_two_processors_ends_the_request() -> None:
    async def test(served: Served) -> None:
        served.processors.serve("processor/0", telling("a"))
        reply = asyncio.create_task(read(served))
        await until(lambda: len(served.processors.calls) == 1)
        await asyncio.sleep(0.05)
        served.processors.kill("processor/0")
        reply.cancel()
        await until(lambda: not served.frontend._gateway._exchanges, timeout_s=1)  # type: ignore[union-attr]

    serve(test)


def test_what_is_open_when_the_ingress_stops_ends_in_an_error() -> None:
    async def test(served: Served) -> None:
        served.processors.serve("processor/0", telling("a"))
        stream = asyncio.create_task(read(served))
        await until(lambda: len(served.processors.calls) == 1)
        await asyncio.sleep(0.05)
        served.processors.remove("processor/0")
        served.processors.serve("processor/1", lambda request, stream: None)
        whole = asyncio.create_task(served.http.post("/x"))
        await until(lambda: len(served.processors.calls) == 2)
        await served.frontend.stop()
        assert json.loads((await stream).rpartition("data: ")[2])["error"]["code"] == "shutting_down"
        refused = await whole
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        await until(lambda: not served.processors.calls)

    serve(test)


def test_a_draining_ingress_answers_once_more_and_says_close() -> None:
    async def test(served: Served) -> None:
        await served.http.get("/live")  # leaves an idle connection behind
        draining = asyncio.create_task(served.frontend.drain())
        await asyncio.sleep(0.1)
        reply = await served.http.get("/live")
        assert (reply.status_code, reply.headers["connection"]) == (200, "close")
        await draining

    serve(test)
