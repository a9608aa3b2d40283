"""Prompts for equality runs: real text cut around block multiples, shared prefixes, and counting."""

from __future__ import annotations

from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from components.model_cache import resolve_model

TEXT = Path(__file__).parents[2] / "LICENSE"
LENGTHS = (
    1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 100, 127, 128, 129, 160, 192, 200, 255, 256, 257,
    300, 333, 384, 400, 511, 512, 513, 600, 640, 700, 800, 1000, 1023, 1024, 1025, 1200, 1500, 1999, 2000,
)  # fmt: skip
FEW = (1, 15, 16, 17, 65, 128, 257, 600)


class Prompt(msgspec.Struct, frozen=True):
    """Token ids and how many greedy tokens to compare."""

    name: str
    ids: tuple[int, ...]
    num_outputs: int = 20


def text_ids() -> list[int]:
    """The token ids of a long English text."""
    tokenizer = Tokenizer.from_file(str(resolve_model("smollm2-135m-instruct") / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(TEXT.read_text(), add_special_tokens=False).ids
    return ids


def counting(start: int) -> str:
    """ "1, 2, ..., 15," from `start`: its continuation is known and far from any tie."""
    return ", ".join(str(n) for n in range(start, start + 15)) + ","


def equality_prompts(lengths: tuple[int, ...] = LENGTHS, *, num_shared: int = 5, num_outputs: int = 20) -> list[Prompt]:
    """One prompt for each length, each from another place in the text, and some that share 528 tokens."""
    ids = text_ids()
    starts = [(n * 37) % (len(ids) - n) for n in lengths]
    cut = [Prompt(f"len{n}", tuple(ids[at : at + n]), num_outputs) for n, at in zip(lengths, starts, strict=True)]
    shared = tuple(ids[64:592])
    tails = [tuple(ids[700 + 50 * i : 705 + 61 * i]) for i in range(num_shared)]
    return cut + [Prompt(f"shared{i}", shared + tail, num_outputs) for i, tail in enumerate(tails)]


def crowd() -> list[Prompt]:
    """Sixteen prompts that fit a pool of 60 blocks together, and whose outputs do not; five outputs do not fit 24."""
    ids = text_ids()
    return [Prompt(f"crowd{i}", tuple(ids[60 * i : 60 * i + 30 + i]), 36) for i in range(16)]
