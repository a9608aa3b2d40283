"""Events over the links: numbered, with a snapshot for whoever missed some.

A subscriber opens one stream per publisher. The publisher answers with a snapshot that says which
event it includes last, then sends every later event. A subscriber that is too far behind is not sent
some; it sees the gap in the numbers, drops the stream and opens another, whose snapshot comes first.
Whatever still arrives on the old stream is ignored, so no event is ever applied to the wrong state.

    following     a snapshot came; each event is the next one
    asking        just opened, or after a gap: nothing is delivered until the snapshot comes
    waiting       the stream ended in an error while the peer lives: ask again a little later
    lost          the peer is gone or was restarted
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from graph.component import Peer, Stream, Subscription
from graph.errors import LinkError
from graph.link.calls import OpenCall
from graph.link.client import Pool
from graph.link.codec import MALFORMED, NIL, decoder, encode
from graph.link.streams import Served, ServerStream
from graph.link.wire import Limits
from graph.ports import Message, Publishes, Subscribes

log = logging.getLogger(__name__)

_REMIND_S = 0.1  # how soon a subscriber that was skipped is told the current number
_RETRY_S = 0.2
_SNAPSHOT_TIMEOUT_S = 10.0

SNAPSHOT, EVENT, REMINDER = 0, 1, 2


class Follow(Message, frozen=True):
    """Asks a publisher for a snapshot and all later events."""


class Numbered(msgspec.Struct, frozen=True, array_like=True):
    """One thing a publisher says. `number` is the last event that is included in, or is, this one."""

    kind: int
    number: int
    body: msgspec.Raw = msgspec.Raw(NIL)


class PortPublisher:
    """Implements `graph.component.Publisher`."""

    def __init__(
        self, port: Publishes, snapshot: Callable[[], Message], *, loop: asyncio.AbstractEventLoop, limits: Limits
    ) -> None:
        self.served = Served(port.name, decoder(Follow), self._follow, max_streams=10_000)
        self.number = 0
        self._snapshot = snapshot
        self._loop = loop
        self._max_backlog = limits.event_backlog_bytes
        self._streams: set[ServerStream] = set()
        self._skipped: set[ServerStream] = set()
        self._reminder: asyncio.TimerHandle | None = None
        self._num_to_drop = 0

    def publish(self, event: Message) -> None:
        """Sends `event` to all subscribers that keep up."""
        self.number += 1
        if not self._streams:
            return
        numbered = Numbered(EVENT, self.number, encode(event))
        is_dropped = self._num_to_drop > 0
        self._num_to_drop -= is_dropped
        for stream in list(self._streams):
            if is_dropped or stream.num_backlog_bytes > self._max_backlog:
                self._skip(stream)
            else:
                self._skipped.discard(stream)  # it sees the gap now
                stream.send(numbered)

    def drop_next(self, num_events: int) -> None:
        """Fault injection: the next events are published but reach nobody."""
        self._num_to_drop = num_events

    def close(self) -> None:
        """Stops reminding."""
        if self._reminder is not None:
            self._reminder.cancel()

    def _follow(self, request: Any, stream: Stream) -> None:
        assert isinstance(stream, ServerStream)
        stream.send(Numbered(SNAPSHOT, self.number, encode(self._snapshot())))
        self._streams.add(stream)
        stream.on_cancel(lambda: self._forget(stream))

    def _forget(self, stream: ServerStream) -> None:
        self._streams.discard(stream)
        self._skipped.discard(stream)

    def _skip(self, stream: ServerStream) -> None:
        self._skipped.add(stream)
        if self._reminder is None:
            self._reminder = self._loop.call_later(_REMIND_S, self._remind)

    def _remind(self) -> None:
        # Without a later event nobody would notice that the last ones were skipped.
        self._reminder = None
        for stream in list(self._skipped):
            if stream.num_backlog_bytes <= self._max_backlog:
                self._skipped.discard(stream)
                stream.send(Numbered(REMINDER, self.number))
        if self._skipped:
            self._reminder = self._loop.call_later(_REMIND_S, self._remind)


class PortSubscriber:
    """Follows one `Subscribes` port at every ready peer of its nodes."""

    def __init__(self, pool: Pool, port: Subscribes, subscription: Subscription, targets: Mapping[str, str]) -> None:
        self._pool = pool
        self._port = port
        self._subscription = subscription
        self._targets = dict(targets)
        self._followers: dict[str, Follower] = {}
        self.refresh()

    def refresh(self) -> None:
        """Drops the followers of peers that drain, are gone or restarted, and follows the new ones."""
        ready = {id: peer for id, peer in self._pool.live.items() if peer.state == "ready"}
        for id, follower in list(self._followers.items()):
            if id not in ready or ready[id].boot != follower.peer.boot:
                del self._followers[id]
                follower.close()
        for peer in ready.values():
            if peer.node in self._targets and peer.id not in self._followers:
                follower = Follower(self._pool, peer, self._targets[peer.node], self._port, self._subscription)
                self._followers[peer.id] = follower
                follower.ask()

    def close(self) -> None:
        """Stops following, without a word to the subscription."""
        for follower in self._followers.values():
            follower.stop()


class Follower:
    """Follows one start of one publisher."""

    def __init__(self, pool: Pool, peer: Peer, port: str, own: Subscribes, subscription: Subscription) -> None:
        self.peer = peer
        self._pool = pool
        self._port = port
        self._edge = f"{peer.node}.{port} >> {pool.id}.{own.name}"
        self._subscription = subscription
        self._numbered = decoder(Numbered)
        self._event = decoder(*own.events)
        self._snapshot = decoder(own.snapshot)
        self._number: int | None = None  # of the last event applied; None while asking
        self._call: OpenCall | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._is_stopped = False
        self._is_known = False  # the subscription has had a snapshot of this peer

    def ask(self) -> None:
        """Opens a stream; its snapshot comes first."""
        self._retry = None
        self._number = None
        self._call = self._pool.open(
            self.peer,
            self._port,
            Follow(),
            edge=self._edge,
            decode=self._numbered,
            timeout_s=_SNAPSHOT_TIMEOUT_S,
            on_item=self._on_item,
            on_end=self._on_end,
        )

    def close(self) -> None:
        """The peer is lost; tells the subscription if it knew of the peer."""
        self.stop()
        if not self._is_known:
            return
        try:
            self._subscription.on_lost(self.peer)
        except Exception:
            log.exception("%s: the subscription failed at the loss of %s", self._edge, self.peer.id)

    def stop(self) -> None:
        """Stops following."""
        self._is_stopped = True
        if self._retry is not None:
            self._retry.cancel()
        if self._call is not None:
            self._call.cancel()

    def _on_item(self, numbered: Numbered) -> None:
        if self._is_stopped:
            return
        if numbered.kind == SNAPSHOT:
            self._apply(self._subscription.on_snapshot, self._snapshot, numbered)
        elif self._number is None:
            return
        elif numbered.kind == EVENT and numbered.number == self._number + 1:
            self._apply(self._subscription.on_event, self._event, numbered)
        elif numbered.number > self._number:
            self._ask_again(0)

    def _apply(self, take: Callable[[Peer, Any], None], decode: Callable[[Any], Any], numbered: Numbered) -> None:
        try:
            take(self.peer, decode(numbered.body))
        except MALFORMED as error:
            log.error("%s: the events of %s do not fit the port: %s", self._edge, self.peer.id, error)
            self._ask_again(_RETRY_S)
        except Exception:
            log.exception("%s: the subscription failed; it starts anew from a snapshot", self._edge)
            self._ask_again(_RETRY_S)
        else:
            self._number = numbered.number
            self._is_known = True
            if self._call is not None:
                self._call.timeout_s = math.inf  # a silent publisher is not a dead one

    def _ask_again(self, delay_s: float) -> None:
        self._number = None
        if self._call is not None:
            call, self._call = self._call, None
            call.cancel()
        if self._retry is None and not self._is_stopped:
            self._retry = self._pool.loop.call_later(delay_s, self.ask)

    def _on_end(self, error: LinkError | None) -> None:
        if self._call is not None and self._call.is_closed and not self._is_stopped:
            self._call = None
            self._ask_again(_RETRY_S)
