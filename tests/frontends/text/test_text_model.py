"""The text side of a model: loading, special tokens, limits, and an event loop that is not held up."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from frontends.text.bound import TokenBound
from frontends.text.errors import ApiError
from frontends.text.model import TextModel

PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_the_default_model_s_facts(smol: TextModel) -> None:
    assert (smol.vocab_size, smol.max_model_len, smol.eos_token_ids) == (49152, 8192, (2,))
    assert smol.encode("Hello") == [19556]
    assert smol.decode([1, 19556, 2]) == "Hello"
    assert smol.decode([19556, 2], skip_special_tokens=False) == "Hello<|im_end|>"
    assert smol.token_bytes(19556) == b"Hello"
    assert {0, 1, 2} <= smol.special_ids


@pytest.mark.parametrize(
    ("contents", "num_tokens"),
    [({"user": ""}, 30), ({"user": "hi"}, 31), ({"user": "hi there"}, 32), ({"system": "S", "user": "hi"}, 16)],
)
def test_the_default_model_s_chats_have_the_known_lengths(
    smol: TextModel, contents: dict[str, str], num_tokens: int
) -> None:
    prompt = smol.render_chat([{"role": role, "content": content} for role, content in contents.items()])
    assert len(smol.encode(prompt, add_special_tokens=False)) == num_tokens


def test_a_folder_s_settings_are_read(make_model: Callable[..., TextModel]) -> None:
    model = make_model("llama")
    assert model.max_model_len == 64
    assert model.eos_token_ids == (2, 7)
    assert model.generation_defaults == {"temperature": 0.6}
    assert model.special_ids == {0, 1, 2}
    assert model.token_bytes(3 + 0xE4) == b"\xe4"
    assert model.token_bytes(model.encode("b", add_special_tokens=False)[0]) == b" b"
    assert model.token_bytes(9_999) == b""


def test_a_lower_limit_counts_and_a_higher_one_does_not(sentencepiece: TextModel, tmp_path: Path) -> None:
    sentencepiece.tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 64, "vocab_size": 500}}')
    for asked, got in ((32, 32), (128, 64), (None, 64)):
        model = TextModel.load(tmp_path, "small", max_model_len=asked)
        model.close()
        assert (model.max_model_len, model.vocab_size) == (got, 500)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match="max_model_len"):
        TextModel.load(tmp_path, "small")
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="does not compile"):
        TextModel.load(tmp_path, "small", max_model_len=64)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        TextModel.load(tmp_path, "small")


def test_special_tokens_are_added_as_asked(make_model: Callable[..., TextModel]) -> None:
    model = make_model("gemma")
    assert model.encode("a")[0] == 1
    assert model.encode("a", add_special_tokens=False) == model.encode("a")[1:]
    assert model.begins_with_bos


@pytest.mark.parametrize(("bos", "eos"), [(False, False), (True, False), (True, True)])
def test_the_configuration_may_say_which_special_tokens_to_add(
    make_model: Callable[..., TextModel], bos: bool, eos: bool
) -> None:
    model = make_model("gemma", add_bos_token=bos, add_eos_token=eos)
    plain = model.encode("ab", add_special_tokens=False)
    assert model.encode("ab") == [1] * bos + plain + [2] * eos
    assert model.begins_with_bos is bos


def test_a_tokenizer_that_was_saved_cutting_and_filling_does_neither(sentencepiece: TextModel, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(sentencepiece.tokenizer.to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = TextModel.load(tmp_path, "small", max_model_len=64)
    model.close()
    assert model.encode("abcdefgh") == sentencepiece.encode("abcdefgh")


async def test_encoding_elsewhere_gives_the_same_ids(smol: TextModel) -> None:
    for text in ("Hello", "word " * 2_000, "word " * 8_000):
        assert await smol.encode_async(text) == smol.tokenizer.encode(text).ids
    assert await smol.encode_batch_async(["Hello", "hi"]) == [smol.encode("Hello"), smol.encode("hi")]


def test_a_batch_in_several_groups_keeps_its_order(smol: TextModel) -> None:
    texts = ["a " * 70_000, "Hello", "b " * 70_000, "", "hi", "c " * 140_000]
    assert smol.encode_batch(texts) == [smol.encode(text) for text in texts]
    assert smol.encode_batch([]) == []


async def test_a_long_encoding_does_not_hold_up_the_loop(smol: TextModel) -> None:
    text = "word " * 100_000
    task = asyncio.create_task(smol.encode_async(text))
    longest = took = 0.0
    start = last = time.perf_counter()
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    took = last - start
    assert len(await task) > smol.max_model_len
    assert longest < max(0.1, took / 2)


async def test_a_short_text_overtakes_a_long_one(smol: TextModel) -> None:
    long = asyncio.create_task(smol.encode_async("word " * 100_000))
    await asyncio.sleep(0.01)
    await smol.encode_async("word " * 200)
    assert not long.done()
    await long


async def test_text_that_cannot_fit_is_refused_before_it_is_encoded(smol: TextModel) -> None:
    with pytest.raises(ApiError, match=r"maximum context length is 8192 .* at least \d+ tokens") as error:
        await smol.encode_async("word " * 1_000_000, param="messages")
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")


@PROPERTY
@given(text=st.text() | st.text("\x00\x04 \t\nab\U000f0000é世").map(lambda t: t * 9))
def test_no_text_has_fewer_tokens_than_the_bound(smol: TextModel, sentencepiece: TextModel, text: str) -> None:
    for model in (smol, sentencepiece):
        bound = model._bound
        assert bound.max_bytes_per_token is not None
        assert bound.least_tokens(text) <= len(model.encode(text, add_special_tokens=False))


BYTE_LEVEL = {
    "model": {"type": "BPE", "byte_fallback": False},
    "pre_tokenizer": {"type": "ByteLevel"},
    "added_tokens": [],
}


def bound_of(**change: object) -> TokenBound:
    """The bound of a byte-level tokenizer whose only token is "a", with a change to its description."""
    return TokenBound(Tokenizer(models.BPE({"a": 0}, [])), {**BYTE_LEVEL, **change})


def test_bytes_the_vocabulary_lacks_are_not_counted() -> None:
    assert bound_of().least_tokens("aba") == 2


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "NFC"}},  # might turn bytes that count into some that do not
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend"}, {"type": "StripAccents"}]}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "Whitespace"}]}},
        {"pre_tokenizer": None},
        {"model": {"type": "WordPiece", "byte_fallback": False}},
        {"added_tokens": [{"content": "<s>", "lstrip": True, "rstrip": False}]},
    ],
)
def test_rules_that_drop_text_allow_no_bound(change: dict[str, object]) -> None:
    assert bound_of(**change).least_tokens("a" * 1_000) == 0


def test_nfc_shortens_no_text_more_than_four_times() -> None:
    """Weighs every character's decomposition: no text in, and no composed text out, breaks the bound."""
    size = {c: len(c.encode()) for c in map(chr, range(0x30000)) if not 0xD800 <= ord(c) < 0xE000}
    parts = {c: d for c in size if (d := unicodedata.normalize("NFD", c)) != c}
    weight: dict[str, int] = {}
    for source, decomposed in parts.items():
        if len(decomposed) == 1:
            weight[decomposed] = max(weight.get(decomposed, size[decomposed]), size[source])

    def weigh(text: str) -> int:
        return sum(weight.get(c, size[c]) for c in text)

    assert all(size[source] <= weigh(decomposed) for source, decomposed in parts.items())
    composed = [c for c in (*parts, *weight) if unicodedata.normalize("NFC", c) == c]
    assert max(weigh(parts.get(c, c)) / size[c] for c in composed) <= 4


def test_the_text_side_loads_neither_torch_nor_numpy() -> None:
    heavy = ("torch", "transformers", "numpy", "nixl")
    program = (
        "import sys, frontends.text.requests, frontends.text.detokenizer;"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert run.stdout.strip() == "[]"
