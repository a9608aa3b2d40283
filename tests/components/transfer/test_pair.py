"""Prefill and decode together: right tokens, chunk-wise reads, and everything free again at the end."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from transfer_pair import CHUNK, make_prompt, oracle, pair, until

from components.messages import LeaseRelease, PrefillDone, PrefillProgress, Sampling, pack_ids, unpack_ids
from graph import LinkError, Refused, RequestCancelled


@pytest.mark.parametrize("length", [17, 31, 32, 33, 100, 200])
async def test_a_pulled_prompt_gives_the_tokens_of_the_oracle(length):
    async with pair() as two:
        prompt = make_prompt(length)

        answer = await two.generate(prompt)

        assert answer.tokens == oracle(prompt)
        assert answer.finish == "length"
        assert answer.timing.mode == "remote"
        assert answer.timing.prefill_worker == "prefill/0"
        blocks = -(-length // 16)
        assert (answer.timing.blocks_moved, answer.timing.descriptors) == (blocks, blocks)
        assert answer.timing.bytes_moved == blocks * two.engines[0].runner.region.block_bytes
        await two.until_clean()
        assert len(two.releases()) == 1


async def test_reads_overlap_the_computation_of_later_chunks():
    async with pair(step_ms=10) as two:
        answer = await two.generate(make_prompt(6 * CHUNK))

        events = answer.events
        assert events.count("chunk") == 6
        assert "read_done" in events[: len(events) - 1 - events[::-1].index("chunk")]


async def test_without_overlap_there_is_one_read_after_the_last_chunk():
    async with pair(step_ms=2, disable_kv_cache_transfer_overlap=True) as two:
        prompt = make_prompt(6 * CHUNK)

        answer = await two.generate(prompt)

        assert answer.tokens == oracle(prompt)
        assert answer.events == ["chunk"] * 6 + ["read", "read_done", "adopted"]


async def test_without_overlap_steps_wait_for_the_read():
    async with pair(step_ms=2, disable_kv_cache_transfer_overlap=True) as two:
        running = two.open(two.request(make_prompt(40), 400))
        chunks = running.__aiter__()
        await anext(chunks)
        two.decode.faults.is_stuck = True
        pulled = asyncio.create_task(two.generate(make_prompt(64, seed=2)))
        active = two.decode._requests._puller._active
        await until(lambda: any(a.pull.is_reading for a in active.values()))
        await asyncio.sleep(0.05)
        before = two.engines[0]._book.num_generated_tokens

        await asyncio.sleep(0.05)
        assert two.engines[0]._book.num_generated_tokens == before
        await two.decode.alive()  # commands are still carried out

        two.decode.faults.is_stuck = False
        assert (await pulled).tokens == oracle(make_prompt(64, seed=2))
        running.cancel()
        await two.until_clean()


async def test_without_overlap_a_read_given_up_lets_the_steps_go_on():
    async with pair(timeout_ms=100, disable_kv_cache_transfer_overlap=True) as two:
        two.decode.faults.is_stuck = True
        prompt = make_prompt(64)

        answer = await two.generate(prompt)

        assert answer.tokens == oracle(prompt)
        two.decode.faults.is_stuck = False
        await two.until_clean()


async def test_only_missing_blocks_are_pulled():
    async with pair() as two:
        first = make_prompt(96)
        await two.generate(first)
        second = first[:80] + make_prompt(60, seed=2)

        answer = await two.generate(second)

        assert answer.tokens == oracle(second)
        assert answer.timing.overlap_blocks == 5
        assert answer.timing.blocks_moved == 4
        assert answer.cached_tokens == 80


async def test_tokens_that_prefill_had_cached_count_as_cached():
    async with pair(has_decode_cache=False) as two:
        prompt = make_prompt(96)
        assert (await two.generate(prompt)).cached_tokens == 0

        answer = await two.generate(prompt)

        assert answer.tokens == oracle(prompt)
        assert answer.cached_tokens == answer.timing.cached_tokens == 80
        assert answer.timing.blocks_moved == 6


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16)])
async def test_unequal_block_sizes(sizes):
    async with pair(block_sizes=sizes) as two:
        for length in (40, 64, 150):
            prompt = make_prompt(length, seed=length)
            answer = await two.generate(prompt)
            assert answer.tokens == oracle(prompt)
            assert answer.timing.mode == "remote"
        await two.until_clean()


async def test_seeded_sampling_with_logprobs_starts_on_prefill_and_goes_on_here():
    sampling = Sampling(temperature=1.0, seed=5, logprobs=2)
    async with pair() as two:
        prompt = make_prompt(70)

        answer = await two.generate(prompt, 8, sampling=sampling)

        assert answer.tokens == oracle(prompt, 8, sampling)
        assert all(len(chunk.logprobs) == 1 for chunk in answer.chunks)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_exactly_as_many_tokens_as_asked_for(max_tokens):
    async with pair() as two:
        prompt = make_prompt(50)

        answer = await two.generate(prompt, max_tokens)

        assert answer.tokens == oracle(prompt, max_tokens)
        assert answer.finish == "length"
        assert (answer.timing.blocks_moved == 0) == (max_tokens == 1)
        await two.until_clean()


async def test_a_stop_token_as_the_first_one_needs_no_blocks():
    async with pair(disable_kv_cache_transfer_overlap=True) as two:
        prompt = make_prompt(50)
        first = oracle(prompt, 1)

        answer = await two.generate(prompt, 9, stop_token_ids=(first[0],))

        assert answer.tokens == first
        assert answer.finish == "stop"
        assert answer.timing.blocks_moved == 0
        await two.until_clean()


async def test_short_prompts_stay_here_and_say_why():
    async with pair() as two:
        answer = await two.generate(make_prompt(16))

        assert answer.timing.mode == "local"
        assert "16 uncached" in answer.timing.reason
        assert two.decode_context.metric("local_prefills_total", reason="short_prompt") == 1
        assert not two.prefill._prompts._prompts


async def test_a_dead_prefill_worker_is_replaced_by_another_or_by_local_work():
    async with pair(started=False) as two:
        prompt = make_prompt(64)

        answer = await two.generate(prompt, prefill="prefill/7")

        assert answer.tokens == oracle(prompt)
        assert answer.timing.reason == "no prefill worker is alive"
        assert two.decode_context.metric("local_prefills_total", reason="no_prefill_worker") == 1


async def test_many_at_once_through_a_small_pool():
    async with pair(blocks=(64, 48)) as two:
        prompts = [make_prompt(20 + 13 * i, seed=i) for i in range(16)]

        answers = await asyncio.gather(*(two.generate(prompt, 6) for prompt in prompts))

        assert [a.tokens for a in answers] == [oracle(p, 6) for p in prompts]
        await two.until_clean()


async def test_a_single_token_buffer_lets_one_prompt_through_at_a_time():
    async with pair() as two:
        two.decode._requests._puller._budget.capacity = 1
        prompts = [make_prompt(60, seed=i) for i in range(5)]

        answers = await asyncio.gather(*(two.generate(prompt) for prompt in prompts))

        assert [a.tokens for a in answers] == [oracle(p) for p in prompts]
        await two.until_clean()


@pytest.mark.parametrize("delay_ms", [0, 1, 3, 6, 12, 25, 40, 60])
async def test_cancel_at_any_moment_frees_both_sides(delay_ms):
    async with pair(step_ms=4) as two:
        two.decode.faults.delay_s = 0.01
        prompt = make_prompt(6 * CHUNK)
        call = two.open(two.request(prompt, 50))
        await asyncio.sleep(delay_ms / 1e3)

        call.cancel()

        await two.until_clean()
        assert (await two.generate(prompt)).tokens == oracle(prompt)


async def test_blocks_of_a_cancelled_request_stay_quarantined_until_its_read_has_ended():
    async with pair() as two:
        two.decode.faults.is_stuck = True
        call = two.open(two.request(make_prompt(64), 50))
        await until(lambda: two.decode._requests._puller.num_active and two.decode.faults and two.used_blocks()[0] >= 4)
        await until(lambda: any(a.pull.is_reading for a in two.decode._requests._puller._active.values()))

        call.cancel()
        await until(lambda: two.engines[0]._pool.num_quarantined == 4)
        other = make_prompt(40, seed=9)
        await asyncio.sleep(0.05)
        assert two.engines[0]._pool.num_quarantined == 4
        assert two.used_blocks()[1] == 0

        two.decode.faults.is_stuck = False
        await two.until_clean()
        assert (await two.generate(other)).tokens == oracle(other)


async def test_a_failed_read_is_recomputed_here_once():
    async with pair() as two:
        two.decode.faults.fails_reads = True
        prompt = make_prompt(64)

        answer = await two.generate(prompt)

        assert answer.tokens == oracle(prompt)
        assert answer.timing.mode == "local"
        assert "failed" in answer.timing.reason
        assert two.decode_context.metric("kv_transport_errors_total") == 1
        assert two.decode_context.metric("local_prefills_total", reason="fallback") == 1
        await two.until_clean()


async def test_a_read_that_never_ends_exceeds_its_time_and_is_recomputed():
    async with pair(timeout_ms=100) as two:
        two.decode.faults.is_stuck = True
        prompt = make_prompt(64)

        answer = await two.generate(prompt)

        assert answer.tokens == oracle(prompt)
        assert "kv_transfer_timeout_ms" in answer.timing.reason
        assert two.decode_context.metric("kv_transfer_timeouts_total") == 1
        assert two.engines[0]._pool.num_quarantined == 4
        two.decode.faults.is_stuck = False
        await two.until_clean()


async def test_a_post_that_fails_is_recomputed():
    async with pair() as two:
        two.decode.faults.fails_post = True
        prompt = make_prompt(64)

        assert (await two.generate(prompt)).tokens == oracle(prompt)
        await two.until_clean()


async def test_lost_announcements_cost_only_time():
    async with pair() as two:
        two.prefill.loses[PrefillProgress] = 3
        prompt = make_prompt(5 * CHUNK)

        answer = await two.generate(prompt)

        assert answer.tokens == oracle(prompt)
        assert answer.timing.mode == "remote"


async def test_decode_asks_again_when_the_last_message_is_lost():
    async with pair(lease_ms=5_000) as two:
        two.decode._requests._puller._rules = type(two.decode._requests._puller._rules)(5.0, 5.0, silence_s=0.1)
        two.decode._requests._puller._tick_s = 0.05
        two.prefill.loses[PrefillDone] = 1
        prompt = make_prompt(80)

        answer = await two.generate(prompt)

        assert answer.tokens == oracle(prompt)
        assert answer.timing.mode == "remote"
        await two.until_clean()


async def test_a_lost_release_is_made_good_by_the_end_of_the_lease():
    async with pair(lease_ms=200) as two:
        two.prefill.loses[LeaseRelease] = 10
        prompt = make_prompt(80)

        assert (await two.generate(prompt)).tokens == oracle(prompt)

        await two.until_clean()
        assert two.prefill_context.metric("kv_lease_expiries_total") == 1


async def test_a_lease_that_ran_out_makes_the_data_worthless():
    async with pair(lease_ms=100) as two:
        two.prefill._prompts.renew = lambda id, lease_s: type(two.prefill._prompts.release("none"))(id, False)
        two.decode.faults.delay_s = 0.3
        prompt = make_prompt(80)

        answer = await two.generate(prompt)

        assert answer.tokens == oracle(prompt)
        assert answer.timing.mode == "local"
        assert "lease" in answer.timing.reason
        assert two.decode_context.metric("kv_leases_lost_total") == 1
        await two.until_clean()


async def test_a_slow_read_outlives_a_short_lease_by_renewing_it():
    async with pair(lease_ms=150) as two:
        two.decode.faults.delay_s = 0.5
        prompt = make_prompt(40)

        answer = await two.generate(prompt)

        assert answer.tokens == oracle(prompt)
        assert answer.timing.mode == "remote"
        await two.until_clean()


async def test_a_prefill_worker_that_dies_midway_costs_only_time():
    async with pair(step_ms=8) as two:
        prompt = make_prompt(6 * CHUNK)
        answer = asyncio.create_task(two.collect(two.open(two.request(prompt))))
        await until(lambda: two.decode._requests._puller.num_active)
        await asyncio.sleep(0.02)

        two.vanish("prefill/0")

        done = await answer
        assert done.tokens == oracle(prompt)
        assert done.timing.mode == "local"


async def test_a_prefill_worker_that_dies_after_its_last_word_is_not_waited_for():
    async with pair() as two:
        two.decode.faults.is_stuck = True
        prompt = make_prompt(64)
        answer = asyncio.create_task(two.collect(two.open(two.request(prompt))))
        active = two.decode._requests._puller._active
        await until(lambda: any(a.pull.is_reading and a.pull.done for a in active.values()))

        two.vanish("prefill/0")

        assert (await answer).tokens == oracle(prompt)
        assert two.engines[0]._pool.num_quarantined == 4
        two.decode.faults.is_stuck = False
        await until(lambda: not active and two.used_blocks()[0] == 0)


async def test_hanging_up_is_enough_where_nothing_was_announced_and_the_release_is_lost():
    async with pair(step_ms=50, lease_ms=60_000) as two:
        two.prefill.loses[LeaseRelease] = 10
        call = two.open(two.request(make_prompt(64)))
        await until(lambda: two.prefill._prompts._prompts)

        call.cancel()

        await until(lambda: not two.prefill._prompts._prompts, timeout_s=1)


async def test_duplicate_releases_and_ids_do_no_harm():
    async with pair() as two:
        prompt = make_prompt(64)
        await two.generate(prompt)
        release = two.releases()[0]
        client = two.decode._requests._puller._caller._client

        assert (await client.call(release, peer="prefill/0", timeout_s=2)).held is False
        assert (await client.call(LeaseRelease("never"), peer="prefill/0", timeout_s=2)).held is False
        call = two.open(two.request(make_prompt(64, seed=3), 30))
        two.number -= 1
        with pytest.raises(Refused, match="already running"):
            await two.collect(two.open(two.request(prompt)))
        await two.collect(call)
        await two.until_clean()


async def test_a_request_that_can_never_fit_ends_at_once_and_leaves_nothing():
    async with pair(max_model_len=128) as two:
        with pytest.raises(Refused) as fault:
            await two.generate(make_prompt(128))

        assert fault.value.code == "context_length_exceeded"
        await two.until_clean()


@pytest.mark.parametrize(
    "spoil", [lambda ids: [i + 9_999 for i in ids], lambda ids: ids[:1], lambda ids: [-1] * len(ids)]
)
async def test_announced_blocks_that_are_not_there_are_not_read(spoil):
    async with pair() as two:
        told = two.decode._requests._puller._told

        def tell(active, item):
            if isinstance(item, PrefillDone):
                ids = pack_ids(spoil(unpack_ids(item.progress.block_ids)))
                item = replace(item, progress=replace(item.progress, block_ids=ids))
                told(active, item)

        two.decode._requests._puller._told = tell
        prompt = make_prompt(64)

        answer = await two.generate(prompt)

        assert answer.tokens == oracle(prompt)
        assert answer.timing.mode == "local"
        await two.until_clean()


async def test_stop_ends_what_runs_in_exactly_one_error():
    async with pair(step_ms=4) as two:
        calls = [
            asyncio.create_task(two.collect(two.open(two.request(make_prompt(150, seed=i), 40)))) for i in range(4)
        ]
        await asyncio.sleep(0.03)

        await two.decode.stop()

        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, RequestCancelled | LinkError)
