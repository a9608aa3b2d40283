"""The decode worker: pulls prompts' KV blocks and generates."""

from __future__ import annotations

from typing import Annotated

from components.messages import GenerateRequest, TokenChunk, WorkerEvents, WorkerSnapshot
from components.options import DisaggOptions
from components.prefill import PREFILL_REPLIES, PREFILL_REQUESTS
from graph import Calls, Component, Publishes, Receives, Serves, option


class DecodeOptions(DisaggOptions, frozen=True, kw_only=True):
    """Options of the decode worker."""

    max_local_prefill_length: Annotated[int, option("uncached prompt tokens up to which it prefills itself")] = 16


class DecodeWorker(Component):
    """Takes requests first, asks prefill for what is missing, pulls it, generates."""

    Options = DecodeOptions
    requests = Serves(GenerateRequest, TokenChunk, required=True)
    prefill = Calls(PREFILL_REQUESTS, PREFILL_REPLIES, required=False)
    kv = Receives("kv-blocks")
    events = Publishes(WorkerEvents, WorkerSnapshot)
