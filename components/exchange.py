"""What both ends of a KV transfer have: a driver over the engine's pool, and what to tell the other end.

Built inside the worker process once the engine stands; `None` where no transfer back end is set.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from components.engine.runner import Runner
from components.messages import KVHandshake
from components.options import DisaggOptions
from components.serving import Serving
from components.transfer.agent import LocalRegion, TransferAgent, TransferError
from components.transfer.driver import TransferDriver
from components.transfer.group import DriverGroup
from components.transfer.probe import prepare
from graph import Context, LaunchError


class Exchange(msgspec.Struct, frozen=True):
    """One worker's end: the drivers of its ranks' agents, and its side of the handshake."""

    drivers: DriverGroup
    handshake: KVHandshake


def make_agent(options: DisaggOptions, region: LocalRegion) -> TransferAgent:
    """The agent that the options name. Called on the driver's thread; raises `TransferError`."""
    if options.cache_transceiver_config.backend == "memory":
        from components.transfer.memory import MemoryAgent

        return MemoryAgent(region)
    from components.transfer.nixl import NixlAgent  # NIXL's Python API imports torch

    return NixlAgent(region, transport=options.nixl_backend)


async def open_exchange(
    options: DisaggOptions, context: Context, serving: Serving, make_agent: Callable[[LocalRegion], TransferAgent]
) -> Exchange | None:
    """Registers the engine's pool with the back end; raises `LaunchError` naming the setting if it cannot."""
    backend = options.cache_transceiver_config.backend
    if backend is None:
        return None
    context.progress(f"registering KV memory with {backend}")
    region = region_of(serving.engine.runner)
    driver = TransferDriver(lambda: make_agent(region))
    try:
        registered = await driver.start()
    except TransferError as error:
        raise LaunchError(f"cache_transceiver_config.backend={backend}: {error}") from error
    context.spawn(driver.run(), name="transfer")
    carrier = backend if backend == "memory" else options.nixl_backend
    prepare(registered)
    drivers = DriverGroup([driver, *serving.team.drivers] if serving.team else [driver])
    regions = (registered, *serving.team.regions) if serving.team else (registered,)
    return Exchange(drivers, KVHandshake(context.id, context.boot, carrier, regions))


def region_of(runner: Runner, rank: int = 0) -> LocalRegion:
    """A runner's pool as a transfer back end registers it."""
    region = runner.region
    return LocalRegion(
        layout=runner.layout,
        base=region.address,
        num_blocks=region.num_blocks,
        block_bytes=region.block_bytes,
        memory="VRAM" if region.memory == "VRAM" else "DRAM",
        device=region.device,
        rank=rank,
        probe_block=region.num_blocks - 1,
    )
