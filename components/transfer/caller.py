"""What a decode worker says to a prefill worker about one prompt: the request, renewals, polls, the release.

Replies come by callback, without a task or a queue. All of it belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from components.messages import LeaseRelease, LeaseRenew, LeaseState, PrefillPoll, PrefillRequest
from graph import Call, Client, LinkError, NoPeer

PREFILL_DEADLINE_S = 3600.0
"""Bound of one remote prefill; its liveness is watched by polls, which have deadlines of their own."""

RELEASE_TRIES = 3
RELEASE_PAUSE_S = 0.2

logger = logging.getLogger(__name__)


class PrefillCaller:
    """Speaks to any prefill worker that `client` reaches."""

    def __init__(self, client: Client, *, answer_s: float) -> None:
        """`answer_s` bounds the wait for the answer to anything but the request itself."""
        self._client = client
        self._answer_s = answer_s

    def ask(
        self,
        request: PrefillRequest,
        peer: str,
        *,
        on_item: Callable[[Any], None],
        on_failure: Callable[[LinkError], None],
    ) -> Call | None:
        """Sends the request. The call is to be cancelled when the pull ends; without a peer there is none."""

        def on_end(error: LinkError | None) -> None:
            if error is not None:
                on_failure(error)

        try:
            return self._client.open(request, peer=peer, timeout_s=PREFILL_DEADLINE_S, on_item=on_item, on_end=on_end)
        except NoPeer as error:
            on_failure(error)
            return None

    def renew(self, request: PrefillRequest, peer: str, on_answer: Callable[[bool | None], None]) -> None:
        """Renews a lease for another full time; tells whether it was held, or None if no answer came."""
        self._once(
            peer,
            LeaseRenew(request.id, request.lease_ms),
            on_reply=lambda reply: on_answer(isinstance(reply, LeaseState) and reply.held),
            on_failure=lambda error: on_answer(None),
        )

    def poll(
        self, attempt: str, peer: str, *, on_reply: Callable[[Any], None], on_failure: Callable[[LinkError], None]
    ) -> None:
        """Asks where a prompt stands."""
        self._once(peer, PrefillPoll(attempt), on_reply=on_reply, on_failure=on_failure)

    def release(self, attempt: str, peer: str, *, tries: int = RELEASE_TRIES) -> None:
        """Gives the blocks back; tried again, as long as the peer lives, and left to the lease's end after that."""

        def on_failure(error: LinkError) -> None:
            if isinstance(error, NoPeer) or tries <= 1:
                logger.info("release of %s did not reach %s, its lease will end: %s", attempt, peer, error)
                return
            asyncio.get_running_loop().call_later(RELEASE_PAUSE_S, lambda: self.release(attempt, peer, tries=tries - 1))

        self._once(peer, LeaseRelease(attempt), on_reply=lambda reply: None, on_failure=on_failure)

    def _once(
        self,
        peer: str,
        request: LeaseRenew | LeaseRelease | PrefillPoll,
        *,
        on_reply: Callable[[Any], None],
        on_failure: Callable[[LinkError], None],
    ) -> None:
        """Sends a request with one reply; exactly one of the two callbacks follows."""
        replies: list[Any] = []

        def on_end(error: LinkError | None) -> None:
            if replies:
                on_reply(replies[0])
            else:
                on_failure(error or LinkError(f"{peer} gave no answer"))

        try:
            self._client.open(request, peer=peer, timeout_s=self._answer_s, on_item=replies.append, on_end=on_end)
        except NoPeer as error:
            on_failure(error)
