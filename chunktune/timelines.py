"""One step on the ranks' time lines: as it was recorded, else simulated from what was predicted of it. Pure.

measured    the last timed step of the confirmation, where the record has its time line
simulated   the program of the schedule, played with the operations that the M's prediction rests on
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from chunktune import simulate
from chunktune.errors import UsageError
from chunktune.predict import Shape, played
from chunktune.results import Predicted, RankTimeline, Record, Timeline, Trial
from chunktune.schedules import SCHEDULES
from chunktune.simulate import Durations, Span
from chunktune.units import shorten, shown

Source = Literal["measured", "simulated"]

MOST_OPERATIONS = 500_000
"""Of a simulated step: about 80 MB as a trace."""
MOST_S = 1e6
"""The longest operation, and the latest that was recorded: eleven days."""
_SLACK_S = 1e-4
"""By how much an operation may begin before its predecessor's end: events of a device are rounded."""
_RULE = "a record of schema version 2 or newer has the times of its operations"


@dataclass(frozen=True)
class Shown:
    """One step at M = `chunks`.

    `step_s`: seconds from the start of the first operation of any rank to the end of the last. `spans`: all
    operations by rank, then in the order in which they ran; kind L (the loss) is measured alone, a simulated F
    holds it. None starts before 0, or before its rank's last one has ended.
    """

    chunks: int
    source: Source
    step_s: float
    spans: tuple[Span, ...]


def timeline(record: Record, chunks: int | None = None) -> Shown:
    """The step at M = `chunks`, that of the verdict where none is given.

    Raises UsageError where there is no such M, it did not run, the record has neither its time line nor the times of
    its operations, or these are damaged or too many.
    """
    wanted = _chosen(record) if chunks is None else chunks
    recorded = _recorded(record, wanted)
    if recorded is not None:
        return _shown(wanted, "measured", _measured(recorded))
    trial = next((trial for trial in record.trials if trial.chunks == wanted), None)
    if trial is None or not trial.fits or not _can_be_played(trial):
        raise UsageError(f"{_why_not(trial, wanted)}; {_those_with_one(record)}")
    return _shown(wanted, "simulated", _simulated(record, trial))


def available(record: Record) -> dict[int, Source]:
    """Each M that has a time line, ascending, and where it is from."""
    found: dict[int, Source] = {trial.chunks: "simulated" for trial in record.trials if _can_be_played(trial)}
    confirmed = record.confirmation
    if confirmed is not None and _recorded(record, confirmed.chunks) is not None:
        found[confirmed.chunks] = "measured"
    return dict(sorted(found.items()))


def _shown(chunks: int, source: Source, operations: Iterable[Span]) -> Shown:
    spans = tuple(_in_order(operations))
    return Shown(chunks, source, max((span.end_s for span in spans), default=0.0), spans)


def _in_order(operations: Iterable[Span]) -> Iterator[Span]:
    """The same, without the overlaps that rounding has left between the operations of a rank."""
    rank, free_s = -1, 0.0
    # Ends are in the order of the program; a start that was counted back from its end need not be.
    for span in sorted(operations, key=lambda span: (span.rank, span.end_s, span.start_s)):
        free_s = free_s if span.rank == rank else 0.0
        start_s = min(max(span.start_s, free_s), span.end_s)
        rank, free_s = span.rank, span.end_s
        yield span if start_s == span.start_s else replace(span, start_s=start_s)


# --- which M


def _chosen(record: Record) -> int:
    chosen = record.chosen
    if chosen is None:
        raise UsageError(f"no M was chosen, so its step cannot be shown; give --chunks M; {_those_with_one(record)}")
    return chosen


def _recorded(record: Record, chunks: int) -> Timeline | None:
    confirmed = record.confirmation
    found = confirmed is not None and confirmed.chunks == chunks and confirmed.fits
    return confirmed.timeline if found and confirmed is not None else None


def _can_be_played(trial: Trial) -> bool:
    return trial.fits and trial.predicted is not None and bool(trial.predicted.parts)


def _why_not(trial: Trial | None, chunks: int) -> str:
    if trial is None:
        return f"M = {chunks} was not tried"
    if not trial.fits:
        reason = "" if trial.reason is None else f": {shorten(trial.reason, 200)}"
        return f"M = {chunks} has no step to show, its state is {trial.state}{reason}"
    return f"the record does not say how long the operations of M = {chunks} took; {_RULE}"


def _those_with_one(record: Record) -> str:
    found = available(record)
    if not found:
        return "no M of this record has a time line"
    return "M with a time line: " + ", ".join(f"{chunks} ({source})" for chunks, source in found.items())


