"""The live pipeline as the search sees it: rank 0 calls, every rank measures, rank 0 makes the answer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from chunktune.pipeline.leading import Command, Leading, shape_of
from chunktune.pipeline.measure import RankTrial, Timed, step_seconds, visiting_order
from chunktune.pipeline.plan import Plan
from chunktune.pipeline.rehearsal import RankReport
from chunktune.predict import ideal_bubble
from chunktune.replay import Fresh, Task
from chunktune.results import Block, Bubble, Predicted, Round, StageFigures, Trial
from chunktune.stats import median_interval


class FreshGroupNeededError(Exception):
    """The choice stands, and is confirmed only by a group that has measured nothing yet."""


@dataclass
class LivePipeline(Leading):
    """Implements `replay.LiveRunner` on rank 0 by leading the other ranks through the same commands."""

    _visits: dict[tuple[int, ...], int] = field(default_factory=dict)

    def trial(self, chunks: int) -> Trial:
        """Rehearsal, prediction, which is journaled before anything is timed, and the real pipeline at M."""
        reports = self.rehearse(chunks)
        if any(report.state != "ok" for report in reports):
            return failed_trial(self.plan, chunks, reports)
        predicted = self.foretell(chunks, reports)
        micro_batch, _ = self.plan.candidates.batch_of(chunks)
        results: list[RankTrial] = self.call(  # type: ignore[assignment]
            Command("trial", chunks, micro_batch, 0, self.command_deadline_s([chunks]))
        )
        trial = self.book.counted(trial_of(self.plan, chunks, results, predicted))
        if trial.fits:
            self.trials[chunks] = trial
        return trial

    def rounds(self, values: Sequence[int], count: int) -> Sequence[Round]:
        """`count` rounds over the values; each round visits them in the opposite order of the last."""
        return [self._round(tuple(values)) for _ in range(count)]

    def _round(self, values: tuple[int, ...]) -> Round:
        visit = self._visits.get(values, 0)
        self._visits[values] = visit + 1
        blocks = {chunks: self._block(chunks) for chunks in visiting_order(values, visit)}
        return Round(blocks=tuple(blocks[chunks] for chunks in values))

    def _block(self, chunks: int) -> Block:
        micro_batch, mini_batch = self.plan.candidates.batch_of(chunks)
        steps = self.measurer.effort.block_count(self.step_s.get(chunks, 0.1))
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
        """The trial once more; `deadline_s` has seen to it that this group is a fresh one."""
        return self.trial(chunks)

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


def failed_trial(plan: Plan, chunks: int, reports: Sequence[RankReport]) -> Trial:
    """The trial of an M that did not fit, or raised, on some rank."""
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
        return failed_trial(plan, chunks, reports)
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
        bubble=Bubble(
            measured=statistics.mean(stage.idle_share for stage in stages),
            ideal=ideal_bubble(shape_of(plan), chunks),
        ),
        predicted=predicted,
        stages=stages,
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
