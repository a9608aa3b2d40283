"""Where a sequence goes: asks the router, and does without it when it must.

The router's stream stays open while the sequence is generated: its life is the placement's. No
router, a dead one, a slow one, or one that names a worker unknown here: the least busy worker.
A router that says that all workers are full is waited for; what it refuses then is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from components.kv.hashing import chain_hashes, root_hash
from components.messages import Explanation, Placement, PlacementQueued, PlacementRequest
from frontends.balance import PeerPool
from graph import Call, Client, LinkError, NoPeer, Overloaded, Refused

ROUTER_TIMEOUT_S = 1.0
ROUTER_REST_S = 5.0
LABEL_WAIT_S = 3.0
"""How long a label that a lost processor held may take to become free."""

_LABEL_RETRY_S = 0.05
_WHOLE_LIFE_S = 30 * 24 * 3600.0  # the router answers once; the stream then lives as long as the request


class Placer:
    """Chooses workers for one processor."""

    def __init__(self, router: Client, workers: Client, *, hash_unit: int) -> None:
        self._router = router
        self._routers = PeerPool(router)
        self._workers = workers
        self._hash_unit = hash_unit
        self._rest_until = 0.0  # a router that did not answer is not asked for a while
        self.pool = PeerPool(workers)

    def hashes(self, tokens: bytes, cache_salt: str | None) -> bytes:
        """The block hashes the router wants to see; nothing without a router."""
        if not self._router.is_linked or self._hash_unit <= 0:
            return b""
        return b"".join(chain_hashes(tokens, self._hash_unit, parent=root_hash(cache_salt)))

    def predicted_tokens(self, placement: Placement, num_tokens: int) -> int:
        """How many of the prompt's tokens nobody will compute, if the router is right: blocks, never the last one."""
        blocks = max(placement.overlap_blocks, placement.prefill_overlap_blocks)
        return min(blocks, (num_tokens - 1) // max(1, self._hash_unit)) * self._hash_unit

    @asynccontextmanager
    async def place(
        self, request: PlacementRequest, *, failed: Collection[str], wait_s: float, is_takeover: bool = False
    ) -> AsyncIterator[Placement]:
        """A placement that holds while the block runs. `failed` are boot ids of workers that failed the request.

        Raises `Refused` if the router declines, `Overloaded` if it sheds the request, `NoPeer` if no
        worker turns up within `wait_s`. The label of a taken-over request may be held a moment longer
        for the processor that was lost.
        """
        call, placement = await self._ask_patiently(request, LABEL_WAIT_S if is_takeover else 0.0)
        try:
            if placement is None or placement.worker not in self._workers.peers:
                peer = await self.pool.wait_least_busy(wait_s, exclude=failed)
                label = request.disagg_request_id or 0
                placement = Placement(peer.id, disagg_request_id=label, reason="no router")
            with self.pool.stream(placement.worker):
                yield placement
        finally:
            if call is not None:
                call.cancel()

    async def explain(self, request: PlacementRequest) -> Explanation:
        """How the router would place a request now. Raises `NoPeer` without a router that explains."""
        router = self._routers.least_busy()
        if router is None:
            raise NoPeer("no router is ready; see graph status", retry_after_s=1.0)
        answer = _Answer(asyncio.get_running_loop())
        call = self._router.open(
            request, peer=router.id, timeout_s=ROUTER_TIMEOUT_S, on_item=answer.on_item, on_end=answer.on_end
        )
        try:
            told = await answer.wait(ROUTER_TIMEOUT_S)
        except TimeoutError:
            raise NoPeer(f"{router.id} does not answer", retry_after_s=1.0) from None
        finally:
            call.cancel()
        if not isinstance(told, Explanation):
            raise Refused(f"{router.id} does not explain its placements", code="not_explained")
        return told

    async def _ask_patiently(
        self, request: PlacementRequest, label_wait_s: float
    ) -> tuple[Call | None, Placement | None]:
        """As `_ask`, but asks again for so long while the label is in use."""
        deadline = time.monotonic() + label_wait_s
        while True:
            try:
                return await self._ask(request)
            except Refused as refused:
                if refused.code != "conflict" or time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_LABEL_RETRY_S)

    async def _ask(self, request: PlacementRequest) -> tuple[Call | None, Placement | None]:
        """The router's answer with the call that keeps it; nothing if there is no answer."""
        loop = asyncio.get_running_loop()
        router = self._routers.least_busy()
        if router is None or loop.time() < self._rest_until:
            return None, None
        answer = _Answer(loop)
        call: Call | None = None
        placement: Placement | None = None
        try:
            call = self._router.open(
                request, peer=router.id, timeout_s=_WHOLE_LIFE_S, on_item=answer.on_item, on_end=answer.on_end
            )
            told = await answer.wait(ROUTER_TIMEOUT_S)
            placement = told if isinstance(told, Placement) else None
        except (Refused, Overloaded):
            raise
        except TimeoutError:
            self._rest_until = loop.time() + ROUTER_REST_S
        except LinkError:
            pass  # it died, or knows of no worker: the least busy one takes over
        finally:
            if placement is None and call is not None:
                call.cancel()
        return call, placement


class _Answer:
    """What a router says to one request: perhaps that it waits, then its answer or an error."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._told: asyncio.Future[Placement | Explanation] = loop.create_future()
        self._loop = loop
        self._timeout: asyncio.Timeout | None = None

    async def wait(self, timeout_s: float) -> Placement | Explanation:
        """The answer. Raises `TimeoutError` if the router is silent for so long, or longer than it said."""
        async with asyncio.timeout(timeout_s) as self._timeout:
            return await self._told

    def on_item(self, item: Placement | Explanation | PlacementQueued) -> None:
        """The call's reply."""
        if self._told.done():
            return
        if not isinstance(item, PlacementQueued):
            self._told.set_result(item)
        elif self._timeout is not None:
            self._timeout.reschedule(self._loop.time() + item.max_wait_s + ROUTER_TIMEOUT_S)

    def on_end(self, error: LinkError | None) -> None:
        """The call's end."""
        if not self._told.done():
            self._told.set_exception(error or NoPeer("the router gave no answer"))
            self._told.exception()  # looked at, also when nobody waits any more
