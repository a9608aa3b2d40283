"""Start-up progress: what each replica is doing, and for how long.

On a terminal one live line per replica; elsewhere a plain line whenever one does something new.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from graph.managed import failure
from graph.status import GraphStatus, ReplicaStatus
from graph.tables import aligned, fitted

_COLOURS = {"ready": "green", "starting": "yellow", "draining": "cyan", "failed": "red", "stopped": "red"}


class Progress:
    """Shows the start of a graph; a context manager. `update` is cheap and may be called for every change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._shown: dict[str, tuple[str, str]] = {}

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, status: GraphStatus, now_s: float | None = None) -> None:
        """Shows `status`; called on every change, and each second so that times go on."""
        replicas = [replica for node in status.nodes.values() for replica in node.replicas]
        now_s = time.time() if now_s is None else now_s
        new = [replica for replica in replicas if self._shown.get(replica.id) != (replica.state, replica.doing)]
        self._shown |= {replica.id: (replica.state, replica.doing) for replica in new}
        if self._live is not None:
            self._live.update(fitted(_start_table(replicas, now_s)), refresh=True)
            return
        for replica in new:
            if replica.state == "failed":  # told once, by whoever waits for the start
                continue
            self._console.print(_line(replica), highlight=False, markup=False, soft_wrap=True)


def _start_table(replicas: list[ReplicaStatus], now_s: float) -> list[Text]:
    rows = []
    for replica in replicas:
        seconds = "" if replica.state == "ready" else f"{max(0.0, now_s - replica.since):.0f} s"
        rows.append((replica.id, _state(replica), seconds, replica.doing))
    return aligned(rows, "<<<<")


def status_table(status: GraphStatus, now_s: float) -> list[Text]:
    """The table that `graph status` shows, a line for each replica."""
    rows: list[tuple[str | Text, ...]] = [
        tuple(Text(name, style="bold") for name in ("replica", "state", "since", "pid", "MiB", "restarts"))
    ]
    for node, counts in status.nodes.items():
        if not counts.replicas:
            rows.append((node, Text("none", style="dim")))
        for replica in counts.replicas:
            since, pid, mib = _duration(now_s - replica.since), str(replica.pid or ""), str(replica.rss_mb or "")
            told = replica.doing or _past(replica)
            rows.append((replica.id, _state(replica), since, pid, mib, str(replica.restarts), told))
    title = Text(f"{status.graph}: {status.state}  {status.url or ''}".rstrip())
    return [title, *aligned(rows, "<<>>>><")]


def _state(replica: ReplicaStatus) -> Text:
    return Text(replica.state, style=_COLOURS[replica.state])


def _past(replica: ReplicaStatus) -> str:
    """What there is to tell of a replica that works: its notice, why it died last, how long it took to start."""
    if replica.notice:
        return replica.notice
    if replica.reason:
        return f"before: {replica.reason}"
    return "" if replica.start_s is None else f"started in {replica.start_s:.1f} s"


def last_words(status: GraphStatus) -> list[str]:
    """Of each replica that failed: its name, why, and the end of its log if that tells more."""
    replicas = [replica for node in status.nodes.values() for replica in node.replicas]
    return [failure(r.id, r.reason, r.last_words) for r in replicas if r.state == "failed"]


def _duration(seconds: float) -> str:
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h"


def _line(replica: ReplicaStatus) -> str:
    return f"{replica.id} {replica.state}" + (f": {replica.doing}" if replica.doing else "")
