"""How many KV blocks fit: into the memory that is set, or into a share of what the device has free."""

from __future__ import annotations

import psutil
import torch

from components.kv.layout import block_bytes
from components.messages import KVLayout
from components.options import WorkerOptions
from graph import LaunchError

_MIB = 1 << 20
_CPU_POOL_BYTES = 2 << 30
_CPU_POOL_SHARE = 0.25  # of the memory that is free at start


def num_pool_blocks(
    options: WorkerOptions,
    layout: KVLayout,
    device: torch.device,
    *,
    gpu_share: float = 1.0,
    reserved_bytes: int = 0,
) -> int:
    """Blocks in the pool: as set, else what fits into the memory set, else a share of what is free.

    Of a GPU's memory only `gpu_share` is ours, and `reserved_bytes` of that are for others than the pool.
    Called once the weights are loaded.
    """
    if options.num_blocks is not None:
        num_blocks = options.num_blocks
    elif options.kv_memory_mb is not None:
        num_blocks = options.kv_memory_mb * _MIB // block_bytes(layout)
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        room = room_on_gpu(free, total, torch.cuda.memory_reserved(device), gpu_share)
        num_blocks = int((room - reserved_bytes) * options.gpu_memory_utilization) // block_bytes(layout)
    else:
        num_bytes = min(_CPU_POOL_BYTES, psutil.virtual_memory().available * _CPU_POOL_SHARE)
        num_blocks = int(num_bytes) // block_bytes(layout)
    if num_blocks < 1:
        raise LaunchError(f"the KV pool has no room for one block of {block_bytes(layout)} bytes; raise kv_memory_mb")
    return num_blocks


def room_on_gpu(free_bytes: int, total_bytes: int, own_bytes: int, gpu_share: float) -> int:
    """What this process may still take. Who shares a GPU goes by its share of the whole, not by what is free:
    the others may not have loaded yet."""
    if gpu_share >= 1:
        return free_bytes
    return max(0, min(free_bytes, int(total_bytes * gpu_share) - own_bytes))
