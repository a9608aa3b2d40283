"""The engine's books: carries out plans and commands on the queues and the pool, and notes what came of it.

Everything here happens between steps, on the engine's thread, and touches no runner. What is to be
told gathers in `outputs` until `take_outputs`.
"""

from __future__ import annotations

import time
from itertools import count

from msgspec.structs import replace

from components.engine.outputs import ChunkComputed, Ended, EngineRequest, Matched, Output, Reserved, StepTokens
from components.engine.queues import Queues
from components.engine.runner import Sampled
from components.engine.scheduler import Admission, Plan, Work
from components.engine.sequence import PENDING, Phase, Sequence
from components.kv.pool import BlockPool
from components.messages import FinishReason, Load, TokenLogprobs
from graph import LinkError, Overloaded, Refused, RequestCancelled

_RETRY_AFTER_S = 1.0


class Book:
    """All sequences of an engine, their blocks, and what is to be reported of them."""

    def __init__(
        self, pool: BlockPool, *, block_size: int, hash_unit: int | None, max_model_len: int, max_waiting: int
    ) -> None:
        """`hash_unit` None switches the prefix cache off. A sequence ends at the model's length or the pool's."""
        self.pool = pool
        self.queues = Queues()
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self._block_size = block_size
        self._hash_unit = hash_unit
        self._max_model_len = max_model_len
        self._max_waiting = max_waiting
        self._arrivals = count()
        self._abandoned: LinkError | None = None
        self._outputs: list[Output] = []

    def take_outputs(self) -> tuple[Output, ...]:
        """What there is to tell since the last call."""
        outputs, self._outputs = self._outputs, []
        return tuple(outputs)

    def load(self) -> Load:
        """How busy the engine is now."""
        queues = self.queues
        queued = sum(s.num_remaining for s in queues.waiting)
        queued += sum(s.num_remaining for s in queues.running if not s.is_decoding)
        return Load(
            running=len(queues.running),
            waiting=len(queues.waiting) + sum(s.phase is not Phase.RESERVING for s in queues.pulling),
            blocks_used=self.pool.num_used,
            blocks_total=self.pool.num_blocks,
            prefill_tokens=queued,
        )

    # --- commands

    def submit(self, request: EngineRequest) -> None:
        """Queues a new sequence, or refuses it at once."""
        assert self.queues.find(request.id) is None, f"request {request.id} is live already"
        if error := self._abandoned or self._refusal(request):
            self._outputs.append(Ended(request.id, error))
            return
        sequence = Sequence(
            request,
            arrival=next(self._arrivals),
            block_size=self._block_size,
            hash_unit=self._hash_unit,
            max_length=self.max_length,
        )
        sequence.arrived_s = time.monotonic()
        self.num_prompt_tokens += request.num_prompt_tokens
        if request.mode != "prefill" and sequence.num_output_tokens >= request.stopping.max_tokens:
            self._outputs.append(StepTokens(request.id, (), finish="length", cached_tokens=0))
            return
        self.queues.move(sequence, Phase.WAITING)

    def abort(self, id: str) -> None:
        """Ends a sequence in any phase."""
        if sequence := self.queues.find(id):
            self.fail(sequence, RequestCancelled(f"request {id} was cancelled"))

    def is_live(self, sequence: Sequence) -> bool:
        """Whether the sequence has not ended."""
        return self.queues.find(sequence.id) is sequence

    def fail(self, sequence: Sequence, error: LinkError) -> None:
        """Ends a sequence with an error and returns its blocks."""
        self._return_blocks(sequence)
        self.queues.move(sequence, Phase.FINISHED)
        self._outputs.append(Ended(sequence.id, error))

    def abandon(self, error: LinkError) -> None:
        """Ends every sequence, and those still to be submitted; called when the engine itself has failed."""
        self._abandoned = error
        self._outputs = [*self._outputs, *(Ended(sequence.id, error) for sequence in self.queues)]
        self.queues = Queues()

    def compute_locally(self, id: str) -> None:
        """Sends a sequence that was to be pulled back to the queue, to be computed here."""
        sequence = self.queues.find(id)
        if sequence is None or sequence not in self.queues.pulling:
            return
        sequence.wants_match = False
        self._return_blocks(sequence)
        self.queues.move(sequence, Phase.WAITING)

    def reserve(self, id: str) -> None:
        """Lets a matched sequence wait for room for the rest of its prompt."""
        sequence = self.queues.find(id)
        if sequence is not None and sequence.phase is Phase.MATCHED:
            self.queues.move(sequence, Phase.RESERVING)

    def adopt(self, id: str, *, token: int, logprobs: TokenLogprobs | None) -> None:
        """Takes a sequence whose KV has all arrived into the batch, with its next token."""
        sequence = self.queues.find(id)
        if sequence is None or sequence.phase is not Phase.RESERVED:
            return
        sequence.num_lent = 0
        sequence.wants_match = False
        sequence.num_computed = len(sequence)
        self.queues.move(sequence, Phase.RUNNING)
        if sequence.has_final_blocks(sequence.num_computed):
            self._enter_final_blocks(sequence, sequence.num_computed)
        sequence.tokens.append(token)
        self._tell(sequence, len(sequence), token, logprobs)

    def release(self, id: str) -> None:
        """Returns the blocks of a held sequence, which finishes it."""
        sequence = self.queues.find(id)
        if sequence is not None and sequence.phase is Phase.HELD:
            self._return_blocks(sequence)
            self.queues.move(sequence, Phase.FINISHED)

    # --- the two halves of a step

    def apply(self, plan: Plan) -> None:
        """What must be true before the plan's work is executed: blocks returned, pinned, allocated."""
        for sequence in plan.preempted:
            self.num_preemptions += 1
            self._return_blocks(sequence)
            self.queues.move(sequence, Phase.WAITING)
        for admission in plan.admitted:  # all pins first: an allocation may evict what nobody holds
            self.pool.pin(admission.cached)
        for work in plan.work:
            if work.num_blocks:
                self._allocate(work.sequence, work.num_blocks)
        for admission in plan.admitted:
            self._admit(admission)

    def launched(self, work: tuple[Work, ...]) -> None:
        """Notes that the work is being executed: its tokens count as computed, those it chooses as pending."""
        places = count()
        for part in work:
            sequence = part.sequence
            sequence.num_computed = part.stop
            if part.is_sampled:
                sequence.tokens.append(PENDING)
                sequence.num_pending += 1
                sequence.feed = next(places)

    def landed(self, work: tuple[Work, ...], sampled: Sampled) -> None:
        """Notes that launched work is done: final blocks, new tokens, what they end."""
        rows = zip(sampled.tokens.tolist(), sampled.logprobs, strict=True)
        for part in work:
            token, logprobs = next(rows) if part.is_sampled else (None, None)
            sequence, stop = part.sequence, part.stop
            if sequence.phase is Phase.FINISHED:
                continue  # it has ended meanwhile; the step trailed
            if token is not None:
                sequence.take(token, stop)
            if sequence.num_computed >= stop and sequence.has_final_blocks(stop):  # else it was preempted meanwhile
                self._enter_final_blocks(sequence, stop)
            if sequence.is_prefill:
                self._book_chunk(sequence, stop, token, logprobs)
            elif token is not None:
                self._tell(sequence, stop + 1, token, logprobs)

    # --- the parts

    def _refusal(self, request: EngineRequest) -> LinkError | None:
        if len(self.queues.waiting) >= self._max_waiting:
            message = f"max_waiting is {self._max_waiting}, and as many requests wait already"
            return Overloaded(message, retry_after_s=_RETRY_AFTER_S)
        length, limit = len(request.tokens), self.max_length
        if 0 < length < limit:
            return None
        if not length:
            return Refused("the request has no tokens", code="invalid_request")
        place = "the model's context" if limit == self._max_model_len else "the worker's KV pool"
        return Refused(
            f"this request has {length} tokens, and {place} holds at most {limit} with the first new one",
            code="context_length_exceeded",
        )

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence that fits when it is alone."""
        return min(self._max_model_len, self.pool.num_blocks * self._block_size + 1)  # the last token has no KV

    def _admit(self, admission: Admission) -> None:
        sequence = admission.sequence
        if admission.phase is not Phase.RESERVED:
            sequence.blocks.extend(admission.cached)
            sequence.num_entered = len(admission.cached)
            sequence.num_computed = len(admission.cached) * self._block_size
            self._note_cached(sequence)
            self.queues.claim(sequence)
        self._allocate(sequence, admission.num_blocks)
        self.queues.move(sequence, admission.phase)
        match admission.phase:
            case Phase.MATCHED:
                self._outputs.append(Matched(sequence.id, sequence.num_computed))
            case Phase.RESERVED:
                sequence.num_lent = admission.num_blocks
                lent = sequence.blocks[sequence.num_entered :]
                self._outputs.append(Reserved(sequence.id, tuple(lent), sequence.num_computed))

    def _note_cached(self, sequence: Sequence) -> None:
        if sequence.cached_tokens is not None:
            return  # a preempted sequence finds its own blocks again; that is no hit
        sequence.cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
        sequence.queue_ms = (time.monotonic() - sequence.arrived_s) * 1e3
        self.num_cached_tokens += sequence.cached_tokens

    def _allocate(self, sequence: Sequence, num_blocks: int) -> None:
        if num_blocks:
            after = sequence.blocks[-1] if sequence.blocks else None
            sequence.blocks.extend(self.pool.allocate(num_blocks, after=after))

    def _return_blocks(self, sequence: Sequence) -> None:
        """Frees what a sequence holds; what is lent to a transfer is quarantined until it is settled."""
        self.queues.disclaim(sequence)
        blocks = sequence.blocks.tolist()
        kept = len(blocks) - sequence.num_lent
        self.pool.quarantine(sequence.id, blocks[kept:])
        self.pool.free(blocks[:kept])
        del sequence.blocks[:]
        sequence.num_computed = sequence.num_entered = sequence.num_lent = 0

    def _enter_final_blocks(self, sequence: Sequence, num_computed: int) -> None:
        for block, parent, units in sequence.final_blocks(num_computed):
            self.pool.enter(block, parent=parent, units=units)
            self.queues.fulfil(units[-1])
            sequence.num_entered += 1

    def _book_chunk(
        self, sequence: Sequence, num_computed: int, token: int | None, logprobs: TokenLogprobs | None
    ) -> None:
        blocks = sequence.blocks[: sequence.num_blocks_for(num_computed)]
        cached = sequence.cached_tokens or 0
        self._outputs.append(
            ChunkComputed(sequence.id, tuple(blocks), num_computed, cached, token, logprobs, queue_ms=sequence.queue_ms)
        )
        if token is not None:
            self.queues.move(sequence, Phase.HELD)

    def _tell(self, sequence: Sequence, length: int, token: int, logprobs: TokenLogprobs | None) -> None:
        """Tells the token that made the sequence `length` long; finishes the sequence if it was the last one."""
        self.num_generated_tokens += 1
        finish: FinishReason | None = None
        if token in sequence.request.stopping.stop_token_ids:
            finish = "stop"
        elif length >= sequence.max_length:
            finish = "length"
        output = StepTokens(sequence.id, (token,), None if logprobs is None else (logprobs,), finish)
        if not sequence.is_told:
            sequence.is_told = True
            output = replace(output, cached_tokens=sequence.cached_tokens, queue_ms=sequence.queue_ms)
        self._outputs.append(output)
        if finish is not None:
            self._return_blocks(sequence)
            self.queues.move(sequence, Phase.FINISHED)
