"""The least number of tokens a text can have, told from its size: what cannot fit is refused before it is encoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from frontends.text.vocabulary import BYTE_LEVEL_ALPHABET

_KEEPING_SPLITTERS = frozenset({"ByteLevel", "Metaspace", "Digits"})
_SHRINKING = {"Prepend": 1, "NFC": 4}
"""Normalizers, and into how many times fewer bytes they can at most turn a text (KELVIN SIGN becomes "K")."""


class TokenBound:
    """Counts from below. Exact is only that no text has fewer tokens.

    The bound holds where every byte of a text ends up in a token: a BPE model that covers all bytes, by a
    byte-level alphabet or by byte fallback, and no rule that drops or joins text on the way. Then a token
    stands for no more bytes than its own text has, in byte-level spelling one for each of its characters.
    Bytes that the alphabet lacks vanish, and are not counted.
    """

    def __init__(self, tokenizer: Tokenizer, description: Mapping[str, Any]) -> None:
        """`description` is tokenizer.json without vocabulary and merges."""
        self.max_bytes_per_token: int | None = None
        self._lost = b""
        shrink = _shrink(description.get("normalizer"))
        added = description["added_tokens"]
        eats_space = any(token["lstrip"] or token["rstrip"] for token in added)
        if shrink is None or eats_space or description["model"]["type"] != "BPE":
            return
        splitter = description.get("pre_tokenizer")
        is_byte_level = "'ByteLevel'" in str(splitter)
        if is_byte_level:
            self._lost = bytes(b for c, b in BYTE_LEVEL_ALPHABET.items() if tokenizer.token_to_id(c) is None)
            is_covered = shrink == 1 or not self._lost
        else:
            falls_back = description["model"]["byte_fallback"]
            is_covered = falls_back and all(tokenizer.token_to_id(f"<0x{b:02X}>") is not None for b in range(256))
        if is_covered and _keeps(splitter):
            sizes = [len(token if is_byte_level else token.encode()) for token in tokenizer.get_vocab(False)]
            sizes += [len(token["content"].encode()) for token in added]
            self.max_bytes_per_token = shrink * max(sizes, default=1)

    def least_tokens(self, text: str) -> int:
        """The number of tokens that `text` has at least; 0 where the tokenizer's rules allow no bound."""
        if self.max_bytes_per_token is None:
            return 0
        data = text.encode("utf-8", "replace").translate(None, self._lost)
        return -(-len(data) // self.max_bytes_per_token)


def _shrink(normalizer: Mapping[str, Any] | None) -> int | None:
    """Into how many times fewer bytes a text can turn; None if there is no limit, or none that is known."""
    if normalizer is None:
        return 1
    if normalizer["type"] == "Replace":
        old = normalizer["pattern"].get("String")
        grows = old is not None and len(normalizer["content"].encode()) >= len(old.encode())
        return 1 if grows else None
    if normalizer["type"] != "Sequence":
        return _SHRINKING.get(normalizer["type"])
    product = 1
    for step in normalizer["normalizers"]:
        factor = _shrink(step)
        if factor is None:
            return None
        product *= factor
    return product


def _keeps(splitter: Mapping[str, Any] | None) -> bool:
    """Whether all of the text comes out of the pre-tokenizer."""
    if splitter is None or splitter["type"] in _KEEPING_SPLITTERS:
        return True
    if splitter["type"] == "Sequence":
        return all(_keeps(part) for part in splitter["pretokenizers"])
    return bool(splitter["type"] == "Split" and splitter["behavior"] != "Removed")
