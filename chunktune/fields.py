"""The kinds of values that a spec holds: a reader for each, which knows the rule and the nearest value. Pure.

pydantic's own messages name its classes and do not say what is nearest; here every leaf is read by a function
of its own, and its mistake travels in the context of a `PydanticCustomError` of type "chunktune".
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from chunktune import kinds
from chunktune.datasheets import DATASHEETS
from chunktune.kinds import MAX_COUNT, MAX_NAME, MAX_NUMBER, MAX_PARTS, MAX_SEED, MAX_WIDTH
from chunktune.units import UnitError, parse_bytes, parse_duration, parse_share, shown

FAULT = "chunktune"
MAX_DEPTH = 32

_RANGE = re.compile(r"([0-9]{1,10}):([0-9]{1,10})")
_IDENTIFIERS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
CHUNKS_RULE = 'must be "auto", a list of whole numbers such as [1, 2, 4], or a range such as "1:64"'
PARTITIONS = ("uniform", "parameters", "time")


def fault(fact: str, rule: str, nearest: str = "") -> PydanticCustomError:
    """A mistake in one value, in the shape that `chunktune.spec` turns into an `errors.Mistake`."""
    parts = {"fact": fact, "rule": rule, "nearest": nearest}
    return PydanticCustomError(FAULT, "{fact}; {rule}", parts)


def closest(name: str, names: Iterable[str]) -> str:
    """The most similar of `names`, or "" where none is similar."""
    folded = {other.lower().replace("_", "-"): other for other in names}
    match = difflib.get_close_matches(name.lower().replace("_", "-"), list(folded), 1, 0.6)
    return folded[match[0]] if match else ""


def whole(minimum: int, maximum: int = MAX_COUNT) -> Callable[[object], int]:
    """A reader of whole numbers from `minimum` to `maximum`; a bool and a float are none."""
    rule = f"must be a whole number, {minimum} or more"

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise fault(f"is {shown(value)}", rule, _nearest_whole(value, minimum, maximum))
        if value > maximum:
            raise fault(f"is {shown(value)}", f"must be a whole number, {maximum} or less", str(maximum))
        if value < minimum:
            raise fault(f"is {shown(value)}", rule, str(minimum))
        return value

    return read


def number(minimum: float) -> Callable[[object], float]:
    """A reader of finite numbers from `minimum` on."""
    rule = f"must be a finite number, {minimum:g} or more"

    def read(value: object) -> float:
        usable = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER
        if not usable or value < minimum:  # type: ignore[operator]
            raise fault(f"is {shown(value)}", rule, f"{minimum:g}")
        return float(value)  # type: ignore[arg-type]

    return read


def read_rate(value: object) -> float:
    """A finite number above 0: what something is divided by."""
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= MAX_NUMBER
    if not usable:
        raise fault(f"is {shown(value)}", "must be a finite number above 0, without a unit, such as 989e12")
    return float(value)  # type: ignore[arg-type]


def read_efficiency(value: object) -> float:
    """A share above 0; all of it, 1, is one too."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == 1:
        return 1.0
    rule = "must be a share above 0 and up to 1, such as 0.5 or 50%"
    try:
        share = 1.0 if value == "100%" else parse_share(value)
    except UnitError as error:
        raise fault(error.fact, rule, _taken(_above_zero(1), error.nearest) or "1") from None
    if share == 0:
        raise fault(f"is {shown(value)}", rule, "1")
    return share


def read_name(value: object) -> str:
    """A short printable text."""
    if isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable() and value == value.strip():
        return value
    raise fault(f"is {shown(value)}", f"must be a name of at most {MAX_NAME} printable characters")


def one_or_several(read_item: Callable[[object], Any], rule: str) -> Callable[[object], Any]:
    """A reader of one value, or of a list of one or more."""
    read_list = several(read_item, rule)

    def read(value: object) -> Any:
        if isinstance(value, (list, tuple)) and not value:
            raise fault("is an empty list", rule)
        return read_list(value) if isinstance(value, (list, tuple)) else read_item(value)

    return read


def choice(*names: str) -> Callable[[object], str]:
    """A reader of one of `names`."""
    rule = f"must be one of {', '.join(names)}"

    def read(value: object) -> str:
        if isinstance(value, str) and value in names:
            return value
        raise fault(f"is {shown(value)}", rule, closest(value, names) if isinstance(value, str) else "")

    return read


