"""The decision: from the known workers to a placement, or none."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from components.messages import Placement, Role
from components.routing.policies import Policy, Question
from components.routing.view import WorkerView

GENERATING: tuple[Role, ...] = ("decode", "worker")


def able(workers: Sequence[WorkerView], exclude: Collection[str]) -> Sequence[WorkerView]:
    """Without whoever stands in `exclude`, by boot or by replica id.

    Those just failed this request and are not asked again; their next life has another boot.
    """
    if not exclude:
        return workers
    return [worker for worker in workers if worker.id not in exclude and worker.boot not in exclude]


def with_room(workers: Iterable[WorkerView], max_requests: int | None) -> list[WorkerView]:
    """Without generating workers that have all the requests they shall have."""
    if max_requests is None:
        return list(workers)
    return [worker for worker in workers if worker.requests < max_requests or worker.role == "prefill"]


def generating(workers: Iterable[WorkerView]) -> list[WorkerView]:
    """Those that can generate."""
    return [worker for worker in workers if worker.role in GENERATING]


def decide(workers: Sequence[WorkerView], question: Question, policy: Policy) -> Placement | None:
    """Places a request, or returns None if none of the workers can generate.

    A decode worker gets a prefill worker beside it, and computes the prompt itself where there is none.
    """
    candidates = generating(workers)
    if not candidates:
        return None
    chosen = policy(candidates, question)
    reason = f"{chosen.worker.id}: {chosen.reason}"
    prefill = None
    if chosen.worker.role == "decode":
        helpers = [worker for worker in workers if worker.role == "prefill"]
        prefill = policy(helpers, question) if helpers else None
        reason += f"; {prefill.worker.id}: {prefill.reason}" if prefill else "; no prefill worker"
    return Placement(
        worker=chosen.worker.id,
        prefill=prefill.worker.id if prefill else None,
        overlap_blocks=question.overlaps.get(chosen.worker.boot, 0),
        prefill_overlap_blocks=question.overlaps.get(prefill.worker.boot, 0) if prefill else 0,
        reason=reason,
    )
