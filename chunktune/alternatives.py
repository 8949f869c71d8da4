"""What another setting would give, each predicted by one engine: the advice of a verdict in numbers. Pure.

Shares are against the same engine's prediction of the choice as it is, never against a measurement: what the engine
gets wrong, it gets wrong on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from chunktune import schedules
from chunktune.errors import ChunktuneError
from chunktune.results import Alternative, Record, StageFigures, Trial, Verdict
from chunktune.settings import Assignment, Settings, leaves
from chunktune.spec import Spec
from chunktune.units import counted, format_bytes, format_share

__all__ = ["alternatives", "with_alternatives"]

Predict = Callable[[Spec], Record | None]
"""A spec to its predicted record; None, or a ChunktuneError, where it cannot be predicted."""

MOST_SENTENCES = 4
_WORTH = 1.01
"""An alternative below this share is no improvement."""


@dataclass(frozen=True)
class _Change:
    """A change before it is predicted."""

    words: str
    settings: dict[str, Any]
    replicas: int = 1


def with_alternatives(spec: Spec, verdict: Verdict, predict: Predict) -> Verdict:
    """The verdict with its alternatives, and a sentence of advice for each that is worth one.

    `spec` names K. Whatever the engine raises, the verdict comes back.
    """
    try:
        found = alternatives(spec, verdict, predict)
    except Exception:
        return verdict
    sentences = advice(found, answering_memory=limited_by_memory(verdict))
    return verdict.model_copy(update={"alternatives": found, "advice": (*verdict.advice, *sentences)})


def alternatives(spec: Spec, verdict: Verdict, predict: Predict) -> tuple[Alternative, ...]:
    """What answers the verdict's limit, each at its best M; the illegal and the unfit are left out.

    Memory (above or as the floor): recomputation, twice the stages, both where neither helps. Throughput: half the
    stages in twice as many replicas, twice the batch, every other schedule. Other limits have none. `spec` names K.
    """
    stages = spec.pipeline.stages
    changes = list(_changes(spec, verdict, stages)) if stages else []
    if not changes or stages is None:
        return ()
    now = _throughput_now(spec, verdict, predict)

    def predicted(some: Iterable[_Change]) -> list[Alternative]:
        return [made for one in some if (made := _predicted(spec, stages, one, now, predict)) is not None]

    found = predicted(changes)
    if limited_by_memory(verdict) and not any(map(_answers, found)):
        found += predicted(_both_for_memory(spec, stages))
    return tuple(found)


def limited_by_memory(verdict: Verdict) -> bool:
    """Whether memory bound the choice, from above or as its floor."""
    return verdict.limit == "memory" or (verdict.floor is not None and verdict.floor.limit == "memory")


def _changes(spec: Spec, verdict: Verdict, stages: int | None) -> Iterator[_Change]:
    if stages is None:
        return
    if limited_by_memory(verdict):
        yield from _for_memory(spec, stages)
    if verdict.limit == "throughput":
        yield from _for_throughput(spec, stages)


def _for_memory(spec: Spec, stages: int) -> Iterator[_Change]:
    if spec.pipeline.recompute == "none":
        yield _Change('pipeline.recompute = "full"', {"pipeline.recompute": "full"})
    yield _Change(f"{2 * stages} stages", _with_stages(spec, 2 * stages))


def _both_for_memory(spec: Spec, stages: int) -> Iterator[_Change]:
    if spec.pipeline.recompute == "none":
        settings = {"pipeline.recompute": "full", **_with_stages(spec, 2 * stages)}
        yield _Change(f'pipeline.recompute = "full" and {2 * stages} stages', settings)


def _for_throughput(spec: Spec, stages: int) -> Iterator[_Change]:
    mini_batch = spec.batch.mini_batch
    if stages % 2 == 0 and (mini_batch is None or mini_batch % 2 == 0):
        settings = _with_stages(spec, stages // 2)
        each = ""
        if mini_batch is not None:
            settings["batch.mini_batch"] = mini_batch // 2
            each = f" of mini_batch = {mini_batch // 2} each"
        yield _Change(f"{counted(stages // 2, 'stage')} in 2 replicas{each}", settings, replicas=2)
    if mini_batch is not None:
        yield _Change(f"mini_batch = {2 * mini_batch}", {"batch.mini_batch": 2 * mini_batch})
    for name in schedules.SCHEDULES:
        if name != spec.pipeline.schedule:
            settings = {"pipeline.schedule": name, "pipeline.virtual_stages": None, **_recut(spec)}
            yield _Change(f"schedule {name}", settings)


def _with_stages(spec: Spec, stages: int) -> dict[str, Any]:
    return {"pipeline.stages": stages, **_recut(spec)}


def _recut(spec: Spec) -> dict[str, Any]:
    """Counts that were written down fit one number of parts only."""
    return {} if isinstance(spec.pipeline.partition, str) else {"pipeline.partition": "parameters"}


def changed(spec: Spec, settings: dict[str, Any]) -> Spec | None:
    """The spec with some values changed, by dotted key; None where the result is no valid spec."""
    merged = Settings()
    for keys, value in leaves(spec.model_dump(mode="json")):
        merged.assign(Assignment(keys, value, ""))
    for key, value in settings.items():
        merged.assign(Assignment(tuple(key.split(".")), value, ""))
    try:
        return Spec.model_validate(merged.nested())
    except ValidationError:
        return None


def _throughput_now(spec: Spec, verdict: Verdict, predict: Predict) -> float | None:
    """The engine's throughput of the very M that was chosen; None where it has none."""
    if verdict.chunks is None:
        return None
    trial = _best(_record(changed(spec, {"batch.chunks": [verdict.chunks]}), predict))
    return None if trial is None else trial.throughput_samples_per_s


