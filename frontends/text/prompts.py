"""The `prompt` of a completion in its four shapes, brought to one: a list of texts or token-id lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from frontends.text.errors import ApiError
from frontends.text.model import TextModel

MAX_PROMPTS = 2_048
"""Prompts in one request."""

Prompt = str | list[int]

_SHAPES = "a string, a list of strings, a list of token ids, or a list of such lists"


def prompt_list(value: Any, model: TextModel) -> list[Prompt]:
    """The prompts, each a text or token ids the model knows. Raises `ApiError` 400; one bad prompt fails all."""
    prompts = _split(value)
    if not prompts:
        raise _refusal("prompt must not be empty")
    if len(prompts) > MAX_PROMPTS:
        raise _refusal(f"at most {MAX_PROMPTS} prompts are allowed in one request, not {len(prompts)}")
    is_text = isinstance(prompts[0], str)
    if any(isinstance(p, str) is not is_text for p in prompts):
        raise _refusal("prompt must not mix texts and token ids")
    for i, prompt in enumerate(prompts):
        name = "prompt" if len(prompts) == 1 else f"prompt.{i}"
        if isinstance(prompt, str):
            if not prompt and not model.begins_with_bos:
                raise _refusal(f"{name} must not be empty", param=name)
        else:
            _check_ids(prompt, model, param=name)
    return prompts


def check_vocabulary(ids: Iterable[int], model: TextModel, *, param: str) -> None:
    """Raises `ApiError` 400 for an id the model does not have."""
    for id in ids:
        if not 0 <= id < model.vocab_size:
            message = f"{param}: token id {id} is not in the vocabulary [0, {model.vocab_size})"
            raise ApiError(400, message, param=param)


def _check_ids(ids: Any, model: TextModel, *, param: str) -> None:
    if not isinstance(ids, list) or not ids:
        if ids == []:
            raise _refusal(f"{param} must not be empty", param=param)
        raise _refusal(f"{param} must be {_SHAPES}", param=param, code="invalid_type")
    model.refuse_full(len(ids), param=param)
    if any(type(id) is not int for id in ids):  # a bool is not an id
        raise _refusal(f"{param} must be {_SHAPES}", param=param, code="invalid_type")
    check_vocabulary(ids, model, param=param)


def _split(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _refusal(f"prompt must be {_SHAPES}", code="invalid_type")
    if value and not isinstance(value[0], str | list):
        return [value]
    return value


def _refusal(message: str, *, param: str = "prompt", code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)
