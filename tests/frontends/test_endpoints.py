"""Routes, refusals and the small endpoints."""

from __future__ import annotations

from typing import Any

import pytest
from fake_worker import FakeWorker
from served import Served, serve

from components.options import DEFAULT_MODEL


def test_models() -> None:
    async def test(served: Served) -> None:
        (card,) = (await served.ask("/v1/models", method="GET")).json["data"]
        assert (card["id"], card["object"], card["owned_by"]) == ("org/name", "model", "headrace")
        assert card["max_model_len"] == 8192
        assert (await served.ask("/v1/models/", method="GET")).json["data"] == [card]
        assert (await served.ask("/v1/models/org/name", method="GET")).json == card
        unknown = await served.ask("/v1/models/other", method="GET")
        assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")

    serve(test, FakeWorker(), served_model_name="org/name")


def test_the_model_is_listed_once_a_worker_was_ready_and_stays() -> None:
    async def test(served: Served) -> None:
        async def statuses() -> set[int]:
            asked = [await served.ask(path, method="GET") for path in ("/v1/models", f"/v1/models/{DEFAULT_MODEL}")]
            assert all((answer.status == 503) == ("retry-after" in answer.headers) for answer in asked)
            return {answer.status for answer in asked}

        assert await statuses() == {503}
        served.workers.serve("decode/0", FakeWorker())
        assert await statuses() == {200}
        served.workers.remove("decode/0")
        assert await statuses() == {200}

    serve(test)


def test_the_length_is_what_every_worker_has_room_for() -> None:
    async def test(served: Served) -> None:
        async def length() -> int:
            told = (await served.ask("/tokenize", {"prompt": "a"})).json["max_model_len"]
            (card,) = (await served.ask("/v1/models", method="GET")).json["data"]
            assert (await served.ask(f"/v1/models/{DEFAULT_MODEL}", method="GET")).json == card
            assert card["max_model_len"] == told
            return int(told)

        served.workers.serve("decode/0", FakeWorker(), max_length=4097)
        assert await length() == 4097
        served.workers.serve("decode/1", FakeWorker(), max_length=1025)
        assert await length() == 1025
        full = await served.complete([33] * 1025, max_tokens=1)
        assert (full.status, full.json["error"]["code"]) == (400, "context_length_exceeded")
        message = full.json["error"]["message"]
        assert message.startswith("The workers' maximum context length is 1025 tokens, but the prompt has 1025 tokens ")
        assert (await served.complete([33] * 1024, max_tokens=9)).json["usage"]["completion_tokens"] == 1
        served.workers.remove("decode/0")
        served.workers.remove("decode/1")
        assert await length() == 1025
        served.workers.serve("decode/2", FakeWorker(), max_length=1_000_000)
        assert await length() == 8192
        over = await served.complete([33] * 8192)
        assert over.json["error"]["message"].startswith("This model's maximum context length is 8192 tokens, ")

    serve(test)


def test_unknown_paths_and_methods() -> None:
    async def test(served: Served) -> None:
        for path in ("/v1/embeddings", "/v1/unknown", "/"):
            reply = await served.ask(path, {"model": DEFAULT_MODEL})
            assert (reply.status, reply.json["error"]["code"]) == (404, "not_found")
        for method in ("GET", "PUT"):
            reply = await served.ask("/v1/chat/completions", method=method)
            assert (reply.status, reply.headers["allow"]) == (405, "POST")
            assert reply.json["error"]["code"] == "method_not_allowed"
        assert (await served.ask("/v1/models", {})).headers["allow"] == "GET"

    serve(test)


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"model": "nope"}, 404, "model_not_found"),
        ({"model": "SmolLM2-135M-Instruct"}, 404, "model_not_found"),
        ({"model": ""}, 400, "invalid_value"),
        ({"model": 5}, 400, "invalid_type"),
        ({"max_tokens": 0}, 400, "invalid_value"),
        ({"max_tokens": -5}, 400, "invalid_value"),
        ({"max_tokens": 1.5}, 400, "invalid_type"),
        ({"max_tokens": True}, 400, "invalid_type"),
        ({"max_tokens": 2**63}, 400, "invalid_value"),
        ({"n": "2"}, 400, "invalid_type"),
        ({"stream": "true"}, 400, "invalid_type"),
        ({"messages": "hi"}, 400, "invalid_type"),
        ({"messages": []}, 400, "invalid_value"),
        ({"messages": None}, 400, "missing_required_parameter"),
        ({"messages": [{"role": "banana", "content": "x"}]}, 400, "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "invalid_type"),
        ({"logit_bias": {"999999": 1}}, 400, "invalid_value"),
        ({"top_logprobs": 21, "logprobs": True}, 400, "invalid_value"),
    ],
)
def test_chats_that_are_refused(fields: dict[str, Any], status: int, code: str) -> None:
    async def test(served: Served) -> None:
        for stream in (False, True):
            reply = await served.chat(**{"stream": stream, **fields})
            assert reply.status == status
            error = reply.json["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["code"] == code
        assert worker.requests == []

    worker = FakeWorker()
    serve(test, worker)


@pytest.mark.parametrize("prompt", [[], "", [""], [[]], [49152], [-1], [1.5], ["a", [33]], None])
def test_prompts_that_are_refused(prompt: Any) -> None:
    async def test(served: Served) -> None:
        reply = await served.complete(prompt)
        assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")

    serve(test, FakeWorker())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 100_000, b'{"prompt": NaN}', b"\xff\xfe", b"null"])
