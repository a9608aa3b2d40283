"""What a client gets for a request that cannot be served: the OpenAI error envelope."""

from __future__ import annotations

import msgspec


class ApiError(Exception):
    """A refusal, raised anywhere on the text side and turned into an HTTP reply once, at the edge.

    `type` and `code` are the machine-readable reasons of the OpenAI API, `param` names the field at
    fault, `retry_after_s` becomes a Retry-After header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The envelope as JSON; valid for any message (what UTF-8 cannot carry becomes "?")."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": _encodable(self.message),
                    "type": self.type,
                    "param": None if self.param is None else _encodable(self.param),
                    "code": self.code,
                }
            }
        )


def context_exceeded(limit: int, asked: str, *, param: str) -> ApiError:
    """The refusal of a request that can never fit; `asked` tells the tokens asked for, with their number."""
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens, but {asked}. Shorten the prompt.",
        code="context_length_exceeded",
        param=param,
    )


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
