"""The explanation of a placement: what each worker would cost a request, part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from components.messages import Explanation, Placement, WorkerCost
from components.routing.cost import terms
from components.routing.policies import Question
from components.routing.view import WorkerView


def explain(
    workers: Sequence[WorkerView],
    with_room: Sequence[WorkerView],
    question: Question,
    *,
    policy: str,
    placement: Placement | None,
    cached: Mapping[str, int],
) -> Explanation:
    """Tells how `placement` came about. `cached` is what each worker (by boot) holds of the prompt now."""
    full = {worker.id for worker in workers} - {worker.id for worker in with_room}
    return Explanation(
        policy=policy,
        hash_unit=question.hash_unit,
        placement=placement,
        workers=tuple(
            _costs(worker, question, cached=cached.get(worker.boot, 0), is_full=worker.id in full) for worker in workers
        ),
    )


def _costs(worker: WorkerView, question: Question, *, cached: int, is_full: bool) -> WorkerCost:
    parts: dict[str, float] = msgspec.structs.asdict(terms(worker, question.missing_tokens(worker.boot)))
    return WorkerCost(
        worker=worker.id,
        role=worker.role,
        load=worker.load,
        placed=worker.placed,
        cached_blocks=cached,
        overlap_blocks=question.overlaps.get(worker.boot, 0),
        is_full=is_full,
        cost=sum(parts.values()),
        terms=parts,
    )
