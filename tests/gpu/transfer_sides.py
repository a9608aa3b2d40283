"""The two ends of a KV transfer under test: pools of Llama-8B blocks, each with a driver over it.

The source lives in a process of its own (`python transfer_sides.py ...` runs it), fills its blocks with a
known pattern and plays the prefill worker; the target is the process that measures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec
import numpy as np
import torch

from components.kv.layout import block_bytes
from components.messages import (
    PREFILL_REPLIES,
    PREFILL_REQUESTS,
    KVLayout,
    LeaseState,
    PrefillDone,
    PrefillProgress,
    PrefillRequest,
    RankRegion,
    pack_ids,
)
from components.transfer.agent import LocalRegion
from components.transfer.driver import TransferDriver
from components.transfer.nixl import NixlAgent
from components.transfer.probe import prepare
from graph.link import Links, ZeroMQ
from graph.ports import Calls, Serves

MAX_TOKENS = 8_192
ORDERS = ("shuffled", "ascending")
SOURCE_SEED, TARGET_SEED = 1, 2
_TOLD = "region: "
_END_TIMEOUT_S = 20


class Ports:
    """Both ends of the hand-over's link."""

    calls = Calls(PREFILL_REQUESTS, PREFILL_REPLIES)
    serves = Serves(PREFILL_REQUESTS, PREFILL_REPLIES)


Ports.calls.name = Ports.serves.name = "requests"


def llama_layout(block_size: int) -> KVLayout:
    """Llama-3.1-8B in bfloat16: 128 KiB of KV a token."""
    return KVLayout("llama-8b", "bfloat16", block_size, 32, 8, 128, 0, 8)


def num_blocks(layout: KVLayout) -> int:
    """Blocks of a pool for `MAX_TOKENS`; the last one is the self-test's."""
    return MAX_TOKENS // layout.block_size + 1


def pick(layout: KVLayout, num_tokens: int, *, order: str, seed: int) -> list[int]:
    """Block ids for so many tokens: any, or neighbours in rising order."""
    count = num_tokens // layout.block_size
    if order == "ascending":
        return list(range(count))
    ids: list[int] = np.random.default_rng(seed).permutation(num_blocks(layout) - 1)[:count].tolist()
    return ids


def make_pool(layout: KVLayout, device: str) -> torch.Tensor:
    """Blocks of zeros, as words."""
    return torch.zeros((num_blocks(layout), block_bytes(layout) // 4), dtype=torch.int32, device=device)


def fill(pool: torch.Tensor) -> None:
    """Gives every word of the pool a value of its own."""
    words = torch.arange(pool.numel(), dtype=torch.int32, device=pool.device)
    pool.copy_((words * -1640531527).view_as(pool))


def synchronize(*devices: torch.device) -> None:
    """Returns when those of the devices that are GPUs have done their work."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


async def start(layout: KVLayout, pool: torch.Tensor) -> tuple[TransferDriver, RankRegion]:
    """A driver over the pool, ready for the self-test."""
    is_cuda = pool.device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(pool.device)
    synchronize(pool.device)  # binds the device's context to this thread
    region = LocalRegion(
        layout,
        pool.data_ptr(),
        len(pool),
        block_bytes(layout),
        memory="VRAM" if is_cuda else "DRAM",
        device=pool.device.index or 0,
        probe_block=len(pool) - 1,
    )
    driver = TransferDriver(lambda: NixlAgent(region))
    registered = await driver.start()
    prepare(registered)
    return driver, registered


class Target:
    """The pool that is read into, and what must be found there."""

    def __init__(self, layout: KVLayout, device: str) -> None:
        self.pool = make_pool(layout, device)
        self._expected = make_pool(layout, device)
        fill(self._expected)

    def verify(self, source: list[int], target: list[int]) -> None:
        """Fails unless the blocks are those of the source, then wipes them."""
        assert torch.equal(self.pool[target], self._expected[source]), "wrong bytes"
        self.pool[target] = 0
        synchronize(self.pool.device)


@contextlib.contextmanager
def source_process(device: str, block_size: int, address: str) -> Iterator[RankRegion]:
    """The source, alive inside the block; yields what must be known to read from it."""
    command = [sys.executable, __file__, "--device", device, "--block-size", str(block_size), "--address", address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            told = next(line for line in child.stdout if line.startswith(_TOLD))  # UCX may warn before it
            yield msgspec.json.decode(told.removeprefix(_TOLD), type=RankRegion)
            child.stdin.close()
            child.wait(_END_TIMEOUT_S)
        finally:
            child.kill()


async def serve_source(device: str, block_size: int, address: str) -> None:
    """Owns filled blocks; announces all of a prompt's at once when asked. Ends with its standard input."""
    layout = llama_layout(block_size)
    pool = make_pool(layout, device)
    fill(pool)
    driver, region = await start(layout, pool)
    driver.watch(True)
    links = Links("prefill/0", "source", transport=ZeroMQ(), listen=address)

    def handle(request: Any, stream: Any) -> None:
        if not isinstance(request, PrefillRequest):
            stream.end(LeaseState(request.id, True))
            return
        num_tokens = len(request.tokens) // 4
        ids = pick(layout, num_tokens, order="shuffled", seed=SOURCE_SEED)
        progress = PrefillProgress(pack_ids(ids), 0, num_tokens, 0, time.monotonic() * 1e3)
        stream.end(PrefillDone(progress, 7, None, 0.0, 0.0))

    links.serve(Ports.serves, handle)
    sys.stdout.write(_TOLD + msgspec.json.encode(region).decode() + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await driver.close()
    await links.close()


def main() -> None:
    """The source's process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--block-size", type=int, required=True)
    parser.add_argument("--address", required=True)
    arguments = parser.parse_args()
    asyncio.run(serve_source(arguments.device, arguments.block_size, arguments.address))


if __name__ == "__main__":
    main()
