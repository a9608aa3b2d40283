"""The driver: one thread that makes the agent, posts and polls; results come back on the loop."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from components.kv.layout import block_bytes
from components.messages import KVLayout
from components.transfer.agent import LocalRegion, TransferError
from components.transfer.driver import TransferDriver
from components.transfer.memory import Faults, MemoryAgent
from components.transfer.plan import Side, plan, route

LAYOUT = KVLayout("m", "float16", 4, 1, 1, 4, 0, 1)
WAY = route(LAYOUT, LAYOUT)


class End:
    """A driver over a region of its own; it notes the thread that made the agent."""

    def __init__(self, *, fill=0):
        self.memory = np.full((4, block_bytes(LAYOUT)), fill, np.uint8)
        self.faults = Faults()
        self.thread = None
        self.driver = TransferDriver(self.make_agent)

    def make_agent(self):
        self.thread = threading.current_thread()
        return MemoryAgent(LocalRegion(LAYOUT, self.memory.ctypes.data, 4, block_bytes(LAYOUT)), self.faults)

    async def read(self, agent, source_ids, target_ids):
        result = asyncio.get_running_loop().create_future()
        pieces = plan(WAY, Side(source_ids, 0), Side(target_ids, 0), start=0, stop=4 * len(source_ids))
        self.driver.read([(agent, pieces)], result.set_result)
        return await asyncio.wait_for(result, 5)


async def joined():
    source, target = End(fill=7), End()
    region = await source.driver.start()
    await target.driver.start()
    await target.driver.connect(region, WAY)
    return source, target, region.agent


async def test_a_read_is_told_with_its_size_and_times():
    source, target, agent = await joined()

    result = await target.read(agent, [0, 2], [3, 1])

    assert result.error is None
    assert (result.descriptors, result.num_bytes) == (2, 2 * block_bytes(LAYOUT))
    assert min(result.wait_ms, result.post_ms, result.wire_ms) >= 0
    assert target.memory[:, 0].tolist() == [0, 7, 0, 7]
    await source.driver.close()
    await target.driver.close()


async def test_the_agent_is_made_and_driven_on_a_thread_of_its_own():
    source, target, _ = await joined()

    assert source.thread is not threading.current_thread()
    assert source.thread is not target.thread
    await source.driver.close()
    await target.driver.close()
    assert not source.thread.is_alive()


async def test_an_agent_that_cannot_be_made_fails_the_start():
    def make():
        raise TransferError("no such transport")

    driver = TransferDriver(make)

    with pytest.raises(TransferError, match="no such transport"):
        await driver.start()
    await driver.close()


async def test_a_peer_that_cannot_be_connected_is_told():
    source, target = End(), End()
    region = await source.driver.start()
    target.faults.fails_connect = True
    await target.driver.start()

    with pytest.raises(TransferError):
        await target.driver.connect(region, WAY)
    await source.driver.close()
    await target.driver.close()


@pytest.mark.parametrize("fault", ["fails_post", "fails_reads"])
async def test_a_read_that_fails_is_told_once(fault):
    source, target, agent = await joined()
    setattr(target.faults, fault, True)

    result = await target.read(agent, [0], [0])

    assert result.error
    await source.driver.close()
    await target.driver.close()


async def test_reads_overlap():
    source, target, agent = await joined()
    target.faults.delay_s = 0.1
    loop = asyncio.get_running_loop()
    began = loop.time()

    await asyncio.gather(*(target.read(agent, [i], [i]) for i in range(4)))

    assert loop.time() - began < 0.35
    await source.driver.close()
    await target.driver.close()


async def test_reads_may_end_in_another_order_than_they_began():
    source, target, agent = await joined()
    target.faults.delay_s = 0.2
    slow = asyncio.create_task(target.read(agent, [0, 1], [0, 1]))
    await asyncio.sleep(0.02)
    target.faults.delay_s = 0.0

    assert (await target.read(agent, [2, 3], [2, 3])).error is None
    assert not slow.done()
    assert (await slow).error is None
    await source.driver.close()
    await target.driver.close()


async def test_closing_waits_only_so_long_for_a_read_that_does_not_end():
    source, target, agent = await joined()
    target.faults.is_stuck = True
    read = asyncio.create_task(target.read(agent, [0], [0]))
    await asyncio.sleep(0.01)

    await target.driver.close(timeout_s=0.05)

    assert not target.thread.is_alive()
    read.cancel()
    await source.driver.close()


async def test_a_thread_that_hangs_is_not_alive():
    source, target, _ = await joined()
    await asyncio.wait_for(target.driver.alive(), 5)
    go_on = threading.Event()
    target.driver._submit(lambda agent: go_on.wait(5))

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(target.driver.alive(), 0.05)
    go_on.set()
    await target.driver.close()
    await source.driver.close()


async def test_a_bug_on_the_thread_surfaces_where_the_worker_waits():
    source, target, _ = await joined()

    target.driver._submit(lambda own: own.no_such_method())

    with pytest.raises(AttributeError, match="no_such_method"):
        await asyncio.wait_for(target.driver.run(), 5)
    await source.driver.close()
    await target.driver.close()
