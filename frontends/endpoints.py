"""The HTTP endpoints of the OpenAI API: from a raw request to its reply.

parsed       the body is valid, the model is ours
encoded      its prompts are token ids that fit the context
generating   see `generate`; text goes to the reply's sink, behind what a lost processor has told
answered     whole reply, finished stream, or an error in the form its moment allows
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from components.messages import pack_ids
from frontends.choice import Choice, Plan
from frontends.faults import api_error
from frontends.formats import ChatFormat, CompletionFormat, Format
from frontends.generate import Generator
from frontends.messages import HttpRequest
from frontends.metrics import Meter, ProcessorMetrics
from frontends.reply import HttpReply
from frontends.sinks import EventSink, WholeSink, replay
from frontends.text.detokenizer import Detokenizer
from frontends.text.errors import ApiError, brief
from frontends.text.model import TextModel
from frontends.text.requests import (
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_prompted,
    parse_tokenize,
)
from frontends.walk import told_explanation, told_walk
from graph import LinkError, NoPeer

_log = logging.getLogger(__name__)

MAX_SEQUENCES = 4_096
"""Choices of one request, over all its prompts."""

_LARGE_BYTES = 64 * 1024
"""Bodies from here on are parsed and templated off the loop, so that running streams do not notice them."""

Endpoint = Callable[[HttpRequest, HttpReply], Awaitable[None]]
Made = TypeVar("Made")


class Endpoints:
    """All endpoints of one processor."""

    def __init__(
        self,
        *,
        name: str,
        model: TextModel,
        generator: Generator,
        metrics: ProcessorMetrics,
        created: int,
        clock: Callable[[], float],
    ) -> None:
        """`name` is the processor's, for the `headrace` object; `created` the time the model was loaded."""
        self._name = name
        self._model = model
        self._generator = generator
        self._metrics = metrics
        self._clock = clock
        self._created = created
        self._routes: dict[str, tuple[str, Endpoint]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/router/explain": ("POST", self._explain),
            "/v1/models": ("GET", self._list_models),
        }

    async def handle(self, http: HttpRequest, reply: HttpReply) -> None:
        """Answers one request; never raises but for its cancellation."""
        if http.trail:
            reply.take_over()
        try:
            await self._route(http, reply)
        except ApiError as error:
            reply.fail(error)
        except LinkError as error:
            reply.fail(api_error(error))
        except Exception:
            _log.exception("request %s failed", http.id)
            reply.fail(ApiError(500, "The server failed on this request.", type="server_error", code="internal_error"))

    async def _route(self, http: HttpRequest, reply: HttpReply) -> None:
        path = http.path.rstrip("/") or "/"
        method, endpoint = self._routes.get(path, ("GET", None))
        if endpoint is None and path.startswith("/v1/models/"):
            endpoint = self._show_model
        if endpoint is None:
            raise ApiError(404, f"There is no {brief(http.path)} here.", code="not_found")
        if http.method != method:
            error = ApiError(405, f"{brief(path)} takes {method}, not {brief(http.method)}.", code="method_not_allowed")
            reply.fail(error, (("allow", method),))
            return
        await endpoint(http, reply)

    async def _chat(self, http: HttpRequest, reply: HttpReply) -> None:
        request = await _made(parse_chat, http.body, size=len(http.body))
        echo = request.echoed
        await self._generate(http, reply, request, ChatFormat, lambda _: echo)

    async def _completion(self, http: HttpRequest, reply: HttpReply) -> None:
        request = await _made(parse_completion, http.body, size=len(http.body))
        await self._generate(http, reply, request, CompletionFormat, self._echo_of(request))

    def _echo_of(self, request: CompletionRequest) -> Callable[[Any], str]:
        def echo(prompt: str | Sequence[int]) -> str:
            if not request.echo:
                return ""
            return prompt if isinstance(prompt, str) else self._model.decode(prompt)

        return echo

    async def _generate(
        self,
        http: HttpRequest,
        reply: HttpReply,
        request: ChatRequest | CompletionRequest,
        format_class: type[Format],
        echo: Callable[[Any], str],
    ) -> None:
        started = self._clock()
        self._check_model(request.model)
        prompts = await _made(request.prompts, self._model, size=len(http.body))
        encoded = await self._encode(prompts, request.add_special_tokens)
        choices = self._choices(http, request, encoded)
        tokenize_ms = (self._clock() - started) * 1e3
        format = self._format(http, request, format_class)
        echoes = {c.plan.index: text for c in choices if (text := echo(prompts[c.plan.prompt]))}

        def headrace() -> Any:
            told = told_walk(choices, processor=self._name, tokenize_ms=tokenize_ms)
            return told if request.headrace.timing else None

        sink: EventSink | WholeSink = WholeSink(reply, format, choices, echoes=echoes, headrace=headrace)
        if request.stream:
            sink = EventSink(
                reply,
                format,
                choices,
                echoes=echoes,
                includes_usage=request.stream_options.include_usage,
                counts_usage=request.stream_options.continuous_usage_stats,
                headrace=headrace,
            )
            if replay(http.trail, choices, sink):
                reply.end()
                return
        with Meter(sink, self._metrics, choices, self._clock) as meter:
            await self._generator.generate(choices, meter)
        sink.close()

    def _format(
        self, http: HttpRequest, request: ChatRequest | CompletionRequest, format_class: type[Format]
    ) -> Format:
        return format_class(
            request_id=http.id,
            created=int(http.received_s),
            model=self._model,
            has_null_usage=request.stream and request.stream_options.include_usage,
        )

    async def _encode(self, prompts: Sequence[str | list[int]], add_special_tokens: bool) -> list[list[int]]:
        """The prompts as token ids; texts are encoded together, off the loop."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        ids = iter(await self._model.encode_batch_async(texts, add_special_tokens) if texts else ())
        return [next(ids) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _choices(
        self, http: HttpRequest, request: ChatRequest | CompletionRequest, prompts: Sequence[list[int]]
    ) -> list[Choice]:
        """All choices, choice j of prompt i at index i * n + j. Raises `ApiError` if a prompt cannot fit."""
        num = len(prompts) * request.n
        if num > MAX_SEQUENCES:
            raise ApiError(400, f"{num} choices in one request; at most {MAX_SEQUENCES} are allowed.", param="n")
        label = max(0, request.disagg_request_id)
        if label and num > 1:
            message = "disagg_request_id names one choice of one prompt; send one prompt with n=1, or leave it out."
            raise ApiError(400, message, param="disagg_request_id")
        seed_base = http.entropy or secrets.randbits(64)
        choices = []
        for number, ids in enumerate(prompts):
            stopping = request.stopping(self._model, len(ids))
            packed = pack_ids(ids)
            for j in range(request.n):
                plan = Plan(
                    index=number * request.n + j,
                    prompt=number,
                    prompt_ids=packed,
                    num_prompt_tokens=len(ids),
                    sampling=request.sampling(j, seed_base),
                    stopping=stopping,
                    cache_salt=request.cache_salt,
                    priority=request.priority,
                    disagg_request_id=label,
                    includes_stop=request.include_stop_str_in_output,
                    is_takeover=http.attempt > 0,
                    wants_timing=request.headrace.timing,
                )
                choices.append(Choice(plan, self._detokenizer(request, stopping.min_tokens)))
        return choices

    def _detokenizer(self, request: ChatRequest | CompletionRequest, min_tokens: int) -> Detokenizer:
        return Detokenizer(
            self._model,
            request.stop,
            request.include_stop_str_in_output,
            request.skip_special_tokens,
            with_tokens=request.num_logprobs is not None,
            min_tokens=min_tokens,
        )

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model.name:
            message = f"The model {brief(name)!r} does not exist; this server has {self._model.name!r}."
            raise ApiError(404, message, code="model_not_found", param="model")

    def _check_advertised(self) -> None:
        """Clients take a listed model as usable, so it is listed once a worker was ready; from then on it stays, also
        while there is none, for a model that vanishes makes them give up."""
        if not self._generator.has_had_workers:
            raise NoPeer("no worker has been ready yet", retry_after_s=1.0)

    def _card(self) -> dict[str, Any]:
        """The model as it is listed; a request can have `max_model_len` tokens on any worker."""
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "headrace",
            "max_model_len": self._model.max_model_len,
        }

    async def _tokenize(self, http: HttpRequest, reply: HttpReply) -> None:
        request = await _made(parse_tokenize, http.body, size=len(http.body))
        self._check_model(request.model)
        text = await _made(request.text, self._model, size=len(http.body))
        ids = await self._model.encode_async(text, request.add_special_tokens)
        told: dict[str, Any] = {"count": len(ids), "max_model_len": self._model.max_model_len, "tokens": ids}
        if request.return_token_strs:
            told["token_strs"] = [self._model.token_bytes(id).decode("utf-8", "replace") for id in ids]
        reply.json(told)

    async def _detokenize(self, http: HttpRequest, reply: HttpReply) -> None:
        request = await _made(parse_detokenize, http.body, size=len(http.body))
        self._check_model(request.model)
        reply.json({"prompt": await _made(request.text, self._model, size=len(http.body))})

    async def _explain(self, http: HttpRequest, reply: HttpReply) -> None:
        request = await _made(parse_prompted, http.body, size=len(http.body))
        self._check_model(request.model)
        prompts = await _made(request.prompts, self._model, size=len(http.body))
        if len(prompts) != 1:
            raise ApiError(400, "One prompt is explained at a time; send one.", param=request.prompt_param)
        choices = self._choices(http, request, await self._encode(prompts, request.add_special_tokens))
        try:
            explanation = await self._generator.explain(choices[0])
        except NoPeer as error:
            raise ApiError(503, error.message, type="server_error", code="no_router", retry_after_s=1.0) from None
        reply.json(told_explanation(explanation, choices[0].plan.num_prompt_tokens))

    async def _list_models(self, http: HttpRequest, reply: HttpReply) -> None:
        self._check_advertised()
        reply.json({"object": "list", "data": [self._card()]})

    async def _show_model(self, http: HttpRequest, reply: HttpReply) -> None:
        self._check_model(http.path.removeprefix("/v1/models/").rstrip("/"))
        self._check_advertised()
        reply.json(self._card())


async def _made(make: Callable[..., Made], *args: Any, size: int) -> Made:
    """`make(*args)`, off the loop if it works on much."""
    if size < _LARGE_BYTES:
        return make(*args)
    return await asyncio.to_thread(make, *args)
