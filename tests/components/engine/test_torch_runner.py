"""The torch runner against transformers: same logits through chunks, batches and scattered blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from paged_sequences import PagedSequences
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from components.engine import torch_runner
from components.engine.runner import Sampled
from components.engine.torch_runner import TorchRunner
from components.messages import Sampling
from components.options import WorkerOptions
from graph import LaunchError

BLOCK = 4
GREEDY = Sampling(temperature=0.0)
SMALL: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "initializer_range": 0.3,
    "dtype": "float32",
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-bias": ("LlamaConfig", {"attention_bias": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral-window": ("MistralConfig", {"sliding_window": 7}),
    "gemma2": ("Gemma2Config", {"sliding_window": 7, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 7}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7, "rope_parameters": ROPE},
    ),
}  # fmt: skip


def save_model(folder: Path, name: str, **changes: Any) -> Path:
    kind, settings = CONFIGS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{**SMALL, **settings, **changes}))
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms, biases and sinks start as constants
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    model.save_pretrained(folder)
    return folder


class Sequences(PagedSequences):
    """Runs sequences through a runner."""

    def __init__(self, runner: TorchRunner, prompts: list[list[int]], *, seed: int = 0) -> None:
        super().__init__(prompts, block_size=BLOCK, num_blocks=runner.num_blocks, seed=seed)
        self.runner = runner

    def step(self, counts: dict[int, int], sampling: Sampling = GREEDY) -> Sampled:
        """Computes `counts[i]` more tokens of sequence i; appends what is sampled."""
        batch = self.batch(counts, sampling)
        sampled = self.runner.execute(batch)
        for sample, token in zip(batch.samples, sampled.tokens, strict=True):
            self.tokens[list(counts)[sample.row]].append(int(token))
        return sampled

    def generate(self, num_tokens: int, chunk: int) -> None:
        """All sequences together, `chunk` tokens of prompt at a time, until each has `num_tokens` more."""
        goals = [len(tokens) + num_tokens for tokens in self.tokens]
        while counts := {
            i: min(chunk, len(tokens) - self.computed[i])
            for i, tokens in enumerate(self.tokens)
            if len(tokens) < goals[i]
        }:
            self.step(counts)


@pytest.fixture
def logits_seen(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every logits tensor that reaches sampling, in order."""
    seen: list[torch.Tensor] = []

    def record(logits: torch.Tensor, rows: Any) -> Sampled:
        seen.append(logits.clone())
        return torch_runner_sample(logits, rows)

    torch_runner_sample = torch_runner.sample
    monkeypatch.setattr(torch_runner, "sample", record)
    return seen


@pytest.fixture
def make_runner(tmp_path: Path) -> Iterator[Callable[..., TorchRunner]]:
    runners: list[TorchRunner] = []

    def make(name: str, *, changes: dict[str, Any] | None = None, **options: Any) -> TorchRunner:
        folder = save_model(tmp_path / name, name, **(changes or {}))
        settings = {"device": "cpu", "block_size": BLOCK, "num_blocks": 40, **options}
        runners.append(TorchRunner(WorkerOptions(model=str(folder), **settings), num_threads=1))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(1)
    return [random.integers(1, 199, length).tolist() for length in lengths]


