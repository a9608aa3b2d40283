"""Request bodies: what is accepted, what is refused, and which field a refusal names."""

from __future__ import annotations

from typing import Any

import pytest
from text_bodies import CONTEXT, chat, completion, raw_chat, refusal

from components.messages import Sampling, Stopping
from frontends.text.errors import ApiError
from frontends.text.generation import MAX_STOPS, choice_seed
from frontends.text.model import TextModel
from frontends.text.requests import (
    ChatRequest,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)


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
        ("guided_json", {}),
        ("prompt_logprobs", 0),
        ("modalities", ["text", "audio"]),
    ],
)
def test_what_would_change_the_answer_is_refused_not_ignored(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as error:
        chat(**{field: value})
    assert refusal(error)[0] == field


def test_harmless_forms_of_unsupported_fields_are_accepted() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for fields in (
        {"tools": tools, "tool_choice": "none"},
        {"tools": []},
        {"response_format": {"type": "text"}},
        {"suffix": "", "documents": [], "use_beam_search": False, "guided_json": None},
    ):
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
