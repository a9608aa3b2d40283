"""Prompts: messages, texts and token ids, what they become and which are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from text_bodies import CONTEXT, HI, chat, completion, refusal

from frontends.text.errors import ApiError
from frontends.text.model import TextModel
from frontends.text.prompts import MAX_PROMPTS
from frontends.text.requests import TokenizeChatRequest, TokenizeRequest, parse_detokenize, parse_tokenize


@pytest.mark.parametrize("size", [CONTEXT, CONTEXT + 1, 3 * CONTEXT])
def test_a_prompt_that_fills_the_context_is_refused(smol: TextModel, size: int) -> None:
    with pytest.raises(ApiError) as error:
        completion(prompt=[33] * size).prompts(smol)
    param, message = refusal(error)
    assert param == "prompt"
    assert error.value.code == "context_length_exceeded"
    assert message == (
        f"This model's maximum context length is 8192 tokens, but the prompt has {size} tokens and at least 1 more "
        "must be generated. Shorten the prompt."
    )


def test_a_prompt_that_fills_the_context_is_refused_in_the_same_words_everywhere(smol: TextModel) -> None:
    told = []
    for full in (
        lambda: completion(prompt=[33] * CONTEXT).prompts(smol),
        lambda: completion().stopping(smol, CONTEXT),
        lambda: chat().stopping(smol, CONTEXT),
    ):
        with pytest.raises(ApiError) as error:
            full()
        told.append(error.value.message)
    assert len(set(told)) == 1
    with pytest.raises(ApiError, match=r"but prompt\.1 has 8192 tokens and"):
        completion(prompt=[[33], [33] * CONTEXT]).prompts(smol)


def test_the_last_token_of_the_context_can_be_had(smol: TextModel) -> None:
    request = completion(prompt=[33] * (CONTEXT - 1), max_tokens=2)
    assert len(request.prompts(smol)[0]) == CONTEXT - 1
    assert request.stopping(smol, CONTEXT - 1).max_tokens == 1
    with pytest.raises(ApiError, match="maximum context length"):
        chat().stopping(smol, CONTEXT)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": None}, "messages.0.content"),
        ({"role": "user"}, "messages.0.content"),
        ({"content": "a"}, "messages.0.role"),
        ({"role": "banana", "content": "a"}, "messages.0.role"),
        ({"role": ["user"], "content": "a"}, "messages.0.role"),
        ({"role": "user", "content": 5}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages.0.content"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages.0.content"),
        ({"role": "assistant", "content": None}, "messages.0.content"),
        ({"role": "assistant", "content": None, "tool_calls": ["x"]}, "messages.0.tool_calls.0"),
    ],
)
def test_wrong_messages_are_refused_by_place(message: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as error:
        chat(messages=[message])
    assert refusal(error)[0] == field


def test_contents_in_parts_or_absent_beside_calls_are_text(smol: TextModel) -> None:
    parts = [{"type": "text", "text": "Name the capital "}, {"type": "text", "text": "of Japan."}]
    whole = chat(messages=[{"role": "user", "content": "Name the capital of Japan."}])
    assert chat(messages=[{"role": "user", "content": parts}]).prompts(smol) == whole.prompts(smol)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "5"}]
    assert "<|im_start|>assistant\n<|im_end|>" in chat(messages=turns).prompts(smol)[0]


def test_a_message_nested_to_the_parser_s_limit_is_rendered_or_refused(smol: TextModel) -> None:
    deep = msgspec.json.decode("[" * 900 + "]" * 900)
    turns = [*HI, {"role": "assistant", "tool_calls": [{"x": deep}]}]
    assert chat(messages=turns, metadata=deep, chat_template_kwargs={"x": deep}).prompts(smol)


def test_a_final_message_is_continued_with_its_trailing_space(smol: TextModel) -> None:
    turns = [*HI, {"role": "assistant", "content": "The capital of France is "}]
    request = chat(messages=turns, continue_final_message=True, echo=True)
    assert request.prompts(smol)[0].endswith("<|im_start|>assistant\nThe capital of France is ")
    assert request.echoed == "The capital of France is "
    with pytest.raises(ApiError) as error:
        chat(messages=turns, continue_final_message=True, add_generation_prompt=True).prompts(smol)
    assert refusal(error)[0] == "continue_final_message"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([33, 28], [[33, 28]]),
        ([[33], [34, 35]], [[33], [34, 35]]),
    ],
)
def test_prompts_come_in_four_shapes(smol: TextModel, prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts(smol) == expected


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        "",
        [""],
        [[]],
        ["a", ""],
        [49152],
        [-1],
        [1.5],
        [True],
        ["a", [33]],
        [[33], "a"],
        [33, "a"],
        [[33], 5],
        [[["a"]]],
        ["a"] * (MAX_PROMPTS + 1),
        5,
        {},
        None,
        True,
    ],
)
def test_wrong_prompts_are_refused(smol: TextModel, prompt: Any) -> None:
    with pytest.raises(ApiError) as error:
        completion(prompt=prompt).prompts(smol)
    assert (refusal(error)[0] or "").startswith("prompt")


def test_an_empty_prompt_will_do_where_the_model_begins_every_text(make_model: Any) -> None:
    assert completion(prompt="").prompts(make_model("llama")) == [""]


def test_tokenize_takes_a_text_or_a_chat(smol: TextModel) -> None:
    text = parse_tokenize(b'{"prompt":"Hello","model":null}')
    assert isinstance(text, TokenizeRequest)
    assert smol.encode(text.text(smol), text.add_special_tokens) == [19556]
    talk = parse_tokenize(msgspec.json.encode({"messages": HI}))
    assert isinstance(talk, TokenizeChatRequest)
    assert len(smol.encode(talk.text(smol), talk.add_special_tokens)) == 31
    with pytest.raises(ApiError) as error:
        parse_tokenize(b"{}")
    assert refusal(error)[0] == "prompt"


def test_detokenize_gives_back_what_was_tokenized(smol: TextModel) -> None:
    for text in ("Hello 😀 世界 <|im_end|>", "", "  spaces \n"):
        body = msgspec.json.encode({"tokens": smol.encode(text)})
        assert parse_detokenize(body).text(smol) == text
    for tokens in ([49152], [-1], ["a"], 5, None):
        with pytest.raises(ApiError) as error:
            parse_detokenize(msgspec.json.encode({"tokens": tokens})).text(smol)
        assert (refusal(error)[0] or "").startswith("tokens")
