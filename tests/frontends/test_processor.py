"""The processor's streams and replies, token by token."""

from __future__ import annotations

import asyncio

import pytest
from fake_worker import SCRIPT, FakeWorker
from frontend_fakes import until
from served import COUNT_TEXT, Served, serve

from components.messages import unpack_ids
from graph import RequestCancelled

ALPHA = "Here is the English alphabet: ABC"
ALPHABET = "DEFGHIJKLMNOPQRSTUVWXYZ"
EMOJI = "😀" * 12
CAPITAL = [504, 3575, 282, 4881, 314, 21539, 30, 2]  # "The capital of Japan is Tokyo.", end of turn


@pytest.mark.parametrize("tokens_per_step", [1, 2, 7])
def test_stream_and_whole_reply_agree(tokens_per_step: int) -> None:
    async def test(served: Served) -> None:
        for prompt, max_tokens, text in ((EMOJI, 18, "😀" * 6), (ALPHA, 14, ALPHABET)):
            whole = await served.complete(prompt, max_tokens=max_tokens)
            assert whole.json["choices"][0]["text"] == text
            assert whole.json["choices"][0]["finish_reason"] == "length"
            assert whole.json["usage"]["completion_tokens"] == max_tokens
            stream = await served.complete(prompt, max_tokens=max_tokens, stream=True)
            assert stream.text() == text
            assert stream.reasons() == [(0, "length")]
            assert "\\ufffd" not in stream.body.decode()

    worker = FakeWorker(SCRIPT)
    worker.tokens_per_step = tokens_per_step
    serve(test, worker)


def test_head_of_a_stream() -> None:
    async def test(served: Served) -> None:
        reply = await served.chat(stream=True, max_tokens=2)
        assert reply.status == 200
        assert reply.headers["content-type"] == "text/event-stream"
        assert reply.headers["cache-control"] == "no-cache"
        assert reply.headers["x-accel-buffering"] == "no"

    serve(test, FakeWorker())


def test_chat_chunks() -> None:
    async def test(served: Served) -> None:
        await served.chat("Name the capital of Japan.", max_tokens=1)  # tells the prompt's ids
        worker.script = {tuple(unpack_ids(worker.requests[0].tokens)): CAPITAL}
        reply = await served.chat("Name the capital of Japan.", stream=True)
        chunks = reply.chunks
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert sum("role" in chunk["choices"][0]["delta"] for chunk in chunks) == 1
        assert {(c["id"], c["object"], c["created"], c["model"]) for c in chunks} == {
            (chunks[0]["id"], "chat.completion.chunk", chunks[0]["created"], "smollm2-135m-instruct")
        }
        assert reply.reasons() == [(0, "stop")]
        assert chunks[-1]["choices"][0]["delta"] == {}
        assert "<|im_end|>" not in reply.text()
        assert "usage" not in chunks[0]
        whole = (await served.chat("Name the capital of Japan.")).json
        assert whole["choices"][0]["message"]["content"] == reply.text()
        assert whole["usage"] == {
            "prompt_tokens": 36,
            "completion_tokens": 8,
            "total_tokens": 44,
            "prompt_tokens_details": {"cached_tokens": 16},
        }

    worker = FakeWorker()
    serve(test, worker)


@pytest.mark.parametrize(
    ("stops", "text", "reason"),
    [
        (["DEFGHIJ"], "", "stop"),
        (["GHIJK"], "DEF", "stop"),
        (["DEFGHIX"], ALPHABET, "length"),
        (["Z nope"], ALPHABET, "length"),
    ],
)
def test_stop_strings(stops: list[str], text: str, reason: str) -> None:
    async def test(served: Served) -> None:
        whole = await served.complete(ALPHA, max_tokens=14, stop=stops)
        assert (whole.json["choices"][0]["text"], whole.json["choices"][0]["finish_reason"]) == (text, reason)
        stream = await served.complete(ALPHA, max_tokens=14, stop=stops, stream=True)
        assert (stream.text(), stream.reasons()) == (text, [(0, reason)])
        await asyncio.sleep(0.01)
        assert worker.num_running == 0

    worker = FakeWorker(SCRIPT)
    serve(test, worker)


