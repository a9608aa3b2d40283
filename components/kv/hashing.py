"""Chained block hashes: equal hashes mean equal tokens from the first on, under the same salt."""

from __future__ import annotations

from hashlib import blake2b

from components.messages import BLOCK_HASH_BYTES, TOKEN_BYTES


def root_hash(cache_salt: str | None = None) -> bytes:
    """The parent of a sequence's first block. Different salts never share a block."""
    return blake2b((cache_salt or "").encode(), digest_size=BLOCK_HASH_BYTES, person=b"headrace-kv").digest()


def chain_hashes(tokens: bytes, unit: int, *, parent: bytes) -> list[bytes]:
    """The hashes of the full units of `unit` tokens in `tokens` (int32 bytes), each over its parent and its tokens."""
    size = unit * TOKEN_BYTES
    hashes = []
    for start in range(0, len(tokens) - size + 1, size):
        parent = blake2b(parent + tokens[start : start + size], digest_size=BLOCK_HASH_BYTES).digest()
        hashes.append(parent)
    return hashes
