"""What has to agree between the keys of a spec. Pure: leaf values by path in, problems out.

Every check is silent where a key it needs is absent, so that it can run on the valid rest of a spec with
mistakes, and all mistakes are found at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from chunktune.datasheets import DATASHEETS, FIGURES, missing_figures
from chunktune.fields import PARTITIONS, closest
from chunktune.units import shown

Keys = tuple[str, ...]
Values = Mapping[Keys, Any]

EXCLUSIVE: tuple[Keys, ...] = (("batch", "mini_batch"), ("batch", "micro_batch"))
# The embedding, the final norm and the head are layers beside the blocks.
TRANSFORMER_EXTRA_LAYERS = 3


@dataclass(frozen=True)
class Problem:
    """A mistake before its source is known: the path, the fact, the rule and the nearest valid value."""

    keys: Keys
    fact: str
    rule: str = ""
    nearest: str = ""


def across(values: Values) -> Iterator[Problem]:
    """The mistakes that lie between keys; `values` holds leaves that are valid each for itself."""
    yield from _check_batch(values)
    yield from _check_heads(values)
    yield from _check_slowdown(values)
    yield from _check_partition(values)
    yield from _check_costs(values)
    yield from _check_hardware(values)


def layers_of(values: Values) -> int | None:
    """L, the layers that the partition cuts between; null where the spec alone does not say it."""
    family, layers = values.get(("model", "family")), values.get(("model", "layers"))
    if family not in ("transformer", "mlp", "sleep") or layers is None:
        return None
    return int(layers) + (TRANSFORMER_EXTRA_LAYERS if family == "transformer" else 0)


def _check_batch(values: Values) -> Iterator[Problem]:
    if not all(keys in values for keys in EXCLUSIVE):
        return
    mini, micro = (values[keys] for keys in EXCLUSIVE)
    rule = "exactly one of mini_batch (N is held fixed) and micro_batch (b is held fixed) must be given"
    if mini is None and micro is None:
        yield Problem(("batch",), "gives neither mini_batch nor micro_batch", rule)
    elif mini is not None and micro is not None:
        yield Problem(("batch",), f"gives both mini_batch = {mini} and micro_batch = {micro}", rule)


def _check_heads(values: Values) -> Iterator[Problem]:
    hidden, heads = values.get(("model", "hidden")), values.get(("model", "heads"))
    if values.get(("model", "family")) == "transformer" and hidden and heads and hidden % heads:
        rule = f"must divide model.hidden = {hidden}"
        yield Problem(("model", "heads"), f"is {heads}", rule, str(_nearest_divisor(hidden, heads)))


def _nearest_divisor(of: int, near: int) -> int:
    """The divisor of `of` nearest to `near`, the smaller of two, found among the pairs d, of / d."""
    small = [d for d in range(1, min(int(of**0.5), 2**16) + 1) if of % d == 0]
    return min((*small, *(of // d for d in small)), key=lambda d: (abs(d - near), d))


def _check_slowdown(values: Values) -> Iterator[Problem]:
    layers, slowdown = values.get(("model", "layers")), values.get(("model", "slowdown"))
    if values.get(("model", "family")) == "sleep" and layers and slowdown and len(slowdown) != layers:
        rule = f"must have one factor for each of model.layers = {layers}, or be empty"
        yield Problem(("model", "slowdown"), f"has {len(slowdown)} factors", rule)


def _check_partition(values: Values) -> Iterator[Problem]:
    keys = ("pipeline", "partition")
    counts = values.get(keys)
    if counts is None or counts in PARTITIONS:
        return
    layers, parts = layers_of(values), _parts(values)
    if layers and sum(counts) != layers:
        yield Problem(keys, f"{shown(counts)} sums to {sum(counts)}", f"must sum to the model's {layers} layers")
    if parts and len(counts) != parts:
        rule = f"must have one count for each of the {parts} parts (stages x virtual_stages)"
        yield Problem(keys, f"{shown(counts)} has {len(counts)} counts", rule)


def _check_costs(values: Values) -> Iterator[Problem]:
    """Lists fix the number of parts; what a part costs is given, so there is nothing to cut."""
    if values.get(("model", "family")) != "costs":
        return
    partition = values.get(("pipeline", "partition"), "parameters")
    if partition != "parameters":
        rule = 'must stay at its default "parameters": the family costs has one cost a part and no layers to cut'
        yield Problem(("pipeline", "partition"), f"is {shown(partition)}", rule, "parameters")
    parts = _parts(values)
    lists = {keys: len(value) for keys, value in values.items() if keys[0] == "model" and isinstance(value, list)}
    wanted = parts if parts else max(lists.values(), default=0)
    of = "parts (stages x virtual_stages)" if parts else "parts that the longest list has"
    for keys, length in lists.items():
        if length != wanted:
            rule = f"must have one value for each of the {wanted} {of}, or be one value for all"
            yield Problem(keys, f"has {length} values", rule)


def _check_hardware(values: Values) -> Iterator[Problem]:
    settings = {keys[1]: value for keys, value in values.items() if keys[0] == "hardware" and len(keys) == 2}
    missing, name = missing_figures(settings), settings.get("name")
    if not missing or not isinstance(name, str):
        return
    needed = ", ".join(FIGURES)
    rule = f"must be one of {', '.join(DATASHEETS)}, or a new name with all of {needed} ({', '.join(missing)} missing)"
    yield Problem(("hardware", "name"), f"is {shown(name)}", rule, closest(name, DATASHEETS))


def _parts(values: Values) -> int | None:
    """K V; null where one of them is not known."""
    from chunktune.schedules import default_virtual_stages  # that table may come to know the spec

    stages, schedule = values.get(("pipeline", "stages")), values.get(("pipeline", "schedule"))
    virtual = values.get(("pipeline", "virtual_stages"), 0)
    if stages in (None, "auto") or schedule is None or virtual == 0:
        return None
    return int(stages) * int(default_virtual_stages(schedule) if virtual in (None, "auto") else virtual)
