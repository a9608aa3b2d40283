"""What the sampling kernels share: orders of floats, weights of logits, noise. Triton; imported on CUDA hosts only."""

from __future__ import annotations

import triton
import triton.language as tl

BUCKET = tl.constexpr(64)  # as in sampling.py
SETTINGS = tl.constexpr(7)  # columns; see draw_settings.py
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit
def order32(values):
    """Integers from 0 to 2^32 - 1, as int64, that compare as the floats do."""
    raw = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # 0.0 and -0.0 are equal
    return (raw ^ tl.where(raw < 0, -1, -2147483648)).to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def least_passed(floor, IS_WIDE: tl.constexpr):
    """The least logit of a floor, which is an `order32` if IS_WIDE, the upper 16 bits of one otherwise; may be -inf."""
    order = floor if IS_WIDE else (floor << 16) | 65535
    bits = (order ^ tl.where(order >= 1 << 31, 1 << 31, (1 << 32) - 1)).to(tl.uint32)
    value = (bits if IS_WIDE else bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(order <= 0x7FFFFF, float("-inf"), value)  # that of -inf; what is below belongs to no number


@triton.jit
def _mix64(words):
    words = (words ^ ((words >> 30) & ((1 << 34) - 1))) * _MIX_1
    words = (words ^ ((words >> 27) & ((1 << 37) - 1))) * _MIX_2
    return words ^ ((words >> 31) & ((1 << 33) - 1))


@triton.jit
def gumbel64(key, places):
    """Standard Gumbel noise of the places, float64."""
    words = _mix64(key + (places + 1).to(tl.int64) * _GOLDEN)
    uniform = (((words >> 12) & ((1 << 52) - 1)).to(tl.float64) + 0.5) * (1.0 / (1 << 52))
    return -tl.log(-tl.log(uniform))


@triton.jit
def scale(values, best, temperature):
    """The logits as `sampling.py` scales them: the best is 0.

    The quotient is corrected by its remainder, which makes it that of a division, at a third of the cost.
    """
    inverse = tl.div_rn(1.0, temperature)
    lower = values - best
    quotient = lower * inverse
    exact = tl.fma(tl.fma(-quotient, temperature, lower), inverse, quotient)
    scaled = tl.maximum(tl.where(tl.abs(exact) < float("inf"), exact, quotient), -1e30)
    return tl.where(values == float("-inf"), float("-inf"), scaled)


@triton.jit
def exact_weights(row, at, vocab_size, best, temperature, lowest):
    """The logits of some places and their weights, which a draw depends on."""
    values = tl.load(row + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    scaled = scale(values, best, temperature)
    return values, tl.where((scaled >= lowest) & (at < vocab_size), tl.exp(scaled), 0.0)


@triton.jit
def load_settings(settings, index):
    """Place, temperature, top_k, top_p and the logarithm of min_p of a drawn row."""
    mine = settings + index * SETTINGS
    temperature = tl.load(mine + 3).to(tl.float64, bitcast=True).to(tl.float32)
    top_p = tl.load(mine + 4).to(tl.float64, bitcast=True).to(tl.float32)
    lowest = tl.load(mine + 5).to(tl.float64, bitcast=True).to(tl.float32)
    return tl.load(mine + 6), temperature, tl.load(mine + 2), top_p, lowest
