"""Sampling: from logits to tokens, row by row independent of the batch.

Randomness is a function of (seed, position, token) alone: a counter-based hash, the same on every
device, turned into Gumbel noise. The largest of logit + noise is a draw from the softmax (Gumbel,
1954), and a small change of a logit changes the choice only near a tie. Noise for a whole
vocabulary would cost more than the rest, so the draw is made in two stages with the same outcome
in distribution: first a bucket of 64 neighbouring tokens, by its total weight, then one of its tokens.

Order: logit_bias, penalties, bans; temperature; min_p, top_k, top_p. Log-probabilities are those of
the untouched logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from components.engine.runner import Sampled, SampleRow
from components.messages import Sampling, TokenLogprobs

_BUCKET = 64
_FIRST_CANDIDATES = 256  # top_p looks at this many tokens before it sorts all
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """Chooses a token for each row of `logits`, (rows, vocabulary), as its `SampleRow` says."""
    adjusted = adjust(logits, rows)
    tokens = adjusted.argmax(dim=-1)
    drawn = [i for i, row in enumerate(rows) if not is_greedy(row.sampling)]
    if drawn:
        picked = adjusted if len(drawn) == len(rows) else adjusted[drawn]
        tokens[drawn] = _draw(picked.float(), [rows[i] for i in drawn])
    chosen = tokens.cpu().numpy().astype(np.int32)
    return Sampled(chosen, _logprobs(logits, rows, chosen))


def is_greedy(sampling: Sampling) -> bool:
    """Whether the largest logit is chosen, without a draw."""
    return sampling.temperature <= 0 or sampling.top_k == 1


# --- before temperature: bias, penalties, bans


def changed_rows(rows: Sequence[SampleRow]) -> list[int]:
    """The places of those whose logits a bias, a penalty or a ban changes."""
    return [i for i, row in enumerate(rows) if not row.is_plain and (row.banned or _changes_logits(row.sampling))]


def adjust(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """The logits with what changes them, in float32; the input itself if no row asks for any."""
    changed = changed_rows(rows)
    if not changed:
        return logits
    adjusted = logits.to(torch.float32, copy=True)
    for i in changed:
        _adjust_row(adjusted[i], rows[i])
    return adjusted


def _changes_logits(sampling: Sampling) -> bool:
    penalties = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0 or sampling.repetition_penalty != 1
    return penalties or bool(sampling.logit_bias)


def _adjust_row(logits: torch.Tensor, row: SampleRow) -> None:
    sampling, device = row.sampling, logits.device
    if sampling.logit_bias:
        ids = torch.tensor([token for token, _ in sampling.logit_bias], device=device)
        logits.index_add_(0, ids, torch.tensor([bias for _, bias in sampling.logit_bias], device=device))
    if sampling.repetition_penalty != 1:
        ids = torch.from_numpy(np.unique(np.concatenate((row.prompt, row.output))).astype(np.int64)).to(device)
        seen = logits[ids]
        logits[ids] = torch.where(seen > 0, seen / sampling.repetition_penalty, seen * sampling.repetition_penalty)
    if len(row.output) and (sampling.presence_penalty != 0 or sampling.frequency_penalty != 0):
        unique, counts = np.unique(row.output, return_counts=True)
        penalty = sampling.presence_penalty + sampling.frequency_penalty * counts
        ids = torch.from_numpy(unique.astype(np.int64)).to(device)
        logits[ids] -= torch.from_numpy(penalty.astype(np.float32)).to(device)
    if row.banned:
        logits[list(row.banned)] = float("-inf")


# --- temperature, cuts, draw


def _draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """One token for each row of float32 `logits`; (rows,) of int64."""
    temperatures = torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float64, device=logits.device)
    # The best is 0 now, so that dividing by next to nothing leaves it alone at the top.
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled = (scaled / temperatures.clamp_min(1e-30).float()[:, None]).clamp_min_(-1e30)
    scaled = scaled.masked_fill_(logits == float("-inf"), float("-inf"))
    return _gumbel_choice(_cut(scaled, [row.sampling for row in rows]), rows)


def _cut(scaled: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Sets what min_p, top_k and top_p exclude to -inf. `scaled` has its best at 0 in every row."""
    vocab_size = scaled.shape[-1]
    lowest = torch.full((len(samplings),), float("-inf"), device=scaled.device)
    for i, sampling in enumerate(samplings):
        if sampling.min_p > 0:
            lowest[i] = float(np.log(min(sampling.min_p, 1.0)))
    cut = [i for i, s in enumerate(samplings) if s.top_p < 1 or 0 < s.top_k < vocab_size]
    if cut:
        part = scaled if len(cut) == len(samplings) else scaled[cut]
        part = part.masked_fill(part < lowest[cut, None], float("-inf"))
        lowest[cut] = torch.maximum(lowest[cut], _nucleus_floor(part, [samplings[i] for i in cut]))
    if not torch.isneginf(lowest).all():
        scaled = scaled.masked_fill(scaled < lowest[:, None], float("-inf"))
    return scaled


