"""The messages of a chat, as clients send them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from frontends.text.errors import brief
from frontends.text.fields import Fields, wrong_type

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Message(Fields):
    """One message. `content` is always text: parts are joined, an assistant that only called tools said "".

    Tool calls of earlier turns reach the template as they are.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _calls_need_no_content(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("content") is None and value.get("role") == "assistant":
            return {**value, "content": ""} if value.get("tool_calls") or value.get("function_call") else value
        return value

    @field_validator("role", mode="before")
    @classmethod
    def _known_role(cls, value: Any) -> Any:
        if value not in _ROLES:
            raise ValueError(f"must be one of {', '.join(_ROLES)}")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _joined_parts(cls, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise wrong_type("must be a string or a list of text parts")
        return "".join(_part_text(part) for part in value)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it, with no field the client did not send."""
        return {name: value for name, value in self if value is not None}


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        raise ValueError(f"parts must be of type 'text', not {brief(repr(kind))}: this model takes text only")
    text = part.get(kind)
    if not isinstance(text, str):
        raise ValueError(f"a part of type {kind!r} must have a string {kind!r}")
    return text