def test_stop_string_cancels_the_worker() -> None:
    async def test(served: Served) -> None:
        reply = await served.complete(max_tokens=500, stop=[" 18"])
        assert reply.json["choices"][0]["text"] == " 16, 17,"
        await asyncio.sleep(0.01)
        assert worker.num_running == 0
        assert worker.num_steps < 20
        assert not served.workers.calls

    worker = FakeWorker(SCRIPT)
    serve(test, worker)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_no_usage_in_a_stream_unless_asked(options: object) -> None:
    async def test(served: Served) -> None:
        reply = await served.chat(stream=True, max_tokens=2, stream_options=options)
        assert all("usage" not in chunk for chunk in reply.chunks)

    serve(test, FakeWorker())


def test_usage_in_a_stream() -> None:
    async def test(served: Served) -> None:
        for max_tokens in (1, 4):
            reply = await served.chat(stream=True, max_tokens=max_tokens, stream_options={"include_usage": True})
            *chunks, last = reply.chunks
            assert all(chunk["usage"] is None for chunk in chunks)
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == max_tokens
            assert last["usage"]["prompt_tokens"] == 31
        options = {"include_usage": True, "continuous_usage_stats": True}
        for ask in (served.chat, served.complete):
            reply = await ask(stream=True, max_tokens=5, stream_options=options)
            counts = [chunk["usage"]["completion_tokens"] for chunk in reply.chunks]
            assert counts == sorted(counts)
            assert counts[-1] == 5

    serve(test, FakeWorker(SCRIPT))


def test_defaults_of_max_tokens() -> None:
    async def test(served: Served) -> None:
        reply = await served.complete()
        assert reply.json["choices"][0]["text"] == " 16, 17, 18, 19,"
        await served.chat(max_tokens=None, stop_token_ids=[33])
        assert worker.requests[-1].stopping.max_tokens == 8192 - 31
        await served.chat(max_tokens=50, max_completion_tokens=2)
        assert worker.requests[-1].stopping.max_tokens == 2

    worker = FakeWorker(SCRIPT)
    serve(test, worker)


def test_context_length_to_the_token() -> None:
    async def test(served: Served) -> None:
        fits = await served.complete([33] * 63, max_tokens=1)
        assert fits.json["usage"]["prompt_tokens"] == 63
        cut = await served.complete([33] * 63, max_tokens=2)
        assert cut.json["usage"]["completion_tokens"] == 1
        for length in (64, 65, 192):
            for stream in (False, True):
                over = await served.complete([33] * length, max_tokens=1, stream=stream)
                assert over.status == 400
                assert over.json["error"]["code"] == "context_length_exceeded"
                assert "maximum context length is 64" in over.json["error"]["message"]
                assert str(length) in over.json["error"]["message"]
        words = await served.chat("word " * 40_000, stream=True)
        assert (words.status, words.json["error"]["code"]) == (400, "context_length_exceeded")
        assert len(worker.requests) == 2

    worker = FakeWorker()
    serve(test, worker, max_model_len=64)


def test_n_and_batch_prompts() -> None:
    async def test(served: Served) -> None:
        prompts = ["1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,", ALPHA]
        for stream in (False, True):
            reply = await served.complete(prompts, n=3, max_tokens=4, seed=7, stream=stream)
            for index in range(6):
                expected = " 16," if index < 3 else "DEFGHIJ"
                found = reply.text(index) if stream else reply.json["choices"][index]["text"]
                assert found == expected
            if stream:
                assert sorted(reply.reasons()) == [(i, "length") for i in range(6)]
            else:
                assert [choice["index"] for choice in reply.json["choices"]] == list(range(6))
                assert reply.json["usage"]["prompt_tokens"] == 57
                assert reply.json["usage"]["completion_tokens"] == 24
                assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        assert len({r.sampling.seed for r in worker.requests[:3]}) == 3
        assert len({r.id for r in worker.requests}) == len(worker.requests)

    worker = FakeWorker(SCRIPT)
    serve(test, worker)


