"""Least busy: chooses a peer by the streams this replica has open there."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from graph import Client, NoPeer, Peer


class PeerPool:
    """The ready peers of one client, with the number of streams this replica has open at each.

    Failures are remembered by the caller as boot ids, so that a restarted peer is a fresh candidate.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._open: Counter[str] = Counter()
        self._last_chosen: dict[str, int] = {}
        self._num_choices = 0
        self._changed = asyncio.Event()
        self._has_had_peers = False
        client.on_change(self._on_change)

    @property
    def has_had_peers(self) -> bool:
        """Whether there was ever a ready peer."""
        return self._has_had_peers

    @property
    def num_open(self) -> int:
        """Streams open now, at all peers."""
        return self._open.total()

    def least_busy(self, *, exclude: Collection[str] = ()) -> Peer | None:
        """The peer with the fewest open streams, the longest unused one of equals; None without candidates.

        `exclude` holds boot ids.
        """
        candidates = [peer for peer in self._client.peers.values() if peer.boot not in exclude]
        if not candidates:
            return None
        return min(candidates, key=lambda peer: (self._open[peer.id], self._last_chosen.get(peer.id, 0), peer.id))

    async def wait_least_busy(self, timeout_s: float, *, exclude: Collection[str] = ()) -> Peer:
        """As `least_busy`, but waits for a candidate; raises `NoPeer` if there is none in time."""
        at_once = self.least_busy(exclude=exclude)
        if at_once is not None:
            return at_once
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    changed = self._changed
                    peer = self.least_busy(exclude=exclude)
                    if peer is not None:
                        return peer
                    await changed.wait()
        except TimeoutError:
            raise NoPeer(f"no ready peer within {timeout_s:g} s", retry_after_s=1.0) from None

    @contextmanager
    def stream(self, peer: str) -> Iterator[None]:
        """Counts one stream at `peer` while the block runs."""
        self._num_choices += 1
        self._last_chosen[peer] = self._num_choices
        self._open[peer] += 1
        try:
            yield
        finally:
            self._open[peer] -= 1
            if self._open[peer] <= 0:
                del self._open[peer]

    def _on_change(self, peers: Mapping[str, Peer]) -> None:
        self._has_had_peers = self._has_had_peers or bool(peers)
        self._last_chosen = {peer: last for peer, last in self._last_chosen.items() if peer in peers}
        self._changed.set()
        self._changed = asyncio.Event()
