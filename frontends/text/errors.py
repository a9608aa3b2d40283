"""What a client gets for a request that cannot be served: the OpenAI error envelope."""

from __future__ import annotations

import msgspec

_ECHOED_CHARS = 100


class ApiError(Exception):
    """A refusal, raised anywhere on the text side and turned into an HTTP reply once, at the edge.

    `type` and `code` are the machine-readable reasons of the OpenAI API, `param` names the field at
    fault, `retry_after_s` becomes a Retry-After header. Codes of a request that is not valid:

        missing_required_parameter   the field must be there
        invalid_type                 it has another JSON type than it must have
        invalid_value                its value is out of range, or does not go with another field's
        invalid_json                 the body is no JSON object
        unsupported_parameter        the OpenAI API has the field, this server does not act on it
        unsupported_value            this server acts on the field, not on this value of it
        context_length_exceeded      the model has no room for so many tokens
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str = "invalid_value",
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


def context_exceeded(limit: int, asked: str, *, param: str, is_models: bool) -> ApiError:
    """The refusal of a request that can never fit; `asked` tells the tokens asked for, with their number.

    Clients know it by its words; `limit` is called the model's only if it is, and not what the workers have room for.
    """
    most = "This model's maximum context length is" if is_models else "The workers' maximum context length is"
    return ApiError(
        400,
        f"{most} {limit} tokens, but {asked}. Shorten the prompt.",
        code="context_length_exceeded",
        param=param,
    )


def brief(text: str, num_chars: int = _ECHOED_CHARS) -> str:
    """What a client sent, as an error message may echo it: the beginning of a long text, with its length."""
    return text if len(text) <= num_chars else f"{text[:num_chars]}... ({len(text)} characters)"


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
