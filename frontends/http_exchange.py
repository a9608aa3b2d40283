"""One HTTP request on its way through the ingress.

    reading    the body arrives; too large (413), stalled (408) or gone ends it here
    asking     a processor was given the request, no byte has gone to the client: should the
               processor die, another one gets the request, for nothing was delivered
    replying   bytes go out as they come, joined per turn of the loop; should the processor die, another
               one gets the request with the reply's trail, and goes on behind the bytes that came with it
    closed     the reply is complete, was broken off with an error event, or the client left

A client that reads slower than its reply comes is cut once `MAX_BACKLOG_BYTES` wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from frontends.balance import PeerPool
from frontends.faults import may_retry
from frontends.http_replies import Headers, Refusal, error_event, link_refusal
from frontends.incoming import Reply
from frontends.messages import HttpBody, HttpHead, HttpRequest
from graph import Client, LinkError, Overloaded, Peer, PeerFault, Refused

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

MAX_BACKLOG_BYTES = 1024 * 1024
MAX_ATTEMPTS = 3
"""Processors that may fail a request in a row with fewer than `PROGRESS_PIECES` each."""

PROGRESS_PIECES = 8
MAX_TRAIL_BYTES = 8 << 20
"""A reply with a longer trail cannot be taken over; it takes logprobs of very many tokens."""

PEER_WAIT_S = 1.0
LOST_WAIT_S = 30.0
"""How long a request whose processor was lost waits for another one: its client sees a pause."""

PROCESSOR_TIMEOUT_S = 60.0  # processors send a sign of life several times as often
WRITE_TIMEOUT_S = 60.0
LINGER_S = 1.0


class ClientLeft(Exception):
    """The connection is gone."""


class RefusedHere(Exception):
    """The ingress answers this request itself."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


