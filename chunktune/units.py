"""Sizes, durations and shares as people write them: text to bytes, seconds and fractions, and back. Pure.

A text is matched as a whole: one number, at most one space, one unit. `pydantic.ByteSize` is not used because
it takes '1.5.2GB' for one byte and '80 G iB' for 80e9.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

CUDA_ROUNDING_BYTES = 512
"""What CUDA's caching allocator rounds a storage up to (kMinBlockSize in c10/core/AllocatorConfig.h)."""
MAX_BYTES = 2**63 - 1

BYTES_PER_UNIT: Mapping[str, int | Fraction] = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
SECONDS_PER_UNIT: Mapping[str, int | Fraction] = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
}
BYTES_RULE = "a size is a whole number of bytes, or one number and a unit of B KB MB GB TB KiB MiB GiB TiB"
DURATION_RULE = "a duration is a number of seconds above 0, or one number and a unit of ms s m h"
SHARE_RULE = "a share is a number from 0 to below 1, or a percentage"

# Digits are counted so that no text can reach the interpreter's limit on converting long integers.
_NUMBER = r"([0-9]{1,20}(?:\.[0-9]{1,20})?)"
_QUANTITY = re.compile(_NUMBER + r" ?([A-Za-z]+)")
_PERCENTAGE = re.compile(_NUMBER + r" ?%")
_LOOSE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)([^0-9]*)")


class UnitError(ValueError):
    """A size, duration or share that cannot be read: the fact, the rule, and the nearest valid form."""

    def __init__(self, fact: str, rule: str, nearest: str = "") -> None:
        self.fact, self.rule, self.nearest = fact, rule, nearest
        super().__init__(f"{fact}; {rule}" + (f" (did you mean {nearest}?)" if nearest else ""))


def counted(count: int, noun: str) -> str:
    """A count with its noun: "1 check", "2 checks"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def shorten(text: str, limit: int = 60) -> str:
    """`text` on one line for a message: cut after `limit`, unprintable characters escaped."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def printable(text: str) -> str:
    """`text` with its line breaks kept and all other control characters escaped."""
    return "\n".join(shorten(line, len(line) + 1) for line in text.split("\n"))


def shown(value: object) -> str:
    """`value` as it would stand in a TOML file, shortened; a table is only named."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{shorten(value)}"'
    if isinstance(value, (list, tuple)):
        items = ["[...]" if isinstance(item, (list, tuple)) else shown(item) for item in value[:20]]
        return shorten("[" + ", ".join(items) + ("]" if len(value) < 21 else ", ...]"))
    return "a table" if isinstance(value, Mapping) else shorten(_digits(value))


def parse_bytes(value: object) -> int:
    """Bytes from a whole number or from a text such as "1.5GiB"; a fraction of a byte is dropped.

    Raises UnitError for anything else, for a negative number and for more than 2**63 - 1 bytes.
    """
    if isinstance(value, str):
        count = int(_quantity(value, BYTES_PER_UNIT, "GiB", BYTES_RULE))
    elif isinstance(value, int) and not isinstance(value, bool):
        count = value
    else:
        usable = isinstance(value, float) and 0 <= value < MAX_BYTES
        raise UnitError(f"is {shown(value)}", BYTES_RULE, f"{value:.0f}" if usable else "1GiB")
    if not 0 <= count <= MAX_BYTES:
        nearest = "0" if count < 0 else str(MAX_BYTES)
        raise UnitError(f"is {shown(value)}", f"a size is 0 to {MAX_BYTES} bytes", nearest)
    return count


def parse_duration(value: object) -> float:
    """Seconds from a number or from a text such as "90s", "10m", "1.5h", "500ms".

    Raises UnitError for anything else, and where the result is not finite and above 0.
    """
    if isinstance(value, str):
        seconds = float(_quantity(value, SECONDS_PER_UNIT, "s", DURATION_RULE))
    else:
        seconds = _as_float(value)
    if not (math.isfinite(seconds) and seconds > 0):
        raise UnitError(f"is {shown(value)}", DURATION_RULE, "10m")
    return seconds


def parse_share(value: object) -> float:
    """A fraction x with 0 <= x < 1, from a number (0.05) or a percentage ("5%").

    Raises UnitError for anything else.
    """
    if isinstance(value, str):
        match = _PERCENTAGE.fullmatch(value)
        share = float(Fraction(match[1]) / 100) if match else math.nan
    else:
        share = _as_float(value)
    if not 0 <= share < 1:  # also false for NaN
        raise UnitError(f"is {shown(value)}", SHARE_RULE, _nearest_share(value))
    return share


def format_bytes(count: float) -> str:
    """Bytes in binary units with three significant digits: 1610612736 is "1.50 GiB".

    Raises ValueError where `count` is negative or not finite.
    """
    _require_finite(count, "bytes")
    value = Fraction(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < (1024 if unit == "B" else Fraction("999.5")):
            break
        value /= 1024
    else:
        unit = "TiB"
    return f"{int(value)} B" if unit == "B" else f"{_three_digits(float(value))} {unit}"


def format_seconds(seconds: float) -> str:
    """Seconds with three significant digits: "850 us", "12.3 ms", "1.23 s", from two minutes on "2 min 05 s".

    Raises ValueError where `seconds` is negative or not finite.
    """
    _require_finite(seconds, "seconds")
    if seconds == 0:
        return "0 s"
    if seconds >= 119.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 0.9995:  # below, three digits would round up to 1000 of the smaller
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def format_share(share: float) -> str:
    """A fraction as a percentage with three significant digits: 0.0125 is "1.25%".

    Raises ValueError where `share` is not finite.
    """
    if not math.isfinite(share):
        raise ValueError(f"a share is {share}; it must be finite")
    return f"{100 * share:.3g}%" if abs(share) < 9.995 else f"{100 * share:.0f}%"


def _quantity(text: str, units: Mapping[str, int | Fraction], default: str, rule: str) -> Fraction:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        raise UnitError(f"is {shown(text)}", rule, _nearest_quantity(text, tuple(units), default))
    return Fraction(match[1]) * units[match[2]]


def _nearest_quantity(text: str, units: tuple[str, ...], default: str) -> str:
    match = _LOOSE.search(text)
    if match is None:
        return f"1{default}"
    rest = "".join(_LOOSE.sub(r"\2", text[match.start() :]).split()).strip(".,-+_").lower()
    exact = [unit for unit in units if unit.lower() == rest]
    similar = [unit for unit in reversed(units) if rest and unit.lower().startswith(rest[0])]
    base = [unit for unit in ("B", "s") if unit in units and not rest]
    return match[1] + [*exact, *similar, *base, default][0]


def _nearest_share(value: object) -> str:
    match = _LOOSE.search(value) if isinstance(value, str) else None
    number = float(match[1]) if match else _as_float(value)
    if not math.isfinite(number) or number < 0 or number >= 100:
        return "0" if number < 0 else "0.05"
    return f"{number:g}" if number < 1 and "%" not in str(value) else f"{number:g}%"


def _as_float(value: object) -> float:
    """`value` as a float, NaN where it is no number (a bool is none) and infinity where it is too large."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _digits(value: object) -> str:
    try:
        return str(value)
    except ValueError:  # the interpreter refuses to print integers of more than 4300 digits
        return "a number of more than 4300 digits"


def _three_digits(value: float) -> str:
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{places}f}"


def _require_finite(value: float, what: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{what} is {value}; it must be finite and 0 or more")
