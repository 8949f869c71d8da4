"""Which values of M may be tried, in which order, and why the others may not. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from chunktune import schedules
from chunktune.errors import UsageError
from chunktune.results import BatchMode, Candidate, FloorLimit, Limit

if TYPE_CHECKING:
    from chunktune.spec import Spec

Choice = str | tuple[int, ...]

ALL_DIVISORS = 12
"""With at most this many legal divisors of N the climb visits them all."""
MOST_REFUSED = 64
MOST_IN_RANGE = 65536
"""A range in micro_batch mode is cut to so many values of M."""


@dataclass(frozen=True)
class Candidates:
    """The values of M of one sweep.

    `legal`: every M that may be tried, ascending (long in micro_batch mode: all legal values up to the cap).
    `ladder`: the values the climb visits, ascending, a subset of `legal`; the last rung is legal[-1].
    `refused`: illegal values with their reasons, for the record.
    `above`: what stands above legal[-1] ("batch": b is already 1; "schedule": no larger legal M; "range": the
    cap).
    `below`: what stands below legal[0] where it is not 1 ("schedule" or "range").
    """

    mode: BatchMode
    size: int
    legal: tuple[int, ...]
    ladder: tuple[int, ...]
    above: Limit
    below: FloorLimit
    refused: tuple[Candidate, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    def batch_of(self, chunks: int) -> tuple[int, int]:
        """(b, N) at this M, in samples."""
        if self.mode == "mini_batch":
            return self.size // chunks, self.size
        return self.size, self.size * chunks


@dataclass(frozen=True)
class Question:
    """What decides the candidates: the schedule at (K, V), what is held fixed (N or b, `size`), the choice.

    `choice`: "auto", "low:high" with both ends included, or values of M.
    """

    schedule: str
    stages: int
    virtual_stages: int
    mode: BatchMode
    size: int
    choice: Choice = "auto"

    def refusal(self, chunks: int) -> str | None:
        """Why the schedule cannot run this M; null where it can."""
        return schedules.refusal(self.schedule, stages=self.stages, chunks=chunks, virtual_stages=self.virtual_stages)

    def legal(self, chunks: int) -> bool:
        """Whether the schedule can run this M."""
        return schedules.admits(self.schedule, self.stages, chunks, self.virtual_stages)

    def in_range(self, chunks: int) -> bool:
        """Whether this M is in the user's range (every M is where there is none)."""
        low, high = self.bounds
        return low <= chunks and (high is None or chunks <= high)

    @property
    def listed(self) -> tuple[int, ...] | None:
        """The values of an explicit list, ascending; null without one."""
        return None if isinstance(self.choice, str) else tuple(sorted(set(self.choice)))

    @property
    def bounds(self) -> tuple[int, int | None]:
        """Smallest and largest M that the user allows; the second is null where no end is given."""
        if self.listed is not None:
            return self.listed[0], self.listed[-1]
        if self.choice == "auto":
            return 1, None
        low, high = str(self.choice).split(":")
        return int(low), int(high)


def enumerate_candidates(spec: Spec, stages: int) -> Candidates:
    """The values of M of a sweep of this spec on K = `stages` ranks.

    Raises UsageError when the schedule cannot run with these virtual stages, or when no M is legal; the
    message says what to change. That K V parts need as many layers is checked by `chunktune.partition`.
    """
    schedule, batch = spec.pipeline.schedule, spec.batch
    virtual = spec.pipeline.virtual_stages or schedules.default_virtual_stages(schedule)
    wrong = schedules.virtual_stages_refusal(schedule, virtual)
    if wrong is not None:
        raise UsageError(wrong)
    if batch.mini_batch is not None:
        return _of_mini_batch(Question(schedule, stages, virtual, "mini_batch", batch.mini_batch, batch.chunks))
    if batch.micro_batch is not None:
        return _of_micro_batch(Question(schedule, stages, virtual, "micro_batch", batch.micro_batch, batch.chunks))
    raise UsageError("batch gives neither mini_batch nor micro_batch; exactly one must be given")


