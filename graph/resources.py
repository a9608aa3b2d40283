"""Resources: how a machine's cores and GPUs are divided among replicas, and how many files a process may open."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

import msgspec

from graph.declare import GraphView, NodeView
from graph.errors import LaunchError
from graph.words import counted

FEW_FILES = 8_192
"""Open files below which a busy ingress runs out of them: one for each connection."""

_GPU_NAME = re.compile(r"\d+|GPU-[0-9a-fA-F-]+|MIG-[0-9a-zA-Z/-]+")
"""An entry of `CUDA_VISIBLE_DEVICES`: an index, or a UUID, which may be cut short."""


def raise_file_limit() -> int:
    """Raises this process's limit of open files as far as it may; returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Machine(msgspec.Struct, frozen=True):
    """What this process may use: CPU cores, and GPUs as `CUDA_VISIBLE_DEVICES` names them."""

    num_cores: int
    gpus: tuple[str, ...] = ()


def this_machine(environment: Mapping[str, str], *, devices: Path = Path("/dev")) -> Machine:
    """The machine as the launcher finds it; GPUs are those made visible, else as many as have a device file."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:  # CUDA counts from 0, also where a container shows /dev/nvidia3 alone
        gpus = tuple(str(i) for i, _ in enumerate(devices.glob("nvidia[0-9]*")))
    else:
        gpus = visible_gpus(visible)
    return Machine(len(os.sched_getaffinity(0)), gpus)


def visible_gpus(value: str) -> tuple[str, ...]:
    """The GPUs that a value of `CUDA_VISIBLE_DEVICES` leaves visible.

    CUDA's rules: the first entry that names no GPU ("-1", "NoDevFiles", nothing at all) hides itself and all
    behind it, and a list that names a GPU twice hides them all.
    """
    names = tuple(takewhile(_GPU_NAME.fullmatch, (entry.strip() for entry in value.split(","))))
    return names if len(set(names)) == len(names) else ()


def cores_for(node: NodeView, view: GraphView, desired: Mapping[str, int], num_cores: int) -> int:
    """CPU cores of one replica of `node`, when `desired` replicas of each node run.

    A node that states its cores gets them. Components that compute all the time share what is
    left, rank by rank; all others get one, because they wait most of the time.
    """
    if node.cores is not None:
        return max(1, int(node.cores))
    if not node.component.compute:
        return 1
    stated = sum((n.cores or 0) * desired[n.name] for n in view.nodes.values())
    sharing = sum(desired[n.name] * n.tp for n in view.nodes.values() if n.cores is None and n.component.compute)
    return node.tp * max(1, int((num_cores - stated) // max(1, sharing)))


class GpuPool:
    """Which replica holds which GPU. Shares below one may sit together on a GPU; whole ones do not."""

    def __init__(self, gpus: tuple[str, ...]) -> None:
        self._free = dict.fromkeys(gpus, 1.0)
        self._held: dict[str, dict[str, float]] = {}

    @property
    def num_gpus(self) -> int:
        """GPUs on this machine, taken or not."""
        return len(self._free)

    def take(self, replica: str, amount: float, ranks: int = 1) -> tuple[str, ...] | None:
        """The GPUs of `replica`, `amount` for each rank; the same ones when asked again. No two ranks share a GPU.

        None where the machine has no GPU at all. Raises `LaunchError` when there is not enough left.
        """
        if not self._free:
            return None
        if replica not in self._held:
            self._held[replica] = self._choose(amount, ranks)
            for gpu, share in self._held[replica].items():
                self._free[gpu] -= share
        return tuple(self._held[replica])

    def give_back(self, replica: str) -> None:
        """Called when `replica` is dead and will not start again. Idempotent."""
        for gpu, share in self._held.pop(replica, {}).items():
            self._free[gpu] += share

    def _choose(self, amount: float, ranks: int) -> dict[str, float]:
        share, count = min(amount, 1.0), max(1, int(amount)) * ranks if amount else 0
        fitting = [gpu for gpu, free in self._free.items() if share <= free + 1e-6]
        fullest = sorted(fitting, key=lambda gpu: self._free[gpu])[:count]
        if len(fullest) < count:
            each = counted(amount, "GPU") + ("" if ranks == 1 else f" for each of {ranks} ranks")
            left = ", ".join(f"{gpu}: {free:g}" for gpu, free in self._free.items())
            raise LaunchError(f"{each} asked for, but of {self.num_gpus} there is left {left}; use fewer replicas")
        return {gpu: share for gpu in self._free if gpu in fullest}


def thread_environment(num_cores: int) -> dict[str, str]:
    """Environment of a replica that may use `num_cores`: as many threads, and none that spins while it waits."""
    threads = str(num_cores)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "RAYON_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "GOMP_SPINCOUNT": "0",
    }
