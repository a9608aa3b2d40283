"""The collectives of a tensor-parallel replica, and the only file that knows torch.distributed.

They carry tensors alone; what to run is told over links. gloo on the CPU, NCCL on GPUs. CUDA graphs
replay the collectives they captured, and NCCL must not mix those with others on one communicator:
inside `capturing()` everything goes over a communicator of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=5)
"""Bound of one collective: ranks load at different speeds, and a dead one ends the replica at once anyhow."""

ONE_HOST_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Their sockets know no authentication; a replica's ranks share a host."""


class Ranks:
    """This process's place among its replica's ranks. One per process."""

    def __init__(self, rank: int, size: int, *, store: str, device: torch.device) -> None:
        """Meets the other ranks; `store` is a file that all of them can reach and that no earlier start used."""
        for name, value in ONE_HOST_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.rank = rank
        self.size = size
        self.device = device
        is_cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
            device_id=device if is_cuda else None,
        )
        self._eager = dist.group.WORLD
        self._captured = dist.new_group() if is_cuda else self._eager
        self._group = self._eager

    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, the same bits on every rank; may reuse `partial`."""
        if partial.device.type == "cpu" and partial.dtype in (torch.bfloat16, torch.float16):
            wide = partial.float()
            dist.all_reduce(wide, group=self._group)
            return wide.to(partial.dtype)
        dist.all_reduce(partial, group=self._group)
        return partial

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        smallest = torch.tensor([number], device=self.device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self._eager)
        return int(smallest.item())

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Collectives inside go over the communicator of CUDA graphs; used around their warm-up and capture."""
        self._group = self._captured
        try:
            yield
        finally:
            self._group = self._eager

    def close(self) -> None:
        """Leaves; the other ranks are leaving too."""
        if dist.is_initialized():
            dist.destroy_process_group()
