"""The runners on CUDA against transformers: logits of tiny random models through chunks, decodes and mixed batches.

    python -m pytest tests/gpu/test_cuda_correctness.py

float32 goes through torch's SDPA, bfloat16 through FlashInfer, our decode kernel, and CUDA graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "components" / "engine"))

from paged_sequences import PagedSequences

from components.engine.runner import Runner, Sampled, SampleRow
from components.engine.sampling import sample
from components.messages import Sampling
from components.options import WorkerOptions

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]

BLOCK = 16
VOCAB = 512
LOGPROBS = Sampling(temperature=0.0, logprobs=VOCAB)
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
    "pad_token_id": 0, "initializer_range": 0.06, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral-window": ("MistralConfig", {"sliding_window": 24}),
    "gemma2": ("Gemma2Config", {"sliding_window": 24, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 64}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}),
    "qwen3-dynamic": (
        "Qwen3Config", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
}  # fmt: skip
LEAD_CYCLES = 10_000_000  # some ms that the host runs ahead of the GPU
TOLERANCE = {"float32": 2e-3, "bfloat16": 1.5e-1}  # of a log-probability
SLACK = 2  # or so many times what transformers errs by in the same dtype, where a tie of experts may go either way


@pytest.fixture
def make_runner(tmp_path: Path) -> Iterator[Callable[..., Runner]]:
    from components.engine.torch_runner import make_torch_runner

    made: list[Runner] = []

    def make(name: str, **options: Any) -> Runner:
        kind, settings = CONFIGS[name]
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SMALL, **settings))
        model.save_pretrained(tmp_path / name)
        options = {"block_size": BLOCK, "num_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 256} | options
        made.append(make_torch_runner(WorkerOptions(model=str(tmp_path / name), device="cuda", **options)))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


class Sequences(PagedSequences):
    """Random prompts driven step by step; keeps what each chose and its log-probabilities."""

    def __init__(self, runner: Runner, lengths: list[int]) -> None:
        random = np.random.default_rng(1)
        prompts = [random.integers(1, VOCAB, length).tolist() for length in lengths]
        super().__init__(prompts, block_size=BLOCK, num_blocks=runner.num_blocks)
        self.seen: dict[tuple[int, int], dict[int, float]] = {}  # (sequence, position) -> log-probabilities
        self._runner = runner

    def step(self, counts: dict[int, int]) -> None:
        """Computes `counts[i]` more tokens of sequence i and appends what is chosen.

        The GPU is busy meanwhile, as it is when steps overlap: what the host prepares must outlast the wait.
        """
        batch = self.batch(counts, LOGPROBS)
        torch.cuda._sleep(LEAD_CYCLES)
        sampled = self._runner.execute(batch)
        for row, token, logprobs in zip(batch.samples, sampled.tokens.tolist(), sampled.logprobs, strict=True):
            i = list(counts)[row.row]
            assert logprobs is not None
            self.seen[i, len(self.tokens[i])] = dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))
            self.tokens[i].append(token)

    def generate(self, steps: int, chunk: int) -> None:
        """`steps` steps of all sequences together, prompts in chunks."""
        for _ in range(steps):
            self.step({i: min(chunk, len(t) - self.computed[i]) for i, t in enumerate(self.tokens)})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(
    name: str, dtype: str, make_runner: Callable[..., Runner], tmp_path: Path
) -> None:
    sequences = Sequences(make_runner(name, dtype=dtype), [5, 300, 33])
    sequences.generate(steps=14, chunk=32)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32, attn_implementation="eager")
    exact = log_probabilities(reference.to("cuda").eval(), sequences.tokens)
    rounded = log_probabilities(reference.to(getattr(torch, dtype)), sequences.tokens)
    own = max(float((a - b).abs().max()) for a, b in zip(rounded, exact, strict=True))
    worst = 0.0
    for (sequence, position), logprobs in sequences.seen.items():
        ours = torch.tensor([logprobs[token] for token in range(VOCAB)])
        worst = max(worst, float((ours - exact[sequence][position - 1]).abs().max()))
    assert len(sequences.seen) > 24
    assert worst < max(TOLERANCE[dtype], SLACK * own)


@torch.inference_mode()
def log_probabilities(model: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    """(tokens, vocabulary) of each sequence, in float32."""
    logits = [model(torch.tensor([tokens], device="cuda"), use_cache=False).logits[0] for tokens in sequences]
    return [torch.log_softmax(each.float(), -1).cpu() for each in logits]


def test_a_step_that_no_graph_holds_is_that_of_the_graphs(make_runner: Callable[..., Runner]) -> None:
    """570 tokens in one step go kernel by kernel, in steps of 57 through graphs."""
    found = []
    for chunk in (500, 50):
        sequences = Sequences(make_runner("llama", dtype="bfloat16", max_num_batched_tokens=600), [500, 70])
        while sequences.computed[0] < 500 or sequences.computed[1] < 70:
            left = {i: min(chunk, len(t) - sequences.computed[i]) for i, t in enumerate(sequences.tokens)}
            sequences.step({i: count for i, count in left.items() if sequences.computed[i] < (500, 70)[i]})
        found.append([sequences.seen[i, length] for i, length in ((0, 500), (1, 70))])
    for one, other in zip(*found, strict=True):
        assert max(abs(one[token] - other[token]) for token in range(VOCAB)) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_flashinfer_gets_no_decodes(
    name: str, make_runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    from components.engine.flash import FlashAttention

    sequences = Sequences(make_runner(name, dtype="bfloat16"), [5, 40, 33])
    planned: list[list[int]] = []
    plan = FlashAttention.plan_chunks

    def seen(attention: FlashAttention, key: Any, tables: Any) -> Any:
        planned.append(np.diff(tables.cu_seqlens_q).tolist())
        return plan(attention, key, tables)

    monkeypatch.setattr(FlashAttention, "plan_chunks", seen)
    for counts, expected in (({0: 5, 1: 20}, [5, 20]), ({0: 1, 1: 20, 2: 33}, [20, 33]), ({0: 1, 1: 1, 2: 1}, None)):
        planned.clear()
        sequences.step(counts)
        assert all(lengths == expected for lengths in planned)
        assert bool(planned) == (expected is not None)


@pytest.mark.parametrize(
    ("name", "is_captured"), [("gemma2", True), ("mixtral", True), ("qwen3-moe", True), ("qwen3-dynamic", False)]
)
def test_forwards_of_transformers_are_captured_unless_they_wait(
    name: str, is_captured: bool, make_runner: Callable[..., Runner], caplog: pytest.LogCaptureFixture
) -> None:
    runner: Any = make_runner(name, dtype="bfloat16")
    told = [record.getMessage() for record in caplog.records if "without CUDA graphs" in record.getMessage()]
    assert len(told) == (not is_captured), told
    sequences = Sequences(runner, [5, 40, 33])
    sequences.step({0: 5, 1: 40, 2: 33})
    calls: list[int] = []
    runner._model.register_forward_pre_hook(lambda *_: calls.append(1))
    sequences.step({0: 1, 1: 1, 2: 1})
    assert bool(calls) != is_captured


def test_more_decodes_than_a_graph_holds_are_those_of_graphs(make_runner: Callable[..., Runner]) -> None:
    """515 in one step go kernel by kernel, in two steps through graphs."""
    count, found = 515, []
    runner = make_runner("llama", dtype="bfloat16", num_blocks=600, max_num_seqs=520, max_num_batched_tokens=4096)
    for most in (count, 300):
        sequences = Sequences(runner, [3 + i % 5 for i in range(count)])
        sequences.step({i: len(tokens) for i, tokens in enumerate(sequences.tokens)})
        for first in range(0, count, most):
            sequences.step(dict.fromkeys(range(first, min(first + most, count)), 1))
        found.append([sequences.seen[i, 4 + i % 5] for i in range(count)])
    for one, other in zip(*found, strict=True):
        assert max(abs(one[token] - other[token]) for token in range(VOCAB)) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_samples_nothing_is_over_when_it_returns(dtype: str, make_runner: Callable[..., Runner]) -> None:
    """Its blocks are announced to whoever READs them."""
    sequences = Sequences(make_runner("llama", dtype=dtype), [500])
    for _ in range(3):
        sequences.step({0: 100})
        assert torch.cuda.current_stream().query()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_fails_is_over_when_that_is_told(dtype: str, make_runner: Callable[..., Runner]) -> None:
    """Its blocks are freed, and may be lent to a transfer at once."""
    runner = make_runner("llama", dtype=dtype)
    batch = Sequences(runner, [50]).batch({0: 50}, LOGPROBS)
    nowhere = msgspec.structs.replace(batch.samples[0], row=7)
    torch.cuda._sleep(LEAD_CYCLES)
    with pytest.raises(IndexError):
        runner.launch(msgspec.structs.replace(batch, samples=(nowhere,)))
    assert torch.cuda.current_stream().query()


KINDS = [
    Sampling(temperature=0.8, top_p=0.95),
    Sampling(temperature=1.0),
    Sampling(temperature=1.3, top_k=40),
    Sampling(temperature=0.7, top_k=100, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.05),
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, top_k=20, min_p=0.1),
    Sampling(temperature=1.5, top_k=300, top_p=0.3, min_p=0.001),
    Sampling(temperature=0.01, top_p=0.9),
    Sampling(temperature=3.0, top_p=0.999),
    Sampling(temperature=1.0, top_k=60_000, top_p=0.9),
    Sampling(temperature=1.0, top_p=1e-9),
]


def make_logits(kind: str, rows: int, vocab: int) -> torch.Tensor:
    """Logits in bfloat16, which the CPU draws from as well."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5)).mul_(2)
    if kind == "flat":
        logits *= 0.05
    elif kind == "below zero":
        logits -= 40
    elif kind == "equal":
        logits.zero_()
    elif kind == "banned":
        logits[:, ::3] = float("-inf")
    elif kind == "one allowed":
        logits.fill_(float("-inf"))[torch.arange(rows), torch.arange(rows) * 7919 % vocab] = 1.5
    return logits.bfloat16()


