"""A model's text side: tokenizer, chat template and limits, loaded from its folder without torch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, processors

from frontends.text.bound import TokenBound
from frontends.text.errors import ApiError, context_exceeded
from frontends.text.template import ChatTemplate
from frontends.text.vocabulary import Vocabulary

_INLINE_CHARS = 512
"""Texts up to this length are encoded in place: 0.2 ms at most, less than a thread's hand-over costs others."""

_SHORT_CHARS = 32_768
"""Longer texts queue in a lane of their own, so that a short prompt never waits behind a long one."""

_GROUP_CHARS = 262_144
"""Texts of a batch that are encoded at once."""

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class TextModel:
    """Turns text into ids and ids into text. One per process; `close` ends its two threads.

    `max_model_len` is the longest sequence, prompt and output together, that the model and, once `fit` was told, the
    workers have room for. `vocab_size` is the model's: ids at or
    above it are nobody's. `eos_token_ids` end a sequence. `generation_defaults` are the sampling fields of the
    model's generation_config.json, for whoever wants to follow them.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        vocabulary: Vocabulary,
        bound: TokenBound,
        template: ChatTemplate | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        generation_defaults: Mapping[str, float],
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.vocab_size = vocab_size
        self.max_model_len = self._own_max_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.generation_defaults = dict(generation_defaults)
        self._bound = bound
        self._template = template
        self._short = ThreadPoolExecutor(1, "encode-short")
        self._long = ThreadPoolExecutor(1, "encode-long")

    @classmethod
    def load(cls, folder: Path, name: str, *, max_model_len: int | None = None) -> TextModel:
        """Reads tokenizer.json, tokenizer_config.json, config.json and generation_config.json of `folder`.

        `name` is the model's name in the API; `max_model_len` lowers the model's own limit. Raises `ValueError`
        for a folder this library cannot serve, saying what is missing.
        """
        source = _read(folder / "tokenizer.json")
        if source is None:
            raise ValueError(f"{folder} has no tokenizer.json; convert the tokenizer to the fast format first")
        tokenizer = Tokenizer.from_buffer(source)
        config = _read_json(folder / "config.json")
        config = config.get("text_config") or config
        settings = _read_json(folder / "tokenizer_config.json")
        generation = _read_json(folder / "generation_config.json")
        names = _special_names(settings)
        _follow(tokenizer, settings, names)
        description = _description(source)
        return cls(
            name,
            tokenizer,
            Vocabulary(tokenizer, description),
            TokenBound(tokenizer, description),
            _template(folder, settings, names),
            vocab_size=config.get("vocab_size") or tokenizer.get_vocab_size(True),
            max_model_len=_length(folder, config, settings, max_model_len),
            eos_token_ids=_eos(tokenizer, generation, config, names),
            generation_defaults={k: v for k in _SAMPLING_DEFAULTS if (v := generation.get(k)) is not None},
        )

    def close(self) -> None:
        """Ends the encoding threads; what they have begun is finished first."""
        self._short.shutdown()
        self._long.shutdown()

    def fit(self, lengths: Iterable[int]) -> None:
        """Follows the workers: `lengths` are the longest sequences that they have room for, each by itself."""
        self.max_model_len = min((self._own_max_len, *lengths))

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text of their own: beginning and end of a turn, and the like."""
        return self.vocabulary.special_ids

    @property
    def begins_with_bos(self) -> bool:
        """Whether encoding adds special tokens, so that even an empty text has one."""
        return self.tokenizer.num_special_tokens_to_add(False) > 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, with the model's beginning-of-sequence token if it has one and it is asked for."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The ids of each text. Unlike the tokenizer's `encode`, this leaves the interpreter lock to others."""
        ids: list[list[int]] = []
        for group in _groups(texts):
            encodings = self.tokenizer.encode_batch_fast(group, add_special_tokens=add_special_tokens)
            ids += [encoding.ids for encoding in encodings]
        return ids

    async def encode_async(self, text: str, add_special_tokens: bool = True, *, param: str = "prompt") -> list[int]:
        """As `encode`, without holding up the event loop; refuses what cannot fit before it is encoded."""
        return (await self.encode_batch_async([text], add_special_tokens, param=param))[0]

    async def encode_batch_async(
        self, texts: Sequence[str], add_special_tokens: bool = True, *, param: str = "prompt"
    ) -> list[list[int]]:
        """As `encode_batch`, without holding up the event loop; refuses what cannot fit before it is encoded.

        `param` is the request's field that a refusal names.
        """
        for text in texts:
            self.refuse_hopeless(text, param=param)
        num_chars = sum(map(len, texts))
        if num_chars <= _INLINE_CHARS:
            return self.encode_batch(texts, add_special_tokens)
        lane = self._short if num_chars <= _SHORT_CHARS else self._long
        return await asyncio.get_running_loop().run_in_executor(lane, self.encode_batch, texts, add_special_tokens)

    def refuse_hopeless(self, text: str, *, param: str = "prompt") -> None:
        """Raises `ApiError` 400 if even the longest tokens could not bring `text` below the context length."""
        least = self._bound.least_tokens(text) if len(text) > self.max_model_len else 0
        if least > self.max_model_len:
            raise self._too_long(f"the text has at least {least} tokens", param=param)

    def refuse_full(self, num_tokens: int, *, param: str = "prompt") -> None:
        """Raises `ApiError` 400 if a prompt of `num_tokens` leaves no room for a token behind it.

        `param` is the request's field that the refusal names.
        """
        if num_tokens >= self.max_model_len:
            prompt = param if param.startswith("prompt.") else "the prompt"
            asked = f"{prompt} has {num_tokens} tokens and at least 1 more must be generated"
            raise self._too_long(asked, param=param)

    def _too_long(self, asked: str, *, param: str) -> ApiError:
        return context_exceeded(
            self.max_model_len, asked, param=param, is_models=self.max_model_len == self._own_max_len
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat; encode it without special tokens, the template has written them."""
        if self._template is None:
            raise ApiError(400, f"the model {self.name!r} has no chat template; use /v1/completions", param="messages")
        return self._template.render(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=chat_template_kwargs,
        )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, id: int) -> bytes:
        """The bytes one token stands for inside a text."""
        return self.vocabulary.bytes_of(id)


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in groups of limited size: an encoding holds a hundred times the memory of its ids."""
    group: list[str] = []
    num_chars = 0
    for text in texts:
        if group and num_chars + len(text) > _GROUP_CHARS:
            yield group
            group, num_chars = [], 0
        group.append(text)
        num_chars += len(text)
    if group:
        yield group


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _read_json(path: Path) -> dict[str, Any]:
    data = _read(path)
    return {} if data is None else msgspec.json.decode(data, type=dict[str, Any])


class _Model(msgspec.Struct):
    """The part of tokenizer.json's model that is small; reading past the rest costs next to nothing."""

    type: str = "BPE"
    byte_fallback: bool = False


