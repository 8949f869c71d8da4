"""What each kind of value looks like in a spec, as JSON Schema: the readers of `chunktune.fields`, for editors. Pure.

A schema admits what its reader admits, but for what JSON Schema cannot say: that a sum has to fit, that a range
ascends, that a duration is above 0 where it is a text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chunktune.units import BYTES_PER_UNIT, MAX_BYTES, SECONDS_PER_UNIT

Schema = dict[str, Any]

MAX_COUNT = 2**31 - 1
MAX_PARTS = 4096
"""Layers, stages: more is a slip of the pen, and would take minutes before anything says so."""
MAX_WIDTH = 2**24
"""Features, words, tokens of a built-in model: one sample is made for real, and more would not fit any memory."""
MAX_SEED = 2**63 - 1
MAX_NAME = 60
MAX_NUMBER = 1e300

_DIGITS = r"[0-9]{1,20}(\.[0-9]{1,20})?"
_IDENTIFIER = r"[^\W\d]\w*"


def _units(names: Iterable[str]) -> str:
    return "(" + "|".join(names) + ")"


def either(*schemas: Schema) -> Schema:
    """What one of the schemas admits."""
    return {"anyOf": list(schemas)}


def whole(minimum: int, maximum: int = MAX_COUNT) -> Schema:
    """A whole number within bounds."""
    return {"type": "integer", "minimum": minimum, "maximum": maximum}


def several(item: Schema, least: int = 0) -> Schema:
    """A list."""
    return {"type": "array", "items": item, **({"minItems": least} if least else {})}


AUTO: Schema = {"const": "auto"}
COUNT = whole(1)
WIDTH = whole(1, MAX_WIDTH)
COUNT_FROM_ZERO = whole(0)
PARTS = whole(1, MAX_PARTS)
PARTS_OR_AUTO = either(AUTO, PARTS)
SEED = whole(0, MAX_SEED)

NUMBER: Schema = {"type": "number", "minimum": 0, "maximum": MAX_NUMBER}
NUMBERS = several(NUMBER)
PART_SECONDS = either(NUMBER, several(NUMBER, 1))
RATE: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_NUMBER}

_SIZE_TEXT: Schema = {"type": "string", "pattern": f"^{_DIGITS} ?{_units(BYTES_PER_UNIT)}$"}
SIZE = either(whole(0, MAX_BYTES), _SIZE_TEXT)
POSITIVE_SIZE = either(whole(1, MAX_BYTES), _SIZE_TEXT)
PART_SIZES = either(SIZE, several(SIZE, 1))
MEMORY = either(AUTO, POSITIVE_SIZE)

_PERCENTAGE: Schema = {"type": "string", "pattern": r"^0*[0-9]{1,2}(\.[0-9]{1,20})? ?%$"}
SHARE = either({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, _PERCENTAGE)
TOLERANCE = either({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, _PERCENTAGE)
EFFICIENCY = either(
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1}, _PERCENTAGE, {"const": "100%"}
)  # 0% is refused by the reader alone

DURATION = either(
    {"type": "number", "exclusiveMinimum": 0},
    {"type": "string", "pattern": f"^{_DIGITS} ?{_units(SECONDS_PER_UNIT)}$"},
)
DURATION_OR_AUTO = either(AUTO, DURATION)

CHUNKS = either(AUTO, {"type": "string", "pattern": "^[0-9]{1,10}:[0-9]{1,10}$"}, several(COUNT, 1))
FACTORY: Schema = {"type": "string", "pattern": rf"^{_IDENTIFIER}(\.{_IDENTIFIER})*:{_IDENTIFIER}$"}


def name(examples: Iterable[str]) -> Schema:
    """A short text; any will do, some are known."""
    return {"type": "string", "minLength": 1, "maxLength": MAX_NAME, "examples": list(examples)}


def partition(names: tuple[str, ...]) -> Schema:
    """A way to cut the model, or the layers of every part."""
    return either({"enum": list(names)}, several(COUNT, 1))


def allowed_names(schema: Schema) -> tuple[str, ...]:
    """The texts that a schema lists one by one: of a const or an enum, or as examples."""
    own = [*([schema["const"]] if "const" in schema else ()), *schema.get("enum", ()), *schema.get("examples", ())]
    nested = [name for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ())) for name in allowed_names(option)]
    return tuple(name for name in (*own, *nested) if isinstance(name, str))