def reference(folder: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(
    name: str, make_runner: Callable[..., TorchRunner], tmp_path: Path, logits_seen: list[torch.Tensor]
) -> None:
    runner = make_runner(name)
    sequences = Sequences(runner, prompts(13, 1, 8))  # a block multiple, one token, one over a block multiple
    sequences.step({0: 5})  # nothing is sampled
    sequences.step({0: 4, 2: 8})  # a chunk with a past beside a whole prompt
    sequences.step({0: 4, 1: 1, 2: 1})  # chunk, prompt of one token, decode
    for _ in range(4):
        sequences.step({2: 1, 0: 1, 1: 1})
    got = [logits[i] for logits, order in zip(logits_seen, [[2], [0, 1, 2], *[[2, 0, 1]] * 4], strict=True)
           for i in range(len(order))]  # fmt: skip
    at = [(2, 7), (0, 12), (1, 0), (2, 8)]
    at += [(i, {2: 8, 0: 12, 1: 0}[i] + step) for step in range(1, 5) for i in (2, 0, 1)]
    expected = [reference(tmp_path / name, tokens) for tokens in sequences.tokens]
    for logits, (i, position) in zip(got, at, strict=True):
        torch.testing.assert_close(logits, expected[i][position], rtol=1e-4, atol=1e-4)


class Asked(TorchDispatchMode):
    """Counts what a GPU's host would have to wait for: values of tensors, and shapes that depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("is_nonzero", "item", "_local_scalar_dense", "nonzero"):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Echo:
    """Attention whose outcome is the queries."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None: ...

    def attend(self, layer: int, queries: torch.Tensor, shape: Any) -> torch.Tensor:
        return queries.clone()


@pytest.mark.parametrize(("name", "is_asked"), [("gemma2", False), ("mixtral", False), ("llama-dynamic", True)])
def test_a_forward_asks_for_no_value(name: str, is_asked: bool, tmp_path: Path) -> None:
    """So that it can be captured on a GPU; tables that follow from the longest sequence cannot."""
    dynamic = {"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 2.0}} if is_asked else {}
    options = WorkerOptions(
        model=str(save_model(tmp_path, name.removesuffix("-dynamic"), **dynamic)), device="cpu", dtype="float32"
    )
    model = torch_runner.load(options, num_threads=None, on_progress=None, place=None, gpu_share=1.0).model
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode(), Asked() as asked:
        model(input_ids=ids, position_ids=ids, use_cache=False, paged_step=Echo())
    assert bool(asked.names) == is_asked, asked.names


def test_tokens_do_not_depend_on_batch_or_chunks(make_runner: Callable[..., TorchRunner]) -> None:
    runner = make_runner("llama", num_blocks=80)
    together = Sequences(runner, prompts(17, 4, 9, 30), seed=1)
    together.generate(8, chunk=64)
    for chunk in (1, 5):
        for i in range(4):
            alone = Sequences(runner, [prompts(17, 4, 9, 30)[i]], seed=2)
            alone.generate(8, chunk=chunk)
            assert alone.tokens[0] == together.tokens[i]


def test_garbage_of_an_earlier_owner_changes_nothing(make_runner: Callable[..., TorchRunner]) -> None:
    runner = make_runner("llama")
    clean = Sequences(runner, prompts(6, 11))
    clean.generate(6, chunk=4)
    runner._pool.blocks.fill_(float("nan"))
    dirty = Sequences(runner, prompts(6, 11))
    dirty.generate(6, chunk=4)
    assert dirty.tokens == clean.tokens


def test_kv_lies_as_the_layout_says(make_runner: Callable[..., TorchRunner], tmp_path: Path) -> None:
    runner = make_runner("llama")
    sequences = Sequences(runner, prompts(6))
    sequences.step({0: 6})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32)
    with torch.inference_mode():
        cache = model(torch.tensor([sequences.tokens[0][:6]]), use_cache=True).past_key_values
    table = sequences._tables[0]
    item, dim, heads, layers = 4, 8, 2, 2
    for layer in range(layers):
        for side, tensor in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
            for head in range(heads):
                for token in range(6):
                    row = (((table[token // BLOCK] * heads + head) * layers + layer) * 2 + side) * BLOCK + token % BLOCK
                    got = runner._pool.blocks.view(-1)[row * dim : (row + 1) * dim]
                    torch.testing.assert_close(got, tensor[0, head, token], rtol=1e-4, atol=1e-5)
    region = runner.region
    assert region.block_bytes == heads * layers * 2 * BLOCK * dim * item
    assert region.address == runner._pool.blocks.data_ptr()
    assert (region.num_blocks, region.memory) == (40 + 1, "DRAM")  # one for transfers to test themselves


def test_bfloat16_weights_are_close_to_float32(
    make_runner: Callable[..., TorchRunner], tmp_path: Path, logits_seen: list[torch.Tensor]
) -> None:
    runner = make_runner("llama", dtype="bfloat16", changes={"initializer_range": 0.1})
    assert runner.layout.dtype == "bfloat16"
    assert runner.region.block_bytes == 2 * 2 * 2 * BLOCK * 8 * 2
    sequences = Sequences(runner, prompts(9))
    sequences.generate(3, chunk=4)
    expected = reference(tmp_path / "llama", sequences.tokens[0])[8:11]
    got = torch.cat(logits_seen).float()
    assert torch.nn.functional.cosine_similarity(got, expected).min() > 0.998


def test_dummy_weights_are_the_same_in_every_process(make_runner: Callable[..., TorchRunner], tmp_path: Path) -> None:
    first = make_runner("llama", load_format="dummy")
    (tmp_path / "llama" / "model.safetensors").unlink()
    options = WorkerOptions(
        model=str(tmp_path / "llama"), device="cpu", load_format="dummy", block_size=BLOCK, num_blocks=40
    )
    second = TorchRunner(options, num_threads=1)
    runs = [Sequences(runner, prompts(5)) for runner in (first, second)]
    for run in runs:
        run.generate(4, chunk=8)
    assert runs[0].tokens == runs[1].tokens
    assert first.layout == second.layout


def test_fingerprint_tells_weights_apart(make_runner: Callable[..., TorchRunner]) -> None:
    models = [make_runner(name).layout.model for name in ("llama", "llama-bias")]
    models.append(make_runner("llama", load_format="dummy").layout.model)
    assert len(set(models)) == 3


def test_pool_size_follows_memory(make_runner: Callable[..., TorchRunner]) -> None:
    runner = make_runner("llama", num_blocks=None, kv_memory_mb=1)
    assert runner.num_blocks == (1 << 20) // runner.region.block_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 129}, "max_model_len is 129 and the model takes at most 128"),
        ({"dtype": "int3"}, "dtype 'int3' is unknown"),
        ({"device": "abacus"}, "device 'abacus' is unknown"),
        ({"num_blocks": None, "kv_memory_mb": 0}, "no room for one block"),
    ],
)
def test_options_that_cannot_work(
    make_runner: Callable[..., TorchRunner], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        make_runner("llama", **options)


def test_models_without_uniform_heads_are_refused(tmp_path: Path) -> None:
    config = transformers.DeepseekV3Config(num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    with pytest.raises(LaunchError, match="kv_lora_rank"):
        TorchRunner(WorkerOptions(model=str(tmp_path), device="cpu"))