def test_one_body_per_step_for_all_choices() -> None:
    async def test(served: Served) -> None:
        reply = await served.complete(n=8, max_tokens=6, stream=True)
        assert len(reply.pieces) <= 8

    serve(test, FakeWorker(SCRIPT))


def test_echo() -> None:
    async def test(served: Served) -> None:
        prompt = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,"
        whole = await served.complete(echo=True, max_tokens=4)
        assert whole.json["choices"][0]["text"] == prompt + " 16,"
        stream = await served.complete(echo=True, max_tokens=4, stream=True)
        assert stream.text() == prompt + " 16,"

    serve(test, FakeWorker(SCRIPT))


def test_logprobs_line_up_in_both_apis_and_modes() -> None:
    async def test(served: Served) -> None:
        for stops, text in (([], ALPHABET), (["MN"], "DEFGHIJKL")):
            whole = await served.complete(ALPHA, max_tokens=14, logprobs=5, stop=stops)
            told = whole.json["choices"][0]["logprobs"]
            assert "".join(told["tokens"]) == text
            assert told["text_offset"] == [len("".join(told["tokens"][:i])) for i in range(len(told["tokens"]))]
            assert all(
                top[token] == max(top.values()) for token, top in zip(told["tokens"], told["top_logprobs"], strict=True)
            )
            stream = await served.complete(ALPHA, max_tokens=14, logprobs=5, stop=stops, stream=True)
            parts = [c["choices"][0]["logprobs"] for c in stream.chunks if c["choices"][0]["logprobs"]]
            assert {key: [value for part in parts for value in part[key]] for key in told} == told

    serve(test, FakeWorker(SCRIPT))


