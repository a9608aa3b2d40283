"""The ways in which the benchmark moves the same blocks: our driver, bare NIXL, torch, and a whole hand-over."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from prometheus_client import CollectorRegistry
from transfer_sides import Ports, synchronize

from components.kv.layout import block_bytes
from components.messages import PrefillRequest, RankRegion, Sampling, Stopping, pack_ids
from components.transfer.budget import Budget
from components.transfer.driver import TransferDriver
from components.transfer.group import DriverGroup
from components.transfer.metrics import TransferMetrics
from components.transfer.peers import LinkedPrefill, RankRoute
from components.transfer.plan import Pieces, Route, Side, plan
from components.transfer.pull import Prompt, PullRules
from components.transfer.puller import Puller
from graph.component import Peer
from graph.link import Links, ZeroMQ

READ_LIMIT_S = 30.0
"""A READ that takes longer has found a path that is not worth measuring."""


class TooSlowError(Exception):
    """A READ did not end within its limit; nothing more can be measured, as nothing can cancel it."""


async def driver_seconds(
    driver: TransferDriver, peer: RankRegion, way: Route, source: list[int], target: list[int]
) -> tuple[float, float]:
    """Plans and moves the blocks once: from posting to the end, and from the decision until the loop knows of it."""
    ended = asyncio.get_running_loop().create_future()
    began = time.perf_counter()
    stop = len(source) * way.target.block_size
    pieces: Pieces = plan(way, Side(source, 0), Side(target, 0), start=0, stop=stop)
    driver.read([(peer.agent, pieces)], ended.set_result)
    try:
        result = await asyncio.wait_for(ended, READ_LIMIT_S)
    except TimeoutError:
        raise TooSlowError(f"our driver's READ of {pieces.num_bytes} bytes took over {READ_LIMIT_S:g} s") from None
    took = time.perf_counter() - began
    assert result.error is None, result.error
    assert result.descriptors == len(source), "one descriptor per block"
    return (result.post_ms + result.wire_ms) / 1e3, took


class Bare:
    """NIXL as its own examples use it: prepared lists, a tight loop."""

    def __init__(self, region: RankRegion, peer: RankRegion, piece_bytes: int) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(f"bare-{uuid4().hex}", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        size = region.num_blocks * block_bytes(region.layout)
        self._registered = self._agent.register_memory([(region.base, size, region.device, "")], mem_type=region.memory)
        self._name = self._agent.add_remote_agent(peer.metadata)
        count = size // piece_bytes
        ours, theirs = (
            np.array([[r.base, piece_bytes, r.device, piece_bytes, count]], np.uint64) for r in (region, peer)
        )
        self._local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, region.memory)
        self._remote = self._agent.prep_xfer_dlist(self._name, theirs, peer.memory)
        self._per_block = block_bytes(region.layout) // piece_bytes

    def seconds(self, source: list[int], target: list[int]) -> float:
        """Moves the blocks once."""
        began = time.perf_counter()
        handle = self._agent.make_prepped_xfer(
            "READ", self._local, self._pieces(target), self._remote, self._pieces(source)
        )
        self._agent.transfer(handle)
        while (state := self._agent.check_xfer_state(handle)) == "PROC":
            if time.perf_counter() - began > READ_LIMIT_S:
                raise TooSlowError(f"a READ of {len(source)} blocks by bare NIXL took over {READ_LIMIT_S:g} s")
        took = time.perf_counter() - began
        assert state == "DONE", state
        handle.release()
        return took

    def close(self) -> None:
        """Frees what NIXL holds of the pool."""
        self._local.release()
        self._remote.release()
        self._agent.remove_remote_agent(self._name)
        self._agent.deregister_memory(self._registered)

    def _pieces(self, blocks: list[int]) -> Any:
        """The indices of the blocks' pieces, layer by layer: those of one block side by side would be merged again."""
        ids = np.array(blocks, np.int32)
        return (ids * self._per_block + np.arange(self._per_block, dtype=np.int32)[:, None]).reshape(-1)


class PeerCopy:
    """One contiguous copy from device to device by torch: what the link between them gives at most."""

    def __init__(self, source: str, target: str, max_bytes: int) -> None:
        self._source = torch.ones(max_bytes, dtype=torch.uint8, device=source)
        self._target = torch.zeros(max_bytes, dtype=torch.uint8, device=target)

    def seconds(self, num_bytes: int) -> float:
        """Copies so many bytes once."""
        devices = self._source.device, self._target.device
        synchronize(*devices)
        began = time.perf_counter()
        self._target[:num_bytes].copy_(self._source[:num_bytes], non_blocking=True)
        synchronize(*devices)
        return time.perf_counter() - began


class HandOver:
    """A decode worker's puller with an engine that has room at once."""

    def __init__(self, driver: TransferDriver, peer: RankRegion, way: Route, address: str) -> None:
        self._links = Links("decode/0", "target", transport=ZeroMQ())
        client = self._links.client(Ports.calls, {"prefill": "requests"})
        self._links.set_peers([Peer("prefill/0", "source", address)])
        self._peer = LinkedPrefill("prefill/0", "source", (RankRoute(0, peer.agent, way),), peer.num_blocks - 1)
        self._block_size = way.target.block_size
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
        self._puller.begin(str(self._number), request, Prompt(num_tokens, 0, self._block_size, 64), self._peer)
        await asyncio.wait_for(self._adopted, READ_LIMIT_S)
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
