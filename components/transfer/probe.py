"""The self-test of a new connection: does a READ bring the right bytes, and how fast?

Every region has a block that no sequence owns. A worker fills it at its start with a pattern in which
head, layer, K or V, token and byte all count; whoever connects READs it along the very route that
requests will take and compares. A transport that mixes up heads, sizes or offsets is found before the
first request; one that takes a slow path is found by timing the same READ many times over.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Mapping
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from components.kv.layout import ITEM_BYTES, block_bytes
from components.messages import KVLayout, RankRegion
from components.transfer.agent import TransferError
from components.transfer.plan import Pieces, Route, Side, plan
from components.transfer.reads import ReadResult, StartRead

READ_TIMEOUT_S = 10.0
TIMED_READS = 3  # the best counts: others may use the machine
TIMED_BYTES = {"DRAM": 8 << 20, "VRAM": 64 << 20}
MAX_TIMED_PIECES = 2_048

LEAST_BYTES_PER_S = {"DRAM": 0.2e9, "VRAM": 5e9}
PIECE_S = 50e-6  # several times what a piece costs on a healthy path
SLACK_S = {"DRAM": 0.02, "VRAM": 0.005}

Bytes = npt.NDArray[np.uint8]


class ProbeTimeout(TransferError):
    """The peer did not take part in time; it may be busy or frozen, so trying again makes sense."""


class Speed(msgspec.Struct, frozen=True):
    """The best of the timed READs."""

    num_bytes: int
    num_pieces: int
    seconds: float
    memory: Literal["DRAM", "VRAM"]

    @property
    def piece_bytes(self) -> int:
        """Bytes of one piece."""
        return self.num_bytes // self.num_pieces

    @property
    def bytes_per_s(self) -> float:
        """What a request's READs can expect."""
        return self.num_bytes / max(self.seconds, 1e-9)

    @property
    def is_slow(self) -> bool:
        """Whether it took several times longer than the slowest healthy path does."""
        least_s = self.num_bytes / LEAST_BYTES_PER_S[self.memory] + self.num_pieces * PIECE_S
        return self.seconds > least_s + SLACK_S[self.memory]


def likely_cause(speed: Speed, environment: Mapping[str, str]) -> str:
    """What most often makes a path slow, as far as the environment tells."""
    tls = environment.get("UCX_TLS", "all")
    if speed.memory == "VRAM":
        if "expandable_segments:True" in environment.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            return "the KV pool lies in PyTorch's expandable segments; unset PYTORCH_CUDA_ALLOC_CONF"
        if tls != "all" and "cuda" not in tls:
            return f"UCX_TLS={tls} leaves out UCX's CUDA transports; add cuda_copy,cuda_ipc or unset it"
        return "UCX found no direct path between the two GPUs (no peer access, or no device set in its thread)"
    if tls != "all" and not any(name in tls for name in ("sm", "shm", "posix", "sysv", "cma")):
        return f"UCX_TLS={tls} leaves out shared memory; unset it"
    return "the two processes share no memory (other containers or hosts), or the machine is overloaded"


def prepare(region: RankRegion) -> None:
    """Fills the probe block of our own region; called once, before anybody connects."""
    if region.probe_block is not None:
        layout = region.layout
        heads = np.arange(layout.head_start, layout.head_stop)
        _Block(region).write(pattern(layout, heads, np.arange(layout.block_size)).reshape(-1))


def pattern(layout: KVLayout, heads: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> Bytes:
    """What slots hold in a source's probe block: (heads, layers, K and V, tokens, bytes of a row)."""
    row = layout.head_dim * ITEM_BYTES[layout.dtype]
    extents = (heads, np.arange(layout.num_layers), np.arange(2), tokens, np.arange(row))
    factors = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)  # xxHash's primes: odd, far apart
    mixed = np.zeros((), np.uint32)
    for axis, (extent, factor) in enumerate(zip(extents, factors, strict=True)):
        shape = [1] * 5
        shape[axis] = len(extent)
        mixed = mixed + ((extent.astype(np.uint64) + 1) * factor).astype(np.uint32).reshape(shape)
    return ((mixed ^ (mixed >> np.uint32(15))) * np.uint32(0x2C1B3C6D) >> np.uint32(24)).astype(np.uint8)


