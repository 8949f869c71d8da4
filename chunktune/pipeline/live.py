"""The live pipeline as the search sees it: rank 0 calls, every rank measures, rank 0 makes the answer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chunktune.pipeline.leading import Command, Leading, shape_of, unfinished_trial
from chunktune.pipeline.measure import RankTrial, Timed, step_seconds, visiting_order
from chunktune.pipeline.plan import Plan
from chunktune.pipeline.rehearsal import RankReport
from chunktune.pipeline.runtime import Operation
from chunktune.predict import ideal_bubble
from chunktune.replay import Fresh, Task
from chunktune.results import (
    Block,
    Bubble,
    OperationKind,
    Predicted,
    RankTimeline,
    Round,
    StageFigures,
    Timeline,
    Trial,
)
from chunktune.stats import median_interval

MOST_OPERATIONS = 20_000
"""Of a recorded time line: about a megabyte of JSON."""
_KINDS: Mapping[str, OperationKind] = {
    "forward": "F",
    "loss": "L",
    "backward": "B",
    "input": "I",
    "weight": "W",
    "optimizer": "U",
}


class FreshGroupNeededError(Exception):
    """The choice stands, and is confirmed only by a group that has measured nothing yet."""


@dataclass
class LivePipeline(Leading):
    """Implements `replay.LiveRunner` on rank 0 by leading the other ranks through the same commands."""

    _visits: dict[tuple[int, ...], int] = field(default_factory=dict)

    def trial(self, chunks: int) -> Trial:
        """Rehearsal, prediction, which is journaled before anything is timed, and the real pipeline at M."""
        return self._trial(chunks, keep_timeline=False)

    def _trial(self, chunks: int, *, keep_timeline: bool) -> Trial:
        reports = self.rehearse(chunks)
        if any(report.state != "ok" for report in reports):
            return trial_without_steps(self.plan, chunks, reports)
        predicted = self.foretell(chunks, reports)
        if self.left_s() < (predicted.step_s or 0.0) / 2:
            return unfinished_trial(self.plan, chunks)
        micro_batch, _ = self.plan.candidates.batch_of(chunks)
        results: list[RankTrial] = self.call(  # type: ignore[assignment]
            Command("trial", chunks, micro_batch, 0, self.command_deadline_s([chunks]))
        )
        trial = self.book.counted(trial_of(self.plan, chunks, results, predicted))
        if trial.fits:
            self.trials[chunks] = trial
        if trial.fits and keep_timeline:
            timeline = timeline_of([rank.timed.operations for rank in results if rank.timed is not None])
            return trial.model_copy(update={"timeline": timeline})
        return trial

    def rounds(self, values: Sequence[int], count: int) -> Sequence[Round]:
        """Up to `count` rounds over the values, as many as the budget has time for.

        Each round visits them in the opposite order of the last.
        """
        measured = []
        for _ in range(count):
            entry = self._round(tuple(values))
            if entry is None:
                break
            measured.append(entry)
        return measured

    def _round(self, values: tuple[int, ...]) -> Round | None:
        """One round, None where the budget ends in it: a comparison needs every value at about the same time."""
        visit = self._visits.get(values, 0)
        self._visits[values] = visit + 1
        blocks: dict[int, Block] = {}
        for chunks in visiting_order(values, visit):
            # One step more than is timed: the first after a change of M.
            if self.left_s() < (1 + self._steps(chunks)) * self.step_s.get(chunks, 0.0):
                return None
            blocks[chunks] = self._block(chunks)
        return Round(blocks=tuple(blocks[chunks] for chunks in values))

    def _steps(self, chunks: int) -> int:
        return self.measurer.effort.block_count(self.step_s.get(chunks, 0.1))

    def _block(self, chunks: int) -> Block:
        micro_batch, mini_batch = self.plan.candidates.batch_of(chunks)
        steps = self._steps(chunks)
        timed: list[Timed] = self.call(  # type: ignore[assignment]
            Command("block", chunks, micro_batch, steps, self.command_deadline_s([chunks]))
        )
        return Block(
            chunks=chunks,
            mini_batch=mini_batch,
            step_s=statistics.median(step_seconds(timed)),
            busy_s=tuple(statistics.median(rank.busy_s) for rank in timed),
        )

    def confirm(self, chunks: int) -> Trial:
        """The trial once more, with its time line; `deadline_s` has seen to it that this group is a fresh one."""
        return self._trial(chunks, keep_timeline=True)

    def freshness(self) -> Fresh:
        """How this group came to be."""
        return "re-initialised group" if self.measurer.group.reopened else "fresh processes"

    def deadline_s(self, task: Task, values: Sequence[int]) -> float:
        """Seconds that one command of the task may take.

        Raises FreshGroupNeededError for a confirmation in a group that has measured before.
        """
        if task == "confirm" and self.measured:
            raise FreshGroupNeededError
        return self.command_deadline_s(values)


def trial_without_steps(plan: Plan, chunks: int, reports: Sequence[RankReport]) -> Trial:
    """The trial of an M that did not fit, or raised, on some rank; or that the budget cut short."""
    if all(report.state in ("ok", "late") for report in reports):
        return unfinished_trial(plan, chunks)
    micro_batch, mini_batch = plan.candidates.batch_of(chunks)
    bad = _worst(reports)
    return Trial(
        chunks=chunks,
        micro_batch=micro_batch,
        mini_batch=mini_batch,
        state=bad.state,
        reason=bad.reason,
        rank=bad.rank,
        shortage=bad.shortage,
    )


def trial_of(plan: Plan, chunks: int, ranks: Sequence[RankTrial], predicted: Predicted) -> Trial:
    """One trial from what its ranks measured."""
    reports = [rank.report for rank in ranks]
    if any(report.state != "ok" for report in reports):
        return trial_without_steps(plan, chunks, reports)
    micro_batch, mini_batch = plan.candidates.batch_of(chunks)
    timed = [rank.timed for rank in ranks if rank.timed is not None]
    step_s = step_seconds(timed)
    median_s = statistics.median(step_s)
    stages = tuple(_figures(rank, number, median_s, mini_batch) for number, rank in enumerate(ranks))
    loss = next((rank.loss for rank in ranks if rank.loss is not None), None)
    return Trial(
        chunks=chunks,
        micro_batch=micro_batch,
        mini_batch=mini_batch,
        state="ok",
        step_s=tuple(step_s),
        step_median_s=median_s,
        step_interval_s=median_interval(step_s),
        throughput_samples_per_s=mini_batch / median_s,
        loss=loss if loss is not None and math.isfinite(loss) else None,
        loss_is_finite=None if loss is None else math.isfinite(loss),
        bubble=Bubble(
            measured=statistics.mean(stage.idle_share for stage in stages),
            ideal=ideal_bubble(shape_of(plan), chunks),
        ),
        predicted=predicted,
        stages=stages,
    )


def timeline_of(ranks: Sequence[Sequence[Operation]]) -> Timeline | None:
    """One step from every rank's operations in order; None where these are none, or more than MOST_OPERATIONS."""
    if not all(ranks) or sum(map(len, ranks)) > MOST_OPERATIONS:
        return None
    origin_s = min(operations[0].start_s for operations in ranks)
    return Timeline(ranks=tuple(_rank_timeline(rank, own, origin_s) for rank, own in enumerate(ranks)))