def unless(word: str, result: Any, read: Callable[[object], Any]) -> Callable[[object], Any]:
    """A reader that takes `word` (and null, where `result` is null) for `result`; `read` has the rest."""

    def read_or(value: object) -> Any:
        if (value is None and result is None) or value == word:
            return result
        try:
            return read(value)
        except UnitError as error:
            raise fault(error.fact, f'must be "{word}" or a value: {error.rule}', _taken(read, error.nearest)) from None

    return read_or


def optional(read: Callable[[object], Any]) -> Callable[[object], Any]:
    """A reader that lets null through: an absent value in a dumped spec."""
    return lambda value: None if value is None else read(value)


def unit(parse: Callable[[object], Any]) -> Callable[[object], Any]:
    """A reader from one of the parsers of `chunktune.units`."""

    def read(value: object) -> Any:
        try:
            return parse(value)
        except UnitError as error:
            raise fault(error.fact, error.rule, _taken(parse, error.nearest)) from None

    return read


def _taken(read: Callable[[object], Any], nearest: str) -> str:
    """`nearest` where `read` takes it as it would stand in a file, else "": a text, or a number without quotes."""
    for value in (nearest, *_numbers(nearest)):
        with suppress(UnitError, PydanticCustomError):
            read(value)
            return nearest
    return ""


def _numbers(text: str) -> Iterator[float]:
    for kind in (int, float):
        with suppress(ValueError):
            yield kind(text)


def several(read_item: Callable[[object], Any], rule: str) -> Callable[[object], tuple[Any, ...]]:
    """A reader of lists whose items `read_item` reads; the message says which item is wrong."""

    def read(value: object) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise fault(f"is {shown(value)}", rule)
        if len(value) > MAX_PARTS:
            raise fault(f"has {len(value)} items", f"must have {MAX_PARTS} at most")
        return tuple(_item(read_item, index, item) for index, item in enumerate(value, 1))

    return read


def read_chunks(value: object) -> str | tuple[int, ...]:
    """ "auto", a range "low:high" (both ends included), or values of M, ascending and each once."""
    if value == "auto":
        return "auto"
    if isinstance(value, str):
        return _read_range(value)
    if isinstance(value, (list, tuple)) and not value:
        raise fault("is an empty list", CHUNKS_RULE, "auto")
    return tuple(sorted(set(several(whole(1), CHUNKS_RULE)(value))))


def read_partition(value: object) -> str | tuple[int, ...]:
    """A way to cut the model, or the layers of every part."""
    rule = f"must be one of {', '.join(PARTITIONS)}, or a list with the layers of every part such as [4, 4]"
    if isinstance(value, (list, tuple)) and value:
        return several(whole(1), rule)(value)
    if isinstance(value, str) and value in PARTITIONS:
        return value
    raise fault(f"is {shown(value)}", rule, closest(value, PARTITIONS) if isinstance(value, str) else "")


def read_tolerance(value: object) -> float:
    """A share above 0 and below 0.5."""
    rule = "must be a share above 0 and below 0.5, such as 0.01 or 1%"
    try:
        share = parse_share(value)
    except UnitError as error:
        raise fault(error.fact, rule, _taken(_above_zero(0.5), error.nearest) or "0.01") from None
    if not 0 < share < 0.5:
        raise fault(f"is {shown(value)}", rule, "0.01" if share == 0 else "0.49")
    return share


def _above_zero(below: float) -> Callable[[object], float]:
    def read(value: object) -> float:
        share = parse_share(value)
        if not 0 < share < below:
            raise UnitError(f"is {shown(value)}", f"must be above 0 and below {below:g}")
        return share

    return read


def read_factory(value: object) -> str:
    """The place of a function, "package.module:function"."""
    if isinstance(value, str) and _IDENTIFIERS.fullmatch(value):
        return value
    nearest = ":".join(value.rsplit(".", 1)) if isinstance(value, str) and ":" not in value else ""
    rule = 'must have the form "package.module:function"'
    raise fault(f"is {shown(value)}", rule, nearest if _IDENTIFIERS.fullmatch(nearest) else "")


