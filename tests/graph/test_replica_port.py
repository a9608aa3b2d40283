"""What the supervisor asks of a replica, over links in this process."""

from __future__ import annotations

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry, Gauge

from graph import Component, Options, Peer, PeerFault
from graph.link import InProcess, Links
from graph.replica_port import Replicas, serve_replica_port


class Patient(Component):
    """Works, waits for ever, or is sick, as told."""

    mood = "well"

    async def alive(self) -> None:
        if self.mood == "stuck":
            await asyncio.Event().wait()
        if self.mood == "sick":
            raise PeerFault("the engine gave up")


class Ward:
    """A replica's port and the supervisor's end of it."""

    def __init__(self) -> None:
        transport = InProcess()
        self.patient = Patient(Options())
        self.version: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        metrics = CollectorRegistry()
        Gauge("headrace_mood", "Mood.", registry=metrics).set(3)
        self.replica = Links("a/0", "boot", transport=transport, listen="a")
        serve_replica_port(self.replica, self.patient, metrics, lambda _: self.version)
        self.supervisor = Links("supervisor/0", "s", transport=transport, listen="s")
        self.asked = Replicas(self.supervisor, ["a"])
        self.supervisor.set_peers([Peer("a/0", "boot", "a")])

    async def close(self) -> None:
        await self.supervisor.close()
        await self.replica.close()


async def test_a_replica_that_works_is_neither_silent_nor_stuck() -> None:
    ward = Ward()
    assert not await ward.asked.is_silent("a/0")
    assert await ward.asked.check_work("a/0", 1.0) is None
    await ward.close()


async def test_stuck_and_sick_are_told_and_the_loop_still_answers() -> None:
    ward = Ward()
    ward.patient.mood = "stuck"
    assert "no answer" in str(await ward.asked.check_work("a/0", 0.05))
    assert not await ward.asked.is_silent("a/0")
    ward.patient.mood = "sick"
    assert isinstance(await ward.asked.check_work("a/0", 1.0), PeerFault)
    await ward.close()


async def test_who_is_gone_is_not_silent_for_its_process_tells() -> None:
    ward = Ward()
    assert not await ward.asked.is_silent("a/7")
    await ward.close()


async def test_metrics_of_those_that_answer() -> None:
    ward = Ward()
    families = await ward.asked.families(["a/0", "a/7"], 1.0)
    assert list(families) == ["a/0"]
    assert families["a/0"][0].samples[0].value == 3
    await ward.close()


async def test_seen_returns_with_the_last_word() -> None:
    ward = Ward()
    seen = asyncio.create_task(ward.asked.see(4, ["a/0", "a/7"]))
    await asyncio.sleep(0.02)
    assert not seen.done()
    ward.version.set_result(None)
    await seen
    await ward.close()


async def test_seen_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graph.replica_port.SEEN_TIMEOUT_S", 0.05)
    ward = Ward()
    began = time.monotonic()
    await ward.asked.see(4, ["a/0"])
    assert time.monotonic() - began < 1
    await ward.close()
