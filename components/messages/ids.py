"""Ids and hashes as bytes: token and block ids are little-endian int32."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

BLOCK_HASH_BYTES = 16
"""Length of one block hash; `hashes` fields hold whole multiples of it."""

TOKEN_BYTES = 4
"""Length of one id in `tokens` and `block_ids` fields."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token or block ids as little-endian int32 bytes."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The ids packed by `pack_ids`."""
    packed = array("i")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
