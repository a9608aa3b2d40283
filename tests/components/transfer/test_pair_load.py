"""A self-verifying load: every answer is known, while reads fail, messages are lost and clients leave at random."""

from __future__ import annotations

import asyncio
import random

import pytest
from transfer_pair import make_prompt, oracle, pair

from components.messages import LeaseRelease, PrefillDone, PrefillProgress
from graph import RequestCancelled


class Load:
    """Random requests against a pair; `wrong` lists every answer that is not the oracle's."""

    def __init__(self, two, seed):
        self.two = two
        self.random = random.Random(seed)
        self.wrong = []
        self.finished = self.cancelled = 0

    async def one(self):
        length = self.random.choice([1, 15, 16, 17, 33, 64, 100, 161])
        prompt = make_prompt(length, seed=self.random.randrange(12))
        count = self.random.choice([1, 2, 9])
        call = self.two.open(self.two.request(prompt, count))
        if self.random.random() < 0.3:
            asyncio.get_running_loop().call_later(self.random.random() * 0.05, call.cancel)
        try:
            answer = await self.two.collect(call)
        except RequestCancelled:
            self.cancelled += 1
            return
        except IndexError:  # hung up before the first chunk
            self.cancelled += 1
            return
        if answer.finish is None:
            self.cancelled += 1
        elif answer.tokens != oracle(prompt, count):
            self.wrong.append((prompt, answer.tokens))
        else:
            self.finished += 1

    async def worker(self, number):
        for _ in range(number):
            await self.one()

    async def mischief(self):
        """Changes what goes wrong every few milliseconds; ends with a well-behaved pair."""
        faults, loses = self.two.decode.faults, self.two.prefill.loses
        try:
            while True:
                faults.delay_s = self.random.choice([0, 0, 0.002, 0.02])
                faults.fails_reads = self.random.random() < 0.1
                faults.fails_post = self.random.random() < 0.1
                faults.is_stuck = self.random.random() < 0.1
                kind = self.random.choice([PrefillProgress, LeaseRelease, PrefillDone])
                loses[kind] = max(loses.get(kind, 0), 0) + 1
                await asyncio.sleep(0.02)
        finally:
            faults.delay_s, faults.fails_reads, faults.fails_post, faults.is_stuck = 0.0, False, False, False


async def run(seed, *, workers, requests):
    async with pair(lease_ms=300, timeout_ms=300, blocks=(64, 40), step_ms=1) as two:
        puller = two.decode._requests._puller
        puller._rules = type(puller._rules)(lease_s=0.3, timeout_s=0.3, silence_s=0.1)
        puller._tick_s = 0.05
        load = Load(two, seed)
        mischief = asyncio.create_task(load.mischief())
        try:
            await asyncio.gather(*(load.worker(requests) for _ in range(workers)))
        finally:
            mischief.cancel()
        await asyncio.gather(mischief, return_exceptions=True)
        await two.until_clean()
        return load


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_wrong_token_and_nothing_leaks(seed):
    load = await run(seed, workers=8, requests=6)

    assert load.wrong == []
    assert load.finished > 15


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(20))
async def test_no_wrong_token_and_nothing_leaks_in_the_long_run(seed):
    load = await run(100 + seed, workers=12, requests=40)

    assert load.wrong == []
    assert load.finished > 100
