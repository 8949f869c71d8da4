"""What else the record was made with than the baseline: device, versions, spec; each a finding of its own. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from chunktune.fields import closest
from chunktune.gate.finding import Finding, Outcome
from chunktune.keys import FREE_KEYS
from chunktune.record import flat
from chunktune.results import Record
from chunktune.tables import FAMILIES, SECTIONS
from chunktune.units import shorten

SPEC = "spec"
MACHINE_KEYS = ("torch", "device", "driver", "cuda", "nccl")
ALLOW_RULE = f"one of {', '.join((*MACHINE_KEYS, SPEC))}, or a key or table of the spec such as pipeline.stages"
NOT_RECORDED = "not recorded"
_MOST_CHARACTERS = 200
# Nobody asks for these to be equal, and a reader of a slowdown wants to know.
_NOTED = ("python", "system")
_FREE_TABLE = "hardware"  # what whatif estimates for; a sweep does not read it


def allowable_keys() -> tuple[str, ...]:
    """Every key that may be allowed to differ, but those of a model's own arguments."""
    return (*MACHINE_KEYS, SPEC, *(key for key in _spec_keys() if key not in MACHINE_KEYS))


def unknown_key(key: str) -> str | None:
    """None for a key that may be allowed to differ; for another the nearest one, or "" where none is near."""
    bare = key.removeprefix(f"{SPEC}.")
    known = _spec_keys()
    if key in (*MACHINE_KEYS, SPEC) or bare in known or bare.startswith("model.arguments."):
        return None
    nearest = closest(bare, (*MACHINE_KEYS, SPEC, *known))
    return nearest or next((name for name in known if name.rpartition(".")[2] == bare), "")


def differences(record: Record, baseline: Record, allowed: tuple[str, ...]) -> tuple[Finding, ...]:
    """A check each of device and versions, one of the spec or of each of its keys that differ, and notes.

    What is not recorded on one side is no difference that is known: a note. `allowed`: keys that may differ.
    """
    mine, theirs = _machine(record), _machine(baseline)
    machine = [_compared(key, theirs[key], mine[key], key in allowed) for key in MACHINE_KEYS]
    noted = [_noted(key, _environment(baseline, key), _environment(record, key)) for key in _NOTED]
    noted.append(_noted("chunktune", baseline.tool.get("version"), record.tool.get("version")))
    found = [*machine, *_of_specs(record, baseline, allowed), *noted]
    return tuple(finding for finding in found if finding is not None)


# --- the machine


def _machine(record: Record) -> dict[str, Any]:
    """Each of MACHINE_KEYS with its value as one text; null where the record does not say."""
    found: dict[str, Any] = {key: _environment(record, key) for key in ("torch", "cuda", "nccl")}
    return {**found, "device": _devices(record), "driver": _driver(record)}


def _environment(record: Record, key: str) -> str | None:
    """A value of the environment as text: "none" for one that is recorded as null, null for one that is not."""
    if key not in record.environment:
        return None
    value = record.environment[key]
    return "none" if value is None else _text(value)


def _devices(record: Record) -> str | None:
    """Count and name of the devices, in the order of the ranks; of CPUs also the cores."""
    described = [_device(device) for device in _tables(record.environment.get("devices"))]
    return ", ".join(f"{count} x {name}" for name, count in Counter(described).items()) or None


def _device(device: Mapping[str, Any]) -> str:
    name = _text(device.get("name") or device.get("kind") or "unnamed")
    return f"{name} ({device.get('cores')} cores)" if device.get("kind") == "cpu" else name


def _driver(record: Record) -> str | None:
    if "driver" in record.environment:
        return _environment(record, "driver")
    drivers = [device["driver"] for device in _tables(record.environment.get("devices")) if device.get("driver")]
    return ", ".join(dict.fromkeys(_text(driver) for driver in drivers)) or None


def _tables(devices: object) -> list[dict[str, Any]]:
    return [device for device in devices if isinstance(device, dict)] if isinstance(devices, list) else []


def _compared(check: str, expected: str | None, found: str | None, allowed: bool) -> Finding | None:
    """The check of one value; None where neither record has it."""
    if expected is None and found is None:
        return None
    outcome: Outcome = "passed"
    words = f"{found}, as in the baseline"
    if expected is None or found is None:
        outcome, words = "noted", f"{NOT_RECORDED} in the {'baseline' if expected is None else 'record'}"
    elif expected != found:
        outcome, words = _differing(expected, found, allowed, check)
    return Finding(check=check, outcome=outcome, words=words, expected=expected, found=found)


def _differing(expected: object, found: object, allowed: bool, key: str) -> tuple[Outcome, str]:
    words = f"{_text(found)} here, {_text(expected)} in the baseline"
    return ("noted", f"{words}; allowed") if allowed else ("failed", f"{words}; --allow-different {key} lets it pass")


def _noted(check: str, expected: str | None, found: str | None) -> Finding | None:
    if expected is None or found is None or expected == found:
        return None
    words = f"{_text(found)} here, {_text(expected)} in the baseline"
    return Finding(check=check, outcome="noted", words=words, expected=expected, found=found)


# --- the spec


def _of_specs(record: Record, baseline: Record, allowed: tuple[str, ...]) -> list[Finding]:
    mine, theirs = dict(flat(record.spec)), dict(flat(baseline.spec))
    keys = [key for key in dict.fromkeys((*theirs, *mine)) if _decides(key)]
    values = {key: (_value(key, theirs, baseline), _value(key, mine, record)) for key in keys}
    findings = []
    for key, (expected, found) in values.items():
        if not _equal(expected, found):
            name = key if unknown_key(key) is None else SPEC
            outcome, words = _differing(expected, found, _is_allowed(key, allowed), name)
            check = f"{SPEC}.{key}"
            findings.append(Finding(check=check, outcome=outcome, words=words, expected=expected, found=found))
    if findings:
        return findings
    return [Finding(check=SPEC, outcome="passed", words="every setting that decides is as in the baseline")]


def _decides(key: str) -> bool:
    return key not in FREE_KEYS and key.partition(".")[0] != _FREE_TABLE


def _is_allowed(key: str, allowed: tuple[str, ...]) -> bool:
    """Whether the key, a table above it or the whole spec is allowed; "device" alone is the machine's."""
    bare = [name.removeprefix(f"{SPEC}.") for name in allowed if name not in MACHINE_KEYS]
    return SPEC in allowed or any(key == name or key.startswith(f"{name}.") for name in bare)


def _value(key: str, values: Mapping[str, Any], record: Record) -> Any:
    """The value, or the default of a key that the record's chunktune did not have; null where there is none."""
    if key in values:
        return values[key]
    section, _, name = key.partition(".")
    model = record.spec.get("model")
    family = model.get("family") if isinstance(model, dict) else None
    table = FAMILIES.get(str(family)) if section == "model" else SECTIONS.get(section)
    field = None if table is None else table.model_fields.get(name)
    return None if field is None or field.is_required() else field.get_default(call_default_factory=True)


def _equal(one: Any, other: Any) -> bool:
    """Equality as JSON has it: a tuple is a list, and true is not 1."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _spec_keys() -> dict[str, None]:
    """Every table and dotted key of a spec, of all families."""
    tables = [*(("model", family) for family in FAMILIES.values()), *SECTIONS.items()]
    keys = [f"{section}.{name}" for section, table in tables for name in table.model_fields]
    return dict.fromkeys([*(section for section, _ in tables), *keys])


def _text(value: object) -> str:
    if value is None:
        return "none"
    return shorten(value if isinstance(value, str) else json.dumps(value, default=str), _MOST_CHARACTERS)
