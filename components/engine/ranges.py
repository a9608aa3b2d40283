"""Which part of a model each tensor-parallel rank holds. Pure.

Attention is cut between KV heads, each with the query heads that share it, so that a rank needs no
keys of another. Ranges may be uneven: 3 KV heads on 2 ranks are 2 and 1. With more ranks than KV heads
a KV head is held by several ranks, which divide its query heads among themselves.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec

from graph import LaunchError


class Share(msgspec.Struct, frozen=True):
    """One rank's heads: [start, stop) of the model's query heads and KV heads."""

    query_start: int
    query_stop: int
    kv_start: int
    kv_stop: int

    @property
    def num_query_heads(self) -> int:
        return self.query_stop - self.query_start

    @property
    def num_kv_heads(self) -> int:
        return self.kv_stop - self.kv_start


def cut(total: int, parts: int) -> list[tuple[int, int]]:
    """[0, total) in `parts` ranges that differ by one at most, the larger ones first."""
    size, larger = divmod(total, parts)
    starts = [part * size + min(part, larger) for part in range(parts + 1)]
    return list(pairwise(starts))


def share_heads(num_query_heads: int, num_kv_heads: int, num_ranks: int) -> list[Share]:
    """Every rank's heads; raises `LaunchError` where some rank would get none."""
    group = num_query_heads // num_kv_heads  # query heads that share a KV head
    if num_ranks > num_query_heads:
        raise LaunchError(f"{num_query_heads} attention heads cannot be divided among tp={num_ranks} ranks; lower tp")
    if num_ranks <= num_kv_heads:
        return [Share(start * group, stop * group, start, stop) for start, stop in cut(num_kv_heads, num_ranks)]
    return [
        Share(kv * group + start, kv * group + stop, kv, kv + 1)
        for kv, (first, last) in enumerate(cut(num_ranks, num_kv_heads))
        for start, stop in cut(group, last - first)
    ]
