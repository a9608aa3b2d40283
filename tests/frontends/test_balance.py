"""Choosing the least busy peer."""

from __future__ import annotations

import asyncio

import pytest
from frontend_fakes import FakeClient

from frontends.balance import PeerPool
from graph import NoPeer


def make_pool(*peers: str) -> tuple[PeerPool, FakeClient]:
    client = FakeClient()
    for peer in peers:
        client.serve(peer, lambda request, stream: None)
    return PeerPool(client), client


def chosen(pool: PeerPool, *exclude: str) -> str | None:
    peer = pool.least_busy(exclude=exclude)
    return peer.id if peer else None


def test_equals_take_turns_and_the_busy_one_waits() -> None:
    async def main() -> None:
        pool, _ = make_pool("a", "b")
        with pool.stream("a"):
            assert chosen(pool) == "b"
            with pool.stream("b"):
                assert chosen(pool) == "a"
                assert pool.num_open == 2
        assert chosen(pool) == "a"  # "b" was chosen last
        assert pool.num_open == 0

    asyncio.run(main())


def test_nobody_and_the_excluded_are_not_chosen() -> None:
    async def main() -> None:
        pool, client = make_pool("a")
        assert chosen(pool, client.peers["a"].boot) is None
        client.kill("a")
        assert chosen(pool) is None
        with pytest.raises(NoPeer):
            await pool.wait_least_busy(0.01)

    asyncio.run(main())


def test_waiting_ends_with_the_next_life_of_an_excluded_peer() -> None:
    async def main() -> None:
        pool, client = make_pool("a")
        first = client.peers["a"].boot
        waiting = asyncio.create_task(pool.wait_least_busy(5, exclude=(first,)))
        await asyncio.sleep(0)
        client.kill("a")
        client.serve("a", lambda request, stream: None)
        assert (await waiting).boot != first

    asyncio.run(main())
