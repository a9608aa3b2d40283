"""A processor in this process, with fake workers behind it, and what its replies hold."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from copy import copy
from functools import cache
from typing import Any

import msgspec
from fake_worker import FakeWorker
from frontend_fakes import FakeCall, FakeClient, FakeContext

from components.model_cache import resolve_model
from components.options import DEFAULT_MODEL
from frontends.messages import HttpBody, HttpHead, HttpRequest
from frontends.processor import Processor, ProcessorOptions
from frontends.text.model import TextModel
from graph import LinkError

COUNT15 = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,"
COUNT_TEXT = " 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40,"


class Answer:
    """One reply as the ingress gets it."""

    def __init__(self) -> None:
        self.head: HttpHead | None = None
        self.pieces: list[bytes] = []
        self.error: LinkError | None = None
        self.ended = asyncio.Event()
        self.call: FakeCall | None = None

    def on_item(self, item: HttpHead | HttpBody) -> None:
        if isinstance(item, HttpHead):
            self.head = item
        elif item.data:
            self.pieces.append(item.data)

    def on_end(self, error: LinkError | None) -> None:
        self.error = error
        self.ended.set()

    @property
    def status(self) -> int:
        assert self.head is not None
        return self.head.status

    @property
    def headers(self) -> dict[str, str]:
        assert self.head is not None
        return dict(self.head.headers)

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The stream's events, the closing [DONE] as a string."""
        events = []
        for block in self.body.split(b"\n\n"):
            if block.startswith(b"data: "):
                data = block.removeprefix(b"data: ").decode()
                events.append(data if data == "[DONE]" else json.loads(data))
        return events

    @property
    def chunks(self) -> list[Any]:
        """The events of a stream that ended well, without the closing one."""
        assert self.events[-1] == "[DONE]"
        assert self.events.count("[DONE]") == 1
        return self.events[:-1]

    def text(self, index: int = 0) -> str:
        """The text of one choice of a stream."""
        found = ""
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                if choice["index"] == index:
                    found += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        return found

    def reasons(self) -> list[tuple[int, str]]:
        """All finish reasons of a stream, with their choices."""
        choices = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return [(c["index"], c["finish_reason"]) for c in choices if c["finish_reason"] is not None]


class Served:
    """A started processor."""

    def __init__(self, processor: Processor, context: FakeContext, workers: FakeClient, router: FakeClient) -> None:
        self.processor = processor
        self.context = context
        self.workers = workers
        self.router = router
        self._received_s = time.time()
        self._front = FakeClient()
        self._front.serve("processor/0", context.handlers["requests"])

    def start(self, method: str, path: str, body: Any = None, *, answer: Answer | None = None, **fields: Any) -> Answer:
        """Sends one request; `body` is JSON or raw bytes, `fields` are further ones of the `HttpRequest`."""
        raw = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
        request = HttpRequest("req-1", method, path, "", (), raw, self._received_s, **fields)
        answer = answer or Answer()
        answer.call = self._front.open(
            request, peer="processor/0", timeout_s=60, on_item=answer.on_item, on_end=answer.on_end
        )
        return answer

    async def ask(self, path: str, body: Any = None, method: str = "POST") -> Answer:
        """Sends one request and waits for the whole reply."""
        answer = self.start(method, path, body)
        async with asyncio.timeout(10):
            await answer.ended.wait()
        assert answer.error is None
        return answer

    async def complete(self, prompt: Any = COUNT15, **fields: Any) -> Answer:
        return await self.ask("/v1/completions", {"model": DEFAULT_MODEL, "prompt": prompt, "temperature": 0, **fields})

    async def chat(self, content: str = "hi", **fields: Any) -> Answer:
        messages = [{"role": "user", "content": content}]
        return await self.ask("/v1/chat/completions", {"messages": messages, "temperature": 0, **fields})


@cache
def shared_model(name: str, max_model_len: int | None) -> TextModel:
    """The default model, read once for all tests."""
    return TextModel.load(resolve_model(DEFAULT_MODEL), name, max_model_len=max_model_len)


class QuickProcessor(Processor):
    """A processor that need not read its model anew."""

    def _load(self) -> TextModel:
        return copy(shared_model(self.options.served_model_name or DEFAULT_MODEL, self.options.max_model_len))

    async def stop(self) -> None:
        self._model = None
        await super().stop()


def serve(
    test: Callable[[Served], Awaitable[None]],
    *workers: FakeWorker,
    router: Callable[[Any, Any], Any] | None = None,
    **options: Any,
) -> None:
    """Runs `test` on a processor of the default model with these workers (and a router, if given)."""

    async def main() -> None:
        tokens, placement = FakeClient(), FakeClient(is_linked=router is not None)
        for worker in workers:
            tokens.serve(worker.name, worker)
        if router is not None:
            placement.serve("router/0", router)
        context = FakeContext(tokens=tokens, placement=placement)
        processor = QuickProcessor(ProcessorOptions(**options))
        await processor.start(context)
        try:
            await test(Served(processor, context, tokens, placement))
        finally:
            await processor.stop()
            context.cancel_tasks()

    asyncio.run(asyncio.wait_for(main(), 30))