def described(candidates: Candidates) -> tuple[Candidate, ...]:
    """The values of M for a record, ascending, the refused ones among them; with b fixed the rungs of the ladder."""
    legal = [
        Candidate(chunks=chunks, micro_batch=b, mini_batch=n, legal=True)
        for chunks in (candidates.legal if candidates.mode == "mini_batch" else candidates.ladder)
        for b, n in [candidates.batch_of(chunks)]
    ]
    return tuple(sorted([*legal, *candidates.refused], key=lambda one: one.chunks))


def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a positive whole number, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def ladder(legal: Sequence[int]) -> tuple[int, ...]:
    """The smallest, then each time the smallest that is at least twice the last; the largest comes last."""
    rungs: list[int] = []
    for chunks in legal:
        if not rungs or chunks >= 2 * rungs[-1]:
            rungs.append(chunks)
    if legal and rungs[-1] != legal[-1]:
        rungs.append(legal[-1])
    return tuple(rungs)


def _of_mini_batch(question: Question) -> Candidates:
    every = divisors(question.size)
    possible = [m for m in every if question.legal(m)]
    chosen = set(every if question.listed is None else question.listed)
    legal = tuple(m for m in possible if m in chosen and question.in_range(m))
    refused = _refused(question, [*(question.listed or ()), *every])
    if not legal:
        raise UsageError(_nothing_legal(question, possible))
    return Candidates(
        mode="mini_batch",
        size=question.size,
        legal=legal,
        ladder=legal if question.listed or len(legal) <= ALL_DIVISORS else ladder(legal),
        above=_above(question, legal, possible),
        below="range" if possible[0] < legal[0] else "schedule",
        refused=refused,
        warnings=_warn_of_divisors(question, possible),
    )


def _of_micro_batch(question: Question) -> Candidates:
    low, high = question.bounds
    cap = _cap(question)
    values: Iterable[int] = range(low, cap + 1) if question.listed is None else question.listed
    legal = tuple(m for m in values if question.legal(m))
    if not legal:
        raise UsageError(_nothing_legal(question, []))
    return Candidates(
        mode="micro_batch",
        size=question.size,
        legal=legal,
        ladder=legal if question.listed else ladder(legal),
        above="range",
        below="range" if _smallest(question, legal[0]) != legal[0] else "schedule",
        refused=_refused(question, question.listed or _looked_at(low, legal)),
        warnings=_warn_of_cap(question, cap) if high is not None and high > cap else (),
    )


def _cap(question: Question) -> int:
    low, high = question.bounds
    if question.listed is not None and high is not None:
        return high
    automatic = max(64, 64 * question.stages)
    return min(automatic if high is None else high, low + MOST_IN_RANGE - 1)


def _smallest(question: Question, at_most: int) -> int | None:
    return schedules.next_legal(question.schedule, question.stages, question.virtual_stages, 1, at_most)


def _above(question: Question, legal: Sequence[int], possible: Sequence[int]) -> Limit:
    if legal[-1] == question.size:
        return "batch"
    return "range" if possible[-1] > legal[-1] else "schedule"


def _looked_at(low: int, legal: Sequence[int]) -> list[int]:
    """The values that the ladder passes over: those below its first rung, and the doubles of its rungs."""
    doubles = [2 * m for m in ladder(legal) if 2 * m <= legal[-1]]
    return [*range(low, min(legal[0], low + MOST_REFUSED)), *doubles]


def _refused(question: Question, values: Iterable[int]) -> tuple[Candidate, ...]:
    """The illegal ones of these, ascending; where they are too many, the first named are kept."""
    reasons: dict[int, str] = {}
    for chunks in values:
        reason = _why_not(question, chunks)
        if reason is not None and len(reasons) < MOST_REFUSED:
            reasons[chunks] = reason
    return tuple(_refused_candidate(question, m, reasons[m]) for m in sorted(reasons))


