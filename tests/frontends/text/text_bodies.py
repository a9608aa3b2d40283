"""Makes request bodies, and reads refusals, for the tests of the text library."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from frontends.text.errors import ApiError
from frontends.text.requests import ChatRequest, CompletionRequest, parse_chat, parse_completion

HI = [{"role": "user", "content": "hi"}]
CONTEXT = 8192


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(msgspec.json.encode({"messages": HI, **fields}))


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(msgspec.json.encode({"prompt": "1, 2,", **fields}))


def raw_chat(field: str, value: str) -> ChatRequest:
    """A chat with a field written as no JSON library would write it."""
    return parse_chat(f'{{"messages":[{{"role":"user","content":"hi"}}],"{field}":{value}}}'.encode())


def refusal(error: pytest.ExceptionInfo[ApiError]) -> tuple[str | None, str]:
    """The field and the message; the envelope must be valid JSON without the request's numbers in it."""
    assert error.value.status == 400
    envelope = msgspec.json.decode(error.value.body())["error"]
    assert envelope["type"] == "invalid_request_error"
    assert "pydantic" not in envelope["message"]
    assert "instance of" not in envelope["message"]
    return envelope["param"], envelope["message"]
