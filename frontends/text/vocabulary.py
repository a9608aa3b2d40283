"""The vocabulary of a tokenizer: which bytes a token stands for, and which tokens are special."""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import ascii_lowercase
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE: 188 bytes stand for themselves, the others follow from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()
"""The byte each character of a byte-level token stands for."""


class Vocabulary:
    """Looks tokens up by id. `is_byte_level` says that decoding is the plain concatenation of the tokens' bytes."""

    def __init__(self, tokenizer: Tokenizer, description: Mapping[str, Any]) -> None:
        """`description` is tokenizer.json without vocabulary and merges."""
        self._tokenizer = tokenizer
        self.size: int = tokenizer.get_vocab_size(True)
        self.special_ids = frozenset(t["id"] for t in description["added_tokens"] if t["special"])
        self.is_byte_level = (description.get("decoder") or {}).get("type") == "ByteLevel"
        self.has_byte_tokens = tokenizer.token_to_id("<0x00>") is not None and not self.is_byte_level
        self._metaspace = "" if self.is_byte_level else "\u2581"
        self._added: dict[str, int] = {t["content"]: t["id"] for t in description["added_tokens"]}
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
            if all(c in BYTE_LEVEL_ALPHABET for c in text):
                return bytes(BYTE_LEVEL_ALPHABET[c] for c in text)
            return text.encode()
        if text in self._added:
            return text.encode()
        byte = _BYTE_TOKEN.fullmatch(text) if self.has_byte_tokens else None
        return bytes([int(byte[1], 16)]) if byte else text.replace(self._metaspace, " ").encode()


def _anchor(tokenizer: Tokenizer) -> tuple[int, ...]:
    for letter in ascii_lowercase:
        token = tokenizer.token_to_id(letter)
        if token is not None and tokenizer.decode([token, token]) == letter * 2:
            return (token,)
    return ()