async def self_test(read: StartRead, own: RankRegion, peer: RankRegion, way: Route) -> Speed | None:
    """READs the peer's probe block into ours along `way`; None if one of the two has none.

    Raises `TransferError` when the bytes are not the expected ones, `ProbeTimeout` when none came.
    One at a time: all tests of a rank share its block.
    """
    if own.probe_block is None or peer.probe_block is None:
        return None
    small, large = sorted((way.source.block_size, way.target.block_size))
    first = large - small
    source = Side((peer.probe_block,), first if way.source.block_size == small else 0)
    target = Side((own.probe_block,), first if way.target.block_size == small else 0)
    pieces = plan(way, source, target, start=first, stop=large)
    block = _Block(own)
    block.write(np.zeros(block.num_bytes, np.uint8))
    await _read(read, peer, pieces)
    _compare(way, block.read(), source_token=first - source.first_token, target_token=first - target.first_token)
    speed = await _timed(read, own, peer, pieces)
    prepare(own)
    return speed


def _compare(way: Route, found: Bytes, *, source_token: int, target_token: int) -> None:
    """Raises `TransferError` naming the first slot that is not as the source wrote it."""
    layout, count = way.target, min(way.source.block_size, way.target.block_size)
    heads = np.arange(way.head_start, way.head_stop)
    shape = (layout.head_stop - layout.head_start, layout.num_layers, 2, layout.block_size, -1)
    slots = found.reshape(shape)[heads - layout.head_start][:, :, :, target_token : target_token + count]
    wrong = (slots != pattern(layout, heads, np.arange(source_token, source_token + count))).any(axis=-1)
    if wrong.any():
        head, layer, side, token = (int(place[0]) for place in np.nonzero(wrong))
        raise TransferError(
            f"the self-test read {int(wrong.sum())} of {wrong.size} slots wrongly, "
            f"first KV head {way.head_start + head}, layer {layer}, {'KV'[side]}, token {source_token + token}: "
            "both sides must lay out blocks alike"
        )


async def _timed(read: StartRead, own: RankRegion, peer: RankRegion, pieces: Pieces) -> Speed:
    times = max(1, min(TIMED_BYTES[own.memory] // pieces.num_bytes, MAX_TIMED_PIECES // pieces.count))
    many = _repeated(pieces, times)
    seconds = []
    for _ in range(TIMED_READS):
        result = await _read(read, peer, many)
        seconds.append((result.post_ms + result.wire_ms) / 1e3)
    return Speed(many.num_bytes, many.count, min(seconds), own.memory)


async def _read(read: StartRead, peer: RankRegion, pieces: Pieces) -> ReadResult:
    ended: asyncio.Future[ReadResult] = asyncio.get_running_loop().create_future()

    def end(result: ReadResult) -> None:
        if not ended.done():
            ended.set_result(result)

    read([(peer.agent, pieces)], end)
    try:
        result = await asyncio.wait_for(ended, READ_TIMEOUT_S)
    except TimeoutError:
        raise ProbeTimeout(f"the self-test's READ did not end within {READ_TIMEOUT_S:.0f} s") from None
    if result.error is not None:
        raise ProbeTimeout(f"the self-test's READ failed: {result.error}")
    return result


def _repeated(pieces: Pieces, times: int) -> Pieces:
    blocks = pieces.blocks
    return Pieces(
        np.tile(pieces.source, times),
        np.tile(pieces.target, times),
        np.tile(pieces.sizes, times),
        None if blocks is None else (np.tile(blocks[0], times), np.tile(blocks[1], times)),
    )


class _Block:
    """The bytes of a region's probe block, in host or device memory of this process."""

    def __init__(self, region: RankRegion) -> None:
        assert region.probe_block is not None
        self.num_bytes = block_bytes(region.layout)
        self._address = region.base + region.probe_block * self.num_bytes
        self._is_host = region.memory == "DRAM"
        self._device = region.device

    def write(self, values: Bytes) -> None:
        """Replaces all of it."""
        if self._is_host:
            ctypes.memmove(self._address, values.ctypes.data, self.num_bytes)
            return
        from components.transfer.device import DeviceBytes

        DeviceBytes(self._address, self.num_bytes, self._device).write(values)

    def read(self) -> Bytes:
        """A copy of all of it."""
        if self._is_host:
            values = np.empty(self.num_bytes, np.uint8)
            ctypes.memmove(values.ctypes.data, self._address, self.num_bytes)
            return values
        from components.transfer.device import DeviceBytes

        return DeviceBytes(self._address, self.num_bytes, self._device).read()
