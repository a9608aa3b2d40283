"""A decode worker without an engine: continues known prompts with known tokens, one per step."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from components.messages import GenerateRequest, Timing, TokenChunk, TokenLogprobs, pack_ids, unpack_ids
from graph import LinkError, PeerFault

FILLER = 33  # "1": what unknown prompts are continued with


class FakeWorker:
    """`script` maps prompt ids to all the output ids that follow; after them comes `FILLER`."""

    def __init__(self, script: Mapping[Sequence[int], Sequence[int]] | None = None, *, name: str = "decode/0") -> None:
        self.name = name
        self.script = {tuple(prompt): list(output) for prompt, output in (script or {}).items()}
        self.requests: list[GenerateRequest] = []
        self.num_running = 0
        self.num_steps = 0
        self.tokens_per_step = 1
        self.refusal: LinkError | None = None
        self.fails_after: int | None = None  # tokens of one attempt, then `failure`
        self.failure: LinkError = PeerFault("the engine broke")
        self.pause_s = 0.0

    async def __call__(self, request: GenerateRequest, stream: Any) -> None:
        self.requests.append(request)
        if self.refusal is not None:
            stream.fail(self.refusal)
            return
        self.num_running += 1
        try:
            await self._generate(request, stream)
        finally:
            self.num_running -= 1

    async def _generate(self, request: GenerateRequest, stream: Any) -> None:
        tokens = unpack_ids(request.tokens)
        prompt, output = tokens[: request.num_prompt_tokens], tokens[request.num_prompt_tokens :]
        follow = self.script.get(tuple(prompt), [])
        num_new = 0
        while not stream.is_closed:
            await asyncio.sleep(self.pause_s)
            if self.fails_after is not None and num_new >= self.fails_after:
                stream.fail(self.failure)
                return
            step: list[int] = []
            finish = None
            while len(step) < self.tokens_per_step and finish is None:
                position = len(output)
                step.append(follow[position] if position < len(follow) else FILLER)
                output.append(step[-1])
                finish = _finish(request, output)
            self.num_steps += 1
            num_new += len(step)
            stream.send(self._chunk(request, step, finish, is_first=num_new == len(step)))
            if finish is not None:
                stream.end()
                return

    def _chunk(self, request: GenerateRequest, step: list[int], finish: Any, *, is_first: bool) -> TokenChunk:
        count = request.sampling.logprobs
        return TokenChunk(
            pack_ids(step),
            logprobs=None if count is None else tuple(_logprobs(id, count) for id in step),
            finish=finish,
            cached_tokens=16 if is_first else None,
            timing=Timing(self.name, "prefill/0", "remote", blocks_moved=3, bytes_moved=300) if finish else None,
        )


def _finish(request: GenerateRequest, output: list[int]) -> str | None:
    if output[-1] in request.stopping.stop_token_ids and len(output) > request.stopping.min_tokens:
        return "stop"
    return "length" if len(output) >= request.stopping.max_tokens else None


def _logprobs(id: int, count: int) -> TokenLogprobs:
    """The chosen token first, then made-up runners-up; the last one impossible."""
    ids = (id, *range(1000 + id, 1000 + id + max(0, count - 1)))[:count]
    values = tuple(-0.5 - i for i in range(len(ids)))
    return TokenLogprobs(-0.5, ids, (*values[:-1], float("-inf")) if len(values) > 1 else values)


def _count_ids(first: int, last: int) -> list[int]:
    """The ids of " 16, 17," and so on in the default model: digits are single tokens, 216 is the space."""
    ids: list[int] = []
    for number in range(first, last + 1):
        ids += [216, *(32 + int(digit) for digit in str(number)), 28]
    return ids


COUNT15_IDS = _count_ids(1, 15)[1:]  # no space before the 1
EMOJI_IDS = [10813, 242, 218]
ALPHA_IDS = [4590, 314, 260, 2321, 12567, 42, 17638]
ALPHA_OUTPUT = [33203, 23960, 57, 58, 59, 34519, 62, 7627, 43323, 3127, 19539, 71, 32891, 74]
SCRIPT = {
    tuple(COUNT15_IDS): _count_ids(16, 99),
    tuple(EMOJI_IDS * 12): EMOJI_IDS * 12,
    tuple(ALPHA_IDS): ALPHA_OUTPUT,
}
"""Real greedy continuations of the default model."""
