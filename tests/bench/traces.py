"""Traces of requests in the format of Mooncake's (FAST '25), read from files or generated.

One JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens), and `hash_ids`, one for each
block of 512 tokens, the last of which may be cut short. Equal ids mean equal prefixes up to there.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path

import msgspec

BLOCK_TOKENS = 512


class Request(msgspec.Struct, frozen=True):
    """One line of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    @property
    def hashes(self) -> bytes:
        """The block hashes of its full blocks, as a processor would send them."""
        full = self.hash_ids[: self.input_length // BLOCK_TOKENS]
        return b"".join(id.to_bytes(8, "little") * 2 for id in full)


def read_trace(path: Path) -> list[Request]:
    """All requests of a file, by time. Raises `ValueError` naming the line that does not fit."""
    requests = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            request = msgspec.json.decode(line, type=Request)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        blocks = -(-request.input_length // BLOCK_TOKENS)
        if len(request.hash_ids) != blocks:
            raise ValueError(
                f"{path}, line {number}: {request.input_length} tokens are {blocks} blocks, not {len(request.hash_ids)}"
            )
        requests.append(request)
    return sorted(requests, key=lambda request: request.timestamp)


def write_trace(path: Path, requests: Iterable[Request]) -> None:
    """The same format."""
    path.write_bytes(b"".join(msgspec.json.encode(request) + b"\n" for request in requests))


class _Ids:
    """Hash ids: those of a stream of tokens stay, the last cut-off block of each request has one of its own."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, int], int] = {}
        self._next = 0

    def of(self, streams: Iterable[tuple[object, int]], length: int) -> tuple[int, ...]:
        """Ids of a prompt of `length` tokens that follows each stream for so many blocks, in turn."""
        ids: list[int] = []
        for stream, num_blocks in streams:
            while len(ids) < min(num_blocks, length // BLOCK_TOKENS):
                ids.append(self._known.setdefault((stream, len(ids)), self._mint()))
        while len(ids) < -(-length // BLOCK_TOKENS):
            ids.append(self._mint())
        return tuple(ids)

    def _mint(self) -> int:
        self._next += 1
        return self._next


def conversations(num_requests: int, *, seed: int = 0, rate_per_s: float = 4.0) -> list[Request]:
    """Chats like Mooncake's: shared system prompts, growing histories, long-tailed lengths, minutes of thinking."""
    rng, ids = random.Random(seed), _Ids()
    requests: list[Request] = []
    start_ms, session = 0.0, 0
    while len(requests) < num_requests:
        session += 1
        start_ms += rng.expovariate(rate_per_s / 3.5) * 1e3
        system = min(int(rng.paretovariate(0.9)), 40)
        system_blocks = 1 + system % 5
        now_ms, length = start_ms, system_blocks * BLOCK_TOKENS
        for _ in range(1 + min(int(rng.expovariate(1 / 2.5)), 20)):
            length += min(int(rng.lognormvariate(7.6, 1.3)), 60_000)
            output = max(8, min(int(rng.lognormvariate(5.5, 0.8)), 2_000))
            if length > 120_000:
                break
            streams = ((("system", system), system_blocks), (("session", session), 1 << 30))
            requests.append(Request(now_ms, length, output, ids.of(streams, length)))
            length += output
            now_ms += (10 + rng.expovariate(1 / 30)) * 1e3
    return _cut(requests, num_requests)


def documents(num_requests: int, *, seed: int = 0, rate_per_s: float = 4.0, num_documents: int = 200) -> list[Request]:
    """Questions about long documents, some of which are asked about far more often than others."""
    rng, ids = random.Random(seed), _Ids()
    lengths = [rng.randrange(8, 60) for _ in range(num_documents)]  # blocks
    weights = list(accumulate(1 / (rank + 1) ** 0.8 for rank in range(num_documents)))
    now_ms, requests = 0.0, []
    for _ in range(num_requests):
        now_ms += rng.expovariate(rate_per_s) * 1e3
        document = rng.choices(range(num_documents), cum_weights=weights)[0]
        blocks = lengths[document]
        length = blocks * BLOCK_TOKENS + rng.randrange(20, 400)
        output = max(8, min(int(rng.lognormvariate(4.8, 0.6)), 1_000))
        requests.append(Request(now_ms, length, output, ids.of([(document, blocks)], length)))
    return requests


def unique(num_requests: int, *, seed: int = 0, rate_per_s: float = 4.0) -> list[Request]:
    """No two prompts share anything."""
    rng, ids = random.Random(seed), _Ids()
    now_ms, requests = 0.0, []
    for _ in range(num_requests):
        now_ms += rng.expovariate(rate_per_s) * 1e3
        length = max(32, min(int(rng.lognormvariate(8.2, 1.0)), 60_000))
        output = max(8, min(int(rng.lognormvariate(5.3, 0.8)), 2_000))
        requests.append(Request(now_ms, length, output, ids.of([], length)))
    return requests


def stretched(requests: Iterable[Request], factor: float) -> Iterator[Request]:
    """The same requests, `factor` times as far apart."""
    return (msgspec.structs.replace(request, timestamp=request.timestamp * factor) for request in requests)


def _cut(requests: list[Request], num_requests: int) -> list[Request]:
    return sorted(requests, key=lambda request: request.timestamp)[:num_requests]


GENERATORS = {"conversations": conversations, "documents": documents, "unique": unique}
