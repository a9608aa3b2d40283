"""KV between two processes on GPUs: our driver and planner against bare NIXL, and against per-layer pieces.

    python tests/gpu/bench_transfer.py [--source cuda:0] [--target cuda:0] [--rounds 20] [--out FILE]

Llama-8B shapes in bfloat16 (32 layers, 8 KV heads of 128, blocks of 16 tokens: 2 MiB), 128, 1,024 and 8,192
tokens in shuffled blocks. In the same run, in turns, and all of it checked byte by byte:

    driver     our agent on its thread: prepare, post, poll; `told` adds the plan and both ways to the event loop
    bare       the same pieces, prepared beforehand, posted and polled in a tight loop by a NIXL agent of its own
    per layer  the same blocks by bare NIXL in pieces of one layer's K or V (32 KiB), as other layouts have it
    hand-over  from asking prefill until decode may go on: request, announcement, room, READ, lease, over ZeroMQ

Exit status 1 if the driver reaches less than 95 % of bare NIXL's bandwidth at any length. `--source cpu --target
cpu` tries the script without a GPU; its figures mean little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec
import numpy as np
import torch
from prometheus_client import CollectorRegistry

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
    Sampling,
    Stopping,
    pack_ids,
)
from components.transfer.agent import LocalRegion
from components.transfer.budget import Budget
from components.transfer.driver import TransferDriver
from components.transfer.group import DriverGroup
from components.transfer.metrics import TransferMetrics
from components.transfer.nixl import NixlAgent
from components.transfer.peers import LinkedPrefill, RankRoute
from components.transfer.plan import Pieces, Side, plan, route
from components.transfer.probe import Speed, prepare
from components.transfer.pull import Prompt, PullRules
from components.transfer.puller import Puller
from graph.component import Peer
from graph.link import Links, ZeroMQ
from graph.ports import Calls, Serves

LAYOUT = KVLayout("llama-8b", "bfloat16", 16, 32, 8, 128, 0, 8)
BLOCK_BYTES = block_bytes(LAYOUT)
LAYER_BYTES = BLOCK_BYTES // (2 * LAYOUT.num_layers)
LENGTHS = (128, 1_024, 8_192)
NUM_BLOCKS = LENGTHS[-1] // LAYOUT.block_size + 1  # the last one is the self-test's
LEAST_SHARE = 0.95
WAY = route(LAYOUT, LAYOUT)
SIDES = ("source", "target")


class Ports:
    """Both ends of the hand-over's link."""

    calls = Calls(PREFILL_REQUESTS, PREFILL_REPLIES)
    serves = Serves(PREFILL_REQUESTS, PREFILL_REPLIES)


Ports.calls.name = Ports.serves.name = "requests"