def read_arguments(value: object) -> dict[str, Any]:
    """A table of values that JSON can hold, so that the record and the workers see what the file says."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise fault(f"is {shown(value)}", "must be a table of the factory's arguments")
    return {key: _plain(item, shown(key), 1) for key, item in value.items()}


def _plain(value: object, where: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise fault(f"{where} is nested {depth} deep", f"must be nested {MAX_DEPTH} deep at most")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{shown(key)}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, depth + 1) for item in value]
    if not _is_plain(value):
        rule = "must be text, a finite 64-bit number, true, false, a list or a table; write a date as text"
        raise fault(f"{where} is {shown(value)}", rule)
    return value


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, int):
        return abs(value) < 2**63
    return value is None or (isinstance(value, float) and math.isfinite(value))


def _read_range(text: str) -> str:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise fault(f"is {shown(text)}", CHUNKS_RULE, closest(text, ("auto",)))
    low, high = int(match[1]), int(match[2])
    if not 1 <= low <= high <= MAX_COUNT:
        nearest = f"{max(1, min(low, high))}:{max(1, low, high)}" if max(low, high) <= MAX_COUNT else ""
        raise fault(f'is "{text}"', "the ends of a range must ascend from 1 on, both included", nearest)
    return f"{low}:{high}"


def _item(read: Callable[[object], Any], index: int, value: object) -> Any:
    try:
        return read(value)
    except PydanticCustomError as error:
        parts = error.context or {}
        raise fault(f"item {index} {parts['fact']}", parts["rule"], parts["nearest"]) from None


def _nearest_whole(value: object, minimum: int, maximum: int) -> str:
    """The whole number that a float or a text of digits stands for, within the bounds; else the minimum."""
    try:
        meant = round(float(value)) if isinstance(value, (float, str)) else minimum
    except (ValueError, OverflowError):
        meant = minimum
    return str(min(max(meant, minimum), maximum))


# What a file may hold (`WithJsonSchema`) stands beside what reads it.
Count = Annotated[int, BeforeValidator(whole(1)), WithJsonSchema(kinds.COUNT)]
Parts = Annotated[int, BeforeValidator(whole(1, MAX_PARTS)), WithJsonSchema(kinds.PARTS)]
PartsOrNull = Annotated[
    int | None, BeforeValidator(unless("auto", None, whole(1, MAX_PARTS))), WithJsonSchema(kinds.PARTS_OR_AUTO)
]
Width = Annotated[int, BeforeValidator(whole(1, MAX_WIDTH)), WithJsonSchema(kinds.WIDTH)]
WidthOrAbsent = Annotated[int | None, BeforeValidator(optional(whole(1, MAX_WIDTH))), WithJsonSchema(kinds.WIDTH)]
CountOrAbsent = Annotated[int | None, BeforeValidator(optional(whole(1))), WithJsonSchema(kinds.COUNT)]
CountFromZero = Annotated[int, BeforeValidator(whole(0)), WithJsonSchema(kinds.COUNT_FROM_ZERO)]
Seed = Annotated[int, BeforeValidator(whole(0, MAX_SEED)), WithJsonSchema(kinds.SEED)]
Number = Annotated[float, BeforeValidator(number(0)), WithJsonSchema(kinds.NUMBER)]
Numbers = Annotated[
    tuple[float, ...],
    BeforeValidator(several(number(0), "must be a list of numbers, one a layer, or empty")),
    WithJsonSchema(kinds.NUMBERS),
]
A_PART = "must be one value for all parts, or a list with one a part"
PartSeconds = Annotated[
    float | tuple[float, ...],
    BeforeValidator(one_or_several(number(0), A_PART)),
    WithJsonSchema(kinds.PART_SECONDS),
]
PartSecondsOrAbsent = Annotated[
    float | tuple[float, ...] | None,
    BeforeValidator(optional(one_or_several(number(0), A_PART))),
    WithJsonSchema(kinds.PART_SECONDS),
]
PartSizesOrAbsent = Annotated[
    int | tuple[int, ...] | None,
    BeforeValidator(optional(one_or_several(unit(parse_bytes), A_PART))),
    WithJsonSchema(kinds.PART_SIZES),
]
RateOrAbsent = Annotated[float | None, BeforeValidator(optional(read_rate)), WithJsonSchema(kinds.RATE)]
SizeOrAbsent = Annotated[
    int | None,
    BeforeValidator(optional(unit(lambda value: whole(1, 2**63 - 1)(parse_bytes(value))))),
    WithJsonSchema(kinds.POSITIVE_SIZE),
]
NumberOrAbsent = Annotated[float | None, BeforeValidator(optional(number(0))), WithJsonSchema(kinds.NUMBER)]
NameOrAbsent = Annotated[str | None, BeforeValidator(optional(read_name)), WithJsonSchema(kinds.name(DATASHEETS))]
Efficiency = Annotated[float, BeforeValidator(read_efficiency), WithJsonSchema(kinds.EFFICIENCY)]
Size = Annotated[int, BeforeValidator(unit(parse_bytes)), WithJsonSchema(kinds.SIZE)]
Share = Annotated[float, BeforeValidator(unit(parse_share)), WithJsonSchema(kinds.SHARE)]
Duration = Annotated[float, BeforeValidator(unit(parse_duration)), WithJsonSchema(kinds.DURATION)]