def _refused_candidate(question: Question, chunks: int, reason: str) -> Candidate:
    if question.mode == "micro_batch":
        micro_batch: int | None = question.size
        mini_batch: int | None = question.size * chunks
    else:
        micro_batch = None if question.size % chunks else question.size // chunks
        mini_batch = question.size
    return Candidate(chunks=chunks, micro_batch=micro_batch, mini_batch=mini_batch, legal=False, reason=reason)


def _why_not(question: Question, chunks: int) -> str | None:
    """Why this M is no candidate: N does not divide, or the schedule refuses; null where it is one."""
    if question.mode == "micro_batch" or question.size % chunks == 0:
        return question.refusal(chunks)
    every = divisors(question.size)
    near = " or ".join(map(str, _neighbours(chunks, [m for m in every if question.legal(m)] or every)))
    return f"M = {chunks} does not divide N = {question.size}; micro-batches have equal size; nearest: {near}"


def _neighbours(value: int, among: Sequence[int]) -> list[int]:
    below = [other for other in among if other < value]
    above = [other for other in among if other > value]
    return below[-1:] + above[:1]


def _nothing_legal(question: Question, possible: Sequence[int]) -> str:
    """Why no M can be tried, and what to change."""
    if question.listed is not None:
        reasons = "; ".join(candidate.reason or "" for candidate in _refused(question, question.listed[:4]))
        return f"none of chunks = {list(question.listed)} is legal: {reasons}"
    if possible:
        near = ", ".join(map(str, possible[:12]))
        return f"no legal divisor of N = {question.size} lies in {question.choice}; legal M: {near}"
    if question.mode == "mini_batch":
        return _batch_too_small(question)
    low, high = question.bounds
    return f"no M in {low}:{high} is legal; {question.refusal(low)}"


def _batch_too_small(question: Question) -> str:
    reason = question.refusal(question.size)
    advice = [f"mini_batch = {_nearest_batch(question)}"]
    fewer = _most_stages(question)
    if fewer is not None:
        advice.append(f"stages = {fewer}")
    advice.append("schedule gpipe")
    return f"no divisor of N = {question.size} is legal: {reason}; use {', or '.join(advice)}"


def _most_stages(question: Question) -> int | None:
    """The largest K below the given one at which M = N is legal; null where none is."""
    smaller = (replace(question, stages=k) for k in range(question.stages - 1, 0, -1))
    return next((q.stages for q in smaller if q.legal(q.size)), None)


def _useful(question: Question, batch: int) -> int:
    """How many legal M lie between 1 and this N: those that trade the bubble against the micro-batch."""
    return sum(1 < m < batch and question.legal(m) for m in divisors(batch))


def _nearest_batch(question: Question) -> int:
    """The N nearest to the given one with a useful divisor; of two as near, the one with more of them."""
    for distance in range(1, 4 * question.stages + 4):
        pair = [n for n in (question.size - distance, question.size + distance) if n > 0]
        best = max(pair, key=lambda n: (_useful(question, n), n))
        if _useful(question, best):
            return best
    return 4 * question.stages


def _warn_of_divisors(question: Question, possible: Sequence[int]) -> tuple[str, ...]:
    if _useful(question, question.size):
        return ()
    legal = ", ".join(map(str, possible))
    near = _nearest_batch(question)
    count = _useful(question, near)
    return (
        f"mini_batch = {question.size} leaves only M = {legal}: no legal divisor lies between 1 and N; "
        f"the nearest N with more is {near}, which has {count} of them",
    )


def _warn_of_cap(question: Question, cap: int) -> tuple[str, ...]:
    return (f"chunks = {question.choice} has more than {MOST_IN_RANGE} values; none above M = {cap} is tried",)