class _TokenizerFile(msgspec.Struct):
    model: _Model
    added_tokens: list[dict[str, Any]] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


def _description(source: bytes) -> dict[str, Any]:
    described: dict[str, Any] = msgspec.to_builtins(msgspec.json.decode(source, type=_TokenizerFile))
    return described


def _special_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens (`bos_token`, ...) as text; older files write them as objects."""
    names = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            names[name] = text
    return names


def _follow(tokenizer: Tokenizer, settings: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Brings the tokenizer to what transformers makes of it: no cutting or filling, explicit bos and eos."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if "add_bos_token" not in settings and "add_eos_token" not in settings:
        return
    bos = names.get("bos_token") if settings.get("add_bos_token") else None
    eos = names.get("eos_token") if settings.get("add_eos_token") else None
    parts = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    special = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=parts, pair=[*parts, "$B:1"], special_tokens=special
    )


def _template(folder: Path, settings: Mapping[str, Any], names: Mapping[str, str]) -> ChatTemplate | None:
    """The folder's chat template: its own file, else the one in the tokenizer's configuration (several: "default")."""
    data = _read(folder / "chat_template.jinja")
    found = settings.get("chat_template") if data is None else data.decode()
    if isinstance(found, list):
        found = next((entry["template"] for entry in found if entry["name"] == "default"), None)
    try:
        return ChatTemplate(found, names) if found else None
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _length(folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any], limit: int | None) -> int:
    own = config.get("max_position_embeddings") or settings.get("model_max_length")
    lengths = [n for n in (own, limit) if isinstance(n, int) and n < 1 << 31]
    if not lengths:
        raise ValueError(f"{folder} does not tell the model's longest sequence; set max_model_len")
    return min(lengths)


def _eos(
    tokenizer: Tokenizer, generation: Mapping[str, Any], config: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[int, ...]:
    """What ends a sequence: the generation configuration's ids (else the model's), and the tokenizer's eos."""
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = list(found) if isinstance(found, list) else [found]
    if "eos_token" in names:
        ids.append(tokenizer.token_to_id(names["eos_token"]))
    return tuple(dict.fromkeys(i for i in ids if i is not None))
