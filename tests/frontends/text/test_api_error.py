"""The error envelope: valid JSON, whatever the message."""

from __future__ import annotations

import msgspec
import pytest

from frontends.text.errors import ApiError


@pytest.mark.parametrize("message", ["plain", 'quote " and \\', "line\nbreak \x00", "é😀", "lone \ud800 surrogate", ""])
def test_the_body_is_an_openai_envelope(message: str) -> None:
    error = ApiError(404, message, type="not_found_error", code="model_not_found", param="model")
    envelope = msgspec.json.decode(error.body())["error"]
    assert envelope["message"] == message.replace("\ud800", "?")
    assert (envelope["type"], envelope["code"], envelope["param"]) == ("not_found_error", "model_not_found", "model")


def test_every_refusal_has_a_code() -> None:
    assert msgspec.json.decode(ApiError(400, "no").body()) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": None, "code": "invalid_value"}
    }
