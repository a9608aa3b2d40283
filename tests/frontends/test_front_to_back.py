"""Ingress and processor together: from a socket to tokens and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import httpx
import uvloop
from fake_worker import SCRIPT, FakeWorker
from frontend_fakes import FakeClient, FakeContext, listening_socket, until
from served import COUNT15, QuickProcessor

from frontends.ingress import FrontendOptions, OpenAIFrontend
from frontends.processor import ProcessorOptions


def serve(test: Callable[[httpx.AsyncClient], Awaitable[None]], worker: FakeWorker) -> None:
    """Runs `test` against an ingress, a processor and `worker`."""

    async def main() -> None:
        processors, workers = FakeClient(), FakeClient()
        workers.serve("decode/0", worker)
        back = FakeContext(tokens=workers, placement=FakeClient(is_linked=False))
        processor = QuickProcessor(ProcessorOptions())
        await processor.start(back)
        processors.serve("processor/0", back.handlers["requests"])
        listener = listening_socket()
        host, port = listener.getsockname()
        frontend = OpenAIFrontend(FrontendOptions())
        await frontend.start(FakeContext(listener=listener, requests=processors))
        try:
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}", trust_env=False) as http:
                await test(http)
        finally:
            await frontend.stop()
            await processor.stop()
            back.cancel_tasks()

    uvloop.run(asyncio.wait_for(main(), 30))


def test_streams_and_replies() -> None:
    async def test(http: httpx.AsyncClient) -> None:
        body = {"prompt": COUNT15, "max_tokens": 8, "temperature": 0}
        whole = await http.post("/v1/completions", json=body, headers={"x-request-id": "r-9"})
        assert whole.json()["id"] == "cmpl-r-9"
        assert whole.json()["choices"][0]["text"] == " 16, 17,"
        assert whole.headers["x-request-id"] == "r-9"
        stream = await http.post("/v1/completions", json={**body, "stream": True})
        assert stream.headers["content-type"] == "text/event-stream"
        *events, done, rest = stream.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
        assert "".join(texts) == " 16, 17,"
        refused = await http.put("/v1/completions")
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        assert refused.headers["x-request-id"]

    serve(test, FakeWorker(SCRIPT))


def test_client_that_leaves_stops_the_worker() -> None:
    async def test(http: httpx.AsyncClient) -> None:
        body = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            await anext(reply.aiter_bytes())
            assert worker.num_running == 1
        await until(lambda: worker.num_running == 0, timeout_s=1)

    worker = FakeWorker()
    worker.pause_s = 0.002
    serve(test, worker)
