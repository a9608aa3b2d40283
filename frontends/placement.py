"""Where a sequence goes: asks the router, and does without it when it must.

The router's stream stays open while the sequence is generated: its life is the placement's. No
router, a dead one, a slow one, or one that names a worker unknown here: the least busy worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from components.kv.hashing import chain_hashes, root_hash
from components.messages import Placement, PlacementRequest
from frontends.balance import PeerPool
from graph import Call, Client, LinkError, NoPeer, Refused

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

    @asynccontextmanager
    async def place(
        self, request: PlacementRequest, *, failed: Collection[str], wait_s: float, is_takeover: bool = False
    ) -> AsyncIterator[Placement]:
        """A placement that holds while the block runs. `failed` are boot ids of workers that failed the request.

        Raises `Refused` if the router declines, `NoPeer` if no worker turns up within `wait_s`. The label of
        a taken-over request may be held a moment longer for the processor that was lost.
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
        answer: asyncio.Future[Placement] = loop.create_future()

        def on_item(placement: Placement) -> None:
            if not answer.done():
                answer.set_result(placement)

        def on_end(error: LinkError | None) -> None:
            if not answer.done():
                answer.set_exception(error or NoPeer("the router gave no placement"))

        call: Call | None = None
        placement: Placement | None = None
        try:
            call = self._router.open(request, peer=router.id, timeout_s=_WHOLE_LIFE_S, on_item=on_item, on_end=on_end)
            async with asyncio.timeout(ROUTER_TIMEOUT_S):
                placement = await answer
        except Refused:
            raise
        except TimeoutError:
            self._rest_until = loop.time() + ROUTER_REST_S
        except LinkError:
            pass  # it died, or knows of no worker: the least busy one takes over
        finally:
            if placement is None and call is not None:
                call.cancel()
        return call, placement
