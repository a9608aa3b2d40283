"""A process that owns a KV region and lets others read it over NIXL; told what to do on stdin, a word a line.

It writes its `RankRegion` (msgpack, hexadecimal) as the first line. "fill N" writes block N's pattern
and answers "filled N"; the end of stdin ends it.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
import numpy as np

from components.kv.layout import block_bytes
from components.messages import KVLayout
from components.transfer.agent import LocalRegion
from components.transfer.driver import TransferDriver
from components.transfer.nixl import NixlAgent

LAYOUT = KVLayout("smollm2", "bfloat16", 16, 30, 3, 64, 0, 3)  # the default model: 23 KiB per token


def pattern(block: int) -> np.ndarray:
    """The bytes of one block."""
    return np.random.default_rng(block).integers(0, 256, block_bytes(LAYOUT), np.uint8)


async def main(num_blocks: int) -> None:
    memory = np.zeros((num_blocks, block_bytes(LAYOUT)), np.uint8)
    region = LocalRegion(LAYOUT, memory.ctypes.data, num_blocks, block_bytes(LAYOUT))
    driver = TransferDriver(lambda: NixlAgent(region))
    registered = await driver.start()
    driver.watch(True)
    sys.stdout.write(msgspec.msgpack.encode(registered).hex() + "\n")
    sys.stdout.flush()
    while line := await asyncio.to_thread(sys.stdin.readline):
        block = int(line.split()[1])
        memory[block] = pattern(block)
        sys.stdout.write(f"filled {block}\n")
        sys.stdout.flush()
    await driver.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
