"""The codec: how frames and messages become bytes, and the only user of msgpack.

A wire message is a msgpack array of frames, all for one peer:

    [[stream, kind, payload], [stream, kind, payload, port], ...]

Stream numbers are chosen by the caller, count up from 1 and are never used twice on one line; 0 is the
line itself. A payload stays raw until its stream tells which port's types it must have. Only bytes
that fit those types become objects; everything else raises `ProtocolFault`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import reduce
from operator import or_
from typing import Any

import msgspec

from graph.errors import Failure, ProtocolFault


class Kind(IntEnum):
    """What a frame does."""

    REQUEST = 0  # caller: opens the stream; carries the port's name
    ITEM = 1  # server: one reply
    END = 2  # server: the good end, with the last reply or nil
    FAILURE = 3  # server: the bad end
    CANCEL = 4  # caller: nobody listens any more
    HELLO = 5  # caller: who speaks on this line; first of all frames
    BYE = 6  # either side: everything on this line has ended


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One frame as it was received."""

    stream: int
    kind: int
    payload: msgspec.Raw
    port: str = ""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Opens a line: who calls, and which start of the server it means to reach ("" is any)."""

    id: str
    boot: str
    server_boot: str = ""


class Bye(msgspec.Struct, frozen=True, array_like=True):
    """Ends every stream of a line with `failure`; after `is_leaving` nobody will answer any more."""

    failure: Failure
    is_leaving: bool = False


Decode = Callable[[Any], Any]
"""Turns a raw payload into a message, or raises `ProtocolFault`."""

NIL = b"\xc0"
LINE = 0  # the stream number of frames about the line itself
_HEAD = b"\xdd\x00\x00\x00\x00"  # array32; the count is filled in when the batch is sealed

_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(list[Frame])


class Batch:
    """Frames being gathered into one wire message."""

    __slots__ = ("_bytes", "_encode_into", "num_frames")

    def __init__(self) -> None:
        self._bytes = bytearray(_HEAD)
        self._encode_into = _encoder.encode_into
        self.num_frames = 0

    def __len__(self) -> int:
        return len(self._bytes)

    def add(self, frame: tuple[Any, ...]) -> None:
        """Encodes one frame now, so that later changes to its payload do not matter."""
        size = len(self._bytes)
        try:
            self._encode_into(frame, self._bytes, -1)
        except BaseException:
            del self._bytes[size:]
            raise
        self.num_frames += 1

    def seal(self) -> bytearray:
        """The finished wire message."""
        self._bytes[1:5] = self.num_frames.to_bytes(4, "big")
        return self._bytes


def decode_batch(data: bytes) -> list[Frame]:
    """The frames of a wire message."""
    try:
        return _frames.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolFault(f"not a batch of frames: {error}") from error


def decoder(*types: Any) -> Decode:
    """The decoder of payloads that are one of `types`."""
    decode: Decode = msgspec.msgpack.Decoder(reduce(or_, types)).decode
    return decode


def fault(error: Exception) -> ProtocolFault:
    """The fault that a decoder's `error` stands for."""
    return ProtocolFault(f"the bytes of a message do not fit its port: {error}")


MALFORMED = (msgspec.DecodeError, RecursionError)
"""What a decoder raises on bytes that do not fit."""


def encode(message: Any) -> msgspec.Raw:
    """A message encoded once, to be sent as (part of) many payloads."""
    return msgspec.Raw(_encoder.encode(message))
