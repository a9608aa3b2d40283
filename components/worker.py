"""The aggregated worker: prefills and generates by itself."""

from __future__ import annotations

from components.messages import GenerateRequest, TokenChunk, WorkerEvents, WorkerSnapshot
from components.options import WorkerOptions
from graph import Component, Publishes, Serves


class Worker(Component):
    """One engine that does both phases."""

    Options = WorkerOptions
    requests = Serves(GenerateRequest, TokenChunk, required=True)
    events = Publishes(WorkerEvents, WorkerSnapshot)
