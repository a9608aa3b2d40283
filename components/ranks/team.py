"""Rank 0's side of a tensor-parallel replica: starts the other ranks, tells them what to run, and watches them.

starting   the processes run; they load their part of the model while rank 0 loads its own
ready      all have answered `RankJoin`: steps and transfers may be told
ended      one of them died, or the replica stops: the replica ends, and all of them with it
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from components.engine.parallel import Place
from components.engine.runner import Batch
from components.messages import RankRegion
from components.options import DisaggOptions, WorkerOptions
from components.ranks.driver import RemoteDriver
from components.ranks.messages import NODE, PORT, RankJoin, RankReady, RankSpec, called_port, step_of
from graph import Client, Context, LaunchError, LinkError, Message, Peer, PeerLost
from graph.link import Links, ZeroMQ

READY_TIMEOUT_S = 900.0
STEP_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class Team:
    """Ranks 1 and up of this replica. All but `run` belongs to the event loop's thread."""

    def __init__(self, context: Context, size: int) -> None:
        self.place = Place(0, size, str(context.run_dir / f"{_plain(context.id)}-{context.boot}.ranks"))
        self.drivers: tuple[RemoteDriver, ...] = ()
        self.regions: tuple[RankRegion, ...] = ()
        self._context = context
        self._links = Links(context.id, context.boot, transport=ZeroMQ())
        self._client: Client = self._links.client(called_port(), {NODE: PORT})
        self._peers: list[str] = []
        self._processes: list[asyncio.subprocess.Process] = []
        self._failed: asyncio.Future[None] = context.loop.create_future()

    async def start(self, options: WorkerOptions) -> None:
        """Starts the processes; returns at once."""
        context = self._context
        peers = []
        for rank in range(1, self.place.size):
            address = f"ipc://{context.run_dir / f'{_plain(context.id)}-{rank}-{context.boot}.sock'}"
            peers.append(Peer(f"{NODE}/{rank}", context.boot, address))
            await self._spawn(rank, address, options)
        self._links.set_peers(peers)
        self._peers = [peer.id for peer in peers]
        self.drivers = tuple(RemoteDriver(self._client, peer.id) for peer in peers)
        context.spawn(self._watch(), name="ranks")

    async def join(self) -> None:
        """Returns when all ranks are ready; raises the `LinkError` of one that is not."""
        calls = [self._client.call(RankJoin(), peer=peer, timeout_s=READY_TIMEOUT_S) for peer in self._peers]
        answers: list[RankReady] = await asyncio.gather(*calls)
        self.regions = tuple(answer.region for answer in answers if answer.region is not None)

    def run(self, batch: Batch) -> None:
        """Lets all ranks run a step; called on the engine's thread."""
        self._context.loop.call_soon_threadsafe(self._tell, step_of(batch))

    async def close(self) -> None:
        """Ends the processes; they are dead and reaped when it returns."""
        if not self._failed.done():
            self._failed.cancel()
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()  # its sign to end
        try:
            await asyncio.wait_for(self._all_dead(), STOP_TIMEOUT_S)
        except TimeoutError:
            for process in self._processes:
                if process.returncode is None:
                    process.kill()
            await self._all_dead()
        await self._links.close()

    async def _spawn(self, rank: int, address: str, options: WorkerOptions) -> None:
        context, place = self._context, self.place
        spec = RankSpec(
            title=f"headrace: {context.graph} {context.id} rank {rank}",
            boot=context.boot,
            rank=rank,
            size=place.size,
            store=place.store,
            address=address,
            options=_shared_options(options),
            num_threads=max(1, context.num_cores // place.size),
            gpu_share=context.gpu_share,
            parent_pid=os.getpid(),
        )
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "components.ranks.process", stdin=asyncio.subprocess.PIPE
            )
        except OSError as error:
            raise LaunchError(f"cannot start rank {rank} of {context.id}: {error}") from error
        self._processes.append(process)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(spec) + b"\n")

    def _tell(self, request: Message) -> None:
        for peer in self._peers:
            self._client.open(
                request, peer=peer, timeout_s=STEP_TIMEOUT_S, on_item=lambda item: None, on_end=self._on_end
            )

    def _on_end(self, error: LinkError | None) -> None:
        """A rank that failed a step has other KV than rank 0: nothing can be told to it any more."""
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _watch(self) -> None:
        """Raises when a rank has died or failed a step, which ends the replica."""
        waits: Sequence[asyncio.Future[Any]] = [
            self._failed,
            *(asyncio.ensure_future(process.wait()) for process in self._processes),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits[1:]:
                wait.cancel()
        if self._failed.cancelled():
            return
        if self._failed.done():
            self._failed.result()
        codes = [process.returncode for process in self._processes]
        raise PeerLost(f"a rank of {self._context.id} ended (exit statuses of ranks 1 and up: {codes})")

    async def _all_dead(self) -> None:
        await asyncio.gather(*(process.wait() for process in self._processes))


def _plain(id: str) -> str:
    return id.replace("/", "-")


def _shared_options(options: WorkerOptions) -> dict[str, Any]:
    """What a rank needs of any worker's options."""
    plain = msgspec.to_builtins(options)
    return {name: plain[name] for name in DisaggOptions.__struct_fields__ if name in plain}
