"""Logprobs in the two forms of the OpenAI API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from components.messages import TokenLogprobs
from frontends.text.detokenizer import TokenText
from frontends.text.model import TextModel

LOWEST = -9999.0
"""Stands for minus infinity and for what is no number: JSON has neither."""

Told = Iterable[tuple[TokenText, TokenLogprobs]]


def chat_logprobs(tokens: Told, model: TextModel) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    return {"content": [_entry(token, found, model) for token, found in tokens], "refusal": None}


def completion_logprobs(tokens: Told, model: TextModel) -> dict[str, Any]:
    """`choices[].logprobs` of a completion. Of alternatives with the same text the likeliest is told."""
    texts, chosen, tops, offsets = [], [], [], []
    for token, found in tokens:
        texts.append(token.text)
        chosen.append(_finite(found.logprob))
        offsets.append(token.offset)
        top = {token.text: _finite(found.logprob)}
        for id, text, logprob in _alternatives(token, found, model):
            if id != token.id:
                top.setdefault(text, logprob)
        tops.append(top)
    return {"tokens": texts, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}


def _entry(token: TokenText, found: TokenLogprobs, model: TextModel) -> dict[str, Any]:
    top = [
        {"token": text, "logprob": logprob, "bytes": list(token.data if id == token.id else model.token_bytes(id))}
        for id, text, logprob in _alternatives(token, found, model)
    ]
    return {"token": token.text, "logprob": _finite(found.logprob), "bytes": list(token.data), "top_logprobs": top}


def _alternatives(token: TokenText, found: TokenLogprobs, model: TextModel) -> Iterator[tuple[int, str, float]]:
    """The best candidates, best first; the chosen token reads there as it does in the text."""
    for id, logprob in zip(found.top_ids, found.top_logprobs, strict=True):
        text = token.text if id == token.id else model.token_bytes(id).decode("utf-8", "replace")
        yield id, text, _finite(logprob)


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST  # false for what is no number
