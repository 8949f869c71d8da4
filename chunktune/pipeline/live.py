"""The live pipeline as the search sees it: rank 0 calls, every rank measures, rank 0 makes the answer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from chunktune import schedules
from chunktune.pipeline.measure import Measurer, RankTrial, Timed, step_seconds, visiting_order
from chunktune.pipeline.plan import Plan
from chunktune.pipeline.rehearsal import RankReport
from chunktune.replay import Fresh, Task
from chunktune.results import Block, Bubble, Predicted, Round, StageFigures, Trial
from chunktune.stats import median_interval

FIRST_DEADLINE_S = 600.0
LEAST_DEADLINE_S = 120.0
DEADLINE_STEPS = 100


@dataclass(frozen=True)
class Command:
    """What rank 0 asks of every rank. `steps`: timed steps of a block."""

    task: Literal["trial", "block", "stop", "reopen"]
    chunks: int = 0
    micro_batch: int = 0
    steps: int = 0
    deadline_s: float = LEAST_DEADLINE_S


class FreshGroupNeededError(Exception):
    """The choice stands, and is confirmed only by a group that has measured nothing yet."""


def obey(measurer: Measurer, command: Command) -> list[RankTrial] | list[RankReport] | list[Timed]:
    """Do this rank's share of a command; every rank gets every rank's result."""
    note = {"chunks": command.chunks}
    with measurer.group.deadline(command.deadline_s, note):
        if command.task == "trial":
            return measurer.trial(command.chunks, command.micro_batch)
        return measurer.block(command.chunks, command.micro_batch, command.steps)


@dataclass
class LivePipeline:
    """Implements `replay.LiveRunner` on rank 0 by leading the other ranks through the same commands.

    `step_s`: seconds a step already known by M, from the journal of an earlier group.
    """

    measurer: Measurer
    plan: Plan
    send: Callable[[Command], Command]
    step_s: dict[int, float] = field(default_factory=dict)
    measured: bool = False
    _visits: dict[tuple[int, ...], int] = field(default_factory=dict)

    def trial(self, chunks: int) -> Trial:
        """Rehearsal and real pipeline at M."""
        micro_batch, _ = self.plan.candidates.batch_of(chunks)
        results = self._call(Command("trial", chunks, micro_batch, 0, self._command_deadline_s([chunks])))
        trial = trial_of(self.plan, chunks, results)  # type: ignore[arg-type]
        if trial.step_median_s is not None:
            self.step_s[chunks] = trial.step_median_s
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
        timed: list[Timed] = self._call(  # type: ignore[assignment]
            Command("block", chunks, micro_batch, steps, self._command_deadline_s([chunks]))
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
        return self._command_deadline_s(values)

    def _command_deadline_s(self, values: Sequence[int]) -> float:
        asked = self.plan.spec.sweep.trial_timeout
        if asked != "auto":
            return float(asked)
        if not self.step_s:
            return FIRST_DEADLINE_S
        known, slowest_s = max(self.step_s.items(), key=lambda item: item[1])
        samples = self.plan.candidates.batch_of
        growth = max(1.0, samples(max(values))[1] / samples(known)[1])
        return max(LEAST_DEADLINE_S, DEADLINE_STEPS * slowest_s * growth)

    def _call(self, command: Command) -> list[RankTrial] | list[RankReport] | list[Timed]:
        self.measured = True
        self.measurer.group.remember(command.chunks)
        return obey(self.measurer, self.send(command))


def trial_of(plan: Plan, chunks: int, results: Sequence[RankTrial] | Sequence[RankReport]) -> Trial:
    """One trial from what its ranks reported."""
    micro_batch, mini_batch = plan.candidates.batch_of(chunks)
    size = {"chunks": chunks, "micro_batch": micro_batch, "mini_batch": mini_batch}
    bad = _worst(results)
    if bad is not None:
        return Trial(**size, state=bad.state, reason=bad.reason, rank=bad.rank, shortage=bad.shortage)
    ranks = [result for result in results if isinstance(result, RankTrial)]
    timed = [rank.timed for rank in ranks if rank.timed is not None]
    step_s = step_seconds(timed)
    median_s = statistics.median(step_s)
    stages = tuple(_figures(rank, number, median_s, mini_batch) for number, rank in enumerate(ranks))
    loss = next((rank.loss for rank in ranks if rank.loss is not None), None)
    return Trial(
        **size,
        state="ok",
        step_s=tuple(step_s),
        step_median_s=median_s,
        step_interval_s=median_interval(step_s),
        throughput_samples_per_s=mini_batch / median_s,
        loss=loss if loss is not None and math.isfinite(loss) else None,
        bubble=Bubble(
            measured=statistics.mean(stage.idle_share for stage in stages),
            ideal=schedules.ideal_bubble(
                plan.spec.pipeline.schedule,
                stages=plan.stages,
                chunks=chunks,
                virtual_stages=plan.virtual_stages,
            ),
        ),
        predicted=Predicted(step_s=None, peak_bytes=tuple(rank.rehearsed_peak_bytes for rank in ranks)),
        stages=stages,
    )


def _worst(results: Sequence[RankTrial] | Sequence[RankReport]) -> RankReport | None:
    """The report that decides the state: an error before a shortage, then the rank that is short by most."""
    reports = [result.report if isinstance(result, RankTrial) else result for result in results]
    errors = [report for report in reports if report.state == "error"]
    short = [report for report in reports if report.state == "oom"]
    return errors[0] if errors else max(short, key=_short_by, default=None)


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


def known_step_s(trials: Mapping[int, Trial]) -> dict[int, float]:
    """Seconds a step of the trials that ran."""
    return {m: trial.step_median_s for m, trial in trials.items() if trial.step_median_s is not None}
