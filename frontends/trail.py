"""The trail of a streamed reply: the steps of its choices, told along with the bytes they became.

    noted      a choice took a step; it waits for the bytes it becomes
    told       it left in one message with these bytes, so that the ingress has both or neither
    replayed   the processor was lost: another one took the same steps, silently, and goes on behind them

The ingress keeps the trail of each open reply without reading it. Nothing else has to survive a processor:
which tokens come next is a function of the request, its seeds and the tokens so far.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from components.messages import FinishReason, Timing, TokenChunk, TokenLogprobs
from graph import ProtocolFault
from graph.link.codec import MALFORMED, decoder, encode

_SIZE_BYTES = 4
_CLOSED = -1


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of one choice; `choice` is `_CLOSED` once all have finished and the stream's end was told."""

    choice: int
    tokens: bytes = b""
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    timing: Timing | None = None

    @property
    def is_closing(self) -> bool:
        """Whether the reply is complete."""
        return self.choice == _CLOSED

    @property
    def chunk(self) -> TokenChunk:
        """The chunk as the worker sent it."""
        return TokenChunk(self.tokens, self.logprobs, self.finish, self.cached_tokens, self.timing)


_step = decoder(Step)


class Trail:
    """The steps that are noted and not told yet."""

    def __init__(self) -> None:
        self._noted = bytearray()

    def note(self, choice: int, chunk: TokenChunk) -> None:
        """A choice took a chunk."""
        rest = (chunk.finish, chunk.cached_tokens, chunk.logprobs, chunk.timing)
        if rest == (None, None, None, None):
            self._add(encode((choice, chunk.tokens)))  # nearly every step; the rest has its defaults
        else:
            self._add(encode(Step(choice, chunk.tokens, *rest)))

    def close(self) -> None:
        """The end of the stream goes out."""
        self._add(encode((_CLOSED,)))

    def take(self) -> bytes:
        """What is to be told with the next bytes."""
        told = bytes(self._noted)
        self._noted.clear()
        return told

    def _add(self, step: msgspec.Raw) -> None:
        data = memoryview(step)
        self._noted += len(data).to_bytes(_SIZE_BYTES, "little")
        self._noted += data


def read_trail(trail: bytes) -> Iterator[Step]:
    """The steps in order; raises `ProtocolFault` for what is no trail."""
    view = memoryview(trail)
    while view:
        size = int.from_bytes(view[:_SIZE_BYTES], "little")
        step, view = view[_SIZE_BYTES : _SIZE_BYTES + size], view[_SIZE_BYTES + size :]
        try:
            yield _step(step)
        except MALFORMED as error:
            raise ProtocolFault(f"the trail of a reply cannot be read: {error}") from error
