"""Fields that would change the answer and that this server does not act on: refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frontends.text.errors import ApiError
from frontends.text.fields import not_supported, value_not_supported

_FIELDS = (
    "suffix",
    "chat_template",
    "documents",
    "audio",
    "prompt_logprobs",
    "prompt_embeds",
    "use_beam_search",
    "truncate_prompt_tokens",
    "bad_words",
    "allowed_token_ids",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
)


def refuse_unsupported(value: Mapping[str, Any]) -> None:
    """Raises `ApiError` 400 if one of the fields is set to anything that asks for something.

    An empty object does: as a schema it allows any JSON, and nothing but JSON. So does 0, as in prompt_logprobs.
    """
    for name in _FIELDS:
        asked = value.get(name)
        if not (asked is None or asked is False or asked in ("", [])):
            raise not_supported(name)
    if value.get("modalities") not in (None, [], ["text"]):
        advice = 'leave modalities out or set it to ["text"]'
        raise value_not_supported("modalities", "any output but text", advice)


def refuse_tools(value: Mapping[str, Any]) -> None:
    """Raises `ApiError` 400 for tools the model may call; with tool_choice "none" it may not, so they are let pass."""
    for tools, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        offered, chosen = value.get(tools), value.get(choice)
        if offered is not None and not isinstance(offered, list):
            raise ApiError(400, f"{tools} must be a list", code="invalid_type", param=tools)
        if chosen in (None, "none"):
            if offered and chosen is None:
                raise not_supported(tools, f'leave it out or set {choice} to "none"')
        else:
            raise value_not_supported(choice, f'{choice} other than "none"', 'leave it out or set it to "none"')


def refuse_response_format(value: Mapping[str, Any]) -> None:
    """Raises `ApiError` 400 for any format but plain text."""
    asked = value.get("response_format")
    if asked is None:
        return
    kind = asked.get("type") if isinstance(asked, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise ApiError(400, "response_format must be an object with a known type", param="response_format")
    if kind != "text":
        advice = 'leave response_format out, or set its type to "text" and ask for the format in the prompt'
        raise value_not_supported("response_format", f'response_format of type "{kind}"', advice)
