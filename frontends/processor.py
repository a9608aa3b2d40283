"""The text processor: OpenAI semantics between raw HTTP bodies and token ids.

Life of a request here: parsed -> encoded -> generating -> answered (see `endpoints`); it is one task,
and a client that leaves cancels the task and with it everything the task has open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING, Annotated

from components.messages import (
    MAX_LENGTH,
    Explanation,
    GenerateRequest,
    Placement,
    PlacementQueued,
    PlacementRequest,
    TokenChunk,
)
from components.options import DEFAULT_MODEL, HashUnit, ModelName, SequenceLength
from components.rules import resolve_hash_unit
from frontends.messages import HttpBody, HttpHead, HttpRequest
from frontends.reply import HttpReply
from graph import Calls, Component, Context, GraphView, LaunchError, NodeView, Options, Peer, Serves, Stream, option

if TYPE_CHECKING:
    from frontends.endpoints import Endpoints
    from frontends.text.model import TextModel

SIGN_OF_LIFE_S = 10.0
"""Silence after which the ingress (and the client of a stream) is told that the request still lives."""


class ProcessorOptions(Options, frozen=True, kw_only=True):
    """Options of the processor."""

    model: ModelName = DEFAULT_MODEL
    served_model_name: Annotated[str | None, option("name in the API; unset: the model's")] = None
    hash_unit: HashUnit = 0
    max_model_len: Annotated[
        SequenceLength | None, option("longest sequence; unset: the smallest of the workers', else the model's")
    ] = None


class Processor(Component):
    """Validates, templates, tokenizes, places, detokenizes, formats."""

    Options = ProcessorOptions
    requests = Serves(HttpRequest, (HttpHead, HttpBody), required=True)
    placement = Calls(PlacementRequest, (PlacementQueued, Placement, Explanation), required=False)
    tokens = Calls(GenerateRequest, TokenChunk)

    options: ProcessorOptions

    def __init__(self, options: ProcessorOptions) -> None:
        super().__init__(options)
        self._running: dict[asyncio.Task[None], HttpReply] = {}
        self._model: TextModel | None = None
        self._endpoints: Endpoints | None = None

    async def start(self, context: Context) -> None:
        from frontends.endpoints import Endpoints
        from frontends.generate import Generator
        from frontends.metrics import ProcessorMetrics
        from frontends.placement import Placer

        context.progress("loading the tokenizer")
        self._model = await asyncio.to_thread(self._load)
        workers = context.client(type(self).tokens)
        router = context.client(type(self).placement)
        placer = Placer(router, workers, hash_unit=self.options.hash_unit)
        self._endpoints = Endpoints(
            name=context.id,
            model=self._model,
            generator=Generator(placer, workers, _attempt_ids(context.boot)),
            metrics=ProcessorMetrics(context.metrics),
            created=int(time.time()),
            clock=time.monotonic,  # the loop's own clock stands still within a turn
        )
        workers.on_change(self._fit_model)
        context.serve(type(self).requests, self._accept)
        context.spawn(self._reassure(), name="signs of life")

    async def drain(self) -> None:
        while self._running:
            await asyncio.wait(set(self._running))

    async def stop(self) -> None:
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        if self._model is not None:
            await asyncio.to_thread(self._model.close)
            self._model = None

    @classmethod
    def resolve(cls, node: NodeView, graph: GraphView) -> Mapping[str, object]:
        resolved = dict(resolve_hash_unit(node, graph))
        lengths = [n.options.get("max_model_len") for n in graph.linked_from(node.name, "tokens")]
        known = [length for length in lengths if length is not None]
        if node.options["max_model_len"] is None and known:
            resolved["max_model_len"] = min(known)
        return resolved

    def _load(self) -> TextModel:
        from components.model_cache import resolve_model
        from frontends.text.model import TextModel

        name, folder = self.options.served_model_name or self.options.model, resolve_model(self.options.model)
        try:
            return TextModel.load(folder, name, max_model_len=self.options.max_model_len)
        except ValueError as error:
            raise LaunchError(f"the model's text side cannot be loaded: {error}") from error

    def _fit_model(self, workers: Mapping[str, Peer]) -> None:
        """A request may go to any worker, so the one with the least room decides. While there is none, its last word
        stands."""
        if workers and self._model is not None:
            self._model.fit(worker.facts[MAX_LENGTH] for worker in workers.values() if MAX_LENGTH in worker.facts)

    def _accept(self, request: HttpRequest, stream: Stream) -> None:
        """Takes one request; its task lives until it is answered or its client has left."""
        assert self._endpoints is not None
        reply = HttpReply(stream, time.monotonic)
        task = asyncio.get_running_loop().create_task(self._endpoints.handle(request, reply))
        self._running[task] = reply
        task.add_done_callback(self._running.pop)
        stream.on_cancel(lambda: _cancel(task))

    async def _reassure(self) -> None:
        while True:
            await asyncio.sleep(SIGN_OF_LIFE_S / 4)
            for reply in list(self._running.values()):
                reply.reassure(SIGN_OF_LIFE_S)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _attempt_ids(boot: str) -> Iterator[str]:
    """Internal ids, unique for ever: this process's boot id and a number."""
    return (f"{boot}-{number}" for number in count(1))
