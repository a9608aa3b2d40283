"""Leases on the prefill side: which prompts' blocks are pinned, for whom, and until when. Pure.

    granted    with the first announcement of blocks
    renewed    by decode, any number of times
    ended      by decode's release, by expiry, or by the death of the decode worker; exactly once

Prefill counts a lease from when the message arrived and adds a margin, decode from when it sent it:
decode always believes a lease to end before it does, whatever the clocks say.
"""

from __future__ import annotations

import msgspec

MARGIN = 0.25
"""Part of a lease's length that prefill waits on top."""


class Lease(msgspec.Struct, frozen=True):
    """Blocks of `id` are pinned for `peer` until `until_s`."""

    id: str
    peer: str
    until_s: float


class LeaseTable:
    """All leases of one prefill worker."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, id: str) -> bool:
        return id in self._leases

    @property
    def next_expiry_s(self) -> float | None:
        """When the first lease ends, if there is one."""
        return min((lease.until_s for lease in self._leases.values()), default=None)

    def grant(self, id: str, peer: str, *, lease_s: float, now: float) -> None:
        """Pins the blocks of `id`; a lease that stands already is left alone."""
        self._leases.setdefault(id, Lease(id, peer, _until(lease_s, now)))

    def renew(self, id: str, *, lease_s: float, now: float) -> bool:
        """Prolongs a lease, never shortens it; False if there is none, or it is over and only not collected yet."""
        lease = self._leases.get(id)
        if lease is None or lease.until_s <= now:
            return False
        self._leases[id] = Lease(id, lease.peer, max(lease.until_s, _until(lease_s, now)))
        return True

    def shorten(self, id: str, *, to_s: float) -> None:
        """Lets a lease end at `to_s` at the latest."""
        lease = self._leases.get(id)
        if lease is not None and lease.until_s > to_s:
            self._leases[id] = Lease(id, lease.peer, to_s)

    def end(self, id: str) -> bool:
        """Ends a lease; False if there was none."""
        return self._leases.pop(id, None) is not None

    def expired(self, now: float) -> list[str]:
        """The ids whose lease is over; they stay in the table until `end`."""
        return [lease.id for lease in self._leases.values() if lease.until_s <= now]

    def of_peer(self, peer: str) -> list[str]:
        """The ids pinned for one decode worker."""
        return [lease.id for lease in self._leases.values() if lease.peer == peer]


def _until(lease_s: float, now: float) -> float:
    return now + lease_s * (1 + MARGIN)
