"""The aggregated worker: prefills and generates by itself."""

from __future__ import annotations

from components.engine_worker import EngineWorker
from components.messages import GenerateRequest, TokenChunk
from graph import Context, Serves


class Worker(EngineWorker):
    """One engine that does both phases."""

    requests = Serves(GenerateRequest, TokenChunk, required=True)

    async def start(self, context: Context) -> None:
        """Loads the model; requests are served once this returns."""
        serving = await self.start_engine(context)
        context.serve(Worker.requests, serving.generate)