# --- as it was recorded


def _measured(recorded: Timeline) -> Iterator[Span]:
    ranks = sorted(recorded.ranks, key=lambda one: one.rank)
    if any(one.rank == other.rank for one, other in pairwise(ranks)) or (ranks and ranks[0].rank < 0):
        raise _damaged("a rank stands in it twice, or below 0")
    for each in ranks:
        yield from _of_rank(each)


def _of_rank(recorded: RankTimeline) -> Iterator[Span]:
    columns = (recorded.kinds, recorded.parts, recorded.chunks, recorded.start_s, recorded.end_s)
    if len({len(column) for column in columns}) > 1:
        raise _damaged(f"the columns of rank {recorded.rank} differ in length")
    free_s = 0.0
    for number, (kind, part, chunk, start_s, end_s) in enumerate(zip(*columns, strict=True)):
        if not free_s - _SLACK_S <= start_s <= end_s <= MOST_S:
            raise _damaged(f"operation {number} of rank {recorded.rank} runs from {start_s:g} to {end_s:g} s")
        free_s = max(end_s, free_s)
        yield Span(recorded.rank, kind, part, chunk, start_s, free_s)


def _damaged(fact: str) -> UsageError:
    rule = "operations of a rank follow each other from 0 on"
    return UsageError(f"the recorded time line is damaged: {fact}; {rule}; give --chunks another M")


# --- simulated


def _simulated(record: Record, trial: Trial) -> tuple[Span, ...]:
    assert trial.predicted is not None
    shape = _shape(record, trial.predicted)
    durations = _durations(shape, trial.predicted)
    _check_size(shape, trial.chunks)
    try:
        spans, _ = simulate.timeline(
            shape.schedule,
            stages=shape.stages,
            chunks=trial.chunks,
            virtual_stages=shape.virtual_stages,
            durations=durations,
        )
    except ValueError as error:
        raise UsageError(f"M = {trial.chunks} cannot be simulated: {error}") from error
    return spans


def _shape(record: Record, predicted: Predicted) -> Shape:
    """The pipeline as the spec has it. Raises UsageError where the prediction has operations of another one."""
    table = record.spec.get("pipeline")
    pipeline = table if isinstance(table, dict) else {}
    schedule, stages = pipeline.get("schedule"), pipeline.get("stages")
    if not isinstance(schedule, str) or schedule not in SCHEDULES:
        raise UsageError(f"spec.pipeline.schedule is {shown(schedule)}; it must be one of {', '.join(SCHEDULES)}")
    usual = SCHEDULES[schedule].default_virtual_stages
    virtual_stages = pipeline.get("virtual_stages", usual)
    found = (len(predicted.update_s), len(predicted.parts))
    if isinstance(stages, int) and isinstance(virtual_stages, int) and (stages, stages * virtual_stages) == found:
        return Shape(schedule, stages, virtual_stages)
    raise UsageError(
        f"the record has operations of {found[0]} ranks and {found[1]} parts; its spec has "
        f"stages = {shown(stages)}, virtual_stages = {shown(virtual_stages)}: K ranks, K V parts"
    )


def _durations(shape: Shape, predicted: Predicted) -> Durations:
    try:
        durations = played(shape, predicted)
    except ValueError as error:  # a V that the schedule does not have
        raise UsageError(f"the record's step cannot be simulated: {error}") from error
    assert durations is not None  # it has parts
    wrong = next((seconds for seconds in _all_of(durations) if not 0 <= seconds <= MOST_S), None)
    if wrong is not None:
        raise UsageError(f"an operation of the record takes {wrong:g} s; a duration is 0 to {MOST_S:g} s")
    return durations


def _all_of(durations: Durations) -> Sequence[float]:
    of_parts = (*durations.forward_s, *durations.backward_s, *durations.input_s, *durations.weight_s)
    return (*of_parts, *durations.transfer_s, *durations.update_s, durations.overhead_s)


def _check_size(shape: Shape, chunks: int) -> None:
    a_chunk = shape.stages * shape.virtual_stages * (3 if SCHEDULES[shape.schedule].splits_backward else 2)
    if a_chunk * chunks > MOST_OPERATIONS:
        raise UsageError(
            f"a step at M = {chunks} has {a_chunk * chunks:,} operations; at most {MOST_OPERATIONS:,} are shown; "
            f"give --chunks {max(1, MOST_OPERATIONS // a_chunk)} or fewer"
        )
