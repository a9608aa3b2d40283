"""The vocabulary of a tokenizer: which bytes a token stands for, and how far a token can reach in a text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_KEEPING_PRETOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits"})
_SHRINKING = {"Prepend": 1, "NFC": 3}
"""Normalizers, and by how much each can at most shorten the UTF-8 of a text (KELVIN SIGN becomes "K")."""


class Vocabulary:
    """Looks tokens up by id. `is_byte_level` says that decoding is the plain concatenation of the tokens' bytes.

    `max_text_bytes_per_token` bounds how much text one token can stand for: a text of more than n times as
    many bytes is certain to have more than n tokens. None where the tokenizer's rules allow no such bound.
    """

    def __init__(self, tokenizer: Tokenizer, description: Mapping[str, Any]) -> None:
        """`description` is tokenizer.json without vocabulary and merges."""
        self._tokenizer = tokenizer
        self.size: int = tokenizer.get_vocab_size(True)
        self.special_ids = frozenset(t["id"] for t in description["added_tokens"] if t["special"])
        self.is_byte_level = (description.get("decoder") or {}).get("type") == "ByteLevel"
        self.has_byte_tokens = tokenizer.token_to_id("<0x00>") is not None and not self.is_byte_level
        self.max_text_bytes_per_token = _reach(tokenizer, description)
        self._metaspace = "" if self.is_byte_level else "\u2581"
        self._byte_of = _byte_level_alphabet() if self.is_byte_level else {}
        self._special: dict[str, int] = {t["content"]: t["id"] for t in description["added_tokens"]}
        self._bytes: dict[int, bytes] = {}
        self.anchor: tuple[int, ...] = () if self.is_byte_level else _anchor(tokenizer)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token as it stands inside a text; empty for an id without a token."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._look_up(token)
        return known

    def is_byte(self, token: int) -> bool:
        """Whether the token is a single byte of a character that has no token of its own (`<0xE4>`)."""
        text = self._tokenizer.id_to_token(token) if self.has_byte_tokens else None
        return text is not None and _BYTE_TOKEN.fullmatch(text) is not None

    def _look_up(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token) if token >= 0 else None
        if text is None:
            return b""
        if self.is_byte_level:
            # As the ByteLevel decoder does it: a token with any character outside the alphabet stands for itself.
            if all(c in self._byte_of for c in text):
                return bytes(self._byte_of[c] for c in text)
            return text.encode()
        if text in self._special:
            return text.encode()
        byte = _BYTE_TOKEN.fullmatch(text) if self.has_byte_tokens else None
        return bytes([int(byte[1], 16)]) if byte else text.replace(self._metaspace, " ").encode()


def _anchor(tokenizer: Tokenizer) -> tuple[int, ...]:
    """A token that reads the same at the beginning of a text and inside it; empty if no plain letter is one."""
    for letter in ascii_lowercase:
        token = tokenizer.token_to_id(letter)
        if token is not None and tokenizer.decode([token, token]) == letter * 2:
            return (token,)
    return ()


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE: 188 bytes stand for themselves, the others follow from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _reach(tokenizer: Tokenizer, description: Mapping[str, Any]) -> int | None:
    """The longest piece of text, in bytes of UTF-8, that one token can stand for; None if unbounded.

    A byte is dropped by no rule that `_keeps_bytes` lets pass, so every byte of the text belongs to a token. A
    token stands for its own text at most; in byte-level spelling that is one byte for each of its characters.
    """
    shrink = _shrink(description.get("normalizer"))
    added: Sequence[Mapping[str, Any]] = description["added_tokens"]
    eats_space = any(t["lstrip"] or t["rstrip"] for t in added)
    if shrink is None or eats_space or not _keeps_bytes(description):
        return None
    is_byte_level = "ByteLevel" in str(description.get("pre_tokenizer"))
    plain = max(len(token if is_byte_level else token.encode()) for token in tokenizer.get_vocab(False))
    return shrink * max(plain, *(len(t["content"].encode()) for t in added), 1)


def _shrink(normalizer: Mapping[str, Any] | None) -> int | None:
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        factor = 1
        for step in normalizer["normalizers"]:
            by = _shrink(step)
            if by is None:
                return None
            factor *= by
        return factor
    if kind == "Replace":
        old = normalizer["pattern"].get("String")
        grows = old is not None and len(normalizer["content"].encode()) >= len(old.encode())
        return 1 if grows else None
    return _SHRINKING.get(kind)


def _keeps_bytes(description: Mapping[str, Any]) -> bool:
    model, splitter = description["model"], description.get("pre_tokenizer")
    covers_all_bytes = model["byte_fallback"] or "ByteLevel" in str(splitter)
    return model["type"] == "BPE" and covers_all_bytes and _splitter_keeps(splitter)


def _splitter_keeps(splitter: Mapping[str, Any] | None) -> bool:
    if splitter is None or splitter["type"] in _KEEPING_PRETOKENIZERS:
        return True
    if splitter["type"] == "Sequence":
        return all(_splitter_keeps(part) for part in splitter["pretokenizers"])
    return bool(splitter["type"] == "Split" and splitter["behavior"] != "Removed")
