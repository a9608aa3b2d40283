"""graph/disagg.py with workers that misbehave when told to, by files in the folder $HEADRACE_TEST_FAULTS.

A file named after a place arms the fault that it contains for the first who comes by; taking it renames
it to `<place>.taken`, so each happens once. A file `always.<fault>` holds as long as it is there.

    places     prefill.request   a prompt has come to prefill: before the transfer
               decode.post       decode is about to post a READ, nothing of it is copied yet: during the transfer
               decode.adopted    decode has all blocks and released the lease: after the transfer
    faults     kill NODE | stop NODE (for STOP_S) | pause (for PAUSE_S, so that a client can leave)
    always     lose-progress, lose-done, lose-release, duplicate, fingerprint
"""

import os
import signal
import subprocess
import time
from pathlib import Path

from msgspec.structs import replace

from components import DecodeWorker, PrefillWorker, Router
from components.messages import KVHandshake, LeaseRelease, PrefillDone, PrefillProgress
from frontends import OpenAIFrontend, Processor
from graph import Graph, LinkError, Node

STOP_S = 1.0
PAUSE_S = 0.4


class Mischief:
    """The folder of faults, as one worker sees it."""

    def __init__(self, node):
        self._folder = Path(os.environ["HEADRACE_TEST_FAULTS"])
        (self._folder / f"{node}.pid").write_text(str(os.getpid()))

    def pass_by(self, place):
        """Commits the fault that is armed at a place, if one is and nobody else takes it."""
        armed = self._folder / place
        try:
            fault = armed.read_text().split()
            armed.rename(armed.with_suffix(".taken"))
        except FileNotFoundError:
            return
        if fault[0] == "pause":
            time.sleep(PAUSE_S)
            return
        pid = int((self._folder / f"{fault[1]}.pid").read_text())
        if fault[0] == "stop":
            command = ["sh", "-c", f"sleep {STOP_S}; kill -CONT {pid}"]
            subprocess.Popen(command, start_new_session=True)
        os.kill(pid, signal.SIGKILL if fault[0] == "kill" else signal.SIGSTOP)

    def holds(self, fault):
        """Whether a lasting fault is in force."""
        return (self._folder / f"always.{fault}").exists()


class Agent:
    """An agent that passes by before it posts a READ of a request; self-tests come before any request."""

    def __init__(self, agent, mischief):
        self._agent, self._mischief = agent, mischief

    def __getattr__(self, name):
        return getattr(self._agent, name)

    def post(self, agent, pieces):
        self._mischief.pass_by("decode.post")
        return self._agent.post(agent, pieces)


class FaultyDecode(DecodeWorker):
    """A decode worker that passes by two places."""

    async def start(self, context):
        self.mischief = Mischief("decode")
        await super().start(context)
        on_adopted = self._requests.on_adopted

        def adopted(id, record):
            on_adopted(id, record)
            context.loop.call_soon(self.mischief.pass_by, "decode.adopted")

        self._requests.on_adopted = adopted

    def make_agent(self, region):
        return Agent(super().make_agent(region), self.mischief)


class FaultyPrefill(PrefillWorker):
    """A prefill worker that loses and repeats messages and claims to have other weights."""

    async def start(self, context):
        self.mischief = Mischief("prefill")
        await super().start(context)

    def _handle(self, request, stream):
        if hasattr(request, "skip_tokens"):
            self.mischief.pass_by("prefill.request")
        if isinstance(request, LeaseRelease) and self.mischief.holds("lose-release"):
            return
        if isinstance(request, KVHandshake) and self.mischief.holds("fingerprint"):
            stream.end(self._other_weights())
            return
        super()._handle(request, FaultyStream(self.mischief, stream))
        if self.mischief.holds("duplicate"):
            try:
                super()._handle(request, DeafStream(stream))
            except LinkError:
                return  # a second request under a known id is refused, as it should be

    def _other_weights(self):
        own = self._exchange.handshake
        return replace(own, ranks=tuple(replace(r, layout=replace(r.layout, model="other")) for r in own.ranks))


class FaultyStream:
    """Loses or repeats announcements."""

    def __init__(self, mischief, stream):
        self._mischief, self._stream = mischief, stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def send(self, item):
        if isinstance(item, PrefillProgress) and self._mischief.holds("lose-progress"):
            return
        self._stream.send(item)
        if self._mischief.holds("duplicate"):
            self._stream.send(item)

    def end(self, item=None):
        if isinstance(item, PrefillDone) and self._mischief.holds("lose-done"):
            return
        if self._mischief.holds("duplicate") and not isinstance(item, KVHandshake):
            self._stream.send(item)
        self._stream.end(item)


class DeafStream:
    """The stream of a request that came twice: nobody listens to the second answer."""

    def __init__(self, stream):
        self.id, self.peer, self.is_closed = f"{stream.id}-again", stream.peer, False

    def send(self, item): ...

    def end(self, item=None): ...

    def fail(self, error): ...

    def on_cancel(self, callback): ...


transceiver = {"backend": "NIXL", "kv_transfer_timeout_ms": 2_000, "kv_lease_ms": 1_000}
workers = {
    "engine": "fake",
    "max_num_batched_tokens": 64,
    "num_blocks": 512,
    "fake": {"step_ms": 3.0},
    "cache_transceiver_config": transceiver,
}

frontend = Node(OpenAIFrontend, port=8000)
processor = Node(Processor)
router = Node(Router)
prefill = Node(FaultyPrefill, **workers)
decode = Node(FaultyDecode, watch_prefill_queue=False, **workers)

graph = Graph(
    "faulty",
    frontend.requests >> processor.requests,
    processor.placement >> router.placement,
    processor.tokens >> decode.requests,
    decode.prefill >> prefill.requests,
    prefill.kv >> decode.kv,
    prefill.events >> router.events,
    decode.events >> router.events,
)
