"""The fields that say how to generate: shared by chats and completions, turned into `Sampling` and `Stopping`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from components.messages import Sampling, Stopping
from frontends.text.errors import ApiError
from frontends.text.fields import INT32_MAX, Fields, TokenId, wrong_type
from frontends.text.model import TextModel
from frontends.text.prompts import check_vocabulary

MAX_CHOICES = 128
MAX_STOPS = 32
MAX_STOP_CHARS = 4_096
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1_024

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_GREEDY_BELOW = 1e-5
_MASK = (1 << 64) - 1

Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]


class StreamOptions(Fields):
    """What a stream tells besides its text; without effect on a reply that is not streamed."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class HeadraceOptions(Fields):
    """This server's own wishes."""

    timing: bool = False


class GenerationFields(Fields):
    """How to generate. Ranges are the OpenAI API's where it has the field, else vLLM's.

    `seed` may be any 64-bit number; `disagg_request_id` is the client's label of a request, 0 and below mean
    none; `priority` goes higher first. `max_tokens` above what the context leaves is cut to that.
    """

    model: Annotated[str, Field(min_length=1)] | None = None  # absent: the one that is served
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=-(1 << 63), le=_MASK)] | None = None
    stop: tuple[Stop, ...] = ()
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] = 0
    disagg_request_id: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] = 0
    headrace: HeadraceOptions = HeadraceOptions()

    @field_validator("stop", mode="before")
    @classmethod
    def _list_of_stops(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list):
            raise wrong_type("must be a string or a list of strings")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are allowed, not {len(stops)}")
        return tuple(s for s in stops if s != "")  # an empty stop would end everything at once

    @field_validator("logit_bias")
    @classmethod
    def _ids_as_keys(cls, value: dict[str, float]) -> dict[str, float]:
        if len(value) > MAX_LOGIT_BIAS:
            raise ValueError(f"at most {MAX_LOGIT_BIAS} tokens can be biased, not {len(value)}")
        for key in value:
            if not _TOKEN_ID.fullmatch(key):
                raise ValueError('keys must be token ids, like "42"')
        return value

    @model_validator(mode="after")
    def _min_within_max(self) -> GenerationFields:
        limit = self.asked_tokens
        if limit is not None and self.min_tokens > limit:
            message = f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({limit})"
            raise ApiError(400, message, param="min_tokens")
        return self

    @property
    def asked_tokens(self) -> int | None:
        """The number of output tokens the client allows, if it says so."""
        return self.max_tokens

    @property
    def prompt_param(self) -> str:
        """The field the prompt comes from, for errors."""
        return "prompt"

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to tell for each position; None: no logprobs at all."""
        return None

    def sampling(self, index: int, seed_base: int, defaults: Mapping[str, float] | None = None) -> Sampling:
        """How choice `index` is sampled. `seed_base`, 64 random bits, stands in for a seed the client did not give;
        `defaults` (a model's `generation_defaults`) stand in for absent fields."""
        given = defaults or {}
        temperature = _first(self.temperature, given.get("temperature"), 1.0)
        return Sampling(
            temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
            top_p=_first(self.top_p, given.get("top_p"), 1.0),
            top_k=max(0, int(_first(self.top_k, given.get("top_k"), 0))),
            min_p=_first(self.min_p, given.get("min_p"), 0.0),
            seed=choice_seed(seed_base if self.seed is None else self.seed, index),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=_first(self.repetition_penalty, given.get("repetition_penalty"), 1.0),
            logit_bias=tuple((int(k), v) for k, v in self.logit_bias.items()),
            logprobs=self.num_logprobs,
        )

    def stopping(self, model: TextModel, prompt_len: int, *, default_tokens: int | None = None) -> Stopping:
        """When a choice for a prompt of `prompt_len` tokens ends.

        Raises `ApiError` 400 if the prompt leaves no room for a token, or a token id is outside the vocabulary.
        """
        self.check_vocabulary(model)
        model.refuse_full(prompt_len, param=self.prompt_param)
        room = model.max_model_len - prompt_len
        default = max(default_tokens, self.min_tokens) if default_tokens else room
        asked = self.asked_tokens or default
        ends = () if self.ignore_eos else model.eos_token_ids
        return Stopping(
            max_tokens=min(asked, room),
            min_tokens=min(self.min_tokens, room),
            stop_token_ids=tuple(dict.fromkeys((*ends, *self.stop_token_ids))),
        )

    def check_vocabulary(self, model: TextModel) -> None:
        """Raises `ApiError` 400 for a token id the model does not have."""
        check_vocabulary(map(int, self.logit_bias), model, param="logit_bias")
        check_vocabulary(self.stop_token_ids, model, param="stop_token_ids")


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: the request's own for the first, mixed with the index for the others."""
    if index == 0:
        return seed & _MASK
    # The finalizer of splitmix64 (Steele, Lea, Flood 2014) over the seed's index-th successor.
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _first(*values: float | None) -> Any:
    return next(v for v in values if v is not None)
