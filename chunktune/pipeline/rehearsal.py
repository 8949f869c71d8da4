"""Rehearsal: one rank runs its own stage's plan alone, so that running out of memory is an ordinary exception.

Nobody waits for a peer: receives find their buffers ready, sends keep their tensor until they are waited for,
as real ones do. What does not fit, or raises, is found here, and no process has to die for it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from chunktune.blame import place_of
from chunktune.device import MIB, MemoryWatch, asked_bytes, chain, is_out_of_memory
from chunktune.errors import ChunktuneError
from chunktune.pipeline.timing import RankSeconds, timed_rehearsal
from chunktune.pipeline.work import Budget, RankWork, Trainer, TrainingStep
from chunktune.results import Shortage
from chunktune.units import format_bytes

USER_ERRORS = (Exception, SystemExit, KeyboardInterrupt)
"""What a user's layer may raise; a real Ctrl-C ends a worker at once."""
_DATA_DEPENDENT = ("DataDependentOutputException", "GuardOnDataDependentSymNode", "DynamicOutputShapeException")
_FAKE_RULE = (
    "the shapes between the stages are read by running the layers on tensors without values: "
    "a layer must not call .item(), branch on what a tensor holds, or cache tensors outside the module"
)
SLACK_BYTES = 8 * MIB
"""What a CPU rank may use besides tensors before its allocator refuses; the counted peak is exact all the same."""


@dataclass(frozen=True)
class RankReport:
    """How one rank fared. `log` is the user's traceback, for the log file; `seconds` what its operations took.

    "late": the budget was spent before all was done; nothing is known of this M.
    """

    rank: int
    state: Literal["ok", "oom", "error", "late"]
    peak_bytes: int = 0
    reason: str | None = None
    shortage: Shortage | None = None
    log: str | None = None
    seconds: RankSeconds | None = None
    budget: Budget | None = None


def rehearse(
    work: RankWork, chunks: int, micro_batch: int, resamples: int = 0, is_late: Callable[[], bool] = lambda: False
) -> RankReport:
    """Two optimizer steps at M chunks of b samples, memory enforced and counted; the peak is the second's.

    Where they fit the step is timed, without the meter and the limit, which both slow it down; `resamples` as in
    `timed_rehearsal`. `is_late` is asked before each step. Never raises for what the user's model does: every
    failure becomes a report.
    """
    if is_late():
        return RankReport(work.rank, "late")
    budget = work.budget()
    work.device.release()
    watch: MemoryWatch | None = None
    step: TrainingStep | None = None
    try:
        work.boundaries(micro_batch)  # needs no memory to speak of, and none of the model's
        with (
            work.device.enforce(budget.budget_bytes, SLACK_BYTES),
            work.device.watch() as watch,
        ):
            step = TrainingStep(Trainer(work), chunks, micro_batch, rehearsal=True)
            step.run()
            watch.restart()
            if is_late():
                return RankReport(work.rank, "late")
            step.run()
            work.device.synchronise()
        report = counted_report(work.rank, watch, budget.budget_bytes, "rehearsal")
        if report.state == "ok" and is_late():
            report = RankReport(work.rank, "late")
        if report.state == "ok":
            report = replace(report, seconds=timed_rehearsal(step, work.device, resamples, is_late), budget=budget)
    except USER_ERRORS as error:
        report = failure_report(work.rank, error, watch, budget.budget_bytes, "rehearsal")
        # The traceback keeps every activation alive.
        error.__traceback__ = None
    finally:
        step = None
        work.device.release()
    return report


def counted_report(
    rank: int, watch: MemoryWatch, budget_bytes: int, where: Literal["rehearsal", "pipeline"]
) -> RankReport:
    """The report of steps that ran: "oom" all the same where the counted peak or a retry is past the budget."""
    if watch.peak_bytes <= budget_bytes and watch.retries == 0:
        return RankReport(rank, "ok", watch.peak_bytes)
    shortage = Shortage(rank=rank, needed_bytes=watch.peak_bytes, budget_bytes=budget_bytes, where=where)
    if watch.retries:
        reason = f"rank {rank}: the allocator was at its limit ({watch.retries} retries)"
    else:
        reason = f"rank {rank} needs {format_bytes(watch.peak_bytes)}, may use {format_bytes(budget_bytes)}"
    return RankReport(rank, "oom", watch.peak_bytes, reason, shortage)


def failure_report(
    rank: int,
    error: BaseException,
    watch: MemoryWatch | None,
    budget_bytes: int,
    where: Literal["rehearsal", "pipeline"],
) -> RankReport:
    """The report of an exception: out of memory by its type, otherwise the user's own error in one line."""
    if not is_out_of_memory(error):
        log = "".join(traceback.format_exception(error))
        return RankReport(rank, "error", reason=f"rank {rank}: {root_cause(error)}", log=log)
    asked = asked_bytes(error)
    held = watch.current_bytes if watch is not None else 0
    needed = held + (asked or 0)
    known = needed > budget_bytes
    shortage = Shortage(
        rank=rank,
        needed_bytes=needed if known else None,
        budget_bytes=budget_bytes,
        asked_bytes=asked,
        where=where,
    )
    need = f"needs at least {format_bytes(needed)}" if known else f"ran out with {format_bytes(held)} allocated"
    reason = f"rank {rank} {need}, may use {format_bytes(budget_bytes)}"
    return RankReport(rank, "oom", 0, reason, shortage)


def root_cause(error: BaseException) -> str:
    """Type, first line and place of the exception that started it; torch wraps the user's in its own."""
    first = list(chain(error))[-1] if error.__cause__ is None else _deepest_cause(error)
    lines = str(first).strip().splitlines()
    said = lines[0][:200] if lines else "(no message)"
    if isinstance(first, ChunktuneError):
        return said
    place = place_of(first)
    where = f" ({place})" if place else ""
    faked = type(first).__name__ in _DATA_DEPENDENT or "FakeTensor" in said
    rule = f"; {_FAKE_RULE}" if faked else ""
    return f"{type(first).__name__}: {said}{where}{rule}"


def _deepest_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
