"""The prefill worker: computes prompts for decode workers."""

from __future__ import annotations

from components.messages import (
    KVHandshake,
    LeaseRelease,
    LeaseRenew,
    LeaseState,
    PrefillDone,
    PrefillPoll,
    PrefillProgress,
    PrefillRequest,
    WorkerEvents,
    WorkerSnapshot,
)
from components.options import DisaggOptions
from graph import Component, Publishes, Sends, Serves

PREFILL_REQUESTS = (PrefillRequest, PrefillPoll, LeaseRenew, LeaseRelease, KVHandshake)
PREFILL_REPLIES = (PrefillProgress, PrefillDone, LeaseState, KVHandshake)


class PrefillWorker(Component):
    """Computes prompts in chunks and pins their blocks until decode has pulled them."""

    Options = DisaggOptions
    requests = Serves(PREFILL_REQUESTS, PREFILL_REPLIES, required=True)
    kv = Sends("kv-blocks", required=True)
    events = Publishes(WorkerEvents, WorkerSnapshot)
