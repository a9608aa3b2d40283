"""Refusals: the code that tells the kind of fault, words that say what to do, and no more echo than helps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from text_bodies import HI, chat, completion, refusal

from frontends.text.errors import ApiError, brief
from frontends.text.model import TextModel
from frontends.text.requests import parse_chat, parse_completion, parse_detokenize, parse_prompted, parse_tokenize

LONG = "x" * 100_000


def code_of(ask: Callable[[], Any]) -> str:
    """The code of the refusal."""
    with pytest.raises(ApiError) as error:
        ask()
    refusal(error)
    return str(msgspec.json.decode(error.value.body())["error"]["code"])


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"messages": None}, "missing_required_parameter"),
        ({"messages": [{"role": "user"}]}, "missing_required_parameter"),
        ({"messages": "hi"}, "invalid_type"),
        ({"messages": []}, "invalid_value"),
        ({"messages": ["hi"]}, "invalid_type"),
        ({"messages": [{"role": "banana", "content": "x"}]}, "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_type"),
        ({"model": 5}, "invalid_type"),
        ({"model": ""}, "invalid_value"),
        ({"n": "2"}, "invalid_type"),
        ({"n": 0}, "invalid_value"),
        ({"max_tokens": 1.5}, "invalid_type"),
        ({"max_tokens": True}, "invalid_type"),
        ({"max_tokens": 0}, "invalid_value"),
        ({"temperature": 3}, "invalid_value"),
        ({"temperature": "1"}, "invalid_type"),
        ({"stream": "true"}, "invalid_type"),
        ({"stream_options": 5}, "invalid_type"),
        ({"stop": 5}, "invalid_type"),
        ({"stop": [5]}, "invalid_type"),
        ({"stop": ["a"] * 33}, "invalid_value"),
        ({"logit_bias": []}, "invalid_type"),
        ({"logit_bias": {"abc": 1}}, "invalid_value"),
        ({"top_logprobs": 3}, "invalid_value"),
        ({"min_tokens": 5, "max_tokens": 4}, "invalid_value"),
        ({"tools": {}}, "invalid_type"),
        ({"tools": [{"type": "function"}]}, "unsupported_parameter"),
        ({"guided_json": {}}, "unsupported_parameter"),
        ({"tool_choice": "required"}, "unsupported_value"),
        ({"response_format": {"type": "json_object"}}, "unsupported_value"),
        ({"response_format": {"type": "banana"}}, "invalid_value"),
        ({"modalities": ["audio"]}, "unsupported_value"),
    ],
)
def test_a_refused_chat_tells_its_kind(fields: dict[str, Any], code: str) -> None:
    assert code_of(lambda: chat(**fields)) == code


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": None}, "missing_required_parameter"),
        ({"prompt": 5}, "invalid_type"),
        ({"prompt": []}, "invalid_value"),
        ({"prompt": [1.5]}, "invalid_type"),
        ({"prompt": [49152]}, "invalid_value"),
        ({"prompt": ["a", [33]]}, "invalid_value"),
        ({"prompt": [[33], [None]]}, "invalid_type"),
        ({"prompt": [33] * 9_000}, "context_length_exceeded"),
        ({"best_of": 1, "n": 2}, "invalid_value"),
        ({"best_of": 3}, "unsupported_value"),
        ({"echo": True, "logprobs": 1}, "unsupported_value"),
    ],
)
def test_a_refused_completion_tells_its_kind(smol: TextModel, fields: dict[str, Any], code: str) -> None:
    assert code_of(lambda: completion(**fields).prompts(smol)) == code


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 100_000])
def test_a_body_that_is_no_object_tells_so(body: bytes) -> None:
    for parse in (parse_chat, parse_completion, parse_tokenize, parse_detokenize):
        assert code_of(lambda parse=parse: parse(body)) == "invalid_json"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: completion(echo=True, logprobs=0), ["echo together with logprobs", "not supported", "leave out"]),
        (lambda: completion(best_of=3), ["best_of above n (3 above 1)", "not supported", "set n to"]),
        (lambda: completion(suffix="x"), ["suffix is not supported", "leave it out"]),
        (lambda: chat(modalities=["audio"]), ["output but text", "not supported", 'set it to ["text"]']),
        (lambda: chat(tool_choice="auto"), ['tool_choice other than "none"', "not supported", "leave it out"]),
        (lambda: chat(response_format={"type": "json_object"}), ['"json_object" is not supported', "leave"]),
    ],
)
def test_what_is_not_supported_says_what_and_what_to_do(ask: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(ApiError) as error:
        ask()
    _, message = refusal(error)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: chat(logit_bias={LONG: "x"}),
        lambda model: chat(messages=[{"role": LONG, "content": "x"}]),
        lambda model: chat(messages=[{"role": "user", "content": [{"type": LONG}]}]),
        lambda model: chat(messages=[{"role": "user", "content": [{"type": {LONG: LONG}}]}]),
        lambda model: chat(chat_template_kwargs={"messages": LONG}).prompts(model),
        lambda model: chat(response_format={"type": LONG}),
        lambda model: chat(tool_choice=LONG),
        lambda model: chat(suffix=LONG),
        lambda model: chat(stop=LONG),
        lambda model: chat(stop_token_ids=[LONG]),
        lambda model: chat(n=LONG),
        lambda model: chat(temperature=int("9" * 300)),
        lambda model: completion(prompt=[LONG, [33]]).prompts(model),
        lambda model: completion(prompt=[[int("9" * 300)]]).prompts(model),
        lambda model: parse_detokenize(msgspec.json.encode({"tokens": [LONG]})),
    ],
)
def test_no_refusal_echoes_more_than_the_beginning_of_a_value(smol: TextModel, ask: Callable[[Any], Any]) -> None:
    with pytest.raises(ApiError) as error:
        ask(smol)
    assert len(error.value.body()) < 1_000


def test_the_beginning_of_a_long_text_is_told_with_its_length() -> None:
    assert brief("a" * 100) == "a" * 100
    assert brief("a" * 101) == "a" * 100 + "... (101 characters)"
    assert brief("abc", 2) == "ab... (3 characters)"


@pytest.mark.parametrize("parse", [parse_tokenize, parse_prompted])
def test_a_prompt_beside_messages_is_refused_where_either_will_do(parse: Callable[[bytes], Any]) -> None:
    assert code_of(lambda: parse(msgspec.json.encode({"prompt": "a", "messages": HI}))) == "invalid_value"
    assert parse(msgspec.json.encode({"prompt": None, "messages": HI})).messages
    assert parse(msgspec.json.encode({"prompt": "a", "messages": None})).prompt == "a"
