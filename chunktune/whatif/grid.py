"""Many settings, a row each: every combination of the varied keys, predicted and ranked. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, Literal

from chunktune.errors import ChunktuneError, Mistake, SpecError, UsageError
from chunktune.fields import closest
from chunktune.results import Basis, Finite, Frozen, Limit, Record, StageFigures, Trial
from chunktune.settings import parse_value
from chunktune.spec import Resolved
from chunktune.tables import FAMILIES, SECTIONS
from chunktune.units import shorten, shown

MOST_ROWS = 4096

SYMBOLS: Mapping[str, str] = {
    "K": "pipeline.stages",
    "V": "pipeline.virtual_stages",
    "N": "batch.mini_batch",
    "b": "batch.micro_batch",
    "M": "batch.chunks",
    "device": "hardware.name",
}
# Of a last part that several tables have, the one that people vary.
_FIRST = ("pipeline", "batch", "training", "device", "sweep", "model", "hardware")
_EXCLUSIVE = ("batch.mini_batch", "batch.micro_batch")
_SHAPE = ("pipeline.stages", "pipeline.schedule", "pipeline.virtual_stages")
_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")

MemoryWord = Literal["FITS", "TIGHT", "OOM"]
Load = Callable[[Mapping[str, Any]], Resolved]
"""Dotted key -> value, put over the spec: the spec of one combination. Raises SpecError."""
Predict = Callable[[Resolved], Record]
"""One combination, predicted. Raises ChunktuneError."""


class Row(Frozen):
    """One combination at its best M. `settings`: the varied keys, as given.

    `reason`: why there is no M (everything below is then null but what is known of memory). `peak_bytes` of the rank
    that is fullest, or that is short by most where no M fits. `samples_per_s_a_device` is `throughput_samples_per_s`
    over K. `memory`: FITS, TIGHT (within the capacity, but not within what headroom leaves) or OOM; null where the
    capacity or the peaks are not known. `basis`: how the costs at this M are known.
    """

    settings: dict[str, Any]
    reason: str | None = None
    stages: int | None = None
    chunks: int | None = None
    micro_batch: int | None = None
    mini_batch: int | None = None
    limit: Limit | None = None
    limit_side: Literal["above", "below"] | None = None
    throughput_samples_per_s: Finite | None = None
    samples_per_s_a_device: Finite | None = None
    step_s: Finite | None = None
    bubble: Finite | None = None
    peak_rank: int | None = None
    peak_bytes: int | None = None
    budget_bytes: int | None = None
    memory: MemoryWord | None = None
    basis: Basis | None = None


class Grid(Frozen):
    """All rows: those with an M by samples/s a device, the best first, then the others as they were asked for."""

    mode: Literal["predicted"] = "predicted"
    costs: str
    varied: tuple[str, ...]
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()

    @property
    def best(self) -> Row | None:
        """The first row; None where no combination has an M."""
        return self.rows[0] if self.rows and self.rows[0].chunks is not None else None


# --- what is varied


def parse_vary(texts: Sequence[str], flags: Mapping[str, str], family: str | None) -> dict[str, tuple[Any, ...]]:
    """Dotted key -> its values, of every `--vary key=v1,v2`.

    `flags`: dotted key -> the flag that sets it too. `family`: of the model, whose keys may stand by their last part.
    Raises UsageError with every mistake, and where there are more than MOST_ROWS combinations.
    """
    varied: dict[str, tuple[Any, ...]] = {}
    mistakes: list[str] = []
    for text in texts:
        try:
            key, values = _one(text, family)
        except UsageError as error:
            mistakes.append(str(error))
            continue
        if key in varied:
            mistakes.append(f"--vary {shown(text)}: {key} is varied twice; a key stands once")
        varied[key] = values
    mistakes += _clashes(varied, flags)
    count = prod(len(values) for values in varied.values())
    if not mistakes and count > MOST_ROWS:
        counted = " x ".join(str(len(values)) for values in varied.values())
        mistakes.append(f"{counted} = {count} combinations; at most {MOST_ROWS} are predicted; vary fewer values")
    if mistakes:
        raise UsageError("\n".join(mistakes))
    return varied


def _one(text: str, family: str | None) -> tuple[str, tuple[Any, ...]]:
    name, equals, listed = text.partition("=")
    if not equals or not _KEY.fullmatch(name.strip()) or not listed.strip(" ,\t"):
        rule = "must have the form key=value,value such as K=2,4,8 or schedule=gpipe,1f1b"
        raise UsageError(f"--vary {shown(text)}: {rule}")
    key = full_key(name.strip(), family)
    values = tuple(_value(key, part) for part in _parts(listed))
    distinct = [value for index, value in enumerate(values) if value not in values[:index]]
    return key, tuple(distinct)


def full_key(name: str, family: str | None) -> str:
    """The dotted key that a symbol, a last part or a dotted key stands for; raises UsageError for an unknown one."""
    if name in SYMBOLS:
        return SYMBOLS[name]
    if "." in name:
        return name
    tables = {**SECTIONS, **({"model": FAMILIES[family]} if family in FAMILIES else {})}
    homes = [table for table in _FIRST if table in tables and name in tables[table].model_fields]
    if homes:
        return f"{homes[0]}.{name}"
    known = [*SYMBOLS, *(key for table in tables.values() for key in table.model_fields)]
    near = closest(name, known)
    rule = f"it takes a dotted key of the spec, the last part of one, or one of {', '.join(SYMBOLS)}"
    raise UsageError(f"--vary {shown(name)} is no setting; {rule}" + (f" (did you mean {near}?)" if near else ""))


def _parts(listed: str) -> list[str]:
    """The values between commas; those in brackets and quotes are none."""
    return [part.strip() for part in re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|\"[^\"]*\"|'[^']*'|[^,])+", listed)]


def _value(key: str, text: str) -> Any:
    try:
        value = parse_value(text)
    except ValueError:
        raise UsageError(f"--vary {key}: {shown(text)} is no TOML value; lists are written as in TOML") from None
    # One M is a list of one.
    return [value] if key == SYMBOLS["M"] and isinstance(value, int) else value


def _clashes(varied: Mapping[str, Any], flags: Mapping[str, str]) -> list[str]:
    both = [f"{flags[key]} and --vary both set {key}; give one of them" for key in varied if key in flags]
    if all(key in varied for key in _EXCLUSIVE):
        both.append("--vary sets both batch.mini_batch (N) and batch.micro_batch (b); a step holds one of them fixed")
    return both


# --- the rows


def predict_grid(varied: Mapping[str, Sequence[Any]], load: Load, predict: Predict) -> Grid:
    """Every combination, predicted.

    A combination that cannot be predicted is a row with its reason. Raises SpecError where no combination is a
    valid spec.
    """
    made: dict[tuple[int, ...], Row] = {}
    wrong: list[Mistake] = []
    warnings: dict[str, None] = {}
    costs: dict[str, None] = {}
    for place in _same_shapes_together(varied):
        settings = {key: values[index] for (key, values), index in zip(varied.items(), place, strict=True)}
        try:
            record = predict(load(settings))
        except ChunktuneError as error:
            wrong += error.mistakes if isinstance(error, SpecError) else ()
            made[place] = Row(settings=settings, reason=one_line(error))
            continue
        warnings.update(dict.fromkeys(record.warnings))
        costs[str(record.environment.get("costs") or "costs")] = None
        made[place] = row_of(settings, record)
    if wrong and all(row.stages is None for row in made.values()):
        raise SpecError(list(dict.fromkeys(wrong)))
    rows = ranked([made[place] for place in sorted(made)])
    return Grid(costs=" and ".join(costs), varied=tuple(varied), rows=rows, warnings=tuple(warnings))


def _same_shapes_together(varied: Mapping[str, Sequence[Any]]) -> list[tuple[int, ...]]:
    """The places of all combinations, those of one schedule, K and V in a row: they share what is simulated."""
    shaping = [index for index, key in enumerate(varied) if key in _SHAPE]
    places = product(*(range(len(values)) for values in varied.values()))
    return sorted(places, key=lambda place: [place[index] for index in shaping])


def ranked(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Those with an M by samples/s a device, the best first, then the others in their order."""
    return tuple(sorted(rows, key=lambda row: -(row.samples_per_s_a_device or 0.0)))