def test_bodies_that_are_no_request(body: bytes) -> None:
    async def test(served: Served) -> None:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            reply = await served.ask(path, body)
            assert (reply.status, reply.headers["content-type"]) == (400, "application/json")
            assert "Traceback" not in reply.body.decode()

    serve(test, FakeWorker())


def test_null_fields_are_absent_fields() -> None:
    async def test(served: Served) -> None:
        nulls = ("stop", "seed", "tools", "response_format", "logit_bias", "user", "stream_options", "n", "top_p")
        reply = await served.chat(max_tokens=2, **dict.fromkeys(nulls))
        assert reply.status == 200
        assert (await served.chat(max_tokens=1, metadata={"a": "b"}, store=False, foo_bar=1)).status == 200

    serve(test, FakeWorker())


def test_tokenize_agrees_with_usage() -> None:
    async def test(served: Served) -> None:
        assert (await served.ask("/tokenize", {"prompt": "Hello"})).json["tokens"] == [19556]
        for text in ("hi", "😀 日本語", "<|im_end|>", "word " * 5000):
            told = (await served.ask("/tokenize", {"prompt": text})).json
            assert told["count"] == len(told["tokens"])
            back = await served.ask("/detokenize", {"tokens": told["tokens"]})
            assert back.json["prompt"] == text
            used = (await served.complete(text, max_tokens=1)).json["usage"]
            assert used["prompt_tokens"] == told["count"]
        messages = [{"role": "user", "content": "hi"}]
        chat = (await served.ask("/tokenize", {"messages": messages})).json
        assert chat["count"] == (await served.chat("hi", max_tokens=1)).json["usage"]["prompt_tokens"] == 31

    serve(test, FakeWorker())


def test_long_names_are_told_in_brief() -> None:
    async def test(served: Served) -> None:
        long = "x" * 30_000
        for reply in (
            await served.chat(model=long),
            await served.complete("a", model=long),
            await served.ask("/tokenize", {"model": long, "prompt": "a"}),
            await served.ask("/detokenize", {"model": long, "tokens": [33]}),
            await served.ask(f"/v1/models/{long}", method="GET"),
            await served.ask(f"/{long}"),
        ):
            assert reply.status == 404
            assert "xxx... (" in reply.json["error"]["message"]
            assert len(reply.body) < 1_000

    serve(test, FakeWorker())


def test_many_prompts_and_the_limit() -> None:
    async def test(served: Served) -> None:
        many = await served.complete(["a"] * 300, max_tokens=1)
        assert [choice["index"] for choice in many.json["choices"]] == list(range(300))
        over = await served.complete(["a"] * 100, n=64, max_tokens=1)
        assert over.status == 400
        assert "4096" in over.json["error"]["message"]

    serve(test, FakeWorker())


def test_large_bodies_leave_the_loop_free() -> None:
    async def test(served: Served) -> None:
        reply = await served.complete("word " * 1_000_000)
        assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")

    serve(test, FakeWorker())
