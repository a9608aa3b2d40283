"""Failures of a link as the text side sees them: may another peer try, and what is the client told."""

from __future__ import annotations

from frontends.text.errors import ApiError
from graph import DeadlineExceeded, LinkError, NoPeer, Overloaded, PeerLost, Refused, RequestCancelled

_REFUSED_STATUS = {
    "conflict": 409,
    "context_length_exceeded": 400,
    "invalid_request": 400,
    "disaggregation_disabled": 501,
    "not_explained": 501,
}
_PASSING = (NoPeer, PeerLost, DeadlineExceeded, RequestCancelled, Overloaded)


def may_retry(error: LinkError) -> bool:
    """Whether another peer may do what this one did not."""
    return isinstance(error, _PASSING)


def api_error(error: LinkError) -> ApiError:
    """The HTTP form of `error`."""
    if isinstance(error, Refused):
        status = _REFUSED_STATUS.get(error.code, 500)
        kind = "invalid_request_error" if status < 500 else "server_error"
        return ApiError(status, error.message, type=kind, code=error.code)
    retry_after_s = error.retry_after_s or 1.0
    if isinstance(error, Overloaded):
        message = f"The workers are busy: {error.message}; try again."
        return ApiError(429, message, type="rate_limit_error", code=error.code, retry_after_s=retry_after_s)
    if isinstance(error, NoPeer):
        message = "No worker is ready; try again."
        return ApiError(503, message, type="server_error", code="no_worker", retry_after_s=retry_after_s)
    if isinstance(error, _PASSING):
        status = 504 if isinstance(error, DeadlineExceeded) else 503
        return ApiError(status, error.message, type="server_error", code=error.code, retry_after_s=retry_after_s)
    return ApiError(500, error.message, type="server_error", code=error.code)
