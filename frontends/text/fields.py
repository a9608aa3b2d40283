"""What all request models share: strict parsing of a body, nulls as absent, errors that name the field."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from frontends.text.errors import ApiError, brief

INT32_MAX = (1 << 31) - 1

_MESSAGES = {"missing": "is required", "dict_type": "must be an object", "model_type": "must be an object"}
"""Our words for errors whose own tell of Python."""

Model = TypeVar("Model", bound="Fields")
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]


class Fields(BaseModel):
    """Base of the request models. Nothing is coerced, null means absent, and unknown fields are accepted.

    Clients send fields that are newer than any server; refusing them would break more than it protects. What
    is known and not supported is refused by name, see `unsupported`.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def parse(model: type[Model], body: bytes) -> Model:
    """The body as `model`. Raises `ApiError` 400 naming the first field at fault."""
    return validate(model, json_object(body))


def json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises `ApiError` 400 for anything else, NaN and lone surrogates included."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


def validate(model: type[Model], value: dict[str, Any]) -> Model:
    """The object as `model`. Raises `ApiError` 400 naming the first field at fault."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error
    param = ".".join(brief(str(part)) for part in first["loc"]) or None
    message = _MESSAGES.get(first["type"]) or first["msg"].removeprefix("Value error, ")
    message = message.replace("Input should be", "must be").removesuffix(" after validation, not 0")
    raise ApiError(400, f"{param}: {message}" if param else message, code=_code(first["type"]), param=param)


def wrong_type(message: str) -> PydanticCustomError:
    """What a validator raises for a value of another JSON type than the field takes."""
    return PydanticCustomError("wrong_type", "{message}", {"message": message})


def not_supported(name: str, advice: str = "leave it out") -> ApiError:
    """The refusal of a field that would change the answer if this server knew it; `advice` is what to do."""
    return ApiError(400, f"{name} is not supported yet; {advice}", code="unsupported_parameter", param=name)


def value_not_supported(name: str, what: str, advice: str) -> ApiError:
    """The refusal of a value of a field that this server knows: `what` it does not support, and what to do."""
    return ApiError(400, f"{what} is not supported yet; {advice}", code="unsupported_value", param=name)


def _code(kind: str) -> str:
    """The OpenAI API's code for a kind of pydantic's errors."""
    if kind == "missing":
        return "missing_required_parameter"
    return "invalid_type" if kind.endswith("_type") else "invalid_value"
