"""What the user wrote: validated, frozen, with the source of every value. No torch.

The spec is checked as a whole before anything starts, and all its mistakes are reported at once. Values come
from the file, over it from CHUNKTUNE_SECTION__KEY variables, then --set, then flags.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from chunktune import settings as given
from chunktune.checks import EXCLUSIVE, Keys, Problem, across
from chunktune.errors import Mistake, SpecError
from chunktune.fields import FAULT, closest
from chunktune.results import Record
from chunktune.settings import Settings, dotted
from chunktune.tables import (
    CROSS,
    FAMILIES,
    SECTIONS,
    BatchSpec,
    CostsModel,
    DeviceSpec,
    HardwareSpec,
    MlpModel,
    Model,
    PipelineSpec,
    PythonModel,
    ScheduleName,
    SleepModel,
    Spec,
    SweepSpec,
    TrainingSpec,
    TransformerModel,
)
from chunktune.units import shorten, shown

__all__ = [
    "BatchSpec",
    "CostsModel",
    "DeviceSpec",
    "HardwareSpec",
    "MlpModel",
    "Model",
    "PipelineSpec",
    "PythonModel",
    "Resolved",
    "ScheduleName",
    "SleepModel",
    "Spec",
    "SweepSpec",
    "TrainingSpec",
    "TransformerModel",
    "load",
    "resolve",
    "tables_of_record",
]

FILE = "file"
VARY = "--vary"
_VIRTUAL = ("pipeline", "virtual_stages")


@dataclass(frozen=True)
class Resolved:
    """A spec with where it came from.

    `sources`: "default", "file", "record", "environment CHUNKTUNE_...", "--set", "flag --..." or "--vary" for every
    leaf of the dumped spec, by dotted key. `name`: the file's stem.
    """

    spec: Spec
    sources: dict[str, str]
    path: Path
    name: str


def load(
    path: Path,
    *,
    environ: Mapping[str, str],
    sets: Sequence[str] = (),
    flags: Mapping[str, tuple[str, Any]] | None = None,
) -> Resolved:
    """Read, merge and check a spec; `flags` is dotted key -> (flag, value), texts being read as by --set.

    Raises SpecError with all mistakes of all sources at once.
    """
    return resolve(given.read_file(path), path, environ=environ, sets=sets, flags=flags)


def resolve(
    tables: Mapping[str, Any],
    path: Path,
    *,
    source: str = FILE,
    environ: Mapping[str, str],
    sets: Sequence[str] = (),
    flags: Mapping[str, tuple[str, Any]] | None = None,
    varied: Mapping[str, Any] | None = None,
) -> Resolved:
    """`load`, from the tables that stand in a spec (or, `source` = "record", in a record) at `path`.

    `varied`: dotted key -> value, over everything else. Raises SpecError with all mistakes at once.
    """
    base = given.Assignment((), tables, source)
    over = [given.Assignment(tuple(key.split(".")), value, VARY) for key, value in (varied or {}).items()]
    levels = (given.from_environment(environ), given.from_sets(sets), given.from_flags(flags or {}))
    merged = given.merge([[base], *(assignments for assignments, _ in levels), over], EXCLUSIVE)
    mistakes = [mistake for _, wrong in levels for mistake in wrong]
    spec = _validate(merged, path, mistakes)
    if spec is None or mistakes:
        raise SpecError(list(dict.fromkeys(mistakes)))
    return Resolved(spec, _sources(spec, merged), path, path.stem)


def tables_of_record(record: Record) -> dict[str, Any]:
    """A record's spec as the tables of a spec; a V that nobody asked for is left to the schedule."""
    merged = Settings()
    for keys, value in given.leaves(record.spec):
        usual = keys == _VIRTUAL and record.sources.get(dotted(_VIRTUAL)) == "default"
        if value is not None and not usual:
            merged.assign(given.Assignment(keys, value, "record"))
    return merged.nested()


def _validate(merged: Settings, path: Path, mistakes: list[Mistake]) -> Spec | None:
    problems: list[Problem] = []
    nested = merged.nested()
    spec: Spec | None = None
    try:
        spec = Spec.model_validate(nested)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = [_problem(detail, nested) for detail in details if detail["type"] != CROSS]
    wrong = {problem.keys for problem in problems}
    problems += across(_without(_with_defaults(merged.values), wrong))
    mistakes += [mistake for problem in problems for mistake in _located(problem, merged, path)]
    return spec