def _rank_timeline(rank: int, operations: Sequence[Operation], origin_s: float) -> RankTimeline:
    return RankTimeline(
        rank=rank,
        kinds=tuple(_KINDS[one.kind] for one in operations),
        parts=tuple(one.part for one in operations),
        chunks=tuple(one.chunk for one in operations),
        start_s=tuple(one.start_s - origin_s for one in operations),
        end_s=tuple(one.start_s - origin_s + one.seconds for one in operations),
    )


def _worst(reports: Sequence[RankReport]) -> RankReport:
    """The report that decides the state: an error before a shortage, then the rank that is short by most."""
    errors = [report for report in reports if report.state == "error"]
    return errors[0] if errors else max((report for report in reports if report.state == "oom"), key=_short_by)


def _short_by(report: RankReport) -> int:
    shortage = report.shortage
    if shortage is None or shortage.needed_bytes is None:
        return 0
    return shortage.needed_bytes - shortage.budget_bytes


def _figures(rank: RankTrial, number: int, step_s: float, mini_batch: int) -> StageFigures:
    assert rank.timed is not None
    busy_s = statistics.median(rank.timed.busy_s)
    return StageFigures(
        rank=number,
        parts=rank.parts,
        forward_s=rank.timed.forward_s,
        backward_s=rank.timed.backward_s,
        busy_s=busy_s,
        idle_share=max(0.0, 1 - busy_s / step_s),
        samples_per_s=mini_batch / busy_s,
        peak_bytes=rank.report.peak_bytes,
        reserved_bytes=rank.reserved_bytes,
        capacity_bytes=rank.budget.capacity_bytes,
        budget_bytes=rank.budget.budget_bytes,
    )
