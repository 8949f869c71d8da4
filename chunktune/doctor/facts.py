"""Facts about the machine: each a value, or null with the reason why it is not available. Readers never raise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import JsonValue

from chunktune.results import Frozen
from chunktune.units import shorten

UNLIMITED = "unlimited"
MOST_CHARACTERS = 300


class Fact(Frozen):
    """One fact. `why`: the reason where `value` is null."""

    value: JsonValue = None
    why: str | None = None


Facts = Mapping[str, Mapping[str, Fact]]
"""Group -> name -> fact. Names carry the unit of the value."""


def known(value: Any) -> Fact:
    """The fact that a value makes; what JSON cannot hold becomes text, and NaN is not available."""
    if value is None:
        return unknown("it says nothing")
    try:
        return Fact(value=_plain(value))
    except ValueError as error:
        return unknown(str(error))


def unknown(why: str) -> Fact:
    """A fact that is not available."""
    return Fact(why=shorten(" ".join(why.split()), MOST_CHARACTERS) or "no reason is known")


def read(reader: Callable[[], Any]) -> Fact:
    """What `reader` returns as a fact, or the error that it raises."""
    try:
        return known(reader())
    except Exception as error:
        return unknown(_reason(error))


def value_of(facts: Facts, group: str, name: str) -> Any:
    """The value of a fact, null where it is not available or was never asked for."""
    fact = facts.get(group, {}).get(name)
    return None if fact is None else fact.value


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _plain(value: Any) -> JsonValue:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"is {value}, no finite number")
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(value)
