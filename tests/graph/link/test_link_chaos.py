"""Whatever happens to a link, in whatever order: each call and each stream ends exactly once."""

import asyncio
import random

import pytest

from graph.component import Peer
from graph.errors import LinkError, NoPeer, Refused

CALLER = Peer("caller/0", "1", "nowhere")


class Chaos:
    """A server and a caller to which random things happen; books every end."""

    def __init__(self, site, ending, seed):
        self._site = site
        self._ending = ending
        self._random = random.Random(seed)
        self._streams = []
        self._calls = []
        self.endings = []
        self.num_cancels = {}
        self.server = site.server(self._handle)
        self.links, self._client = site.caller(self.server)

    def _handle(self, ask, stream):
        self._streams.append(stream)
        self.num_cancels[stream.id] = 0
        stream.on_cancel(lambda: self._cancelled(stream))
        if ask.number == 1:
            raise Refused("no")
        if ask.number == 2:
            raise ValueError("a bug")

    def _cancelled(self, stream):
        self.num_cancels[stream.id] += 1

    def act(self):
        """One random thing."""
        actions = [self._open] * 5 + [self._send] * 8 + [self._end] * 3 + [self._cancel] * 2
        self._random.choice([*actions, self._fail, self._lose_peer, self._lose_caller])()

    def _open(self):
        timeout_s = self._random.choice([0.001, 0.02, 30.0])
        got = self._ending()
        ask = self._site.Ask(self._random.randrange(6))
        try:
            call = self._client.open(ask, peer="server/0", timeout_s=timeout_s, on_item=got.on_item, on_end=got.on_end)
        except NoPeer:
            return
        self._calls.append(call)
        self.endings.append(got)

    def _stream(self):
        return self._random.choice(self._streams) if self._streams else None

    def _send(self):
        if stream := self._stream():
            stream.send(self._site.Tell(1, bytes(self._random.choice([0, 10, 100_000]))))

    def _end(self):
        if stream := self._stream():
            stream.end(self._site.Tell(2))

    def _fail(self):
        if stream := self._stream():
            stream.fail(Refused("enough"))

    def _cancel(self):
        if self._calls:
            self._random.choice(self._calls).cancel()

    def _lose_peer(self):
        self.links.set_peers([])
        self.links.set_peers([self._site.peer(self.server)])

    def _lose_caller(self):
        self.server.set_peers([CALLER])
        self.server.set_peers([])

    @property
    def streams(self):
        """All streams that were ever opened."""
        return self._streams


@pytest.mark.parametrize("seed", range(4))
def test_everything_ends_exactly_once(site, ending, until, seed):
    async def body():
        chaos = Chaos(site, ending, seed)
        for step in range(600):
            chaos.act()
            if step % 7 == 0:
                await asyncio.sleep(0)
            if step % 50 == 0:
                await asyncio.sleep(0.005)
        await chaos.links.close()
        await until(lambda: all(stream.is_closed for stream in chaos.streams))
        await chaos.server.close()
        await asyncio.sleep(0.01)
        assert len(chaos.endings) > 50
        assert {len(got.ends) for got in chaos.endings} == {1}
        assert all(end is None or isinstance(end, LinkError) for got in chaos.endings for end in got.ends)
        assert set(chaos.num_cancels.values()) <= {0, 1}

    site.run(body)
