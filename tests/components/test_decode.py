"""The decode worker's decisions: remote, local, or refused, and what it tells about them."""

from __future__ import annotations

import pytest
from transfer_pair import Prefill, make_prompt, oracle, pair, until

from components import rules
from components.messages import KVHandshake
from components.options import CacheTransceiverConfig, DisaggOptions, FakeEngine
from components.transfer import peers
from graph import Refused

OFF = CacheTransceiverConfig()


def make_prefill(**changes):
    """A prefill worker like that of the pair, but for `changes`."""
    config = CacheTransceiverConfig(backend="memory", kv_lease_ms=2_000)
    options = {"engine": "fake", "model": "fake", "fake": FakeEngine(step_ms=0.2), "num_blocks": 256}
    return Prefill(DisaggOptions(**{**options, "cache_transceiver_config": config, **changes}))


async def test_without_a_backend_a_request_that_names_a_prefill_worker_is_refused():
    async with pair(cache_transceiver_config=OFF) as two:
        with pytest.raises(Refused) as fault:
            await two.generate(make_prompt(40))

        assert str(fault.value) == "Disaggregated serving is not enabled, please check the configuration"


async def test_without_a_backend_an_aggregated_request_is_served():
    async with pair(cache_transceiver_config=OFF) as two:
        prompt = make_prompt(40)

        answer = await two.generate(prompt, prefill=None)

        assert answer.tokens == oracle(prompt)
        assert answer.timing.reason == "no transfer backend is set"
        assert two.decode_context.metric("local_prefills_total", reason="disabled") == 1


async def test_without_a_backend_a_cancelled_request_is_forgotten():
    async with pair(cache_transceiver_config=OFF) as two:
        call = two.open(two.request(make_prompt(40), 100_000, prefill=None))
        await until(lambda: two.decode._requests._walks)

        call.cancel()

        await until(lambda: not two.decode._requests._walks)


async def test_a_prefill_worker_without_a_backend_is_no_silent_local_prefill():
    async with pair(started=False) as two:
        two.prefill = make_prefill(cache_transceiver_config=OFF)
        await two.start_prefill(is_usable=False)
        await until(lambda: two.decode._requests._peers.refusal(None))

        with pytest.raises(Refused, match=rules.DISABLED):
            await two.generate(make_prompt(40))


@pytest.mark.parametrize(
    ("changes", "values"),
    [({"model": "other"}, ("'other'", "'fake'")), ({"block_size": 24, "hash_unit": 8}, ("24", "16"))],
)
async def test_a_layout_that_does_not_fit_is_named_with_both_values(changes, values):
    async with pair(started=False) as two:
        two.prefill = make_prefill(**changes)
        await two.start_prefill(is_usable=False)
        await until(lambda: two.decode._requests._peers.refusal(None))
        prompt = make_prompt(40)

        answer = await two.generate(prompt)

        assert answer.tokens == oracle(prompt)
        assert answer.timing.mode == "local"
        assert all(value in answer.timing.reason for value in values)
        assert two.decode_context.metric("local_prefills_total", reason="refused") == 1


@pytest.mark.parametrize(("length", "mode"), [(40, "local"), (41, "remote")])
async def test_the_limit_of_local_prefills_counts_uncached_tokens(length, mode):
    async with pair(max_local_prefill_length=40) as two:
        answer = await two.generate(make_prompt(length))

        assert answer.timing.mode == mode


async def test_a_restarted_prefill_worker_is_used_again_under_its_new_boot():
    async with pair() as two:
        await two.generate(make_prompt(64))
        old, old_context = two.prefill, two.prefill_context
        two.vanish("prefill/0")
        two.prefill = make_prefill(max_num_batched_tokens=32)
        await two.start_prefill(boot="2")
        prompt = make_prompt(64, seed=4)

        answer = await two.generate(prompt)

        assert answer.tokens == oracle(prompt)
        assert answer.timing.mode == "remote"
        await two.until_clean()
        await old.stop()
        await old_context.links.close()


async def test_a_request_waits_for_the_first_prefill_worker_that_is_being_linked():
    async with pair(started=False) as two:
        await two.start_prefill(is_usable=False)
        assert two.decode._requests._peers.is_linking
        prompt = make_prompt(64)

        answer = await two.generate(prompt)

        assert answer.tokens == oracle(prompt)
        assert answer.timing.mode == "remote"


async def test_a_link_that_does_not_come_is_not_waited_for_longer_than_its_time(monkeypatch):
    monkeypatch.setattr(peers, "LINK_PATIENCE_S", 0.2)
    async with pair(started=False) as two:
        two.prefill.loses[KVHandshake] = 100
        await two.start_prefill(is_usable=False)
        await until(lambda: two.decode._requests._peers.is_linking)
        prompt = make_prompt(64)
        left = two.open(two.request(prompt, 100_000))
        left.cancel()

        answer = await two.generate(prompt)

        assert answer.tokens == oracle(prompt)
        assert answer.timing.mode == "local"
        assert not two.decode._requests._walks
        assert not two.decode._requests._peers.is_linking  # so that later requests wait no more
        two.vanish("prefill/0")


async def test_the_output_so_far_of_a_moved_request_is_pulled_as_well():
    async with pair() as two:
        prompt = make_prompt(64)
        whole = oracle(prompt, 12)
        request = two.request(prompt + whole[:5], 12)
        request = type(request)(
            **{**{f: getattr(request, f) for f in request.__struct_fields__}, "num_prompt_tokens": 64}
        )

        answer = await two.collect(two.open(request))

        assert answer.tokens == whole[5:]
        assert answer.timing.mode == "remote"
        await two.until_clean()


async def test_a_moved_request_that_lacks_one_token_needs_no_transfer():
    async with pair() as two:
        prompt = make_prompt(64)
        whole = oracle(prompt, 6)
        request = two.request(prompt + whole[:5], 6)
        request = type(request)(
            **{**{f: getattr(request, f) for f in request.__struct_fields__}, "num_prompt_tokens": 64}
        )

        answer = await two.collect(two.open(request))

        assert answer.tokens == whole[5:]
        assert answer.finish == "length"
        assert answer.timing.blocks_moved == 0


async def test_the_workers_tell_load_and_cached_blocks_to_the_router():
    async with pair() as two:
        await two.generate(make_prompt(64))

        for worker in (two.decode, two.prefill):
            snapshot = worker._serving._snapshot()
            assert len(snapshot.hashes) == 4 * 16
            assert snapshot.load.blocks_total == 256


async def test_alive_returns_while_the_engine_works():
    async with pair() as two:
        await two.decode.alive()
        await two.prefill.alive()