def make_pool(device: str) -> torch.Tensor:
    """Blocks of zeros."""
    return torch.zeros((NUM_BLOCKS, BLOCK_BYTES // 4), dtype=torch.int32, device=device)


def fill(pool: torch.Tensor) -> None:
    """Gives every word of the pool a value of its own."""
    words = torch.arange(pool.numel(), dtype=torch.int32, device=pool.device)
    pool.copy_((words * -1640531527).view_as(pool))


def local_region(pool: torch.Tensor) -> LocalRegion:
    """The pool as an agent registers it."""
    is_cuda = pool.device.type == "cuda"
    return LocalRegion(
        LAYOUT,
        pool.data_ptr(),
        NUM_BLOCKS,
        BLOCK_BYTES,
        memory="VRAM" if is_cuda else "DRAM",
        device=pool.device.index or 0,
        probe_block=NUM_BLOCKS - 1,
    )


async def start(pool: torch.Tensor) -> tuple[TransferDriver, RankRegion]:
    """A driver over the pool, ready for the self-test."""
    if pool.device.type == "cuda":
        torch.cuda.set_device(pool.device)
        torch.cuda.synchronize()
    driver = TransferDriver(lambda: NixlAgent(local_region(pool)))
    region = await driver.start()
    prepare(region)
    return driver, region


# --- the source's process


async def serve_source(device: str, address: str) -> None:
    """Owns filled blocks; announces all of a prompt's at once when asked."""
    pool = make_pool(device)
    fill(pool)
    driver, region = await start(pool)
    driver.watch(True)
    links = Links("prefill/0", "source", transport=ZeroMQ(), listen=address)

    def handle(request: Any, stream: Any) -> None:
        if not isinstance(request, PrefillRequest):
            stream.end(LeaseState(request.id, True))
            return
        num_tokens = len(request.tokens) // 4
        ids = shuffled(num_tokens // LAYOUT.block_size, seed=1)
        progress = PrefillProgress(pack_ids(ids), 0, num_tokens, 0, time.monotonic() * 1e3)
        stream.end(PrefillDone(progress, 7, None, 0.0, 0.0))

    links.serve(Ports.serves, handle)
    sys.stdout.write(msgspec.json.encode(region).decode() + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await driver.close()
    await links.close()


def shuffled(count: int, *, seed: int) -> list[int]:
    """`count` block ids in no order."""
    ids: list[int] = np.random.default_rng(seed).permutation(NUM_BLOCKS - 1)[:count].tolist()
    return ids


# --- what is measured


class Bare:
    """NIXL as its own examples use it: prepared lists, a tight loop."""

    def __init__(self, region: RankRegion, peer: RankRegion, piece_bytes: int) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(f"bare-{uuid4().hex}", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        size = region.num_blocks * BLOCK_BYTES
        self._agent.register_memory([(region.base, size, region.device, "")], mem_type=region.memory)
        self._name = self._agent.add_remote_agent(peer.metadata)
        count = size // piece_bytes
        ours, theirs = (
            np.array([[r.base, piece_bytes, r.device, piece_bytes, count]], np.uint64) for r in (region, peer)
        )
        self._local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, region.memory)
        self._remote = self._agent.prep_xfer_dlist(self._name, theirs, peer.memory)
        self._per_block = BLOCK_BYTES // piece_bytes

    def seconds(self, source: list[int], target: list[int]) -> float:
        """Moves the blocks once."""
        began = time.perf_counter()
        handle = self._agent.make_prepped_xfer(
            "READ", self._local, self._pieces(target), self._remote, self._pieces(source)
        )
        self._agent.transfer(handle)
        while (state := self._agent.check_xfer_state(handle)) == "PROC":
            pass
        took = time.perf_counter() - began
        assert state == "DONE", state
        handle.release()
        return took

    def _pieces(self, blocks: list[int]) -> Any:
        ids = np.array(blocks, np.int32)
        return (ids[:, None] * self._per_block + np.arange(self._per_block, dtype=np.int32)).reshape(-1)


async def driver_seconds(
    driver: TransferDriver, peer: RankRegion, source: list[int], target: list[int]
) -> tuple[float, float]:
    """Plans and moves the blocks once: from posting to the end, and from the decision until the loop knows of it."""
    ended = asyncio.get_running_loop().create_future()
    began = time.perf_counter()
    pieces: Pieces = plan(WAY, Side(source, 0), Side(target, 0), start=0, stop=len(source) * LAYOUT.block_size)
    driver.read([(peer.agent, pieces)], ended.set_result)
    result = await ended
    took = time.perf_counter() - began
    assert result.error is None, result.error
    assert result.descriptors == len(source), "one descriptor per block"
    return (result.post_ms + result.wire_ms) / 1e3, took


class HandOver:
    """A decode worker's puller with an engine that has room at once."""

    def __init__(self, driver: TransferDriver, peer: RankRegion, address: str) -> None:
        self._links = Links("decode/0", "target", transport=ZeroMQ())
        client = self._links.client(Ports.calls, {"prefill": "requests"})
        self._links.set_peers([Peer("prefill/0", "source", address)])
        self._peer = LinkedPrefill("prefill/0", "source", (RankRoute(0, peer.agent, WAY),), NUM_BLOCKS - 1)
        self._puller = Puller(
            engine=self,
            client=client,
            drivers=DriverGroup([driver]),
            owner=self,
            rules=PullRules(lease_s=10.0, timeout_s=60.0),
            budget=Budget(1 << 30),
            metrics=TransferMetrics(CollectorRegistry()),
        )
        self._number = 0

    async def seconds(self, num_tokens: int, target: list[int]) -> float:
        """From asking prefill until the engine may go on."""
        self._number += 1
        self._target = target
        self._adopted = asyncio.get_running_loop().create_future()
        tokens = pack_ids(range(num_tokens))
        stopping = Stopping(max_tokens=64)
        request = PrefillRequest(f"t-{self._number}", tokens, num_tokens, 0, Sampling(), stopping, lease_ms=10_000)
        began = time.perf_counter()
        self._puller.begin(str(self._number), request, Prompt(num_tokens, 0, LAYOUT.block_size, 64), self._peer)
        await asyncio.wait_for(self._adopted, 60)
        return time.perf_counter() - began

    async def close(self) -> None:
        await self._links.close()

    def reserve(self, id: str) -> None:
        asyncio.get_running_loop().call_soon(self._puller.reserved, id, self._target, 0)

    def adopt(self, id: str, *, token: int, logprobs: Any) -> None:
        self._adopted.set_result(None)

    def compute_locally(self, id: str) -> None:
        raise AssertionError("the pull was given up")

    def on_local(self, id: str, reason: str) -> None:
        self._adopted.set_exception(RuntimeError(reason))

    def on_adopted(self, id: str, record: Any) -> None: ...

    def on_finished(self, id: str, record: Any, finish: Any) -> None: ...

    def settled(self, ids: Any) -> None: ...

    def hold(self, id: str) -> None: ...

    def resume(self, id: str) -> None: ...


class Target:
    """This process: the pool that is read into, and everything that reads."""

    def __init__(self, device: str) -> None:
        self.pool = make_pool(device)
        expected = make_pool(device)
        fill(expected)
        self._expected = expected

    def verify(self, source: list[int], target: list[int]) -> None:
        """Fails unless the blocks are those of the source, then wipes them."""
        assert torch.equal(self.pool[target], self._expected[source]), "wrong bytes"
        self.pool[target] = 0
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize()


async def measure(target: Target, peer: RankRegion, address: str, rounds: int) -> dict[str, Any]:
    """All figures, medians over `rounds`; bandwidths in GB/s, times in ms."""
    driver, region = await start(target.pool)
    speed: Speed | None = await driver.link(peer, WAY)
    whole, by_layer = Bare(region, peer, BLOCK_BYTES), Bare(region, peer, LAYER_BYTES)
    hand_over = HandOver(driver, peer, address)
    assert speed is not None
    report: dict[str, Any] = {"self_test_gb_s": speed.bytes_per_s / 1e9, "is_slow": speed.is_slow}
    for num_tokens in LENGTHS:
        count = num_tokens // LAYOUT.block_size
        ids = shuffled(count, seed=1), shuffled(count, seed=2)
        times: dict[str, list[float]] = {"driver": [], "told": [], "bare": [], "per_layer": [], "hand_over": []}
        for turn in range(rounds + 2):
            moved, told = await driver_seconds(driver, peer, *ids)
            turns = {
                "driver": moved,
                "told": told,
                "bare": whole.seconds(*ids),
                "per_layer": by_layer.seconds(*ids) if turn % 5 == 2 else None,
                "hand_over": await hand_over.seconds(num_tokens, ids[1]),
            }
            if turn == 0:
                target.verify(*ids)
            elif turn > 1:
                for name, took in turns.items():
                    times[name] += [] if took is None else [took]
        report[str(num_tokens)] = summary(count * BLOCK_BYTES, times)
    await hand_over.close()
    await driver.close()
    return report


def summary(num_bytes: int, times: dict[str, list[float]]) -> dict[str, float]:
    """One length's figures."""
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    rates = {f"{name}_gb_s": round(num_bytes / seconds / 1e9, 2) for name, seconds in median.items()}
    return rates | {
        "driver_ms": round(median["driver"] * 1e3, 3),
        "told_ms": round(median["told"] * 1e3, 3),
        "bare_ms": round(median["bare"] * 1e3, 3),
        "hand_over_ms": round(median["hand_over"] * 1e3, 3),
        "share_of_bare": round(median["bare"] / median["driver"], 4),
        "times_per_layer": round(median["per_layer"] / median["driver"], 1),
    }


def main() -> int:
    """Runs the source as a child and measures here; one JSON object on stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="cuda:0")
    parser.add_argument("--target", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve_source(arguments.source, arguments.serve))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/source.sock"
        command = [sys.executable, __file__, "--source", arguments.source, "--serve", address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                peer = msgspec.json.decode(child.stdout.readline(), type=RankRegion)
                target = Target(arguments.target)
                report = asyncio.run(measure(target, peer, address, arguments.rounds))
            finally:
                child.stdin.close()
    report |= {side: getattr(arguments, side) for side in SIDES}
    text = json.dumps(report, indent=2)
    sys.stdout.write(text + "\n")
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0 if all(report[str(n)]["share_of_bare"] >= LEAST_SHARE for n in LENGTHS) else 1


if __name__ == "__main__":
    sys.exit(main())
