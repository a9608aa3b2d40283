"""Every fault at every moment on either side, over real NIXL: the right answer or a clean error, and nothing left.

    {kill, stop and continue} x {before, during, after the transfer} x {prefill, decode}
    {client leaves} x {before, during, after}
    {ready-messages lost, last message lost, release lost, messages doubled, other weights, restart under load}

each with enough blocks and a lease of a second, with a lease of 50 ms, and with very few blocks; over shared
memory and over TCP. `make test` runs the most telling cells, `make soak` all.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from faults import ENDLESS_S, RESTART_S, SHM, TCP, FaultyGraph, Reply, faulty, make_question, wait_for

PLACES = {"before": "prefill.request", "during": "decode.post", "after": "decode.adopted"}
CONFIGURATIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "lease50ms": {
        "prefill__cache_transceiver_config__kv_lease_ms": 50,
        "decode__cache_transceiver_config__kv_lease_ms": 50,
    },
    "fewblocks": {"prefill__num_blocks": 24, "decode__num_blocks": 28},  # a prompt takes 19
}
TRANSPORTS = {"shm": SHM, "tcp": TCP}

Cell = Callable[[FaultyGraph], list[Reply]]


def disturbed(graph: FaultyGraph, place: str, fault: str) -> list[Reply]:
    """Four requests at once, one of which meets the fault."""
    graph.arm(place, fault)
    replies = graph.ask_all([make_question(seed) for seed in range(2, 6)])
    assert graph.was_taken(place), "nobody met the fault"
    return replies


def process_fault(action: str, phase: str, node: str) -> Cell:
    """A worker is killed, or stopped for a second."""
    return lambda graph: disturbed(graph, PLACES[phase], f"{action} {node}")


def client_leaves(phase: str) -> Cell:
    """One client hangs up at that moment while another stays."""

    def run(graph: FaultyGraph) -> list[Reply]:
        graph.arm(PLACES[phase], "pause")
        left = graph.ask(make_question(2), leave_at=PLACES[phase])
        return [left, graph.ask(make_question(3))]

    return run


def lasting(*faults: str) -> Cell:
    """Messages are lost or doubled for as long as the requests run."""

    def run(graph: FaultyGraph) -> list[Reply]:
        with ExitStack() as stack:
            for fault in faults:
                stack.enter_context(graph.always(fault))
            return graph.ask_all([make_question(seed) for seed in (2, 3)])

    return run


def other_weights(graph: FaultyGraph) -> list[Reply]:
    """Prefill comes back with another fingerprint: it is refused, and decode does without it."""
    with graph.always("fingerprint"):
        replies = disturbed(graph, "decode.post", "kill prefill")
        wait_for(lambda: graph.served.pids("prefill"), RESTART_S)
        wait_for(lambda: "KV layouts differ" in graph.ask(make_question(6)).timing.get("reason", ""), RESTART_S)
    assert graph.served.run("restart", "prefill/0").returncode == 0
    return replies


def restart(node: str) -> Cell:
    """A worker is restarted while requests run."""

    def run(graph: FaultyGraph) -> list[Reply]:
        command = threading.Thread(target=graph.served.run, args=("restart", f"{node}/0"), daemon=True)
        command.start()
        replies = [reply for _ in range(3) for reply in graph.ask_all([make_question(seed) for seed in range(2, 6)])]
        command.join(RESTART_S)
        assert not command.is_alive()
        return replies

    return run


MOMENTS: dict[str, Cell] = {
    f"{action}-{node}-{phase}": process_fault(action, phase, node)
    for action in ("kill", "stop")
    for phase in PLACES
    for node in ("prefill", "decode")
} | {f"leave-{phase}": client_leaves(phase) for phase in PLACES}
MESSAGES: dict[str, Cell] = {
    "lose-progress": lasting("lose-progress"),
    "lose-done": lasting("lose-done"),
    "lose-release": lasting("lose-release"),
    "duplicate": lasting("duplicate"),
    "other-weights": other_weights,
    "restart-prefill": restart("prefill"),
    "restart-decode": restart("decode"),
}
CELLS = MOMENTS | MESSAGES
MUST_BE_RIGHT = {name for name in CELLS if "decode" not in name}
"""What costs only time; where decode dies an error is allowed, another token never."""

TELLING = {
    ("shm", "plain"): ["kill-prefill-during", "stop-prefill-during", "kill-decode-during", "leave-during", "duplicate"],
    ("tcp", "plain"): ["stop-prefill-during", "kill-prefill-during", "lose-done"],
}


def cells() -> Iterator[object]:
    """All cells, those of one graph together; those that are not telling are left to `make soak`."""
    for transport in TRANSPORTS:
        for configuration in CONFIGURATIONS:
            key = (transport, configuration)
            for name in CELLS if configuration == "plain" else MOMENTS:
                marks = () if name in TELLING.get(key, ()) else (pytest.mark.soak,)
                yield pytest.param(*key, name, marks=marks, id="-".join((*key, name)))


class Graphs:
    """One running graph at a time, kept while tests ask for the same one."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self._make_folder = make_folder
        self._running: tuple[tuple[str, str], FaultyGraph] | None = None
        self._stack = ExitStack()

    def get(self, transport: str, configuration: str) -> FaultyGraph:
        """The running graph of a configuration."""
        key = (transport, configuration)
        if self._running is None or self._running[0] != key:
            self.close()
            folder = self._make_folder("-".join(key))
            started = faulty(folder, TRANSPORTS[transport], **CONFIGURATIONS[configuration])
            self._running = key, self._stack.enter_context(started)
        return self._running[1]

    def close(self) -> None:
        """Ends what runs."""
        self._running = None
        self._stack.close()


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graphs]:
    """The graphs of this file, ended with it."""
    made = Graphs(tmp_path_factory.mktemp)
    yield made
    made.close()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("transport", "configuration", "name"), list(cells()))
def test_cell(
    graphs: Graphs, transport: str, configuration: str, name: str, record_property: Callable[[str, object], None]
) -> None:
    graph = graphs.get(transport, configuration)

    replies = CELLS[name](graph)
    for outcome, count in Counter(reply.outcome for reply in replies).items():
        record_property(outcome, count)
    record_property("longest wait, s", round(max(reply.seconds for reply in replies), 1))

    assert [reply for reply in replies if reply.outcome == "WRONG"] == []
    if name in MUST_BE_RIGHT:
        assert {reply.outcome for reply in replies} <= {"right", "left"}, replies
    assert max(reply.seconds for reply in replies) < ENDLESS_S
    graph.wait_linked()
    graph.assert_clean()