def _nucleus_floor(scaled: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """The smallest value in each row that top_k and then top_p let pass."""
    vocab_size = scaled.shape[-1]
    top_k = torch.tensor([s.top_k if 0 < s.top_k < vocab_size else vocab_size for s in samplings], device=scaled.device)
    top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float32, device=scaled.device)
    limits = [s.top_k for s in samplings if 0 < s.top_k < vocab_size]
    num_candidates = min(vocab_size, max(_FIRST_CANDIDATES, *limits) if limits else _FIRST_CANDIDATES)
    everything = torch.logsumexp(scaled, dim=-1)
    while True:
        best = scaled.topk(num_candidates, dim=-1).values
        kept = best.masked_fill(torch.arange(num_candidates, device=scaled.device) >= top_k[:, None], float("-inf"))
        is_limited = top_k <= num_candidates
        total = torch.where(is_limited, torch.logsumexp(kept, dim=-1), everything)
        probabilities = torch.exp(kept - total[:, None])
        before = probabilities.cumsum(dim=-1) - probabilities
        inside = (before < top_p[:, None]) & (kept > float("-inf"))
        inside[:, 0] = True
        is_settled = is_limited | ~inside[:, -1] | (num_candidates == vocab_size)
        if bool(is_settled.all()):
            return kept.masked_fill(~inside, float("inf")).amin(dim=-1)
        num_candidates = vocab_size


def _gumbel_choice(scaled: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """A draw from softmax(scaled) for each row, keyed by the row's seed and position."""
    vocab_size = scaled.shape[-1]
    if vocab_size % _BUCKET:
        scaled = torch.nn.functional.pad(scaled, (0, _BUCKET - vocab_size % _BUCKET), value=float("-inf"))
    buckets = scaled.view(len(rows), -1, _BUCKET)
    weights = torch.exp(buckets).sum(dim=-1, dtype=torch.float64)
    keys = [_key(row) for row in rows]
    bucket = (weights.log() + _gumbel(keys, 0, buckets.shape[1], scaled.device)).argmax(dim=-1)
    inside = buckets[torch.arange(len(rows), device=scaled.device), bucket].double()
    return bucket * _BUCKET + (inside + _gumbel(keys, 1, _BUCKET, scaled.device)).argmax(dim=-1)


def _gumbel(keys: Sequence[int], stage: int, count: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise, (rows, count) of float64: a function of key, stage and place alone."""
    stage_keys = torch.tensor([_signed(_mix(key ^ stage)) for key in keys], device=device)
    counters = torch.arange(1, count + 1, device=device) * _signed(_GOLDEN)
    words = _mix_tensor(stage_keys[:, None] + counters)
    uniform = ((words >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52  # inside (0, 1), exactly representable
    return -torch.log(-torch.log(uniform))


def _key(row: SampleRow) -> int:
    return _mix(_mix(row.sampling.seed & _WORD) ^ row.position & _WORD)


def _mix(value: int) -> int:
    """A step of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = value + _GOLDEN & _WORD
    value = (value ^ value >> 30) * _MIX_1 & _WORD
    value = (value ^ value >> 27) * _MIX_2 & _WORD
    return value ^ value >> 31


def _mix_tensor(words: torch.Tensor) -> torch.Tensor:
    """The finalizer of `_mix` on int64, whose products wrap and whose shifts must be told to be logical."""
    words = (words ^ (words >> 30 & (1 << 34) - 1)) * _signed(_MIX_1)
    words = (words ^ (words >> 27 & (1 << 37) - 1)) * _signed(_MIX_2)
    return words ^ (words >> 31 & (1 << 33) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


# --- log-probabilities


def _logprobs(logits: torch.Tensor, rows: Sequence[SampleRow], chosen: np.ndarray) -> tuple[TokenLogprobs | None, ...]:
    wanted = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    result: list[TokenLogprobs | None] = [None] * len(rows)
    if not wanted:
        return tuple(result)
    raw = torch.log_softmax(logits[wanted].float(), dim=-1)
    own = raw[torch.arange(len(wanted)), torch.from_numpy(chosen[wanted].astype(np.int64))].tolist()
    most = min(raw.shape[-1], max(rows[i].sampling.logprobs or 0 for i in wanted))
    best = raw.topk(most, dim=-1)
    for place, i in enumerate(wanted):
        k = min(most, rows[i].sampling.logprobs or 0)
        ids, values = best.indices[place, :k].tolist(), best.values[place, :k].tolist()
        result[i] = TokenLogprobs(own[place], tuple(ids), tuple(values))
    return tuple(result)