def _predicted(spec: Spec, stages: int, change: _Change, now: float | None, predict: Predict) -> Alternative | None:
    record = _record(changed(spec, change.settings), predict)
    trial = _best(record)
    if trial is None or trial.throughput_samples_per_s is None or trial.predicted is None:
        return None
    throughput = change.replicas * trial.throughput_samples_per_s
    fullest = max((stage for stage in trial.stages if stage.peak_bytes is not None), key=_peak, default=None)
    return Alternative(
        change=change.words,
        settings=change.settings,
        replicas=change.replicas,
        devices=change.replicas * int(change.settings.get("pipeline.stages", stages)),
        chunks=trial.chunks,
        micro_batch=trial.micro_batch,
        mini_batch=trial.mini_batch,
        throughput_samples_per_s=throughput,
        share=throughput / now if now else None,
        peak_rank=None if fullest is None else fullest.rank,
        peak_bytes=None if fullest is None else fullest.peak_bytes,
        budget_bytes=None if fullest is None else fullest.budget_bytes,
        fits=True if fullest is not None and fullest.budget_bytes is not None else None,
        basis=trial.predicted.basis or "estimated",
    )


def _record(spec: Spec | None, predict: Predict) -> Record | None:
    try:
        return None if spec is None else predict(spec)
    except ChunktuneError:
        return None


def _best(record: Record | None) -> Trial | None:
    """The trial that the record's verdict chose."""
    if record is None or record.verdict is None:
        return None
    return next((trial for trial in record.trials if trial.chunks == record.verdict.chunks), None)


def _peak(stage: StageFigures) -> int:
    return stage.peak_bytes or 0


# --- in words


def advice(found: Iterable[Alternative], *, answering_memory: bool) -> list[str]:
    """At most four sentences: what answers a memory limit first, then what is faster on as many devices, by gain."""
    every = list(found)
    answers = [one for one in every if answering_memory and _answers(one)]
    faster = [one for one in every if one not in answers and one.share is not None and one.share >= _WORTH]
    faster.sort(key=lambda one: -(one.share or 0.0))
    return [sentence(one) for one in (*answers, *faster)[:MOST_SENTENCES]]


def _answers(one: Alternative) -> bool:
    return one.replicas == 1 and bool({"pipeline.recompute", "pipeline.stages"} & one.settings.keys())


def sentence(one: Alternative) -> str:
    """One alternative with its numbers."""
    devices = f" on {counted(one.devices, 'device')}" if "pipeline.stages" in one.settings else ""
    return (
        f"With {one.change}{devices} the prediction is M = {one.chunks} (b = {one.micro_batch}) at "
        f"{one.throughput_samples_per_s:.4g} samples/s{_gain(one)}{_memory(one)}; basis: {one.basis}"
        f"{'; what the replicas exchange is left out' if one.replicas > 1 else ''}"
    )


def _gain(one: Alternative) -> str:
    if one.share is None:
        return ""
    more = "more" if one.share >= 1 else "less"
    return f", {format_share(abs(one.share - 1))} {more} than predicted for the choice as it is"


def _memory(one: Alternative) -> str:
    if one.peak_bytes is None:
        return ""
    of = "" if one.budget_bytes is None else f" of {format_bytes(one.budget_bytes)} usable"
    return f", rank {one.peak_rank} peaking at {format_bytes(one.peak_bytes)}{of}"
