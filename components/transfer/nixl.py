"""The NIXL transfer agent, and the only file that knows NIXL. Loading NIXL loads torch: worker processes only.

What shapes it: a name is new at every start (a restarted peer under an old name is refused); one
region is registered; descriptors of whole blocks are prepared once per peer and picked by index;
NIXL's own progress thread spins on a whole core, so ours drives it; releasing a handle in flight
does not stop its bytes, so a handle is released only after it ended.
"""

from __future__ import annotations

import logging
import os
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np

from components.messages import RankRegion
from components.transfer.agent import LocalRegion, State, TransferError, rank_region
from components.transfer.plan import Pieces, Route, Slots

WARM_UP_BYTES = 64
"""Read from every new peer at once: a first READ pays tens of milliseconds for the connection."""

ONE_HOST_ENVIRONMENT = {"UCX_NET_DEVICES": "lo"}
"""NIXL's sockets know no authentication: on one host they stay on loopback."""

logger = logging.getLogger(__name__)


class _Peer(msgspec.Struct, frozen=True):
    """A connected peer: prepared descriptors of its blocks and of ours, if whole blocks move."""

    region: RankRegion
    local: Any = None
    remote: Any = None


class NixlAgent:
    """One NIXL agent over one registered region."""

    def __init__(self, region: LocalRegion, *, transport: str = "UCX") -> None:
        """Loads NIXL and registers `region`; raises `TransferError` if either cannot be done."""
        for name, value in ONE_HOST_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if region.memory == "VRAM":
            from components.transfer.device import bind_thread

            bind_thread(region.device)
        api = _load()
        self._errors = _errors(api)
        self.name = f"headrace-{uuid4().hex}"
        self._agent = _make_agent(api, self.name, transport, self._errors)
        self._scratch = np.zeros(WARM_UP_BYTES, np.uint8)
        try:
            self._registered = [
                self._register(region.base, region.num_bytes, region.memory, region.device),
                self._register(self._scratch.ctypes.data, WARM_UP_BYTES, "DRAM", 0),
            ]
            metadata = self._agent.get_agent_metadata()
        except self._errors as error:
            raise TransferError(f"NIXL cannot register {region.num_bytes} bytes of {region.memory}: {error}") from error
        self.region = rank_region(region, agent=self.name, metadata=metadata)
        self._peers: dict[str, _Peer] = {}
        self._leaving: dict[str, _Peer] = {}
        self._warming: list[int] = []
        self._handles: dict[int, tuple[str, Any]] = {}
        self._next_handle = 1

    def connect(self, peer: RankRegion, way: Route) -> None:
        try:
            name = self._agent.add_remote_agent(peer.metadata)
            name = name.decode() if isinstance(name, bytes) else name
            if name != peer.agent:
                raise TransferError(f"metadata of NIXL agent {peer.agent!r} describes {name!r}")
            self._peers[peer.agent] = self._prepared(peer, way)
            self._warm_up(peer)
        except self._errors as error:
            self._peers.pop(peer.agent, None)
            raise TransferError(f"NIXL cannot connect to agent {peer.agent!r}: {_say(error)}") from error

    def disconnect(self, agent: str) -> None:
        peer = self._peers.pop(agent, None)
        if peer is not None:
            self._leaving[agent] = peer
            self._forget_if_quiet(agent)

    def _forget_if_quiet(self, agent: str) -> None:
        """Frees a disconnected peer's descriptors once none of its READs is in flight."""
        if agent not in self._leaving or any(name == agent for name, _ in self._handles.values()):
            return
        peer = self._leaving.pop(agent)
        try:
            for prepared in (peer.local, peer.remote):
                if prepared is not None:
                    prepared.release()
            self._agent.remove_remote_agent(agent)
        except self._errors as error:
            logger.info("NIXL agent %s is gone: %s", agent, _say(error))

    def post(self, agent: str, pieces: Pieces) -> int:
        peer = self._peers.get(agent)
        if peer is None:
            raise TransferError(f"agent {agent!r} is not connected")
        try:
            handle = self._prepare(peer, pieces)
        except self._errors as error:
            raise TransferError(f"READ from {agent!r} could not be prepared: {_say(error)}") from error
        return self._start(agent, handle)

    def poll(self, handle: int) -> State:
        agent, transfer = self._handles[handle]
        try:
            state = self._agent.check_xfer_state(transfer)
        except self._errors as error:
            logger.warning("READ from %s failed: %s", agent, _say(error))
            state = "ERR"
        if state == "PROC":
            return "pending"
        del self._handles[handle]
        self._release(transfer)
        self._forget_if_quiet(agent)
        return "done" if state == "DONE" else "failed"

    def progress(self) -> None:
        self._agent.get_new_notifs()
        for handle in list(self._warming):
            if self.poll(handle) != "pending":
                self._warming.remove(handle)

    def close(self) -> None:
        for _, transfer in self._handles.values():
            self._release(transfer)
        self._handles.clear()
        for agent in list(self._peers):
            self.disconnect(agent)
        for descriptors in self._registered:
            self._agent.deregister_memory(descriptors)
        self._registered.clear()

    def _register(self, address: int, num_bytes: int, memory: str, device: int) -> Any:
        return self._agent.register_memory([(address, num_bytes, device, "")], mem_type=memory)

    def _prepared(self, peer: RankRegion, way: Route) -> _Peer:
        if way.source_slots is None or way.target_slots is None:
            return _Peer(peer)
        ours = _strided(self.region, way.target_slots)
        theirs = _strided(peer, way.source_slots)
        local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, self.region.memory)
        return _Peer(peer, local, self._agent.prep_xfer_dlist(peer.agent, theirs, peer.memory))

    def _warm_up(self, peer: RankRegion) -> None:
        """Reads a few bytes of the peer's first block into a scratch of ours."""
        here = self._agent.get_xfer_descs([(self._scratch.ctypes.data, WARM_UP_BYTES, 0)], "DRAM")
        there = self._agent.get_xfer_descs([(peer.base, WARM_UP_BYTES, peer.device)], peer.memory)
        transfer = self._agent.initialize_xfer("READ", here, there, peer.agent)
        self._warming.append(self._start(peer.agent, transfer))

    def _start(self, agent: str, transfer: Any) -> int:
        """Posts a prepared transfer; from here on it has a handle, whatever becomes of it."""
        try:
            self._agent.transfer(transfer)
        except self._errors as error:  # some pieces may be on their way: `poll` tells when it is over
            logger.warning("READ from %s could not be posted: %s", agent, _say(error))
        handle = self._next_handle
        self._next_handle += 1
        self._handles[handle] = (agent, transfer)
        return handle

    def _prepare(self, peer: _Peer, pieces: Pieces) -> Any:
        if pieces.blocks is not None and peer.remote is not None:
            theirs, ours = pieces.blocks
            return self._agent.make_prepped_xfer("READ", peer.local, ours, peer.remote, theirs)
        local = _rows(self.region, pieces.target, pieces.sizes)
        remote = _rows(peer.region, pieces.source, pieces.sizes)
        return self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(local, self.region.memory),
            self._agent.get_xfer_descs(remote, peer.region.memory),
            peer.region.agent,
        )

    def _release(self, handle: Any) -> None:
        try:
            handle.release()
        except self._errors as error:
            logger.warning("a NIXL handle could not be released: %s", _say(error))


