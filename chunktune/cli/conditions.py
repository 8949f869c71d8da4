"""The conditions of `chunktune check` as they stand on the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from chunktune.errors import UsageError
from chunktune.units import UnitError, parse_bytes, parse_share

if TYPE_CHECKING:
    from chunktune.gate import Conditions

Number = TypeVar("Number", int, float)


def conditions(
    max_slowdown: str | None,
    min_headroom: str | None,
    expect_chunks: int | None,
    max_peak: str | None,
    allow_unclear: bool,
    allowed: Sequence[str],
) -> Conditions:
    """The conditions as they were given. Raises UsageError."""
    from chunktune.gate import Conditions

    _check_allowed(allowed)
    slowdown = _share("--max-slowdown", max_slowdown)
    return Conditions(
        max_slowdown=Conditions.max_slowdown if slowdown is None else slowdown,
        min_headroom=_share("--min-headroom", min_headroom),
        expect_chunks=expect_chunks,
        max_peak_bytes=_size("--max-peak", max_peak),
        allow_unclear=allow_unclear,
        allowed=tuple(allowed),
    )


def _check_allowed(keys: Sequence[str]) -> None:
    from chunktune.gate.differences import ALLOW_RULE, unknown_key

    for key in keys:
        nearest = unknown_key(key)
        if nearest is not None:
            hint = f" (did you mean {nearest}?)" if nearest else ""
            raise UsageError(f"--allow-different {key} is unknown; it takes {ALLOW_RULE}{hint}")


def _share(flag: str, text: str | None) -> float | None:
    return None if text is None else _read(flag, text, parse_share, float)


def _size(flag: str, text: str | None) -> int | None:
    return None if text is None else _read(flag, text, parse_bytes, int)


def _read(flag: str, text: str, parse: Callable[[object], Number], bare: Callable[[str], object]) -> Number:
    """The value of a flag, a bare number or a text with its unit. Raises UsageError."""
    try:
        value: object = bare(text)
    except ValueError:
        value = text
    try:
        return parse(value)
    except UnitError as error:
        raise UsageError(f"{flag} {error}") from error
