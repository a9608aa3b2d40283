"""Where the text of a request goes: a stream of events, or one whole reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from frontends.choice import Choice, Delta
from frontends.formats import DONE, Format, usage_of
from frontends.reply import HttpReply
from frontends.trail import Trail, read_trail
from graph import ProtocolFault

Told = Callable[[], Any]
"""Makes the reply's `headrace` object, once all is known; None if it was not asked for."""


class EventSink:
    """Writes events as the tokens come: at most one body per turn of the loop, whatever the number of choices.

    Each body takes along the trail of the steps it came from.
    """

    def __init__(
        self,
        reply: HttpReply,
        format: Format,
        choices: Sequence[Choice],
        *,
        echoes: Mapping[int, str],
        includes_usage: bool,
        counts_usage: bool,
        headrace: Told,
    ) -> None:
        """`echoes` are texts that open choices; `counts_usage` puts the usage so far into every chunk."""
        self._reply = reply
        self._format = format
        self._choices = choices
        self._echoes = echoes
        self._includes_usage = includes_usage
        self._counts_usage = counts_usage
        self._headrace = headrace
        self._opened: set[int] = set()
        self._num_open = len(choices)
        self._pending: list[bytes] = []
        self._trail = Trail()
        self._is_flushing = False  # at the next turn of the loop

    def replay(self, choice: Choice, delta: Delta) -> None:
        """Another processor has told this."""
        self._shape(choice, delta)
        self._pending.clear()

    def add(self, choice: Choice, delta: Delta) -> None:
        self._shape(choice, delta)
        if delta.chunk is not None:
            self._trail.note(choice.plan.index, delta.chunk)
        if len(self._choices) == 1:
            self._flush()
        elif self._pending and not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def close(self) -> None:
        """All choices have finished."""
        if self._includes_usage:
            self._pending.append(self._format.usage(usage_of(self._choices), self._headrace()))
        self._pending.append(DONE)
        self._trail.close()
        self._flush()
        self._reply.end()

    def _shape(self, choice: Choice, delta: Delta) -> None:
        index = choice.plan.index
        usage = usage_of(self._choices) if self._counts_usage else None
        if index not in self._opened:
            self._opened.add(index)
            self._pending.append(self._format.role(index, usage))
            if echo := self._echoes.get(index):
                self._pending.append(self._format.delta(index, Delta(echo), usage))
        if delta.text or delta.tokens:
            self._pending.append(self._format.delta(index, delta, usage))
        if choice.finish is not None:
            self._num_open -= 1
            told = self._headrace() if self._num_open == 0 and not self._includes_usage else None
            self._pending.append(self._format.finish(index, choice.finish, usage, told))

    def _flush(self) -> None:
        self._is_flushing = False
        data = b"".join(self._pending)
        self._pending.clear()
        if data and not self._reply.is_closed:
            self._reply.events(data, self._trail.take())


class WholeSink:
    """Collects everything and replies once."""

    def __init__(
        self,
        reply: HttpReply,
        format: Format,
        choices: Sequence[Choice],
        *,
        echoes: Mapping[int, str],
        headrace: Told,
    ) -> None:
        self._reply = reply
        self._format = format
        self._choices = choices
        self._headrace = headrace
        self._deltas: dict[int, list[Delta]] = {
            choice.plan.index: [Delta(echoes.get(choice.plan.index, ""))] for choice in choices
        }

    def add(self, choice: Choice, delta: Delta) -> None:
        self._deltas[choice.plan.index].append(delta)

    def close(self) -> None:
        """All choices have finished."""
        wholes = [_joined(self._deltas[choice.plan.index]) for choice in self._choices]
        self._reply.whole(200, self._format.whole(self._choices, wholes, usage_of(self._choices), self._headrace()))


def replay(trail: bytes, choices: Sequence[Choice], sink: EventSink) -> bool:
    """Takes the steps of a lost processor's trail, silently. Whether the whole reply was told already."""
    for step in read_trail(trail):
        if step.is_closing:
            return True
        if step.choice >= len(choices):
            raise ProtocolFault(f"the trail of a reply names choice {step.choice} of {len(choices)}")
        choice = choices[step.choice]
        sink.replay(choice, choice.take(step.chunk))
    return False


def _joined(deltas: Sequence[Delta]) -> Delta:
    return Delta("".join(delta.text for delta in deltas), tuple(token for delta in deltas for token in delta.tokens))
