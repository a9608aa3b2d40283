"""NIXL between two real processes: chunk-wise reads, a killed and a frozen source, and the bandwidth."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from nixl_source import LAYOUT, pattern

from components.kv.layout import block_bytes
from components.messages import RankRegion
from components.transfer.agent import LocalRegion
from components.transfer.driver import TransferDriver
from components.transfer.nixl import NixlAgent
from components.transfer.plan import Side, plan, route

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")

NUM_BLOCKS = 64  # 1,024 tokens
SOURCE = Path(__file__).with_name("nixl_source.py")
WAY = route(LAYOUT, LAYOUT)


class Source:
    """The process whose blocks are read."""

    def __init__(self, **environment):
        root = str(Path(__file__).parents[3])
        env = {**os.environ, **environment, "PYTHONPATH": root}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, str(SOURCE), str(NUM_BLOCKS)], env=env, stdin=pipe, stdout=pipe, text=True
        )

    def region(self):
        return msgspec.msgpack.decode(bytes.fromhex(self.process.stdout.readline()), type=RankRegion)

    def fill(self, *blocks):
        for block in blocks:
            self.process.stdin.write(f"fill {block}\n")
            self.process.stdin.flush()
            assert self.process.stdout.readline().split() == ["filled", str(block)]

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Target:
    """This process: a region, and the driver of its agent."""

    def __init__(self):
        self.memory = np.zeros((NUM_BLOCKS, block_bytes(LAYOUT)), np.uint8)
        region = LocalRegion(LAYOUT, self.memory.ctypes.data, NUM_BLOCKS, block_bytes(LAYOUT))
        self.driver = TransferDriver(lambda: NixlAgent(region))

    async def read(self, agent, source_ids, target_ids):
        result = asyncio.get_running_loop().create_future()
        stop = len(source_ids) * LAYOUT.block_size
        pieces = plan(WAY, Side(source_ids, 0), Side(target_ids, 0), start=0, stop=stop)
        self.driver.read([(agent, pieces)], result.set_result)
        return await asyncio.wait_for(result, 10)


@pytest.fixture
def source():
    """A running source; it starts while the test's own NIXL loads."""
    made = Source()
    yield made
    made.end()


async def connected(source):
    target = Target()
    await target.driver.start()
    region = await asyncio.to_thread(source.region)
    await target.driver.connect(region, WAY)
    return target, region.agent


async def test_blocks_are_read_as_they_become_ready_until_the_source_is_killed(source, capsys):
    target, agent = await connected(source)

    source.fill(3, 9)
    first = await target.read(agent, [3, 9], [1, 0])
    source.fill(4)
    second = await target.read(agent, [4], [2])

    assert (first.error, second.error) == (None, None)
    assert (first.descriptors, first.num_bytes) == (2, 2 * block_bytes(LAYOUT))
    assert all(np.array_equal(target.memory[to], pattern(at)) for to, at in ((1, 3), (0, 9), (2, 4)))

    order = np.random.default_rng(1).permutation(NUM_BLOCKS).tolist()
    best = min([await target.read(agent, order, order[::-1]) for _ in range(5)], key=lambda r: r.post_ms + r.wire_ms)
    speed = best.num_bytes / (best.post_ms + best.wire_ms) / 1e6
    with capsys.disabled():
        sys.stderr.write(f"\n1,024 tokens of the default model ({best.num_bytes >> 20} MiB): {speed:.1f} GB/s\n")
    assert speed > 0.05

    source.process.kill()
    source.process.wait()
    failed = await target.read(agent, [0], [0])
    assert failed.error is not None
    await target.driver.close()


async def test_over_tcp_a_frozen_source_keeps_the_read_pending_and_a_killed_one_fails_it(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    source = Source()
    try:
        target, agent = await connected(source)
        assert (await target.read(agent, [1], [1])).error is None

        os.kill(source.process.pid, signal.SIGSTOP)
        blocks = list(range(NUM_BLOCKS))
        read = asyncio.create_task(target.read(agent, blocks, blocks))
        done, _ = await asyncio.wait([read], timeout=0.3)
        assert not done

        source.process.kill()
        assert (await read).error is not None
        await target.driver.close()
    finally:
        source.end()


async def test_an_idle_driver_leaves_the_core_alone():
    target = Target()
    await target.driver.start()
    await asyncio.sleep(0.1)
    before, began = time.process_time(), time.monotonic()

    await asyncio.sleep(1.0)

    assert (time.process_time() - before) / (time.monotonic() - began) < 0.05
    await target.driver.close()
