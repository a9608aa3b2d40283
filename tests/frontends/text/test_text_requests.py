"""Request bodies: what is accepted, what is refused, and which field a refusal names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from components.messages import Sampling, Stopping
from frontends.text.errors import ApiError
from frontends.text.generation import MAX_STOPS, choice_seed
from frontends.text.model import TextModel
from frontends.text.prompts import MAX_PROMPTS
from frontends.text.requests import (
    ChatRequest,
    CompletionRequest,
    TokenizeChatRequest,
    TokenizeRequest,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)

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


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", ["0", "-1", "-5", "1.5", '"10"', "true", "1e9", str(1 << 63), "9" * 30, "[1]"])
def test_a_wrong_token_limit_is_refused_by_name(field: str, value: str) -> None:
    with pytest.raises(ApiError) as error:
        raw_chat(field, value)
    assert refusal(error)[0] == field


def test_token_limits_are_capped_by_the_context_and_have_the_api_s_defaults(smol: TextModel) -> None:
    assert chat().stopping(smol, 31).max_tokens == CONTEXT - 31
    assert chat(max_tokens=None).stopping(smol, 31).max_tokens == CONTEXT - 31
    assert chat(max_tokens=50, max_completion_tokens=2).stopping(smol, 31).max_tokens == 2
    assert chat(max_tokens=(1 << 31) - 1).stopping(smol, 31).max_tokens == CONTEXT - 31
    assert completion().stopping(smol, 50) == Stopping(16, 0, (2,))
    assert completion(min_tokens=20).stopping(smol, 50).max_tokens == 20
    assert completion(ignore_eos=True, stop_token_ids=[5, 2, 5]).stopping(smol, 50).stop_token_ids == (5, 2)
    assert completion(stop_token_ids=[5, 2]).stopping(smol, 50).stop_token_ids == (2, 5)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(ApiError) as error:
        chat(max_completion_tokens=4, min_tokens=5)
    assert refusal(error)[0] == "min_tokens"


@pytest.mark.parametrize("size", [CONTEXT, CONTEXT + 1, 3 * CONTEXT])
def test_a_prompt_that_fills_the_context_is_refused(smol: TextModel, size: int) -> None:
    with pytest.raises(ApiError) as error:
        completion(prompt=[33] * size).prompts(smol)
    param, message = refusal(error)
    assert param == "prompt"
    assert error.value.code == "context_length_exceeded"
    assert "maximum context length is 8192" in message
    assert str(size) in message


def test_the_last_token_of_the_context_can_be_had(smol: TextModel) -> None:
    request = completion(prompt=[33] * (CONTEXT - 1), max_tokens=2)
    assert len(request.prompts(smol)[0]) == CONTEXT - 1
    assert request.stopping(smol, CONTEXT - 1).max_tokens == 1
    with pytest.raises(ApiError, match="maximum context length"):
        chat().stopping(smol, CONTEXT)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", ["NaN", "Infinity", "-Infinity", "-0.1", "2.01", '"NaN"', "1e999", "true"]),
        ("top_p", ["0", "1.0001", "NaN", "-1"]),
        ("top_k", ["0.01", "-2", "true", '"3"']),
        ("min_p", ["-0.1", "1.1"]),
        ("presence_penalty", ["1e9", "NaN", "-2.5"]),
        ("frequency_penalty", ["2.5"]),
        ("repetition_penalty", ["0", "-1", "Infinity"]),
        ("n", ['"2"', "0", "true", "129", "1.0"]),
        ("stream", ['"true"', "1"]),
        ("seed", ["1.0", '"1"', str(1 << 64), "true"]),
        ("stop", ["5", "[5]", "{}", "[null]"]),
        ("messages", ['"hi"', "{}", "[]", "5", '["hi"]', "null"]),
        ("model", ["5", '""', "[]"]),
        ("stream_options", ["5", '{"include_usage":"x"}']),
        ("logit_bias", ["[]", '{"-1":1}', '{"abc":1}', '{"033":1}', '{"33":"x"}', '{"33":101}', '{"33":true}']),
        ("priority", ["1.5", str(1 << 31)]),
        ("chat_template_kwargs", ["[]"]),
    ],
)
def test_wrong_values_are_refused_with_valid_json(field: str, values: list[str]) -> None:
    for value in values:
        with pytest.raises(ApiError) as error:
            raw_chat(field, value)
        param, message = refusal(error)
        assert (param or "").partition(".")[0] == field or "not valid JSON" in message, value


def test_extremes_that_have_a_meaning_are_accepted() -> None:
    assert chat(temperature=1e-12).sampling(0, 0).temperature == 0.0
    assert chat(top_k=1_000_000).sampling(0, 0).top_k == 1_000_000
    assert chat(top_k=-1).sampling(0, 0).top_k == 0
    assert chat(temperature=2, top_p=1).sampling(0, 0) == Sampling(temperature=2.0)


def test_nulls_are_absent_and_unknown_fields_are_accepted(smol: TextModel) -> None:
    optional = [name for name in ChatRequest.model_fields if name != "messages"]
    nulls = dict.fromkeys([*optional, "tools", "tool_choice", "response_format", "user", "suffix"])
    new = {"foo_bar": 1, "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True, "service_tier": "auto"}
    for fields in (nulls, new):
        assert chat(**fields) == chat()
        assert completion(**fields) == completion()
    assert chat(stream_options={"include_usage": None}).stream_options.include_usage is False


def test_internal_names_in_a_body_change_nothing() -> None:
    assert chat(id="x", boot="y", prefill="prefill/0", bootstrap_room=7, kv_transfer_params={}) == chat()


def test_labels_of_a_request() -> None:
    request = chat(disagg_request_id=42, cache_salt="s", priority=-3, headrace={"timing": True})
    assert (request.disagg_request_id, request.cache_salt, request.priority) == (42, "s", -3)
    assert request.headrace.timing is True


def test_sampling_carries_every_field() -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "presence_penalty": 0.1}
    more = {"frequency_penalty": 0.2, "repetition_penalty": 1.1}
    request = chat(**fields, **more, logit_bias={"33": -100, "7": 2}, logprobs=True, top_logprobs=4)
    expected = Sampling(**fields, **more, logit_bias=((33, -100.0), (7, 2.0)), logprobs=4)
    assert request.sampling(0, 99) == expected
    assert completion(logprobs=0).sampling(0, 0).logprobs == 0
    assert completion().sampling(0, 0).logprobs is None


def test_a_model_s_defaults_stand_in_for_absent_fields_only() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    assert chat().sampling(0, 0, defaults).temperature == 0.6
    assert chat(temperature=0).sampling(0, 0, defaults) == Sampling(temperature=0.0, top_k=20)


def test_seeds_differ_between_choices_and_repeat_between_requests() -> None:
    seeds = [chat(seed=7, n=4).sampling(i, seed_base=99).seed for i in range(4)]
    assert len(set(seeds)) == 4
    assert seeds == [chat(seed=7).sampling(i, seed_base=1).seed for i in range(4)]
    assert chat().sampling(0, seed_base=99).seed == 99
    assert all(0 <= choice_seed(-1, i) < 1 << 64 for i in range(4))


def test_stops_are_a_string_or_a_list_and_empty_ones_are_ignored() -> None:
    assert chat(stop="a").stop == ("a",)
    assert chat(stop=list("abcde")).stop == tuple("abcde")
    assert chat(stop="").stop == chat(stop=[""]).stop == chat(stop=[]).stop == ()
    for stop in ([str(i) for i in range(MAX_STOPS + 1)], "x" * 10_000):
        with pytest.raises(ApiError) as error:
            chat(stop=stop)
        assert any(character.isdigit() for character in refusal(error)[1])


@pytest.mark.parametrize("id", ["49152", "999999"])
def test_ids_outside_the_vocabulary_are_refused(smol: TextModel, id: str) -> None:
    for fields in ({"logit_bias": {id: 5}}, {"stop_token_ids": [int(id)]}):
        with pytest.raises(ApiError) as error:
            chat(**fields).stopping(smol, 31)
        assert refusal(error)[0] == next(iter(fields))
    assert chat(logit_bias={"49151": -100}).stopping(smol, 31).max_tokens > 0


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tools", {}),
        ("tool_choice", "auto"),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "missing"}}),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": ""}}),
        ("response_format", {"type": "banana"}),
        ("response_format", "x"),
        ("chat_template", "x"),
        ("suffix", "x"),
        ("modalities", ["text", "audio"]),
    ],
)
def test_what_would_change_the_answer_is_refused_not_ignored(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as error:
        chat(**{field: value})
    assert refusal(error)[0] == field


def test_harmless_forms_of_unsupported_fields_are_accepted() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for fields in ({"tools": tools, "tool_choice": "none"}, {"tools": []}, {"response_format": {"type": "text"}}):
        assert chat(**fields) == chat()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_completions_refuse_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        completion(**fields)
    assert refusal(error)[0] == param


def test_chat_logprobs_need_their_switch() -> None:
    assert chat(logprobs=True, top_logprobs=20).num_logprobs == 20
    for fields in ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(ApiError) as error:
            chat(**fields)
        assert refusal(error)[0] == "top_logprobs"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b"\xff{}",
        b'{"prompt":"\xff"}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\xed\xa0\x80"}',
        b"[" * 100000,
        b'{"a":' * 100000,
        b'{"prompt":' + b"[" * 100000 + b"]" * 100000 + b"}",
    ],
)
def test_bodies_that_are_no_json_object_are_refused(body: bytes) -> None:
    for parse in (parse_chat, parse_completion, parse_tokenize, parse_detokenize):
        with pytest.raises(ApiError) as error:
            parse(body)
        refusal(error)


def test_of_duplicate_keys_the_last_one_counts() -> None:
    assert parse_completion(b'{"prompt":"a","prompt":"b"}').prompt == "b"


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
