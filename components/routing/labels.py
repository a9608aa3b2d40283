"""Labels of live requests: `disagg_request_id`, the client's own or a 64-bit snowflake.

    63         22          11        0
    |  time ms  |  origin   | counter |     41, 11 and 11 bits; the sign bit stays 0

The origin is hashed from host, process and boot id, so that neither another process nor this one after
a restart, its clock set back or not, mints the same labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from graph import Refused

EPOCH_MS = 1_767_225_600_000  # 2026-01-01
_COUNTER_BITS = 11
_ORIGIN_BITS = 11


class Snowflake:
    """Mints labels that grow with time. `now_ms` is unix time."""

    def __init__(self, host: str, pid: int, boot: str, now_ms: Callable[[], float]) -> None:
        digest = hashlib.blake2b(f"{host}/{pid}/{boot}".encode(), digest_size=8).digest()
        self._origin = int.from_bytes(digest, "big") % (1 << _ORIGIN_BITS)
        self._now_ms = now_ms
        self._last_ms = 0
        self._counter = 0

    def mint(self) -> int:
        """The next label; a clock that stands still or goes back, or a full counter, borrows from the future."""
        now_ms = max(1, int(self._now_ms()) - EPOCH_MS)
        if now_ms > self._last_ms:
            self._last_ms, self._counter = now_ms, 0
        elif self._counter + 1 < 1 << _COUNTER_BITS:
            self._counter += 1
        else:
            self._last_ms, self._counter = self._last_ms + 1, 0
        return (((self._last_ms << _ORIGIN_BITS) | self._origin) << _COUNTER_BITS) | self._counter


class Labels:
    """The labels that are in use. Each belongs to one request; its attempts share it."""

    def __init__(self, snowflake: Snowflake) -> None:
        self._snowflake = snowflake
        self._holders: dict[int, tuple[str, int]] = {}  # label -> (request id, claims)

    def claim(self, wanted: int | None, request: str) -> int:
        """A client's positive label as it is, else a new one. Raises `Refused` ("conflict") if another request has it.

        Every claim is given back by one `release`.
        """
        label = wanted if wanted is not None and wanted > 0 else self._mint()
        holder, claims = self._holders.get(label, (request, 0))
        if holder != request:
            raise Refused(
                f"disagg_request_id {label} belongs to a request that still runs; choose another, or leave it out",
                code="conflict",
            )
        self._holders[label] = (holder, claims + 1)
        return label

    def release(self, label: int) -> None:
        """Gives one claim back; the label is free after the last."""
        holder, claims = self._holders[label]
        if claims == 1:
            del self._holders[label]
        else:
            self._holders[label] = (holder, claims - 1)

    def _mint(self) -> int:
        label = self._snowflake.mint()
        while label in self._holders:
            label = self._snowflake.mint()
        return label
