"""The decode worker: pulls prompts' KV blocks and generates.

Life of a request here (`components.decode_requests` keeps the books):

    taken       handed to the engine, which matches its prefix cache
    decided     few uncached tokens, or no prefill worker that can be used: local, the engine goes on
    pulling     asked of a prefill worker, pulled chunk by chunk (see `components.transfer.pull`)
    generating  in the engine's batch: all KV is here, computed or pulled
    ended       in its last chunk, or an error; a pull that is still open is cancelled
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar

from components import rules
from components.engine_worker import ExchangeWorker
from components.messages import PREFILL_REPLIES, PREFILL_REQUESTS, GenerateRequest, TokenChunk
from components.options import DisaggOptions
from graph import Calls, Context, GraphView, Natural, NodeView, Receives, Serves, option

if TYPE_CHECKING:
    from components.decode_requests import DecodeRequests


class DecodeOptions(DisaggOptions, frozen=True, kw_only=True):
    """Options of the decode worker."""

    gpu_itl_budget_ms: ClassVar[float | None] = 20.0

    max_local_prefill_length: Annotated[Natural, option("uncached prompt tokens up to which it prefills itself")] = 16
    watch_prefill_queue: Annotated[
        bool, option("prefills itself while the wait for prefill is longer than the work")
    ] = True


class DecodeWorker(ExchangeWorker):
    """Takes requests first, asks prefill for what is missing, pulls it, generates."""

    Options = DecodeOptions
    role = "decode"
    requests = Serves(GenerateRequest, TokenChunk, required=True)
    prefill = Calls(PREFILL_REQUESTS, PREFILL_REPLIES, required=False)
    kv = Receives("kv-blocks")

    _requests: DecodeRequests | None = None

    @classmethod
    def check(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        """What every engine worker must satisfy, and every prefill worker can be pulled from."""
        return (*super().check(node, graph), *rules.pull_faults(node, graph))

    async def start(self, context: Context) -> None:
        """Loads the model, registers its KV pool, and starts to follow the prefill workers."""
        from components.decode_requests import DecodeRequests

        self._requests = DecodeRequests(self.options)
        serving, exchange = await self.start_exchange(context, self._requests)
        self._requests.attach(context, serving)
        if exchange is not None:
            self._requests.connect(context, exchange, context.client(DecodeWorker.prefill))
        context.serve(DecodeWorker.requests, self._requests.begin)

    async def stop(self) -> None:
        """Releases what prefill holds for this worker, then frees the agents and the engine."""
        if self._requests is not None:
            self._requests.close()
        await super().stop()
