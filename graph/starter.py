"""How a replica's process is started: what it is told, and its share of the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from socket import socket

from graph.component import Peer
from graph.declare import GraphView
from graph.launcher import LocalLauncher, LocalProcess
from graph.loader import component_reference
from graph.managed import Managed
from graph.resources import GpuPool, Machine, cores_for, thread_environment
from graph.rundir import RunDir
from graph.spec import ReplicaSpec, plain_options, targets_of


class Starter:
    """Starts the processes of one graph's replicas. `desired`, which the supervisor changes, divides the cores."""

    def __init__(
        self,
        view: GraphView,
        run_dir: RunDir,
        *,
        launcher: LocalLauncher,
        machine: Machine,
        listeners: Mapping[str, socket],
        environment: Mapping[str, str],
        desired: Mapping[str, int],
        supervisor: Peer,
    ) -> None:
        self.gpus = GpuPool(machine.gpus)
        self._view = view
        self._run_dir = run_dir
        self._launcher = launcher
        self._num_cores = machine.num_cores
        self._listeners = listeners
        self._environment = environment
        self._desired = desired
        self._supervisor = supervisor

    def start(self, managed: Managed, boot: str, path: Path) -> LocalProcess:
        """Starts a process of the replica that listens at `path`; it keeps its GPUs until they are given back.

        Raises `LaunchError` where there is nothing left to start it on, or the system refuses.
        """
        node = self._view.nodes[managed.node]
        num_cores = cores_for(node, self._view, self._desired, self._num_cores)
        spec = ReplicaSpec(
            id=managed.id,
            boot=boot,
            graph=self._run_dir.name,
            component=component_reference(node.component, self._view.file),
            options=plain_options(node),
            run_dir=str(self._run_dir.path),
            address=f"ipc://{path}",
            supervisor=self._supervisor,
            targets=targets_of(self._view, node.name),
            num_cores=num_cores,
            tp=node.tp,
            gpu_share=min(1.0, node.gpus) or 1.0,
            parent_pid=os.getpid(),
        )
        environment = {"UCX_NET_DEVICES": "lo", **self._environment, **thread_environment(max(1, num_cores // node.tp))}
        gpus = self.gpus.take(managed.id, node.gpus, node.tp)
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            managed.gpus = gpus
        return self._launcher.start(
            spec, environment=environment, log=managed.log_file, listener=self._listeners.get(node.name)
        )
