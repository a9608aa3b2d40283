"""Models for the tests of the text library: the default one, and small ones of the SentencePiece kind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from components.model_cache import resolve_model
from components.options import DEFAULT_MODEL
from frontends.text.model import TextModel

sys.path.insert(0, str(Path(__file__).parent))  # lets the tests import their helpers by name

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def smol() -> Iterator[TextModel]:
    """The default model: byte-level BPE."""
    model = TextModel.load(resolve_model(DEFAULT_MODEL), DEFAULT_MODEL)
    yield model
    model.close()


@pytest.fixture(scope="session", params=["llama", "gemma", "metaspace"])
def sentencepiece(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextModel]:
    """Byte fallback and "\u2581" for a space, with the three decoders in use: stripping, not stripping, Metaspace."""
    model = load(make_folder(tmp_path_factory.mktemp(request.param), make_sentencepiece(request.param)))
    yield model
    model.close()


@pytest.fixture
def make_model(tmp_path: Path) -> Iterator[Callable[..., TextModel]]:
    """Loads a small model of a kind, with further settings for its tokenizer_config.json."""
    made: list[TextModel] = []

    def make(kind: str = "llama", **settings: object) -> TextModel:
        made.append(load(make_folder(tmp_path, make_sentencepiece(kind), **settings)))
        return made[-1]

    yield make
    for model in made:
        model.close()


def load(folder: Path) -> TextModel:
    return TextModel.load(folder, "small")


def make_sentencepiece(kind: str) -> Tokenizer:
    """A vocabulary of ~400 tokens: specials, all bytes, letters with and without a space before, some CJK."""
    words = ["\u2581", "\u2581\u2581", *"abcdefghijklmnop.,!", "\u2581a", "\u2581b", "ab", "\u4f60", "\u597d", "\ufffd"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [("\u2581", "\u2581"), ("\u2581", "a"), ("\u2581", "b"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    spaces, fallback = decoders.Replace("\u2581", " "), decoders.ByteFallback()
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([fallback, decoders.Metaspace()])
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.decoder = decoders.Sequence([spaces, fallback, decoders.Fuse()])
    if kind == "llama":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), tokenizer.normalizer])
        tokenizer.decoder = decoders.Sequence([spaces, fallback, decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def make_folder(folder: Path, tokenizer: Tokenizer, **settings: object) -> Path:
    """A model folder around a tokenizer, with a context of 64 tokens."""
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode({**tokens, **settings}))
    (folder / "config.json").write_bytes(msgspec.json.encode({"max_position_embeddings": 64, "eos_token_id": 2}))
    (folder / "generation_config.json").write_bytes(msgspec.json.encode({"eos_token_id": [2, 7], "temperature": 0.6}))
    return folder
