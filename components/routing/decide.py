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

    Whoever stands in `exclude` (replica ids or boots) just failed this request: another is taken as
    long as there is one, since a worker that is the last one may have recovered. A decode worker
    gets a prefill worker beside it; it computes the prompt itself where there is no good one.
    """
    able = [worker for worker in workers if worker.role in GENERATING]
    good = [worker for worker in able if not {worker.id, worker.boot} & set(exclude)]
    if not able:
        return None
    chosen = policy(good or able, question)
    reason = f"{chosen.worker.id}: {chosen.reason}"
    prefill = None
    if chosen.worker.role == "decode":
        helpers = [w for w in workers if w.role == "prefill" and not {w.id, w.boot} & set(exclude)]
        prefill = policy(helpers, question) if helpers else None
        reason += f"; {prefill.worker.id}: {prefill.reason}" if prefill else "; no prefill worker"
    return Placement(
        worker=chosen.worker.id,
        prefill=prefill.worker.id if prefill else None,
        overlap_blocks=chosen.overlap_blocks,
        prefill_overlap_blocks=prefill.overlap_blocks if prefill else 0,
        reason=reason,
    )