@pytest.mark.parametrize(
    ("kind", "num_rows", "vocab"),
    [
        ("normal", 48, 128_256),
        ("normal", 1, 128_256),
        ("normal", 200, 32_003),
        ("normal", 24, 4_097),  # one over a part
        ("normal", 12, 65),  # one over a bucket
        ("flat", 24, 50_257),
        ("below zero", 24, 50_257),
        ("equal", 12, 10_000),
        ("banned", 24, 50_257),
        ("one allowed", 24, 50_257),
    ],
)
def test_draws_equal_those_on_the_cpu(kind: str, num_rows: int, vocab: int) -> None:
    from components.engine.gpu_sampling import GpuSampler

    logits = make_logits(kind, num_rows, vocab)
    sampler = GpuSampler(num_rows, vocab, torch.device("cuda"))
    for position in (100, 101):  # the second step finds what the first one left
        rows = _draw_rows(num_rows, position)
        expected: Sampled = sample(logits.float(), rows)
        for on_gpu in (logits.to("cuda"), logits.to("cuda").float()):
            tokens = on_gpu.argmax(-1)
            sampler.draw(on_gpu, rows, tokens)
            assert tokens.tolist() == expected.tokens.tolist(), on_gpu.dtype


@pytest.mark.parametrize("num_rows", [1, 23, 48])
def test_rows_with_penalties_are_drawn_as_on_the_cpu(num_rows: int) -> None:
    """They are drawn apart, from float32; each row has the token that it has alone, and that it has in float32."""
    from components.engine.gpu_sampling import GpuSampler

    logits = make_logits("normal", num_rows, 32_003)
    sampler = GpuSampler(num_rows, 32_003, torch.device("cuda"))
    changes: list[dict[str, Any]] = [
        {"logit_bias": ((5, 4.0), (7, -100.0))},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.25},
        {},
    ]
    for position, every in ((100, 1), (101, 3), (102, 100), (103, 2)):  # all rows changed, some, one, and others
        rows = _draw_rows(num_rows, position)
        for i in range(0, num_rows, every):
            changed = msgspec.structs.replace(rows[i].sampling, **changes[i // every % len(changes)])
            output = logits[i].topk(3).indices.numpy().astype(np.int32)
            rows[i] = msgspec.structs.replace(rows[i], sampling=changed, prompt=output[:1], output=output, banned=(9,))
        expected: Sampled = sample(logits.float(), rows)
        for on_gpu in (logits.to("cuda"), logits.to("cuda").float()):
            tokens = on_gpu.argmax(-1)
            sampler.draw(on_gpu, rows, tokens)
            assert tokens.tolist() == expected.tokens.tolist(), (on_gpu.dtype, every)


@pytest.mark.parametrize(
    ("kind", "num_rows", "vocab"),
    [("normal", 48, 128_256), ("normal", 24, 32_003), ("equal", 12, 10_000), ("banned", 24, 50_257)],
)
def test_floors_of_bfloat16_are_those_of_float32(kind: str, num_rows: int, vocab: int) -> None:
    """But for the rounding of sums: no value of the row lies between the two then."""
    from components.engine.draw_settings import COLUMNS, DrawSettings
    from components.engine.row_floor import make_row_floor
    from components.engine.wide_floor import wide_floor_kernel

    row_floor = make_row_floor(torch.device("cuda"))
    if row_floor is None:
        pytest.skip("the kernel does not run on this GPU")
    logits, rows = make_logits(kind, num_rows, vocab).to("cuda"), _draw_rows(num_rows, 100)
    made = DrawSettings([row.sampling for row in rows], vocab).at(rows)
    settings, tokens = torch.from_numpy(made).to("cuda").view(-1, COLUMNS), logits.argmax(-1)
    narrow, wide = torch.zeros(2, len(settings), dtype=torch.int64, device="cuda")
    row_floor.find(logits, settings, tokens, narrow)
    given = (logits, logits.stride(0), settings, tokens)
    wide_floor_kernel[(len(settings),)](*given, wide, vocab, TILE=16_384, num_warps=32)
    assert (narrow == wide >> 16).float().mean() > 0.9
    for place, orders in zip(
        made[:, 6].tolist(), zip(narrow.tolist(), (wide >> 16).tolist(), strict=True), strict=True
    ):
        low, high = sorted(map(_value_of, orders))
        assert not ((logits[place] > low) & (logits[place] < high)).any()


def _value_of(order: int) -> float:
    """The bfloat16 of an order, as `order32` has it in its upper half; -inf below all numbers."""
    bits = np.uint32((order ^ 0x8000 if order & 0x8000 else order ^ 0xFFFF) << 16)
    return float(bits.view(np.float32)) if order > 0x7F else float("-inf")


def test_draws_repeat() -> None:
    """What is counted atomically is counted the same in any order."""
    from components.engine.gpu_sampling import GpuSampler

    logits = make_logits("normal", 64, 128_256).to("cuda")
    sampler = GpuSampler(64, 128_256, logits.device)
    outcomes = set()
    for _ in range(20):
        tokens = logits.argmax(-1)
        sampler.draw(logits, _draw_rows(64, 7), tokens)
        outcomes.add(tuple(tokens.tolist()))
    assert len(outcomes) == 1


def _draw_rows(count: int, position: int) -> list[SampleRow]:
    empty = np.empty(0, np.int32)
    samplings = [msgspec.structs.replace(KINDS[i % len(KINDS)], seed=i * 7919) for i in range(count)]
    return [SampleRow(i, sampling, position + i, empty, empty) for i, sampling in enumerate(samplings)]