async def read_body(receive: Receive, headers: Headers, *, limit: int, pause_s: float) -> bytes:
    """The request's body. Raises `RefusedHere` (413, 408) or `ClientLeft`."""
    declared = next((int(value) for name, value in headers if name == "content-length" and value.isdigit()), 0)
    pieces: list[bytes] = []
    size = 0
    while True:
        if max(size, declared) > limit:
            raise RefusedHere(Refusal(413, f"The body exceeds {limit} bytes.", code="body_too_large", close=True))
        try:
            async with asyncio.timeout(pause_s):
                message = await receive()
        except TimeoutError:
            refusal = Refusal(408, f"The body stalled for {pause_s:g} s.", code="body_timeout", close=True)
            raise RefusedHere(refusal) from None
        if message["type"] != "http.request":
            raise ClientLeft
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Exchange:
    """Carries one request to a processor and its reply to the client."""

    def __init__(
        self,
        *,
        client: Client,
        pool: PeerPool,
        receive: Receive,
        send: Send,
        abort: Callable[[], None],
        on_takeover: Callable[[], None],
    ) -> None:
        """`on_takeover` is called whenever another processor gets the request; `abort` cuts the connection."""
        self._client = client
        self._pool = pool
        self._receive = receive
        self._send = send
        self._abort = abort
        self._on_takeover = on_takeover
        self._trail = bytearray()
        self._is_events = False  # the reply that has begun is a stream of events
        self._wake = asyncio.Event()
        self._has_left = False
        self._ending: LinkError | None = None
        self._writing_since: float | None = None
        self._loop = asyncio.get_running_loop()
        self._stall_timer = self._loop.call_later(WRITE_TIMEOUT_S / 4, self._check_stall)
        self.status = 0  # 0 until the client was sent a status

    async def run(self, request: HttpRequest) -> None:
        """Returns when the reply is complete. Raises `ClientLeft`, or `RefusedHere` before any byte was sent."""
        watcher = self._loop.create_task(self._watch())
        try:
            error = await self._try(request)
            if error is None:
                return
            if self.status == 0:
                raise RefusedHere(link_refusal(error))
            await self._break_off(error)
        finally:
            watcher.cancel()
            self._stall_timer.cancel()

    def end(self) -> None:
        """The ingress is stopping: the request ends in an error, if it has not ended yet."""
        self._ending = Refused("the server is stopping", code="shutting_down")
        self._wake.set()

    async def _try(self, request: HttpRequest) -> LinkError | None:
        """Asks one processor after the other; the error that nothing could mend, None when the reply is complete."""
        failed: set[str] = set()
        error: LinkError | None = None
        num_in_a_row = 0
        while num_in_a_row < MAX_ATTEMPTS:
            try:
                peer = await self._choose(failed, error)
            except LinkError as none:
                return self._ending or error or none
            if error is not None:
                self._on_takeover()
                attempt, trail = request.attempt + 1, bytes(self._trail)
                request = msgspec.structs.replace(request, attempt=attempt, trail=trail)
            failed.add(peer.boot)
            reply = Reply(self._wake, self._trail)
            error = await self._attempt(request, peer, reply)
            if error is None or not may_retry(error) or not self._can_go_on:
                return error
            num_in_a_row = 1 if reply.num_pieces >= PROGRESS_PIECES else num_in_a_row + 1
        return error

    @property
    def _can_go_on(self) -> bool:
        """Whether another processor can take over: nothing was sent, or it is known what."""
        return self.status == 0 or (self._is_events and 0 < len(self._trail) <= MAX_TRAIL_BYTES)

    async def _watch(self) -> None:
        """Notices that the client has left, at any time."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        self._wake.set()

    async def _choose(self, failed: set[str], error: LinkError | None) -> Peer:
        """The least busy processor; waits a little if there is none, as during a restart. Raises `LinkError`."""
        peer = self._pool.least_busy(exclude=failed)
        if peer is None:
            if isinstance(error, Overloaded):
                raise error
            wait_s = PEER_WAIT_S if error is None else LOST_WAIT_S
            waiting = self._loop.create_task(self._pool.wait_least_busy(wait_s, exclude=failed))
            peer = await self._unless_left(waiting)
        self._check_end()
        return peer

    async def _unless_left(self, waiting: asyncio.Task[Peer]) -> Peer:
        """The task's result; raises `ClientLeft` as soon as nobody needs it any more."""
        try:
            while not waiting.done():
                self._wake.clear()
                self._check_end()
                left = self._loop.create_task(self._wake.wait())
                await asyncio.wait((waiting, left), return_when=asyncio.FIRST_COMPLETED)
                left.cancel()
            return waiting.result()
        finally:
            waiting.cancel()

    async def _attempt(self, request: HttpRequest, peer: Peer, reply: Reply) -> LinkError | None:
        """Asks one processor. Returns the error it failed with, None once the reply is complete."""
        try:
            call = self._client.open(
                request,
                peer=peer.id,
                timeout_s=PROCESSOR_TIMEOUT_S,
                on_item=self._guarded(reply),
                on_end=reply.on_end,
            )
        except LinkError as error:
            return error
        with self._pool.stream(peer.id):
            try:
                return await self._relay(request.id, reply)
            except Refused as ending:
                return ending
            finally:
                if not reply.has_ended:
                    call.cancel()

    def _check_end(self) -> None:
        """Raises if the exchange is to end before its reply is complete."""
        if self._has_left:
            raise ClientLeft
        if self._ending is not None:
            raise self._ending

    def _guarded(self, reply: Reply) -> Callable[[Any], None]:
        """The reply's `on_item`, which cuts a client that does not read."""

        def on_item(item: HttpHead | HttpBody) -> None:
            reply.on_item(item)
            if self._writing_since is not None and reply.backlog_bytes > MAX_BACKLOG_BYTES:
                self._cut()

        return on_item

    async def _relay(self, request_id: str, reply: Reply) -> LinkError | None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._check_end()
            data = reply.take()
            if self.status == 0:
                if reply.head is None or not data:
                    if reply.has_ended:
                        return reply.error or PeerFault("the processor ended without a reply")
                    continue
                await self._start(reply.head, request_id)
            if reply.error is not None:
                if data:
                    await self._write(data, more=True)
                return reply.error
            is_last = reply.has_ended
            await self._write(data, more=not is_last)
            if is_last:
                return None

    async def _start(self, head: HttpHead, request_id: str) -> None:
        self.status = head.status
        self._is_events = ("content-type", "text/event-stream") in head.headers
        headers = [(name.encode(), value.encode("latin-1")) for name, value in head.headers]
        headers.append((b"x-request-id", request_id.encode()))
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})

    async def _write(self, data: bytes, *, more: bool) -> None:
        self._writing_since = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._writing_since = None

    async def _break_off(self, error: LinkError) -> None:
        """The reply has begun and cannot be finished: a stream of events says so, anything else is cut."""
        if not self._is_events:
            self._cut()
            raise ClientLeft
        await self._write(error_event(error.message, code=error.code), more=False)

    def _check_stall(self) -> None:
        """Runs now and then beside a reply, cheaper than a timer per write."""
        if self._writing_since is not None and self._loop.time() - self._writing_since > WRITE_TIMEOUT_S:
            self._cut()
        else:
            self._stall_timer = self._loop.call_later(WRITE_TIMEOUT_S / 4, self._check_stall)

    def _cut(self) -> None:
        self._has_left = True
        self._wake.set()
        self._abort()


async def send_refusal(refusal: Refusal, *, request_id: str, receive: Receive, send: Send) -> None:
    """Answers with `refusal`; if it came before the body's end, reads on briefly so that the client sees it."""
    body = refusal.body()
    headers = (*refusal.headers(), ("content-length", str(len(body))), ("x-request-id", request_id))
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": refusal.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": refusal.close})
    if not refusal.close:
        return
    try:
        async with asyncio.timeout(LINGER_S):
            message = await receive()
            while message["type"] == "http.request" and message.get("more_body", False):
                message = await receive()
    except TimeoutError:
        pass  # closed below: the client had time to read the reply
    await send({"type": "http.response.body", "body": b"", "more_body": False})
