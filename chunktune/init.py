"""A spec to start from: valid as written, every key with its default, its meaning and what it takes. No torch."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunktune import kinds
from chunktune.candidates import enumerate_candidates
from chunktune.checks import EXCLUSIVE, Keys, layers_of
from chunktune.datasheets import FIGURES, hardware
from chunktune.errors import Mistake, SpecError
from chunktune.keys import FAMILY_TEXTS, TABLES, meaning
from chunktune.partition import check_parts
from chunktune.schedules import SCHEDULES, default_virtual_stages
from chunktune.settings import Assignment, Settings, from_flags, from_sets, leaves, merge
from chunktune.spec import Spec, resolve
from chunktune.spec_schema import key_schema
from chunktune.tables import FAMILIES, SECTIONS, HardwareSpec

FAMILY = "transformer"
STAGES = 2
MINI_BATCH = 32
LAYERS = 8
WIDTH = 118
"""Columns of the file; a comment that would go beyond stands above its key."""

_COMMENT_COLUMN = 30
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

FACTORY_NOTE = """\
python_model.py stands beside this file, in the working directory, or is installed:

    def build(width=64):
        return {
            "layers": [...],        # builders: functions without arguments that make one nn.Module each
            "sample_batch": ...,    # sample_batch(samples, generator): (inputs, targets) on the CPU
            "loss": ...,            # loss(outputs, targets): the mean over the samples
        }

A layer takes one tensor and returns one; the model is cut between layers."""


@dataclass(frozen=True)
class Start:
    """A spec to write: its text, and what was put into it."""

    text: str
    spec: Spec


def start(sets: Sequence[str], flags: Mapping[str, tuple[str, Any]], path: Path) -> Start:
    """The commented spec with these settings in it, over an example of its family.

    `sets`: KEY=VALUE texts; `flags`: dotted key -> (flag, value), over them. Raises SpecError with all mistakes at
    once, and UsageError where the schedule could run no M, as a sweep would.
    """
    merged = _merged(sets, flags)
    spec = resolve(merged.nested(), path, environ={}, sets=sets, flags=flags).spec
    if spec.pipeline.stages is not None:
        _check_runnable(spec, spec.pipeline.stages)
    return Start(_rendered(spec.model.family, merged), spec)


def _merged(sets: Sequence[str], flags: Mapping[str, tuple[str, Any]]) -> Settings:
    """The settings over an example of the family. Raises SpecError for texts that are no settings."""
    levels = (from_sets(sets), from_flags(flags))
    mistakes: list[Mistake] = [mistake for _, wrong in levels for mistake in wrong]
    if mistakes:
        raise SpecError(mistakes)
    given = [assignments for assignments, _ in levels]
    example = Assignment((), _example(merge(given, EXCLUSIVE).values), "file")
    return merge([[example], *given], EXCLUSIVE)


def _example(given: Mapping[Keys, Any]) -> dict[str, Any]:
    """Values for what a spec must say, as large as K and V need."""
    family = given.get(("model", "family"), FAMILY)
    stages = _whole(given.get(("pipeline", "stages")), STAGES)
    parts = stages * _whole(given.get(("pipeline", "virtual_stages")), _usual_parts(given))
    # At N = 4 K every schedule has an M of at least 2 K.
    mini_batch = max(MINI_BATCH, 4 * stages)
    models: dict[str, dict[str, Any]] = {
        "transformer": {"layers": max(LAYERS, parts), "hidden": 256, "heads": 4, "vocab": 4096, "sequence": 128},
        "mlp": {"layers": max(LAYERS, parts), "hidden": 256},
        "sleep": {"layers": max(LAYERS, parts), "seconds_per_chunk": 0.002, "seconds_per_sample": 0.0005},
        "costs": {"micro_batch": _whole(given.get(EXCLUSIVE[1]), 4), "forward_s": 0.02, "backward_s": 0.04},
        "python": {"factory": "python_model:build"},
    }
    return {
        "model": {"family": family, **models.get(str(family), {})},
        "pipeline": {"stages": STAGES},
        "batch": {"mini_batch": mini_batch},
    }


def _usual_parts(given: Mapping[Keys, Any]) -> int:
    schedule = given.get(("pipeline", "schedule"))
    return default_virtual_stages(schedule) if isinstance(schedule, str) and schedule in SCHEDULES else 1


def _whole(value: object, default: int) -> int:
    """`value` where it is a sensible count; what is none is told by the spec's own check."""
    sensible = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= kinds.MAX_PARTS
    return value if sensible else default  # type: ignore[return-value]


def _check_runnable(spec: Spec, stages: int) -> None:
    """Raises UsageError where no M is legal, or the model has too few layers."""
    enumerate_candidates(spec, stages)
    layers = layers_of(dict(leaves(spec.model_dump(mode="json"))))
    if layers is not None:
        check_parts(layers, stages, spec.pipeline.virtual_stages or default_virtual_stages(spec.pipeline.schedule))


