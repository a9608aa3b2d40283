"""Events: a snapshot first, then every event in order, and a fresh snapshot whenever that fails."""

import asyncio

from graph.link import Limits


class Follower:
    """A subscription that rebuilds the publisher's state and books what it was told."""

    def __init__(self):
        self.state = {}
        self.log = []

    def on_snapshot(self, peer, snapshot):
        self.state[peer.id] = list(snapshot.numbers)
        self.log.append("snapshot")

    def on_event(self, peer, event):
        self.state[peer.id].append(event.number)
        self.log.append(event.number)

    def on_lost(self, peer):
        del self.state[peer.id]
        self.log.append("lost")


class News:
    """A publisher and the sum of what it published."""

    def __init__(self, site, links):
        self._tell = site.Tell
        self.numbers = []
        self.publisher = links.publisher(site.Ports.news, lambda: site.State(list(self.numbers)))

    def publish(self, number, body=b""):
        self.numbers.append(number)
        self.publisher.publish(self._tell(number, body))


def follow(site, server, **more):
    """A caller that follows `server`."""
    links = site.links("caller/0", **more)
    follower = Follower()
    links.subscribe(site.Ports.follows, follower, {"server": "news"})
    links.set_peers([site.peer(server)])
    return links, follower


def test_a_snapshot_and_then_each_event(site, until):
    async def body():
        server = site.server()
        news = News(site, server)
        news.publish(1)
        _, follower = follow(site, server)
        await until(lambda: follower.log)
        for number in (2, 3):
            news.publish(number)
        await until(lambda: follower.state["server/0"] == [1, 2, 3])
        assert follower.log == ["snapshot", 2, 3]

    site.run(body)


def test_dropped_events_are_noticed_and_replaced_by_a_snapshot(site, until):
    async def body():
        server = site.server()
        news = News(site, server)
        _, follower = follow(site, server)
        await until(lambda: follower.log)
        news.publisher.drop_next(2)
        for number in (1, 2, 3):
            news.publish(number)
        await until(lambda: follower.state["server/0"] == [1, 2, 3])
        news.publish(4)
        await until(lambda: follower.state["server/0"] == [1, 2, 3, 4])
        assert follower.log == ["snapshot", "snapshot", 4]

    site.run(body)


def test_a_gap_at_the_very_end_is_noticed_without_a_later_event(site, until):
    async def body():
        server = site.server()
        news = News(site, server)
        _, follower = follow(site, server)
        await until(lambda: follower.log)
        news.publisher.drop_next(1)
        news.publish(1)
        await until(lambda: follower.state["server/0"] == [1])
        assert follower.log == ["snapshot", "snapshot"]

    site.run(body)


def test_events_published_while_a_snapshot_is_on_its_way_are_neither_lost_nor_doubled(site, until):
    async def body():
        server = site.server()
        news = News(site, server)
        _, follower = follow(site, server)
        await until(lambda: follower.log)
        for number in range(200):
            if number % 20 == 0:
                news.publisher.drop_next(1)
            news.publish(number)
            await asyncio.sleep(0)
        await until(lambda: follower.state["server/0"] == list(range(200)))
        assert follower.log.count("snapshot") >= 2

    site.run(body)


def test_a_restarted_publisher_starts_from_its_own_snapshot(site, until):
    async def body():
        server = site.server()
        news = News(site, server)
        news.publish(1)
        links, follower = follow(site, server)
        await until(lambda: follower.log)
        await server.close()
        reborn = site.server(boot="2")
        News(site, reborn).publish(100)
        links.set_peers([site.peer(reborn, boot="2")])
        await until(lambda: follower.state.get("server/0") == [100])
        assert follower.log == ["snapshot", "lost", "snapshot"]
        links.set_peers([])
        assert follower.log[-1] == "lost"

    site.run(body)


def test_a_subscription_that_fails_starts_anew(site, until, caplog):
    class Fragile(Follower):
        has_failed = False

        def on_event(self, peer, event):
            if not self.has_failed:
                self.has_failed = True
                raise ValueError("a bug")
            super().on_event(peer, event)

    async def body():
        server = site.server()
        news = News(site, server)
        links, follower = site.links("caller/0"), Fragile()
        links.subscribe(site.Ports.follows, follower, {"server": "news"})
        links.set_peers([site.peer(server)])
        await until(lambda: follower.log)
        news.publish(1)
        await until(lambda: follower.log.count("snapshot") == 2)
        news.publish(2)
        await until(lambda: follower.state["server/0"] == [1, 2])

    site.run(body)
    assert "a bug" in caplog.text


def test_a_publisher_that_is_not_there_yet_is_asked_again(site, until):
    async def body():
        server = site.server()
        _, follower = follow(site, server)
        await asyncio.sleep(0.05)
        News(site, server).publish(1)
        await until(lambda: follower.state.get("server/0") == [1])

    site.run(body)


def test_a_subscriber_that_is_far_behind_gets_a_snapshot_instead_of_a_queue(site, until):
    async def body():
        server = site.server(limits=Limits(event_backlog_bytes=100_000))
        news = News(site, server)
        _, follower = follow(site, server)
        await until(lambda: follower.log)
        for number in range(1000):  # within one turn of the loop: nothing leaves meanwhile
            news.publish(number, bytes(1000))
        await until(lambda: follower.state["server/0"] == list(range(1000)))
        assert follower.log.count("snapshot") == 2
        assert len(follower.log) < 200

    site.run(body)


def test_a_peer_that_drains_is_lost_once_and_followed_anew_when_ready(site, until):
    async def body():
        server = site.server()
        News(site, server)
        links, follower = follow(site, server)
        await until(lambda: follower.log)
        for state in ("draining", "draining", "starting", "ready"):
            links.set_peers([site.peer(server, state=state)])
        await until(lambda: follower.log == ["snapshot", "lost", "snapshot"])

    site.run(body)
