"""What a link needs of a transport: whole byte messages, in order, between a dialer and a listener."""

from __future__ import annotations

from typing import Protocol


class Transport(Protocol):
    """Carries wire messages."""

    async def close(self) -> None: ...