# --- the text


def _rendered(family: str, merged: Settings) -> str:
    """The file: a head, then every table of the spec with all its keys."""
    sections = [("model", _model_lines(family, merged)), *((name, _lines(name, None, merged)) for name in SECTIONS)]
    blocks = [_head(family), *("\n".join([_heading(name), *lines]) for name, lines in sections)]
    return "\n\n".join(blocks) + "\n"


def _head(family: str) -> str:
    sweeps = [
        "#     chunktune sweep FILE --dry-run    what would be tried; nothing is run",
        "#     chunktune sweep FILE              measure, and choose M",
    ]
    return "\n".join(
        [
            "# A spec for chunktune. Keys show their defaults; [model], stages and the batch are examples.",
            "# Lines that are commented out are optional, their values examples.",
            "#",
            *([] if family == "costs" else sweeps),
            "#     chunktune whatif FILE             predict; no device needed",
        ]
    )


def _heading(section: str) -> str:
    return f"[{section}]".ljust(_COMMENT_COLUMN - 2) + f"# {TABLES[section]}"


def _model_lines(family: str, merged: Settings) -> Iterator[str]:
    yield from _line(f'family = "{family}"', f"{' | '.join(FAMILIES)}; {family}: {FAMILY_TEXTS[family]}")
    yield from _lines("model", family, merged)
    if family == "python":
        yield from (f"# {line}".rstrip() for line in FACTORY_NOTE.split("\n"))
        yield "\n[model.arguments]".ljust(_COMMENT_COLUMN - 1) + f"# {meaning('model', 'arguments', family)}"
        arguments = {keys[2:]: value for keys, value in merged.values.items() if keys[:2] == ("model", "arguments")}
        yield from (f"{'.'.join(map(_key, keys))} = {toml(value)}" for keys, value in arguments.items() if keys)


def _lines(section: str, family: str | None, merged: Settings) -> Iterator[str]:
    """Every key of a table: as given, else at its default; what has none is commented out."""
    table = FAMILIES[family] if family else SECTIONS[section]
    for key, field in table.model_fields.items():
        if (section, key) in (("model", "family"), ("model", "arguments")):
            continue
        schema = key_schema(section, key, family)
        given = merged.values.get((section, key))
        value = _default(field.default, schema) if given is None else given
        sign = "# " if value is None else ""
        shown = _sample(section, key, schema) if value is None else value
        yield from _line(f"{sign}{key} = {toml(shown)}", _comment(section, key, family, schema))


def _default(default: Any, schema: kinds.Schema) -> Any:
    """A default as people write it."""
    if default is None and schema.get("anyOf", [None])[0] == kinds.AUTO:
        return "auto"
    if _is(schema, kinds.DURATION) and isinstance(default, float):
        return f"{default / 60:g}m" if default % 60 == 0 else f"{default:g}s"
    if _is(schema, kinds.SIZE) and isinstance(default, int):
        return f"{default}B" if default % 2**30 else f"{default // 2**30}GiB"
    return list(default) if isinstance(default, tuple) else default


def _sample(section: str, key: str, schema: kinds.Schema) -> Any:
    """Something that a key without a default would take."""
    if section == "hardware":
        return _usual_hardware()[key]
    samples = ((kinds.COUNT, 4), (kinds.PART_SIZES, "1GiB"), (kinds.PART_SECONDS, 0.01))
    return next((sample for kind, sample in samples if _is(schema, kind)), 0)


def _usual_hardware() -> dict[str, Any]:
    """What [hardware] comes to where nothing is said."""
    usual = hardware(HardwareSpec().model_dump())
    figures = {key: getattr(usual.sheet, figure) for key, figure in FIGURES.items()}
    figures["memory"] = f"{usual.sheet.memory_bytes / 2**30:g}GiB"
    return {"name": usual.name, **figures, "link_latency": usual.link_latency_s, "launch_s": usual.launch_s}


def _is(schema: kinds.Schema, kind: kinds.Schema) -> bool:
    return all(schema.get(name) == value for name, value in kind.items())


def _comment(section: str, key: str, family: str | None, schema: kinds.Schema) -> str:
    names = kinds.allowed_names(schema)
    text = meaning(section, key, family)
    return f"{' | '.join(names)}; {text}" if len(names) > 1 else text


def _line(setting: str, comment: str) -> Iterator[str]:
    """A setting with its comment behind it, or above it where the line would be too long."""
    whole = f"{setting.ljust(_COMMENT_COLUMN - 2)}# {comment}"
    if len(whole) <= WIDTH and len(setting) < _COMMENT_COLUMN - 2:
        yield whole
        return
    yield from textwrap.wrap(comment, WIDTH, initial_indent="# ", subsequent_indent="# ")
    yield setting


def toml(value: Any) -> str:
    """A value of a spec as TOML: text, number, true or false, list, or table on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        short = f"{value:g}"
        return short if "e" in short and float(short) == value else repr(value)
    return str(value)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else toml(key)
