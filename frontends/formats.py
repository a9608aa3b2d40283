"""The bytes of the OpenAI API: chunks of a stream and whole replies, for chats and for completions.

What is constant in a stream's chunks is encoded once; per chunk only the text is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from frontends.choice import Choice, Delta
from frontends.logprobs import chat_logprobs, completion_logprobs
from frontends.text.model import TextModel

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


class CachedTokens(msgspec.Struct, frozen=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """`usage`: tokens of all prompts, each counted once, and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


def usage_of(choices: Sequence[Choice]) -> Usage:
    """The usage so far; `cached_tokens` are those of each prompt's first choice."""
    firsts = list({choice.plan.prompt: choice for choice in reversed(choices)}.values())
    prompt = sum(choice.plan.num_prompt_tokens for choice in firsts)
    completion = sum(len(choice.output) for choice in choices)
    cached = sum(choice.cached_tokens or 0 for choice in firsts)
    return Usage(prompt, completion, prompt + completion, CachedTokens(cached))


class Format:
    """Shapes one reply. `usage` and `headrace` are left out of a chunk where they are None."""

    id_prefix = ""
    stream_object = ""
    whole_object = ""

    def __init__(self, *, request_id: str, created: int, model: TextModel, has_null_usage: bool) -> None:
        """With `has_null_usage` chunks without usage carry an explicit null, as `include_usage` demands."""
        self._model = model
        self._id = f"{self.id_prefix}-{request_id}"
        self._created = created
        self._head = self._opening(self.stream_object)
        self._tail = b',"usage":null}\n\n' if has_null_usage else b"}\n\n"

    def role(self, index: int, usage: Usage | None) -> bytes:
        """The chunk that opens a choice, if this API has one."""
        return b""

    def delta(self, index: int, delta: Delta, usage: Usage | None) -> bytes:
        """A chunk with text."""
        body = self._delta_body(index, _encode(delta.text), self._logprobs(delta.tokens))
        return b"data: " + self._head + b',"choices":[' + body + b"]" + self._closing(usage, None)

    def finish(self, index: int, reason: str, usage: Usage | None, headrace: Any) -> bytes:
        """The last chunk of a choice; it has no text."""
        body = self._finish_body(index, _encode(reason))
        return b"data: " + self._head + b',"choices":[' + body + b"]" + self._closing(usage, headrace)

    def usage(self, usage: Usage, headrace: Any) -> bytes:
        """The chunk without choices at the end of a stream."""
        return b"data: " + self._head + b',"choices":[]' + self._closing(usage, headrace)

    def whole(self, choices: Sequence[Choice], deltas: Sequence[Delta], usage: Usage, headrace: Any) -> bytes:
        """The whole reply, all choices finished."""
        bodies = [
            self._whole_body(choice.plan.index, delta.text, self._logprobs(delta.tokens), choice.finish)
            for choice, delta in zip(choices, deltas, strict=True)
        ]
        rest = b"" if headrace is None else b',"headrace":' + _encode(headrace)
        opening = self._opening(self.whole_object)
        return opening + b',"choices":' + _encode(bodies) + b',"usage":' + _encode(usage) + rest + b"}"

    def _opening(self, kind: str) -> bytes:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model.name}
        return _encode(head)[:-1]

    def _closing(self, usage: Usage | None, headrace: Any) -> bytes:
        if usage is None and headrace is None:
            return self._tail
        parts = b"" if usage is None else b',"usage":' + _encode(usage)
        if headrace is not None:
            parts += b',"headrace":' + _encode(headrace)
        return parts + b"}\n\n" if usage is not None else parts + self._tail

    def _logprobs(self, tokens: Any) -> Any:
        raise NotImplementedError

    def _delta_body(self, index: int, text: bytes, logprobs: Any) -> bytes:
        raise NotImplementedError

    def _finish_body(self, index: int, reason: bytes) -> bytes:
        raise NotImplementedError

    def _whole_body(self, index: int, text: str, logprobs: Any, finish: str | None) -> Any:
        raise NotImplementedError


class ChatFormat(Format):
    """/v1/chat/completions."""

    id_prefix = "chatcmpl"
    stream_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def role(self, index: int, usage: Usage | None) -> bytes:
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return b"data: " + self._head + b',"choices":[{"index":%d,' % index + delta + self._closing(usage, None)

    def _logprobs(self, tokens: Any) -> Any:
        return chat_logprobs(tokens, self._model) if tokens else None

    def _delta_body(self, index: int, text: bytes, logprobs: Any) -> bytes:
        told = b"null" if logprobs is None else _encode(logprobs)
        return b'{"index":%d,"delta":{"content":' % index + text + b'},"logprobs":' + told + b',"finish_reason":null}'

    def _finish_body(self, index: int, reason: bytes) -> bytes:
        return b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}' % (index, reason)

    def _whole_body(self, index: int, text: str, logprobs: Any, finish: str | None) -> Any:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}


class CompletionFormat(Format):
    """/v1/completions."""

    id_prefix = "cmpl"
    stream_object = "text_completion"
    whole_object = "text_completion"

    def _logprobs(self, tokens: Any) -> Any:
        return completion_logprobs(tokens, self._model) if tokens else None

    def _delta_body(self, index: int, text: bytes, logprobs: Any) -> bytes:
        told = b"null" if logprobs is None else _encode(logprobs)
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}' % (index, text, told)

    def _finish_body(self, index: int, reason: bytes) -> bytes:
        return b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b}' % (index, reason)

    def _whole_body(self, index: int, text: str, logprobs: Any, finish: str | None) -> Any:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
