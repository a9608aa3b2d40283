"""Workers to the router: what they are, which blocks they hold, how busy they are."""

from __future__ import annotations

from typing import Literal

import msgspec

from graph import Message

Role = Literal["worker", "prefill", "decode"]
"""What a worker is for; "worker" does both phases."""


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How busy a worker is."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0  # by live sequences; blocks that only the prefix cache holds are free
    blocks_total: int = 0
    prefill_tokens: int = 0  # queued or being computed


class BlocksStored(Message, frozen=True, array_like=True, tag=True):
    """These hash units can be matched now; `parent` is the hash before the first one (empty at the root)."""

    parent: bytes
    hashes: bytes


class BlocksRemoved(Message, frozen=True, array_like=True, tag=True):
    """These hash units are gone."""

    hashes: bytes


class BlocksCleared(Message, frozen=True, array_like=True, tag=True):
    """The whole prefix cache is gone."""


class LoadChanged(Message, frozen=True, array_like=True, tag=True):
    """The worker's load now."""

    load: Load


class WorkerSnapshot(Message, frozen=True, array_like=True, tag=True):
    """All of a worker that events tell: replaces whatever was known of it."""

    role: Role
    hash_unit: int  # tokens per hash
    load: Load
    hashes: bytes = b""
    parents: bytes = b""  # the hash before each of `hashes`


WorkerEvents = (BlocksStored, BlocksRemoved, BlocksCleared, LoadChanged)
