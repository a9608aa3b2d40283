"""What answers of a load amount to: latencies, throughput, goodput. Pure."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from http_load import Answer, Request

TTFT_LIMIT_S = 0.5
ITL_LIMIT_S = 0.02
STRICT_SHARE = 0.99


def random_prompt(rng: random.Random, num_tokens: int, vocab_size: int) -> list[int]:
    """Token ids that share nothing with another prompt."""
    return [rng.randrange(256, vocab_size) for _ in range(num_tokens)]


def poisson(
    rate_per_s: float, window_s: float, num_in: int, num_out: int, *, vocab_size: int, seed: int
) -> list[Request]:
    """Arrivals at random times within the window, the same for the same seed."""
    rng, due_s, requests = random.Random(seed), 0.0, []
    while (due_s := due_s + rng.expovariate(rate_per_s)) < window_s:
        requests.append(Request(random_prompt(rng, num_in, vocab_size), num_out, due_s))
    return requests


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` of them lie; None of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def gaps_of(answer: Answer) -> list[float]:
    """Seconds between its events."""
    return [later - earlier for earlier, later in itertools.pairwise(answer.times_s)]


def mean_decoding(answers: Sequence[Answer], *, warm_s: float, window_s: float) -> float:
    """How many answers were between their first and their last token, on average over the time that counts."""
    spans = [(answer.times_s[0], answer.times_s[-1]) for answer in answers if answer.times_s]
    inside = sum(max(0.0, min(window_s, last) - max(warm_s, first)) for first, last in spans)
    return inside / (window_s - warm_s)


def joint_gaps(answers: Sequence[Answer]) -> list[float]:
    """Seconds between events while all answers are under way: from the last one's first to the first one's last."""
    spans = [(answer.times_s[0], answer.times_s[-1]) for answer in answers if answer.times_s]
    began_s = max((first for first, _ in spans), default=0.0)
    ended_s = min((last for _, last in spans), default=0.0)
    pairs = [pair for answer in answers for pair in itertools.pairwise(answer.times_s)]
    return [later - earlier for earlier, later in pairs if began_s <= earlier and later <= ended_s]


def is_good(answer: Answer, *, is_strict: bool = False) -> bool:
    """Whether it kept both limits: its mean gap, or when strict 99 % of its gaps."""
    if not answer.is_complete or answer.ttft_s > TTFT_LIMIT_S:
        return False
    gaps = gaps_of(answer) or [0.0]
    if is_strict:
        return sum(gap <= ITL_LIMIT_S for gap in gaps) >= STRICT_SHARE * len(gaps)
    return statistics.fmean(gaps) <= ITL_LIMIT_S


def figures(answers: Sequence[Answer], *, warm_s: float, window_s: float) -> dict[str, Any]:
    """Figures of the requests that came in after `warm_s`; those that failed or were cut off count against goodput.

    Times in ms. Tokens per second are those that left between `warm_s` and the end of the window.
    """
    counted = [answer for answer in answers if answer.due_s >= warm_s]
    seconds = window_s - warm_s
    complete = [answer for answer in counted if answer.is_complete and answer.times_s]
    gaps = [gap * 1e3 for answer in complete for gap in gaps_of(answer)]
    ttft = [answer.ttft_s * 1e3 for answer in counted if answer.times_s]
    num_tokens = sum(warm_s <= time_s < window_s for answer in answers for time_s in answer.times_s)
    return {
        "requests": len(counted),
        "complete": len(complete),
        "errors": dict(Counter(answer.error[:200] for answer in counted if answer.error).most_common(5)),
        "ttft_p50_ms": percentile(ttft, 0.5),
        "ttft_p99_ms": percentile(ttft, 0.99),
        "itl_p50_ms": percentile(gaps, 0.5),
        "itl_p99_ms": percentile(gaps, 0.99),
        "tokens_per_s": num_tokens / seconds,
        "goodput_per_s": sum(is_good(answer) for answer in counted) / seconds,
        "strict_goodput_per_s": sum(is_good(answer, is_strict=True) for answer in counted) / seconds,
        "modes": dict(Counter(str((answer.walk or {}).get("mode")) for answer in complete)),
        "latest_send_ms": max((answer.sent_s - answer.due_s for answer in counted), default=0.0) * 1e3,
    }


def burst_tokens_per_s(answers: Sequence[Answer]) -> float:
    """Output tokens of requests that were sent at once, over the time from the first to the last of them."""
    ends = [answer.ended_s for answer in answers if answer.ended_s is not None]
    if not ends:
        return 0.0
    return sum(answer.num_tokens for answer in answers) / (max(ends) - min(answer.sent_s for answer in answers))
