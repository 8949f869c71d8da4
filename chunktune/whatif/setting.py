"""A spec made concrete: K, V, the layers of each part, and the bytes that a rank may use. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chunktune import partition, schedules
from chunktune.candidates import Candidates
from chunktune.checks import layers_of
from chunktune.costs import CostSource, Setting
from chunktune.errors import UsageError
from chunktune.results import LayerProfile, Record, Trial
from chunktune.settings import leaves
from chunktune.spec import Spec


@dataclass(frozen=True)
class Room:
    """What one rank may use, in bytes; both null where nobody knows the device's capacity.

    `budget_bytes` is the capacity less headroom and reserve, as in a sweep; `limit_bytes` the capacity less the
    reserve alone, above which a peak does not fit at all.
    """

    capacity_bytes: int | None
    budget_bytes: int | None
    limit_bytes: int | None

    @classmethod
    def of(cls, spec: Spec, source: CostSource) -> Room:
        """The room that the spec gives, or the source's device."""
        asked = spec.device.memory
        capacity = source.capacity_bytes(spec) if asked == "auto" else int(asked)
        if capacity is None:
            return cls(None, None, None)
        reserve = spec.device.reserve
        free = int(capacity * (1 - spec.device.headroom))
        return cls(capacity, max(0, free - reserve), max(0, capacity - reserve))


def stages_of(spec: Spec, record: Record | None) -> int:
    """K as the spec says it, else as the record ran it. Raises UsageError where neither does."""
    recorded = None if record is None else recorded_pipeline(record).get("stages")
    stages = spec.pipeline.stages or recorded
    if stages is None:
        raise UsageError(
            "pipeline.stages is not given; whatif looks at no device, so the number of ranks K has to be said; "
            "give --stages"
        )
    return int(stages)


def virtual_stages_of(spec: Spec) -> int:
    """V as the spec says it, else the schedule's usual. Raises UsageError where the schedule cannot run with it."""
    name = spec.pipeline.schedule
    virtual = spec.pipeline.virtual_stages or schedules.default_virtual_stages(name)
    refused = schedules.virtual_stages_refusal(name, virtual)
    if refused:
        raise UsageError(f"pipeline.virtual_stages: {refused}")
    return virtual


def settle(
    spec: Spec, stages: int, candidates: Candidates, source: CostSource, record: Record | None = None
) -> tuple[Setting, tuple[str, ...]]:
    """The setting of a spec on K = `stages` ranks, and what has to be said about its partition.

    The layers are cut as a sweep cuts them; where `record` ran as many parts cut the same way, as they were
    cut there. Raises UsageError for parts that do not fit the model, and what the source raises.
    """
    virtual = virtual_stages_of(spec)
    layers = source.layers(spec)
    parts = stages * virtual
    recorded = _recorded_counts(spec, parts, record)
    if recorded is not None:
        return Setting(spec, stages, virtual, recorded), ()
    counts, notes = _counts(spec, parts, candidates, source, layers, record)
    return Setting(spec, stages, virtual, counts), notes


def same_setting(setting: Setting, record: Record) -> bool:
    """Whether a record ran this very pipeline: what it measured at an M and b can stand beside the prediction."""
    spec, ran = setting.spec.model_dump(mode="json"), record.spec
    pipeline = {**spec["pipeline"], "stages": setting.stages, "virtual_stages": setting.virtual_stages}
    of_pipeline = ("schedule", "stages", "virtual_stages", "recompute")
    recorded = recorded_pipeline(record)
    return (
        all(recorded.get(key) == pipeline[key] for key in of_pipeline)
        and record.layers_per_part == setting.counts
        and all(_agrees(ran.get(section), spec[section]) for section in ("model", "training"))
    )


def measured_trials(setting: Setting, record: Record | None) -> dict[tuple[int, int], Trial]:
    """(M, b) -> what a record measured in this setting; empty where it ran another, or was itself predicted."""
    if record is None or record.mode != "measured" or not same_setting(setting, record):
        return {}
    return {(trial.chunks, trial.micro_batch): trial for trial in record.trials if trial.fits}


def recorded_pipeline(record: Record) -> dict[str, Any]:
    """The record's [pipeline] table."""
    table = record.spec.get("pipeline")
    return table if isinstance(table, dict) else {}


def _agrees(recorded: object, wanted: dict[str, Any]) -> bool:
    """Whether every key that the record knows has this value; a newer chunktune may know more keys."""
    return isinstance(recorded, dict) and all(wanted.get(key) == value for key, value in recorded.items())


def _recorded_counts(spec: Spec, parts: int, record: Record | None) -> tuple[int, ...] | None:
    if record is None or len(record.layers_per_part) != parts:
        return None
    recorded = recorded_pipeline(record).get("partition")
    wanted = spec.model_dump(mode="json")["pipeline"]["partition"]
    return record.layers_per_part if recorded in (None, wanted) else None


def _counts(
    spec: Spec,
    parts: int,
    candidates: Candidates,
    source: CostSource,
    layers: Sequence[LayerProfile] | None,
    record: Record | None,
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    if spec.model.family == "costs":
        return (1,) * parts, ()
    choice: partition.Choice = spec.pipeline.partition
    number = _layer_count(spec, layers, record)
    weights: Sequence[float] | None = None
    notes: tuple[str, ...] = ()
    if choice == "time":
        weights = _layer_seconds(spec, candidates, source)
    elif choice == "parameters":
        weights = _parameters(layers)
        if weights is None:
            choice = "uniform"
            notes = (f"{source.label} does not say the parameters of a layer: the {number} layers are cut evenly",)
    partition.check_parts(number, parts // virtual_stages_of(spec), virtual_stages_of(spec))
    return partition.counts_for(choice, layers=number, parts=parts, weights=weights), notes


def _layer_count(spec: Spec, layers: Sequence[LayerProfile] | None, record: Record | None) -> int:
    """L: from the profiles, the record's parts, or the spec."""
    if layers:
        return sum(profile.count for profile in layers if not profile.loss)
    if record is not None and record.layers_per_part:
        return sum(record.layers_per_part)
    named = layers_of(dict(leaves(spec.model_dump(mode="json"))))
    if named is None:
        raise UsageError(f"how many layers a model of family {spec.model.family} has is not known without its profile")
    return named


def _parameters(layers: Sequence[LayerProfile] | None) -> list[float] | None:
    if not layers:
        return None
    return [float(profile.parameters) for profile in layers if not profile.loss for _ in range(profile.count)]


def _layer_seconds(spec: Spec, candidates: Candidates, source: CostSource) -> Sequence[float]:
    """Seconds a layer at the b in the middle of the legal values of M, where a sweep times them too."""
    micro_batch, _ = candidates.batch_of(candidates.legal[len(candidates.legal) // 2])
    layer_s = source.layer_s(spec, micro_batch)
    if layer_s is None:
        raise UsageError(
            f'pipeline.partition = "time" needs the seconds of single layers, which {source.label} does not know; '
            'use "parameters", "uniform" or the layers of every part'
        )
    return layer_s
