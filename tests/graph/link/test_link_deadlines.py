"""Deadlines: one timer for all, exact to the call, and no memory of calls that have ended."""

import asyncio
import gc
import math
import weakref

from graph.link.deadlines import Deadlines


class Timed:
    """Something with a deadline."""

    def __init__(self, deadline):
        self.deadline = deadline
        self.is_closed = False
        self.expired_at = None

    def expire(self):
        self.is_closed = True
        self.expired_at = asyncio.get_running_loop().time()


def test_each_expires_in_its_turn_and_not_early(until):
    async def main():
        loop = asyncio.get_running_loop()
        deadlines, start = Deadlines(loop, lambda: None), loop.time()
        late, early, moved, closed, never = (Timed(start + s) for s in (0.06, 0.02, 0.01, 0.01, math.inf))
        for timed in (late, early, moved, closed, never):
            deadlines.add(timed)
        moved.deadline = start + 0.04
        closed.is_closed = True
        await until(lambda: late.expired_at)
        assert closed.expired_at is None
        assert never.expired_at is None
        assert early.expired_at <= moved.expired_at <= late.expired_at
        for timed, after in ((early, 0.02), (moved, 0.04), (late, 0.06)):
            assert timed.expired_at - start >= after - 0.002  # what a loop's clock may be coarse by
        deadlines.close()

    asyncio.run(main())


def test_what_has_arrived_already_is_looked_at_first():
    async def main():
        loop = asyncio.get_running_loop()
        timed = Timed(loop.time() + 0.01)

        def drain():
            timed.deadline = loop.time() + 1

        deadlines = Deadlines(loop, drain)
        deadlines.add(timed)
        await asyncio.sleep(0.03)
        assert timed.expired_at is None
        deadlines.close()

    asyncio.run(main())


def test_ended_calls_are_forgotten_long_before_their_deadline():
    async def main():
        loop = asyncio.get_running_loop()
        deadlines, refs = Deadlines(loop, lambda: None), []
        for _ in range(5000):
            timed = Timed(loop.time() + 3600)
            deadlines.add(timed)
            timed.is_closed = True
            refs.append(weakref.ref(timed))
        del timed
        gc.collect()
        assert sum(ref() is not None for ref in refs) <= 1024
        deadlines.close()

    asyncio.run(main())
