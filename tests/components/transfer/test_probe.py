"""The self-test of a connection: what it finds wrong, what it measures, and what is said of a slow link."""

from __future__ import annotations

import ctypes
from contextlib import asynccontextmanager

import numpy as np
import pytest
from transfer_pair import make_prompt, oracle, pair, until

from components.kv.layout import block_bytes
from components.messages import KVLayout
from components.transfer import probe
from components.transfer.agent import LocalRegion, TransferError
from components.transfer.driver import TransferDriver
from components.transfer.memory import Faults, MemoryAgent
from components.transfer.plan import route
from components.transfer.probe import ProbeTimeout, Speed, likely_cause, prepare

NUM_BLOCKS = 3


def make_layout(block_size=4, heads=(0, 3)):
    return KVLayout("m", "float16", block_size, 2, 3, 8, *heads)


class SwappedAgent(MemoryAgent):
    """Takes keys for values: moves the right number of bytes from and to places that are half a head off."""

    def _land(self, peer, pieces, *, share):
        shift = peer.layout.block_size * peer.layout.head_dim * 2
        for at, to, size in zip(pieces.source, pieces.target, pieces.sizes, strict=True):
            ctypes.memmove(self.region.base + int(to), peer.base + int(at) + shift, int(size) - shift)


@asynccontextmanager
async def site(layout, *, make=MemoryAgent):
    """A region with a probe block, and its running driver."""
    memory = np.zeros((NUM_BLOCKS, block_bytes(layout)), np.uint8)
    local = LocalRegion(layout, memory.ctypes.data, NUM_BLOCKS, block_bytes(layout), probe_block=NUM_BLOCKS - 1)
    driver = TransferDriver(lambda: make(local))
    region = await driver.start()
    prepare(region)
    try:
        yield memory, driver, region
    finally:
        await driver.close()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (make_layout(), make_layout()),
        (make_layout(16), make_layout(4)),
        (make_layout(4), make_layout(16)),
        (make_layout(heads=(0, 3)), make_layout(heads=(1, 3))),
        (make_layout(8, heads=(1, 2)), make_layout(4)),
    ],
)
async def test_any_layout_is_read_along_the_route_of_requests(source, target):
    async with site(source) as (_, _, peer), site(target) as (memory, driver, _):
        before = memory.copy()

        speed = await driver.link(peer, route(source, target))

        assert speed.num_bytes > 0
        assert speed.bytes_per_s > 0
        assert np.array_equal(memory, before)


async def test_a_transport_that_mixes_up_keys_and_values_is_found():
    async with site(make_layout()) as (_, _, peer), site(make_layout(), make=SwappedAgent) as (_, driver, _):
        with pytest.raises(TransferError, match=r"read \d+ of 48 slots wrongly, first KV head 0, layer 0, K, token 0"):
            await driver.link(peer, route(make_layout(), make_layout()))


async def test_a_source_that_holds_something_else_is_found():
    async with site(make_layout()) as (memory, _, peer), site(make_layout()) as (_, driver, _):
        memory[NUM_BLOCKS - 1, -1] ^= 1

        with pytest.raises(TransferError, match="read 1 of 48 slots wrongly, first KV head 2, layer 1, V, token 3"):
            await driver.link(peer, route(make_layout(), make_layout()))


async def test_a_peer_that_does_not_take_part_may_be_asked_again(monkeypatch):
    monkeypatch.setattr(probe, "READ_TIMEOUT_S", 0.05)
    faults = Faults(is_stuck=True)
    async with (
        site(make_layout()) as (_, _, peer),
        site(make_layout(), make=lambda local: MemoryAgent(local, faults)) as (_, driver, _),
    ):
        with pytest.raises(ProbeTimeout):
            await driver.link(peer, route(make_layout(), make_layout()))

        faults.is_stuck = False
        assert await driver.link(peer, route(make_layout(), make_layout()))


def test_two_places_of_a_block_never_look_alike():
    block = probe.pattern(make_layout(), np.arange(3), np.arange(4)).reshape(-1, 16)
    assert len(np.unique(block, axis=0)) == len(block)


@pytest.mark.parametrize(
    ("speed", "is_slow"),
    [
        (Speed(8 << 20, 24, 0.005, "DRAM"), False),
        (Speed(8 << 20, 24, 0.2, "DRAM"), True),
        (Speed(64 << 20, 32, 0.0004, "VRAM"), False),
        (Speed(64 << 20, 32, 0.022, "VRAM"), True),  # a hundredth of what one GPU reads from itself
        (Speed(2 << 20, 2048, 0.02, "DRAM"), False),  # tiny pieces cost what pieces cost
    ],
)
def test_slow_is_several_times_slower_than_a_healthy_path(speed, is_slow):
    assert speed.is_slow is is_slow


@pytest.mark.parametrize(
    ("memory", "environment", "words"),
    [
        ("VRAM", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable segments"),
        ("VRAM", {"UCX_TLS": "tcp"}, "UCX_TLS=tcp"),
        ("VRAM", {}, "no device set"),
        ("DRAM", {"UCX_TLS": "tcp"}, "leaves out shared memory"),
        ("DRAM", {}, "share no memory"),
    ],
)
def test_the_likely_cause_is_read_off_the_environment(memory, environment, words):
    assert words in likely_cause(Speed(1, 1, 1.0, memory), environment)


async def test_a_link_is_tested_before_it_is_used_and_its_speed_is_a_metric():
    async with pair() as two:
        assert two.decode_context.metric("kv_link_bytes_per_second", peer="prefill/0") > 0
        assert two.decode_context.metric("kv_link_slow", peer="prefill/0") == 0
        assert two.decode_context.notices == []


async def test_a_slow_link_is_told_once_with_its_likely_cause_and_still_used():
    async with pair(started=False) as two:
        two.decode.faults.delay_s = 0.3

        await two.start_prefill()

        assert two.decode_context.metric("kv_link_slow", peer="prefill/0") == 1
        assert len(two.decode_context.notices) == 1
        assert "prefill/0" in two.decode_context.notices[0]
        assert "likely cause" in two.decode_context.notices[0]
        two.decode.faults.delay_s = 0.0
        prompt = make_prompt(40)
        assert (await two.generate(prompt)).timing.mode == "remote"


async def test_a_prefill_worker_that_fails_the_self_test_is_refused_and_done_without():
    async with pair(started=False) as two:
        two.prefill_context = two.context("prefill/0", {})
        await two.prefill.start(two.prefill_context)
        two.prefill._serving.engine.runner.memory[-1] ^= 1

        two.appear("prefill/0")
        peers = two.decode._requests._peers
        await until(lambda: peers.refusal("prefill/0") is not None)

        assert "self-test" in str(peers.refusal("prefill/0"))
        prompt = make_prompt(40)
        answer = await two.generate(prompt)
        assert answer.tokens == oracle(prompt)
        assert answer.timing.mode == "local"
