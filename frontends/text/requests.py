"""The requests of the API: `parse_*` make them from raw bodies, methods turn them into prompts and sampling.

    request = parse_chat(body)                     ApiError 400 if it is not what the API allows
    prompts = request.prompts(model)               text or token ids, at least one
    sampling = request.sampling(index, seed_base)  per choice
    stopping = request.stopping(model, len(ids))   per prompt, once its length is known

Every field at fault is named in the refusal.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from components.messages import Stopping
from frontends.text.chat import Message
from frontends.text.errors import ApiError
from frontends.text.fields import Fields, TokenId, json_object, parse, validate, value_not_supported, wrong_type
from frontends.text.generation import MAX_CHOICES, MAX_TOP_LOGPROBS, Count, GenerationFields
from frontends.text.model import TextModel
from frontends.text.prompts import Prompt, check_vocabulary, prompt_list
from frontends.text.unsupported import refuse_response_format, refuse_tools, refuse_unsupported

DEFAULT_COMPLETION_TOKENS = 16
"""What a completion without max_tokens generates, as the OpenAI API has it."""

MAX_MESSAGES = 10_000


class ChatPromptFields(Fields):
    """The fields of a chat that make its prompt."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    add_generation_prompt: bool | None = None  # absent: unless the final message is continued
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def render(self, model: TextModel) -> str:
        """The prompt's text; encode it without special tokens."""
        wants_turn = self.add_generation_prompt
        return model.render_chat(
            [message.for_template() for message in self.messages],
            add_generation_prompt=not self.continue_final_message if wants_turn is None else wants_turn,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class ChatRequest(GenerationFields, ChatPromptFields):
    """POST /v1/chat/completions."""

    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    echo: bool = False
    add_special_tokens: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return self

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def prompt_param(self) -> str:
        return "messages"

    @property
    def echoed(self) -> str:
        """What the reply's text begins with: with `echo`, the assistant message that is being continued."""
        last = self.messages[-1]
        return last.content if self.echo and last.role == "assistant" else ""

    def prompts(self, model: TextModel) -> list[Prompt]:
        """The one prompt, as text."""
        return [self.render(model)]


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: Any
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @field_validator("prompt", mode="before")
    @classmethod
    def _is_prompt(cls, value: Any) -> Any:
        if not isinstance(value, str | list):
            raise wrong_type("must be a string, a list of strings, a list of token ids, or a list of such lists")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < self.n:
            raise ApiError(400, f"best_of ({self.best_of}) must not be less than n ({self.n})", param="best_of")
        if self.best_of is not None and self.best_of > self.n:
            advice = "leave best_of out, set n to the number of choices, and keep the best of them"
            raise value_not_supported("best_of", f"best_of above n ({self.best_of} above {self.n})", advice)
        if self.echo and self.logprobs is not None:
            what = "echo together with logprobs (log-probabilities of the prompt's tokens)"
            raise value_not_supported("echo", what, "leave out echo to get those of the output, or leave out logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self, model: TextModel) -> list[Prompt]:
        """Each prompt as text or as token ids, in the client's order. Raises `ApiError` 400 for ids the model lacks."""
        return prompt_list(self.prompt, model)

    def stopping(
        self, model: TextModel, prompt_len: int, *, default_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    ) -> Stopping:
        return super().stopping(model, prompt_len, default_tokens=default_tokens)


class TokenizeRequest(Fields):
    """POST /tokenize of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False

    def text(self, model: TextModel) -> str:
        """What is to be encoded."""
        return self.prompt


class TokenizeChatRequest(ChatPromptFields):
    """POST /tokenize of a chat."""

    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False

    def text(self, model: TextModel) -> str:
        """What is to be encoded."""
        return self.render(model)


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]

    def text(self, model: TextModel) -> str:
        """The text of the tokens, special ones included. Raises `ApiError` 400 for ids the model lacks."""
        check_vocabulary(self.tokens, model, param="tokens")
        return model.decode(self.tokens, skip_special_tokens=False)


def parse_chat(body: bytes) -> ChatRequest:
    """The body of a chat. Raises `ApiError` 400 naming the field."""
    value = json_object(body)
    refuse_unsupported(value)
    refuse_tools(value)
    refuse_response_format(value)
    return validate(ChatRequest, value)


def parse_completion(body: bytes) -> CompletionRequest:
    """The body of a completion. Raises `ApiError` 400 naming the field."""
    value = json_object(body)
    refuse_unsupported(value)
    refuse_response_format(value)
    return validate(CompletionRequest, value)


def parse_prompted(body: bytes) -> ChatRequest | CompletionRequest:
    """The body of a chat if it has messages, else of a completion. Raises `ApiError` 400 naming the field."""
    return parse_chat(body) if _is_chat(json_object(body)) else parse_completion(body)


def parse_tokenize(body: bytes) -> TokenizeRequest | TokenizeChatRequest:
    """The body of a tokenization, of a chat if it has messages. Raises `ApiError` 400 naming the field."""
    value = json_object(body)
    refuse_unsupported(value)
    return validate(TokenizeChatRequest, value) if _is_chat(value) else validate(TokenizeRequest, value)


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """The body of a detokenization. Raises `ApiError` 400 naming the field."""
    return parse(DetokenizeRequest, body)


def _is_chat(value: dict[str, Any]) -> bool:
    """Whether the body has messages rather than a prompt. Raises `ApiError` 400 if it has both."""
    has_messages = value.get("messages") is not None
    if has_messages and value.get("prompt") is not None:
        raise ApiError(400, "prompt and messages exclude each other; leave one of them out", param="prompt")
    return has_messages
