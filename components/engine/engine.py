"""The engine: a thread that turns requests into steps of a runner.

Life of a sequence (all moves happen on the engine's thread, between steps):

    waiting    admitted to the queue; by priority, then arrival
    matched    mode "remote" only: its cached prefix is pinned, `Matched` was reported, and the
               owner decides: `compute_locally` -> waiting, or `reserve`
    reserving  waits for room for all missing blocks of the prompt at once -> reserved, `Reserved`
    reserved   its blocks are lent to the transfer until `adopt` -> running, `compute_locally`
               -> waiting (recompute), or abort; lent blocks of a sequence that left this state any
               other way than by `adopt` are quarantined until `settled`
    running    in the batch: prompt chunks first, then a token per step
    held       mode "prefill" only: prompt done, blocks pinned until `release`
    finished   blocks returned, in exactly one terminal output (finish, or `Ended` with an error)

A running sequence may be preempted: its blocks are freed, it waits again at the front and is
recomputed, prompt and output alike.

    plan = schedule(...)            pure: which sequences, how many tokens, who is preempted
    sampled = runner.execute(batch) acts
    book(plan, sampled)             pure bookkeeping: lengths, hashes, outputs, events
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from components.engine.runner import Runner
from components.messages import FinishReason, Load, Sampling, Stopping, TokenLogprobs
from graph import LinkError, Message


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine needs to know, all "auto" resolved."""

    hash_unit: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    enable_prefix_caching: bool = True


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to compute; the fields are those of `GenerateRequest` and `PrefillRequest`."""

    id: str
    tokens: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    stopping: Stopping
    mode: Literal["generate", "prefill", "remote"] = "generate"
    cache_salt: str | None = None
    priority: int = 0


class StepTokens(msgspec.Struct, frozen=True):
    """New tokens of a sequence; `finish` ends it. `cached_tokens` stands in the first one."""

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    cached_tokens: int | None = None


class ChunkComputed(msgspec.Struct, frozen=True):
    """Mode "prefill": KV of tokens [0, num_tokens) is final in `block_ids` (from token 0). The last one has the first token."""

    id: str
    block_ids: tuple[int, ...]
    num_tokens: int
    cached_tokens: int
    token: int | None = None
    logprobs: TokenLogprobs | None = None


class Matched(msgspec.Struct, frozen=True):
    """Mode "remote": the prompt's first `cached_tokens` are here and pinned; decide what to do with the rest."""

    id: str
    cached_tokens: int


class Reserved(msgspec.Struct, frozen=True):
    """Mode "remote": blocks for all prompt tokens from `first_token` on; they are lent to the transfer now."""

    id: str
    block_ids: tuple[int, ...]
    first_token: int


class Ended(msgspec.Struct, frozen=True):
    """The sequence ended without finishing: cancelled, refused, or failed."""

    id: str
    error: LinkError


Output = StepTokens | ChunkComputed | Matched | Reserved | Ended


class StepReport(msgspec.Struct, frozen=True):
    """All that one step, or one round of commands, brought: handed over in one piece."""

    outputs: tuple[Output, ...]
    events: tuple[Message, ...]  # BlocksStored, BlocksRemoved, BlocksCleared
    load: Load
    quarantined_blocks: int = 0


class Engine:
    """Thread-safe front of the engine's thread; commands are queued and carried out between steps."""

    def __init__(self, runner: Runner, config: EngineConfig, on_report: Callable[[StepReport], None]) -> None:
        """`on_report` is called on the engine's thread, once per step that has something to tell."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def submit(self, request: EngineRequest) -> None: ...
    def abort(self, id: str) -> None:
        """Ends the sequence in any state; idempotent, unknown ids are ignored."""
    def compute_locally(self, id: str) -> None: ...
    def reserve(self, id: str) -> None: ...
    def adopt(self, id: str, *, token: int, logprobs: TokenLogprobs | None) -> None:
        """All of the prompt's KV has arrived; `token` is the first output token, already chosen."""
    def settled(self, ids: Sequence[str]) -> None:
        """No byte will land any more in what was lent to these sequences."""
    def release(self, id: str) -> None:
        """Unpins a held sequence; idempotent."""
