"""The decision between remote and local prefill, and the pace it rests on."""

from __future__ import annotations

import asyncio

import pytest
from transfer_pair import CHUNK, make_prompt, oracle, pair, until

from components.disaggregation import Pace, Queue, choose
from components.engine.outputs import StepStats

IDLE = Queue(0, 0.0)


def make_step(num_tokens, *, seconds, num_sequences=1):
    return StepStats(seconds, num_sequences, num_tokens, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("uncached", "here", "there", "word"),
    [
        (16, IDLE, None, "short_prompt"),
        (17, IDLE, None, "remote"),
        (1_000, IDLE, Queue(0, 0.0), "remote"),  # nothing is known of the pace
        (1_000, IDLE, Queue(0, 500.0), "remote"),
        (1_000, IDLE, Queue(1_000, 500.0), "remote"),  # waiting takes as long as computing, no longer
        (1_000, IDLE, Queue(1_001, 500.0), "prefill_queue"),
        (1_000, Queue(0, 250.0), Queue(1_001, 500.0), "remote"),  # this worker is slower
        (1_000, Queue(2_000, 500.0), Queue(2_999, 500.0), "remote"),  # there is a queue here too
        (1_000, Queue(2_000, 500.0), Queue(3_001, 500.0), "prefill_queue"),
    ],
)
def test_remote_unless_short_or_the_wait_costs_more_than_the_work(uncached, here, there, word):
    choice = choose(uncached, max_local=16, here=here, there=there)

    assert choice.word == word
    assert choice.is_remote == (word == "remote")


def test_the_reason_names_both_times():
    choice = choose(100, max_local=16, here=IDLE, there=Queue(400, 200.0))

    assert choice.reason == "the prefill queue takes 2000 ms, computing the prompt here 500 ms"


def test_the_pace_follows_steps_with_prompts_alone():
    pace = Pace()
    pace.note(None)
    pace.note(make_step(8, seconds=0.1, num_sequences=8))
    assert pace.tokens_per_s == 0

    pace.note(make_step(256, seconds=0.5))
    assert pace.tokens_per_s == 512
    for _ in range(20):
        pace.note(make_step(256, seconds=0.25))
    assert pace.tokens_per_s == pytest.approx(1_024, rel=0.01)


async def test_a_prompt_that_would_wait_longer_than_its_computation_stays_here():
    async with pair(step_ms=20) as two:
        warm = make_prompt(3 * CHUNK, seed=9)
        assert (await two.generate(warm)).timing.mode == "remote"
        long = [two.open(two.request(make_prompt(12 * CHUNK, seed=i))) for i in (1, 2)]
        puller = two.decode._requests._puller
        await until(lambda: puller.num_active == 2)
        short = make_prompt(2 * CHUNK, seed=3)

        answer = await two.generate(short)

        assert answer.tokens == oracle(short)
        assert answer.timing.mode == "local"
        assert "the prefill queue takes" in answer.timing.reason
        assert two.decode_context.metric("local_prefills_total", reason="prefill_queue") == 1
        await asyncio.gather(*(two.collect(call) for call in long))
        await two.until_clean()


async def test_decode_knows_the_queue_of_a_prefill_worker_until_it_goes():
    async with pair() as two:
        peers = two.decode._requests._peers
        await until(lambda: peers.queue("prefill/0") is not None)
        await two.generate(make_prompt(4 * CHUNK))

        await until(lambda: peers.queue("prefill/0").tokens_per_s > 0)
        await until(lambda: peers.queue("prefill/0").tokens == 0)

        two.vanish("prefill/0")
        assert peers.queue("prefill/0") is None
