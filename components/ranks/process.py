"""The process of a further rank: holds its part of the model and of the KV, and does as rank 0 says.

told      the spec arrives on standard input
loading   its part of the model, together with the other ranks; then its KV pool is registered
ready     `RankJoin` is answered; steps are run in the order in which they come, READs beside them
ended     with rank 0, at the end of standard input; a step that fails is told, and ends them all
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from components.engine.build import make_runner
from components.engine.parallel import Place
from components.engine.runner import Runner
from components.exchange import make_agent, region_of
from components.messages import RankRegion
from components.options import DisaggOptions
from components.ranks.driver import TIMED_OUT
from components.ranks.messages import (
    NODE,
    RankAlive,
    RankDone,
    RankJoin,
    RankLink,
    RankLinked,
    RankRead,
    RankReadEnded,
    RankReady,
    RankSpec,
    RankStep,
    RankUnlink,
    RankWatch,
    batch_of,
    part_of,
    route_of,
    served_port,
)
from components.transfer.agent import TransferError
from components.transfer.driver import TransferDriver
from components.transfer.probe import ProbeTimeout, prepare
from graph import PeerFault, Refused, Stream
from graph.child import die_with_parent, end_with_pipe, log_failure, read_line, set_title
from graph.link import Links, ZeroMQ

logger = logging.getLogger(__name__)


class Rank:
    """One rank. Everything but loading and steps happens on the event loop."""

    def __init__(self, spec: RankSpec) -> None:
        self._options = msgspec.convert(spec.options, DisaggOptions)
        self._place = Place(spec.rank, spec.size, spec.store)
        self._num_threads = spec.num_threads
        self._gpu_share = spec.gpu_share
        self._engine = ThreadPoolExecutor(1, "engine")
        self._runner: Runner | None = None
        self._driver: TransferDriver | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def load(self) -> RankRegion | None:
        """Loads this rank's part; returns where its KV lies, if it may be transferred."""
        loop = asyncio.get_running_loop()
        self._runner = await loop.run_in_executor(self._engine, self._make_runner)
        if self._options.cache_transceiver_config.backend is None:
            return None
        region = region_of(self._runner, self._place.rank)
        self._driver = TransferDriver(lambda: make_agent(self._options, region))
        registered = await self._driver.start()
        prepare(registered)
        return registered

    def handle(self, request: Any, stream: Stream) -> None:
        """Serves rank 0; `RankJoin` is answered by whoever awaits `load`."""
        match request:
            case RankStep():
                self._run(request, stream)
            case RankLink():
                self._spawn(self._link(request, stream))
            case RankRead():
                parts = [part_of(part) for part in request.parts]
                self._transfers.read(parts, lambda result: stream.end(RankReadEnded(result)))
            case RankUnlink():
                self._transfers.disconnect(request.agent)
                stream.end(RankDone())
            case RankWatch():
                self._watch(request)
                stream.end(RankDone())
            case RankAlive():
                self._spawn(self._live(stream))

    @property
    def _transfers(self) -> TransferDriver:
        if self._driver is None:
            raise Refused("this rank has no transfer back end", code="no_backend")
        return self._driver

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _make_runner(self) -> Runner:
        return make_runner(
            self._options,
            num_threads=self._num_threads,
            on_progress=logger.info,
            place=self._place,
            gpu_share=self._gpu_share,
        )

    def _run(self, step: RankStep, stream: Stream) -> None:
        assert self._runner is not None
        loop, runner, batch = asyncio.get_running_loop(), self._runner, batch_of(step)

        def run() -> None:
            try:
                runner.execute(batch)
            except Exception as error:  # whatever it was, rank 0 must know that this rank is behind
                logger.exception("a step failed")
                loop.call_soon_threadsafe(stream.fail, PeerFault(f"a step failed: {type(error).__name__}: {error}"))
            else:
                loop.call_soon_threadsafe(stream.end, RankDone())

        self._engine.submit(run)

    async def _link(self, request: RankLink, stream: Stream) -> None:
        try:
            speed = await self._transfers.link(request.peer, route_of(request))
        except TransferError as error:
            code = TIMED_OUT if isinstance(error, ProbeTimeout) else "transfer_error"
            stream.fail(Refused(str(error), code=code))
        else:
            stream.end(RankLinked(speed))

    async def _live(self, stream: Stream) -> None:
        await self._transfers.alive()
        stream.end(RankDone())

    def _watch(self, request: RankWatch) -> None:
        if request.seconds is not None:
            self._transfers.watch_for(request.seconds)
        else:
            self._transfers.watch(request.is_on)


async def _serve(spec: RankSpec) -> None:
    end_with_pipe(asyncio.get_running_loop())
    links = Links(f"{NODE}/{spec.rank}", spec.boot, transport=ZeroMQ(), listen=spec.address)
    rank = Rank(spec)
    joined: list[Stream] = []
    ready: list[RankReady] = []

    def handle(request: Any, stream: Stream) -> None:
        if not isinstance(request, RankJoin):
            rank.handle(request, stream)
        elif ready:
            stream.end(ready[0])
        else:
            joined.append(stream)

    links.serve(served_port(), handle)
    ready.append(RankReady(await rank.load()))
    for stream in joined:
        stream.end(ready[0])
    await asyncio.Event().wait()


def main() -> int:
    """Entry point of `python -m components.ranks.process`."""
    die_with_parent()
    spec = msgspec.json.decode(read_line(), type=RankSpec)
    if os.getppid() != spec.parent_pid:  # it died before the kernel was asked to tell
        return 1
    set_title(spec.title)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s rank {spec.rank} %(name)s: %(message)s")
    try:
        asyncio.run(_serve(spec))
    except Exception as error:  # rank 0 sees this process end, and its log is rank 0's
        log_failure(logger, f"rank {spec.rank}", error)
    return 1


if __name__ == "__main__":
    sys.exit(main())