def _located(problem: Problem, merged: Settings, path: Path) -> Iterator[Mistake]:
    """The problem at each of its sources; what is nowhere given is missing in the file."""
    name = shorten(str(path), 200)
    for source in merged.sources_of(problem.keys) or [FILE]:
        where = name if source in (FILE, "record") else source
        yield Mistake(where, dotted(problem.keys), problem.fact, problem.rule, problem.nearest)


def _sources(spec: Spec, merged: Settings) -> dict[str, str]:
    paths = [keys for keys, _ in given.leaves(spec.model_dump(mode="json"))]
    return {".".join(keys): merged.sources.get(keys, "default") for keys in paths}


def _problem(detail: ErrorDetails, nested: Mapping[str, Any]) -> Problem:
    """A pydantic error in chunktune's words."""
    keys, kind = _path(detail["loc"], nested), detail["type"]
    if kind == FAULT:
        parts = detail["ctx"]
        return Problem(keys, parts["fact"], parts["rule"], parts["nearest"])
    if kind == "missing":
        return Problem(keys, "is missing", _missing_rule(keys))
    if kind == "extra_forbidden":
        return _unknown_key(keys, nested)
    if kind.startswith("union_tag"):
        return _family_problem(nested)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return Problem(keys, f"is {shown(detail['input'])}", f"must be a table, headed by [{dotted(keys)}]")
    return Problem(keys, f"is {shown(detail['input'])}", "is not valid here")


def _path(loc: Sequence[str | int], nested: Mapping[str, Any]) -> Keys:
    """pydantic's location without the tag that it adds for the family."""
    keys = tuple(str(key) for key in loc)
    return (keys[0], *keys[2:]) if keys[:1] == ("model",) and keys[1:2] == (_family(nested),) else keys


def _family(nested: Mapping[str, Any]) -> Any:
    model = nested.get("model")
    return model.get("family") if isinstance(model, Mapping) else None


def _family_problem(nested: Mapping[str, Any]) -> Problem:
    family, keys = _family(nested), ("model", "family")
    rule = f"must be one of {', '.join(FAMILIES)}"
    if family is None:
        return Problem(keys, "is missing", rule)
    if family == "huggingface":
        return Problem(keys, f"is {shown(family)}", f"there is no such family in this version; it {rule}")
    nearest = closest(family, FAMILIES) if isinstance(family, str) else ""
    return Problem(keys, f"is {shown(family)}", rule, nearest)


def _missing_rule(keys: Keys) -> str:
    if keys == ("model",):
        return f"a spec has a table [model] with family = one of {', '.join(FAMILIES)}"
    return f"the table [{keys[0]}] of this family needs it"


def _unknown_key(keys: Keys, nested: Mapping[str, Any]) -> Problem:
    known = _known_keys(_family(nested))
    if len(keys) == 1:
        homes = [dotted(path) for path in known if path[-1] == keys[0]]
        nearest = homes[0] if homes else closest(keys[0], Spec.model_fields)
        rule = f"a spec has the tables {', '.join(Spec.model_fields)}"
        return Problem(keys, "unknown table or key", rule, nearest)
    siblings = [path[1] for path in known if path[0] == keys[0]]
    homes = [dotted(path) for path in known if path[1] == keys[-1]]
    near = closest(keys[1], siblings)
    nearest = f"{keys[0]}.{near}" if near else next(iter(homes), "")
    return Problem(keys, "unknown key", f"[{keys[0]}] has {', '.join(siblings)}", nearest)


def _known_keys(family: Any) -> list[Keys]:
    """The path of every key of a spec of this family."""
    tables = {**SECTIONS, "model": FAMILIES[family]} if family in FAMILIES else SECTIONS
    return [(name, key) for name, table in tables.items() for key in table.model_fields]


def _with_defaults(values: Mapping[Keys, Any]) -> dict[Keys, Any]:
    """What is given, over the defaults of everything but the model."""
    defaults: dict[Keys, Any] = {
        (section, key): field.default for section, part in SECTIONS.items() for key, field in part.model_fields.items()
    }
    return {**defaults, **values}


def _without(values: Mapping[Keys, Any], wrong: set[Keys]) -> dict[Keys, Any]:
    """The values that neither are wrong nor lie below or above what is wrong."""
    return {keys: value for keys, value in values.items() if not any(keys[: len(bad)] == bad for bad in wrong)}
