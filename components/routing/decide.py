"""The decision: from the known workers to a placement, or none."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from components.messages import Placement
from components.routing.policies import Policy, Question
from components.routing.workers import Role, WorkerView

GENERATING: tuple[Role, ...] = ("decode", "worker")


def decide(
    workers: Sequence[WorkerView], question: Question, policy: Policy, exclude: Collection[str] = ()
) -> Placement | None:
    """Places a request, or returns None while nobody can generate.

    Whoever stands in `exclude`, by boot or by replica id, just failed this request and is not asked
    again; its next life has another boot. A decode worker gets a prefill worker beside it, and
    computes the prompt itself where there is none.
    """
    able = [worker for worker in workers if worker.id not in exclude and worker.boot not in exclude]
    generating = [worker for worker in able if worker.role in GENERATING]
    if not generating:
        return None
    chosen = policy(generating, question)
    reason = f"{chosen.worker.id}: {chosen.reason}"
    prefill = None
    if chosen.worker.role == "decode":
        helpers = [worker for worker in able if worker.role == "prefill"]
        prefill = policy(helpers, question) if helpers else None
        reason += f"; {prefill.worker.id}: {prefill.reason}" if prefill else "; no prefill worker"
    return Placement(
        worker=chosen.worker.id,
        prefill=prefill.worker.id if prefill else None,
        overlap_blocks=chosen.overlap_blocks,
        prefill_overlap_blocks=prefill.overlap_blocks if prefill else 0,
        reason=reason,
    )
