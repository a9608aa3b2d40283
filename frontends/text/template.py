"""The chat template: messages in, prompt text out, as transformers renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from frontends.text.errors import ApiError, brief

_FOREIGN_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template can raise over a client's messages; all of it is the client's 400."""

_TOLD_CHARS = 500  # of a template's objection, which may quote the messages
_CONTINUE_HERE = "\u2063continue-here\u2063"
_OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """One compiled template. `names` are what it may use besides the messages, `bos_token` and the like."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        """Raises `ValueError` if the template does not compile."""
        extensions = [loopcontrols, _GenerationTag]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        self._names = dict(names)
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt; `kwargs` are more names for the template.

        With `continue_final_message` the prompt ends with the last message's text, trailing space included.

        Raises `ApiError` 400 with whatever the template objects to.
        """
        if continue_final_message and add_generation_prompt:
            message = "add_generation_prompt and continue_final_message exclude each other; set one of them to false"
            raise ApiError(400, message, param="continue_final_message")
        kwargs = kwargs or {}
        clash = next((name for name in kwargs if name in _OWN_NAMES or name in self._names), None)
        if clash is not None:
            raise ApiError(400, f"chat_template_kwargs must not set {brief(clash)!r}", param="chat_template_kwargs")
        chat = [_plain(message, self._knows_developer) for message in messages]
        if continue_final_message:
            chat[-1]["content"] += _CONTINUE_HERE
        own = {"messages": chat, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render({**self._names, **kwargs, **own})
        except _FOREIGN_ERRORS as error:
            message = f"the chat template cannot render these messages: {brief(str(error), _TOLD_CHARS)}"
            raise ApiError(400, message, param="messages") from error
        return _cut(text) if continue_final_message else text


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; in serving only its content counts."""

    tags = {"generation"}  # noqa: RUF012  (declared so by the base class)

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _plain(message: Mapping[str, Any], knows_developer: bool) -> dict[str, Any]:
    """A message as templates expect it: content a string, the developer a system, call arguments an object."""
    plain = dict(message)
    content = plain.get("content")
    plain["content"] = "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
    if plain["role"] == "developer" and not knows_developer:
        plain["role"] = "system"
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return dict(call)  # not JSON: templates get the model's words as they were
    return {**call, "function": {**function, "arguments": arguments}}


def _cut(text: str) -> str:
    head, marker, _ = text.rpartition(_CONTINUE_HERE)
    if not marker:
        message = "the chat template does not show the final message, so it cannot be continued"
        raise ApiError(400, message, param="continue_final_message")
    return head


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model has seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)
