"""JSON that others wrote, and plain data, as values of our own: every mistake is one line with its place."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from chunktune.errors import ChunktuneError, EnvironmentFailedError
from chunktune.results import SCHEMA_VERSION

_Model = TypeVar("_Model", bound=BaseModel)


def strict_loads(data: bytes) -> object:
    """JSON without NaN, infinity or numbers beyond a float.

    Raises ValueError with one line: not UTF-8, not JSON (where), nested too deeply, or a number out of range.
    """
    try:
        return json.loads(data.decode(), parse_constant=_refuse_number, parse_float=_finite_float)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON (line {error.lineno}, column {error.colno}: {error.msg})") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def validated(model: type[_Model], data: object, where: str) -> _Model:
    """`data` (plain JSON values) as a value of `model`; no type is converted but an integer to a float.

    Raises EnvironmentFailedError, one line with the first mistake, its place and the number of the others.
    """
    try:
        text = json.dumps(data, allow_nan=False)
    except RecursionError as error:
        raise EnvironmentFailedError(f"{where}: nested too deeply") from error
    return validated_text(model, text, where)


def validated_text(model: type[_Model], text: str | bytes, where: str) -> _Model:
    """As `validated`, of JSON text."""
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise EnvironmentFailedError(f"{where}: {_first_mistake(error)}") from error


def _first_mistake(error: ValidationError) -> str:
    mistakes = error.errors(include_url=False)
    place = ".".join(str(part) for part in mistakes[0]["loc"]) or "(whole)"
    message = mistakes[0]["msg"].removeprefix("Value error, ")
    others = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
    return f"{place}: {message[:1].lower()}{message[1:]}{others}"


def check_version(where: str, data: dict[str, Any], kind: type[ChunktuneError]) -> None:
    """Raise `kind` where the data has no schema version, or one that a newer chunktune wrote."""
    version = data.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise kind(f"{where}: schema_version is {version!r:.40}; it must be a whole number, 1 to {SCHEMA_VERSION}")
    if version > SCHEMA_VERSION:
        raise kind(
            f"{where}: schema_version is {version}; this chunktune reads up to {SCHEMA_VERSION}: "
            "read it with the newer chunktune that wrote it"
        )


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number that JSON knows")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is beyond what a float can hold")
    return value
