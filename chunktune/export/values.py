"""What a training framework has to be told, read out of a record. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import get_args

from chunktune.errors import UsageError
from chunktune.kinds import MAX_PARTS
from chunktune.report import setting, tokens_per_sample, trial_of
from chunktune.results import Record, Verdict
from chunktune.schedules import SCHEDULES, Placement, virtual_stages_refusal
from chunktune.tables import Optimizer, Precision, Recompute
from chunktune.units import shown

MAX_INTEGER = 2**63 - 1
"""The largest whole number that every one of the formats can hold."""


@dataclass(frozen=True)
class Values:
    """The chosen M and the setting that it was found under.

    `chunks` M, `micro_batch` b, `mini_batch` N = M b, in samples; `stages` K, `virtual_stages` V, `replicas` D.
    `layers_per_part`: in the units of the record's own model, empty where the record has none. `blocks_per_part`:
    transformer blocks alone, null where the model is no transformer of chunktune's. `sequence`: tokens a sample, null
    where samples have none.
    """

    chunks: int
    micro_batch: int
    mini_batch: int
    stages: int
    virtual_stages: int
    schedule: str
    recompute: bool
    precision: str
    optimizer: str
    replicas: int = 1
    layers_per_part: tuple[int, ...] = ()
    blocks_per_part: tuple[int, ...] | None = None
    sequence: int | None = None

    @property
    def global_batch(self) -> int:
        """Samples that all replicas take in one step: D N."""
        return self.replicas * self.mini_batch

    @property
    def parts(self) -> int:
        """Parts that the model is cut into: K V."""
        return self.stages * self.virtual_stages

    @property
    def placement(self) -> Placement:
        """Where the parts go; see `chunktune.schedules`."""
        return SCHEDULES[self.schedule].placement


def values_of(record: Record, verdict: Verdict, replicas: int) -> Values:
    """The values of a record with a chosen M, for `replicas` pipelines side by side.

    Raises UsageError where the record contradicts itself, lacks what every framework needs, or where D N is beyond
    MAX_INTEGER.
    """
    chunks, micro_batch, mini_batch = _batch(verdict)
    schedule = _named(record, "pipeline", "schedule", tuple(SCHEDULES), "1f1b")
    stages, virtual_stages = _stages(record, chunks), _virtual_stages(record, schedule)
    counts = record.layers_per_part if len(record.layers_per_part) == stages * virtual_stages else ()
    values = Values(
        chunks=chunks,
        micro_batch=micro_batch,
        mini_batch=mini_batch,
        stages=stages,
        virtual_stages=virtual_stages,
        schedule=schedule,
        recompute=_named(record, "pipeline", "recompute", get_args(Recompute), "none") == "full",
        precision=_named(record, "training", "precision", get_args(Precision), "float32"),
        optimizer=_named(record, "training", "optimizer", get_args(Optimizer), "adamw"),
        replicas=replicas,
        layers_per_part=counts,
        blocks_per_part=_blocks(record, counts),
        sequence=tokens_per_sample(record),
    )
    require_integer(values.global_batch, f"the global batch of {replicas} replicas")
    return values


def require_integer(count: int, what: str) -> None:
    """Raises UsageError for a number that not every format can hold."""
    if count > MAX_INTEGER:
        raise UsageError(f"{what} is {shown(count)}; a setting holds {MAX_INTEGER} at most")


def _batch(verdict: Verdict) -> tuple[int, int, int]:
    chunks, micro_batch, mini_batch = verdict.chunks or 0, verdict.micro_batch or 0, verdict.mini_batch or 0
    if min(chunks, micro_batch, mini_batch) < 1 or chunks * micro_batch != mini_batch:
        found = f"M = {chunks}, b = {micro_batch}, N = {mini_batch}"
        raise UsageError(f"the record's verdict has {found}; N is M b, each a whole number from 1 on")
    return chunks, micro_batch, mini_batch


def _named(record: Record, section: str, key: str, names: tuple[str, ...], default: str) -> str:
    value = setting(record, section, key)
    if value is None:
        return default
    if value not in names or not isinstance(value, str):
        raise _odd(f"{section}.{key}", value, f"must be one of {', '.join(names)}")
    return value


def _stages(record: Record, chunks: int) -> int:
    value = setting(record, "pipeline", "stages")
    if value is None:  # "auto": one a device, so that only the trial knows
        trial = trial_of(record, chunks)
        value = len(trial.stages) if trial and trial.stages else None
    return _parts("pipeline.stages", value)


def _virtual_stages(record: Record, schedule: str) -> int:
    value = setting(record, "pipeline", "virtual_stages")
    count = SCHEDULES[schedule].default_virtual_stages if value is None else _parts("pipeline.virtual_stages", value)
    if refusal := virtual_stages_refusal(schedule, count):
        raise UsageError(f"the record's spec has {refusal}")
    return count


def _parts(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_PARTS:
        raise _odd(key, value, f"must be a whole number, 1 to {MAX_PARTS}")
    return value


def _odd(key: str, value: object, rule: str) -> UsageError:
    return UsageError(f"the record's spec has {key} = {'null' if value is None else shown(value)}; it {rule}")


def _blocks(record: Record, counts: tuple[int, ...]) -> tuple[int, ...] | None:
    """Blocks of each part of `models.transformer`, whose layers are embedding, blocks, final norm and head."""
    layers = setting(record, "model", "layers")
    if setting(record, "model", "family") != "transformer" or not isinstance(layers, int) or not counts:
        return None
    if min(counts) < 1 or sum(counts) != layers + 3:
        return None
    ends = list(accumulate(counts))
    starts = [0, *ends[:-1]]
    return tuple(max(0, min(end, layers + 1) - max(start, 1)) for start, end in zip(starts, ends, strict=True))
