"""What becomes of a link's failure in HTTP."""

from __future__ import annotations

import pytest

from frontends.faults import api_error, may_retry
from graph import (
    DeadlineExceeded,
    LinkError,
    NoPeer,
    Overloaded,
    PeerFault,
    PeerLost,
    ProtocolFault,
    Refused,
    RequestCancelled,
)


@pytest.mark.parametrize(
    ("error", "status", "code", "is_passing"),
    [
        (NoPeer("x"), 503, "no_worker", True),
        (PeerLost("x"), 503, "peer_lost", True),
        (RequestCancelled("x"), 503, "cancelled", True),
        (DeadlineExceeded("x"), 504, "deadline_exceeded", True),
        (Overloaded("x", retry_after_s=9), 429, "overloaded", True),
        (PeerFault("x"), 500, "internal_error", False),
        (ProtocolFault("x"), 500, "protocol_fault", False),
        (Refused("x", code="context_length_exceeded"), 400, "context_length_exceeded", False),
        (Refused("x", code="conflict"), 409, "conflict", False),
        (Refused("x", code="disaggregation_disabled"), 501, "disaggregation_disabled", False),
        (Refused("x", code="anything"), 500, "anything", False),
    ],
)
def test_every_failure_has_one_form(error: LinkError, status: int, code: str, is_passing: bool) -> None:
    told = api_error(error)
    assert (told.status, told.code) == (status, code)
    assert may_retry(error) is is_passing
    assert (told.retry_after_s is not None) is is_passing
    if isinstance(error, Overloaded):
        assert told.retry_after_s == 9
