"""The bytes of chunks and replies, whatever text is in them."""

from __future__ import annotations

import json

import pytest
from served import shared_model

from components.messages import Sampling, Stopping, TokenLogprobs
from frontends.choice import Choice, Delta, Plan
from frontends.formats import ChatFormat, CompletionFormat, Format, usage_of
from frontends.logprobs import chat_logprobs, completion_logprobs
from frontends.text.detokenizer import Detokenizer, TokenText


def make_format(kind: type[Format], *, has_null_usage: bool = False) -> Format:
    model = shared_model('m"o/d', None)
    return kind(request_id="r1", created=7, model=model, has_null_usage=has_null_usage)


def make_choice(index: int = 0, prompt: int = 0, *, output: int = 3, cached: int | None = 16) -> Choice:
    plan = Plan(index, prompt, b"", 20, Sampling(), Stopping(8))
    choice = Choice(plan, Detokenizer(shared_model('m"o/d', None)))
    choice.output = [33] * output
    choice.cached_tokens = cached
    choice.finish = "length"
    return choice


def event(data: bytes) -> dict[str, object]:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    parsed: dict[str, object] = json.loads(data.removeprefix(b"data: "))
    return parsed


@pytest.mark.parametrize("text", ["a", '"\\', "100 %d %b %s", "\r\n\t\x00\x1f", "\u2028\u2029", "😀é", "</script>"])
def test_any_text_survives(text: str) -> None:
    for kind in (ChatFormat, CompletionFormat):
        format = make_format(kind)
        (told,) = event(format.delta(3, Delta(text), None))["choices"]
        assert told["index"] == 3
        assert told["finish_reason"] is None
        assert (told["delta"]["content"] if kind is ChatFormat else told["text"]) == text
        whole = json.loads(format.whole([make_choice()], [Delta(text)], usage_of([make_choice()]), None))
        (told,) = whole["choices"]
        assert (told["message"]["content"] if kind is ChatFormat else told["text"]) == text


def test_usage_and_headrace_stand_only_where_they_belong() -> None:
    usage = usage_of([make_choice()])
    plain, explicit = make_format(ChatFormat), make_format(ChatFormat, has_null_usage=True)
    assert "usage" not in event(plain.role(0, None))
    assert event(explicit.role(0, None))["usage"] is None
    assert event(plain.role(0, usage))["usage"]["completion_tokens"] == 3
    assert event(explicit.finish(0, "stop", None, {"x": 1}))["headrace"] == {"x": 1}
    assert event(explicit.finish(0, "stop", None, {"x": 1}))["usage"] is None
    assert event(plain.finish(0, "stop", usage, None))["usage"]["completion_tokens"] == 3
    assert event(plain.usage(usage, None))["choices"] == []
    assert make_format(CompletionFormat).role(0, usage) == b""


def test_usage_counts_each_prompt_once() -> None:
    choices = [make_choice(0, 0), make_choice(1, 0, cached=None), make_choice(2, 1, output=1, cached=4)]
    usage = usage_of(choices)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (40, 7, 47)
    assert usage.prompt_tokens_details.cached_tokens == 20


def test_logprobs_are_finite_and_alternatives_apart() -> None:
    model = shared_model('m"o/d', None)
    token = TokenText(33, "1", b"1", 5)
    found = TokenLogprobs(-0.25, (33, 34, 10813), (-0.25, float("-inf"), float("nan")))
    (entry,) = chat_logprobs([(token, found)], model)["content"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.25, -9999.0, -9999.0]
    assert [top["token"] for top in entry["top_logprobs"]][:2] == ["1", "2"]
    assert entry["top_logprobs"][2]["bytes"] == list(model.token_bytes(10813))
    told = completion_logprobs([(token, found)], model)
    assert (told["tokens"], told["token_logprobs"], told["text_offset"]) == (["1"], [-0.25], [5])
    assert told["top_logprobs"][0]["1"] == -0.25
    outside = completion_logprobs([(token, TokenLogprobs(-7.0, (34,), (-0.1,)))], model)
    assert outside["top_logprobs"] == [{"1": -7.0, "2": -0.1}]