def _load() -> Any:
    """NIXL's Python API; raises `TransferError` saying what to install."""
    try:
        from nixl import _api
    except ImportError as error:
        raise TransferError(
            f"cache_transceiver_config.backend is 'NIXL', but NIXL cannot be loaded ({error}); "
            "install it with `pip install nixl`"
        ) from error
    logging.getLogger("nixl").setLevel(logging.WARNING)
    _api.logger.setLevel(logging.WARNING)
    return _api


def _errors(api: Any) -> tuple[type[Exception], ...]:
    """NIXL's exception classes: they share no base of their own."""
    bindings = api.nixlBind
    return tuple(
        getattr(bindings, name) for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")
    )


def _make_agent(api: Any, name: str, transport: str, errors: tuple[type[Exception], ...]) -> Any:
    config = api.nixl_agent_config(enable_prog_thread=False, backends=[transport])
    try:
        agent = api.nixl_agent(name, config)
    except errors + (RuntimeError,) as error:  # noqa: RUF005 - mypy cannot see through a starred tuple
        raise TransferError(
            f"NIXL cannot start its transport {transport!r} (option nixl_backend; is NIXL_PLUGIN_DIR right?): {error}"
        ) from error
    if transport not in agent.backends:
        known = ", ".join(agent.plugin_list) or "none; is NIXL_PLUGIN_DIR right?"
        raise TransferError(f"option nixl_backend: NIXL has no transport {transport!r}; it has {known}")
    return agent


def _strided(region: RankRegion, slots: Slots) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """One row (address, length, device, stride, count) for all blocks of a region."""
    row = (region.base + slots.offset, slots.length, region.device, slots.stride, region.num_blocks)
    return np.array([row], np.uint64)


def _rows(region: RankRegion, offsets: Any, sizes: Any) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Rows (address, length, device), one per piece."""
    rows = np.empty((len(sizes), 3), np.uint64)
    rows[:, 0] = offsets + region.base
    rows[:, 1] = sizes
    rows[:, 2] = region.device
    return rows


def _say(error: Exception) -> str:
    return f"{type(error).__name__} {error}"