def test_chat_logprobs_with_bytes() -> None:
    async def test(served: Served) -> None:
        whole = await served.chat(max_tokens=3, logprobs=True, top_logprobs=2)
        entries = whole.json["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == ["1", "1", "1"]
        assert entries[0]["bytes"] == [49]
        assert entries[0]["top_logprobs"][0] == {"token": "1", "logprob": -0.5, "bytes": [49]}
        assert entries[0]["top_logprobs"][1]["logprob"] == -9999.0
        stream = await served.chat(max_tokens=3, logprobs=True, top_logprobs=2, stream=True)
        parts = [c["choices"][0]["logprobs"]["content"] for c in stream.chunks if c["choices"][0]["logprobs"]]
        assert [entry for part in parts for entry in part] == entries
        ended = await served.chat(max_tokens=3, logprobs=True, stop_token_ids=[33])
        assert ended.json["choices"][0]["logprobs"] is None
        assert ended.json["usage"]["completion_tokens"] == 1

    serve(test, FakeWorker())


def test_timing_is_told_when_asked_for() -> None:
    async def test(served: Served) -> None:
        asked = {"timing": True}
        whole = await served.complete(max_tokens=4, headrace=asked)
        assert worker.requests[0].timing
        told = whole.json["headrace"]
        assert (told["worker"], told["prefill_worker"], told["mode"]) == ("decode/0", "prefill/0", "remote")
        assert (told["blocks_moved"], told["bytes_moved"]) == (3, 300)
        assert {"tokenize", "place", "worker_prefill", "worker_transfer_wire"} <= set(told["ms"])
        stream = await served.complete(max_tokens=4, headrace=asked, stream=True)
        assert [("headrace" in chunk) for chunk in stream.chunks[-2:]] == [False, True]
        counted = await served.complete(
            max_tokens=4, headrace=asked, stream=True, stream_options={"include_usage": True}
        )
        assert [("headrace" in chunk) for chunk in counted.chunks[-2:]] == [False, True]
        assert "headrace" not in (await served.complete(max_tokens=4)).json

    worker = FakeWorker(SCRIPT)
    serve(test, worker)


def test_client_that_leaves_cancels_all_choices_at_once() -> None:
    async def test(served: Served) -> None:
        for stream in (True, False):
            body = {"prompt": "a", "n": 4, "max_tokens": 8000, "stream": stream, "ignore_eos": True}
            answer = served.start("POST", "/v1/completions", body)
            await until(lambda: worker.num_running >= 4)
            assert answer.call is not None
            answer.call.cancel()
            await asyncio.sleep(0.01)
            assert not served.workers.calls
            assert worker.num_running == 0

    worker = FakeWorker()
    worker.pause_s = 0.001
    serve(test, worker)


def test_failure_before_the_first_byte_is_a_status() -> None:
    async def test(served: Served) -> None:
        worker.fails_after = 0
        reply = await served.complete(stream=True)
        assert (reply.status, reply.json["error"]["message"]) == (500, "the engine broke")

    worker = FakeWorker()
    serve(test, worker)


def test_failure_after_the_first_byte_is_an_event_without_done() -> None:
    async def test(served: Served) -> None:
        worker.fails_after = 3
        reply = await served.complete(stream=True)
        assert reply.status == 200
        assert reply.events[-1] == {
            "error": {"message": "the engine broke", "type": "server_error", "param": None, "code": "internal_error"}
        }
        assert "[DONE]" not in reply.events

    worker = FakeWorker()
    serve(test, worker)


def test_drain_waits_for_the_running_requests() -> None:
    async def test(served: Served) -> None:
        answer = served.start("POST", "/v1/completions", {"prompt": "a", "max_tokens": 20, "stream": True})
        await until(lambda: worker.num_running >= 1)
        await served.processor.drain()
        await answer.ended.wait()
        assert answer.reasons() == [(0, "length")]

    worker = FakeWorker()
    worker.pause_s = 0.001
    serve(test, worker)


def test_500_concurrent_streams_stay_apart() -> None:
    async def test(served: Served) -> None:
        prompts = [EMOJI, ALPHA]
        replies = await asyncio.gather(
            *(served.complete(prompts[i % 2], max_tokens=12, stream=True) for i in range(500))
        )
        assert {reply.text() for reply in replies[::2]} == {"😀" * 4}
        assert {reply.text() for reply in replies[1::2]} == {"DEFGHIJKLMNOPQRSTUVW"}

    serve(test, FakeWorker(SCRIPT))


def test_metrics_count_tokens_and_streams() -> None:
    async def test(served: Served) -> None:
        await served.complete(max_tokens=4)
        await served.complete(max_tokens=4, stream=True)
        value = served.context.metrics.get_sample_value
        assert value("headrace_prompt_tokens_total") == 100
        assert value("headrace_generation_tokens_total") == 8
        assert value("headrace_ttft_seconds_count") == 2
        assert value("headrace_itl_seconds_count") == 6
        assert value("headrace_e2e_seconds_count") == 2
        assert value("headrace_running_streams") == 0
        assert value("headrace_processor_queue") == 0
        assert value("headrace_finished_choices_total", {"reason": "length"}) == 2

    serve(test, FakeWorker(SCRIPT))


def test_long_silence_is_bridged_by_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontends.processor.SIGN_OF_LIFE_S", 0.04)

    async def test(served: Served) -> None:
        worker.pause_s = 0.2
        reply = await served.complete(max_tokens=2, stream=True)
        assert b": ping\n\n" in reply.body
        assert reply.text() == COUNT_TEXT[:2]

    worker = FakeWorker(SCRIPT)
    serve(test, worker)


def test_a_worker_that_shuts_down_is_replaced() -> None:
    async def test(served: Served) -> None:
        leaving.fails_after, leaving.failure = 5, RequestCancelled("the worker stops")
        reply = await served.complete(max_tokens=40, stream=True)
        assert reply.text() == COUNT_TEXT[: len(reply.text())]
        assert reply.reasons() == [(0, "length")]

    leaving, staying = FakeWorker(SCRIPT), FakeWorker(SCRIPT, name="decode/1")
    serve(test, leaving, staying)
