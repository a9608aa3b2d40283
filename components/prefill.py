"""The prefill worker: computes prompts for decode workers.

Life of a prompt here (`components.prefill_prompts` keeps the books):

    queued      waits until the asking decode worker has few enough blocks pinned here
    computing   in the engine; after each chunk its ready blocks are announced, cumulatively
    leased      from the first announcement on its blocks are pinned: until decode releases them,
                or does not renew in time
    held        all computed, the first token told; only the lease is left
    gone        released, expired, failed, or cancelled; decode asking again is told so

A cancelled stream ends a prompt at once if nothing was announced. Otherwise the release that decode
sends on every exit ends it, or a short rest of the lease: reads may be in flight, and a block that
is read must not change before the lease is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from components import rules
from components.engine_worker import ExchangeWorker
from components.messages import (
    PREFILL_REPLIES,
    PREFILL_REQUESTS,
    FollowPrefillQueue,
    KVHandshake,
    LeaseRelease,
    LeaseRenew,
    PrefillPoll,
    PrefillRequest,
)
from graph import Context, Refused, Sends, Serves, Stream

if TYPE_CHECKING:
    from components.prefill_prompts import PrefillPrompts


class PrefillWorker(ExchangeWorker):
    """Computes prompts in chunks and pins their blocks until decode has pulled them."""

    role = "prefill"
    requests = Serves(PREFILL_REQUESTS, PREFILL_REPLIES, required=True)
    kv = Sends("kv-blocks", required=True)

    _prompts: PrefillPrompts | None = None

    async def start(self, context: Context) -> None:
        """Loads the model and registers its KV pool with the transfer back end."""
        from components.prefill_prompts import PrefillPrompts
        from components.transfer.metrics import LeaseMetrics

        self._prompts = PrefillPrompts(metrics=LeaseMetrics(context.metrics))
        serving, exchange = await self.start_exchange(context, self._prompts)
        self._prompts.attach(serving.engine, exchange)
        context.serve(PrefillWorker.requests, self._handle)

    async def drain(self) -> None:
        """Returns when no prompt is computed or pinned any more."""
        if self._prompts is not None:
            await self._prompts.drain()

    async def stop(self) -> None:
        """Frees the agents and the engine."""
        if self._prompts is not None:
            self._prompts.close()
        await super().stop()

    def _handle(self, request: Any, stream: Stream) -> None:
        assert self._prompts is not None
        if self._exchange is None:
            raise Refused(rules.DISABLED, code=rules.DISABLED_CODE)
        match request:
            case PrefillRequest():
                self._prompts.begin(request, stream)
            case PrefillPoll():
                stream.end(self._prompts.state(request.id))
            case FollowPrefillQueue():
                self._prompts.follow_queue(stream)
            case LeaseRenew():
                stream.end(self._prompts.renew(request.id, request.lease_ms / 1e3))
            case LeaseRelease():
                stream.end(self._prompts.release(request.id))
            case KVHandshake():
                stream.end(self._prompts.shake_hands(request, stream.peer))
