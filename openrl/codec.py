"""JSON or plain objects <-> frozen dataclasses, strictly typed; unknown fields are ignored.

Strict means no guessing: "1" is no number and 1 is no string; an int is fine where a float is due. A value that does
not fit is a `BadRequest` that names field, value and what would be legal.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, to_json, to_jsonable_python

from openrl.errors import BadRequest

T = TypeVar("T")

_SHOWN = 80  # characters of a refused value that a message repeats


@lru_cache(maxsize=256)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def decode_json(kind: type[T], data: bytes | str, what: str = "body") -> T:
    """Parse JSON text into `kind`. Raises `BadRequest` for text that is no JSON and for values that do not fit."""
    try:
        return _adapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        raise BadRequest(_explain(error, what)) from None


def decode_object(kind: type[T], value: Mapping[str, Any], what: str = "value") -> T:
    """The same for an already parsed object, such as a TOML table or a row's JSON column."""
    return decode_json(kind, to_json(value), what)


def encode_json(value: Any) -> bytes:
    """A dataclass, or any tree of JSON-like values, as compact JSON.

    Non-finite floats become the strings "NaN", "Infinity" and "-Infinity": a bare NaN is no JSON and kills the SDK's
    parser (T11), while pydantic reads these strings as the floats they are.
    """
    return to_json(value, inf_nan_mode="strings")


def to_object(value: Any) -> Any:
    """A dataclass as dicts, lists and scalars."""
    return to_jsonable_python(value, inf_nan_mode="strings")


def as_text(value: Any) -> str:
    """A JSON value as the wire's string maps hold it: strings as they are, anything else as JSON (T24)."""
    return value if isinstance(value, str) else encode_json(value).decode()


def _explain(error: ValidationError, what: str) -> str:
    details = error.errors(include_url=False, include_context=True)
    shown = [_one(detail, what) for detail in details[:3]]
    more = len(details) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


def _one(detail: ErrorDetails, what: str) -> str:
    if detail["type"] == "json_invalid":
        return f"{what} is not valid JSON: {detail['ctx']['error'] if 'ctx' in detail else detail['msg']}"
    field = ".".join(str(part) for part in detail["loc"]) or what
    if detail["type"] in ("missing", "missing_argument"):
        return f"{field} is required"
    expected = detail["msg"].removeprefix("Input ")
    return f"{field} {expected}, got {_show(detail['input'])}"


def _show(value: object) -> str:
    if isinstance(value, (list, dict)) and len(value) > _SHOWN:
        return f"{type(value).__name__} of {len(value)} entries"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
