"""What a process logs of a failure."""

from __future__ import annotations

import logging

import pytest

from graph import LaunchError
from graph.child import log_failure

LOG = logging.getLogger("headrace.test")


def raised(error: Exception) -> Exception:
    """The error with a traceback."""
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


def test_what_is_raised_on_purpose_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_failure(LOG, "decode/0", raised(LaunchError("no room; raise kv_memory_mb")))
    assert caplog.messages == ["decode/0 failed: no room; raise kv_memory_mb"]
    assert "Traceback" not in caplog.text


def test_where_it_was_raised_is_told_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        log_failure(LOG, "decode/0", raised(LaunchError("no room")))
    assert "Traceback" in caplog.text


def test_a_fault_of_ours_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_failure(LOG, "decode/0", raised(KeyError("x")))
    assert caplog.messages == ["decode/0 failed"]
    assert "Traceback" in caplog.text
