"""Ids to text, one token at a time, so that the pieces join to exactly what decoding all ids at once gives.

    decoder = incremental_decoder(model, skip_special_tokens=True)
    text += decoder.push(id)    any number of times; never part of a character
    text += decoder.flush()     once; an unfinished character becomes U+FFFD, as in the full decoding

A decoder serves one sequence of tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from frontends.text.model import TextModel

_REPLACEMENT = "\ufffd"


class IncrementalDecoder(Protocol):
    """What both decoders do."""

    @property
    def is_mid_character(self) -> bool:
        """Whether tokens were taken whose text is not out yet."""

    def push(self, id: int) -> str:
        """Takes a token; the text that is certain now."""

    def push_all(self, ids: Sequence[int]) -> str:
        """Takes several tokens at once."""

    def flush(self) -> str:
        """The text of what is still pending; no token may follow."""


def incremental_decoder(model: TextModel, *, skip_special_tokens: bool) -> IncrementalDecoder:
    """The fastest decoder that is exact for the model's tokenizer."""
    if model.vocabulary.is_byte_level:
        return ByteDecoder(model, skip_special_tokens=skip_special_tokens)
    return WindowDecoder(model, skip_special_tokens=skip_special_tokens)


class ByteDecoder:
    """For byte-level BPE: the text is the UTF-8 of the tokens' bytes, one after the other."""

    def __init__(self, model: TextModel, *, skip_special_tokens: bool) -> None:
        self._bytes_of = model.vocabulary.bytes_of
        self._skipped = model.special_ids if skip_special_tokens else frozenset()
        # Rust and Python replace invalid bytes alike: one U+FFFD for each longest beginning of a character.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_mid_character(self) -> bool:
        return self._utf8.getstate()[0] != b""

    def push(self, id: int) -> str:
        return "" if id in self._skipped else self._utf8.decode(self._bytes_of(id))

    def push_all(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join([self._bytes_of(i) for i in ids if i not in self._skipped]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For any other tokenizer: decodes a short window twice, and the difference is the new text.

    Exact for decoders whose view of a token depends on its neighbours and on being the first of all
    (SentencePiece's Metaspace and byte fallback). An ordinary token, the anchor, stands before every window
    but the first, so that the rule for the first token of all never touches a later one. A run of byte tokens
    is held until it ends, because one bad byte turns the whole run into replacement characters.
    """

    def __init__(self, model: TextModel, *, skip_special_tokens: bool) -> None:
        self._decode = model.decode
        self._vocabulary = model.vocabulary
        self._skip = skip_special_tokens
        self._before: list[int] = []  # decoded and shown, the context of what follows
        self._shown = ""  # the text of `_before`
        self._pending: list[int] = []

    @property
    def is_mid_character(self) -> bool:
        return bool(self._pending)

    def push(self, id: int) -> str:
        vocabulary = self._vocabulary
        if (self._skip and id in vocabulary.special_ids) or not vocabulary.bytes_of(id):
            return ""  # decoding leaves it out, so it does not even end a run of byte tokens
        self._pending.append(id)
        if vocabulary.is_byte(id):
            return ""
        text = self._decode(self._before + self._pending, self._skip)
        return "" if text.endswith(_REPLACEMENT) else self._advance(text)

    def push_all(self, ids: Sequence[int]) -> str:
        return "".join([self.push(i) for i in ids])

    def flush(self) -> str:
        return self._advance(self._decode(self._before + self._pending, self._skip)) if self._pending else ""

    def _advance(self, text: str) -> str:
        new = text[len(self._shown) :]
        if not text:
            return ""  # still at the first token of all: nothing but space that is stripped there
        self._before = [*self._vocabulary.anchor, *self._pending]
        self._shown = self._decode(self._before, self._skip)
        self._pending = []
        return new