def one_line(error: ChunktuneError) -> str:
    """An error as the reason of a row."""
    text = "; ".join(map(str, error.mistakes)) if isinstance(error, SpecError) else str(error)
    return shorten(" ".join(text.split()), 400)


def row_of(settings: Mapping[str, Any], record: Record) -> Row:
    """The row of one predicted record."""
    verdict = record.verdict
    stages = int(record.spec["pipeline"]["stages"])
    trial = next((each for each in record.trials if verdict and each.chunks == verdict.chunks), None)
    if verdict is None or trial is None or trial.throughput_samples_per_s is None:
        return _unfit(settings, stages, record)
    peak = max((stage for stage in trial.stages if stage.peak_bytes is not None), key=_peak, default=None)
    return Row(
        settings=dict(settings),
        stages=stages,
        chunks=trial.chunks,
        micro_batch=trial.micro_batch,
        mini_batch=trial.mini_batch,
        limit=verdict.limit,
        limit_side=verdict.limit_side,
        throughput_samples_per_s=trial.throughput_samples_per_s,
        samples_per_s_a_device=trial.throughput_samples_per_s / stages,
        step_s=trial.step_median_s,
        bubble=None if trial.bubble is None else trial.bubble.measured,
        peak_rank=None if peak is None else peak.rank,
        peak_bytes=None if peak is None else peak.peak_bytes,
        budget_bytes=None if peak is None else peak.budget_bytes,
        memory=memory_word(trial),
        basis=None if trial.predicted is None else trial.predicted.basis,
    )


def _unfit(settings: Mapping[str, Any], stages: int, record: Record) -> Row:
    """No M fits: the one that comes nearest says by how much."""
    short = [trial for trial in record.trials if trial.shortage is not None and trial.shortage.needed_bytes is not None]
    nearest = min(short, key=_needed, default=None)
    shortage = None if nearest is None else nearest.shortage
    if nearest is None or shortage is None:
        reason = next((trial.reason for trial in record.trials if trial.reason), "no M is feasible")
        return Row(settings=dict(settings), stages=stages, reason=reason)
    return Row(
        settings=dict(settings),
        stages=stages,
        reason=f"no M fits; at M = {nearest.chunks} {nearest.reason}",
        limit="memory",
        peak_rank=shortage.rank,
        peak_bytes=shortage.needed_bytes,
        budget_bytes=shortage.budget_bytes,
        memory=memory_word(nearest),
    )


def memory_word(trial: Trial) -> MemoryWord | None:
    """FITS, TIGHT or OOM; None where the peaks or the capacity are not known, or the trial says nothing of memory."""
    if trial.shortage is not None:
        return "TIGHT" if trial.shortage.within_capacity else "OOM"
    known = [stage for stage in trial.stages if stage.peak_bytes is not None and stage.budget_bytes is not None]
    return "FITS" if known else None


def _peak(stage: StageFigures) -> int:
    return stage.peak_bytes or 0


def _needed(trial: Trial) -> int:
    return 0 if trial.shortage is None else trial.shortage.needed_bytes or 0
