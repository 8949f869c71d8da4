"""What every rank does when rank 0 calls: a trial, rounds of a comparison, a layer's cost. Collective throughout."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from chunktune.errors import UserCodeError
from chunktune.pipeline.group import Group
from chunktune.pipeline.rehearsal import SLACK_BYTES, USER_ERRORS, RankReport, counted_report, failure_report, rehearse
from chunktune.pipeline.runtime import Operation
from chunktune.pipeline.work import Budget, RankWork, Trainer, TrainingStep


@dataclass(frozen=True)
class Effort:
    """How long to measure: the least timed steps of a trial and of a block, and the seconds they should fill."""

    trial_steps: int = 3
    trial_s: float = 0.3
    block_steps: int = 1
    block_s: float = 0.1
    most_steps: int = 20

    def trial_count(self, step_s: float) -> int:
        """Timed steps of a trial whose step takes `step_s`."""
        return self._count(self.trial_steps, self.trial_s, step_s)

    def block_count(self, step_s: float) -> int:
        """Timed steps of one block of a round."""
        return self._count(self.block_steps, self.block_s, step_s)

    def _count(self, least: int, fill_s: float, step_s: float) -> int:
        return max(least, min(self.most_steps, math.ceil(fill_s / max(step_s, 1e-9))))


@dataclass(frozen=True)
class Timed:
    """Consecutive timed steps of one rank: when each ended (s after a common start), how long it was busy in each.

    `forward_s`, `backward_s`: seconds a micro-batch, summed over the rank's parts. `operations`: those of the last
    step, where they were asked for, their starts in seconds after the common one.
    """

    ends_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    forward_s: float
    backward_s: float
    operations: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class RankTrial:
    """One rank's part of a trial that ran in the real pipeline."""

    report: RankReport
    parts: tuple[int, ...]
    budget: Budget
    warm_step_s: float
    reserved_bytes: int | None = None
    timed: Timed | None = None
    loss: float | None = None


@dataclass
class Measurer:
    """Runs one rank's share of every task. All methods are collective: every rank calls the same in the same order.

    `works`: the ranks that this process stands for; one in the real pipeline, several where they only rehearse in
    turn. `resamples`: bootstrap samples of rehearsed operations. `until_s`: when the budget ends, on this process's
    `perf_counter`.
    """

    works: tuple[RankWork, ...]
    group: Group
    effort: Effort
    resamples: int = 0
    until_s: float = math.inf
    _trainer: Trainer | None = field(default=None, init=False)
    _step: TrainingStep | None = field(default=None, init=False)

    @property
    def work(self) -> RankWork:
        """The rank's work in the real pipeline."""
        return self.works[0]

    def rehearsal(self, chunks: int, micro_batch: int) -> list[RankReport]:
        """Rehearse every rank, and agree: the reports of all K ranks, rank 0 first."""
        self._drop()
        reports = [self._rehearsed(work, chunks, micro_batch) for work in self.works]
        everyone = [report for share in self.group.gather(reports) for report in share]
        return sorted(everyone, key=lambda report: report.rank)

    def _rehearsed(self, work: RankWork, chunks: int, micro_batch: int) -> RankReport:
        report = rehearse(work, chunks, micro_batch, self.resamples, self._is_late)
        if report.log is not None:
            print(report.log, file=sys.stderr, flush=True)
        return report

    def _is_late(self, step_s: float = 0.0) -> bool:
        """Whether the budget is spent before half of a step that takes so long would be done."""
        return time.perf_counter() + step_s / 2 > self.until_s

    def trial(self, chunks: int, micro_batch: int) -> list[RankTrial]:
        """Run the real pipeline, which the rehearsal said fits.

        Raises what the real pipeline raises on this rank; then the group is lost, and only its end frees the peers.
        """
        return self.group.gather(self._real_trial(chunks, micro_batch))

    def _real_trial(self, chunks: int, micro_batch: int) -> RankTrial:
        budget = self.work.budget()
        result = self._warm_up(chunks, micro_batch, budget)
        fits = all(self.group.gather(result.report.state == "ok"))
        if not fits:
            self._drop()
            return result
        count = self.group.broadcast(self._affordable(self.effort.trial_count(result.warm_step_s), result.warm_step_s))
        if not count:
            self._drop()
            return replace(result, report=RankReport(self.work.rank, "late"))
        return replace(result, timed=self._timed(count, keep=True))

    def _affordable(self, count: int, step_s: float) -> int:
        """As many of these steps as the budget has time for, one where it has time for half of it."""
        if self._is_late(step_s):
            return 0
        left_s = self.until_s - time.perf_counter()
        return count if left_s > count * step_s else max(1, int(left_s / max(step_s, 1e-9)))

    def _warm_up(self, chunks: int, micro_batch: int, budget: Budget) -> RankTrial:
        """Two untimed, counted steps of the real pipeline from the initial weights; the peak is the second's."""
        device = self.work.device
        # Past the budget the count says no; the allocator stops only what would endanger the machine.
        slack = budget.budget_bytes // 4 if device.kind == "cpu" else 0
        with device.enforce(budget.budget_bytes, slack), device.watch() as watch:
            try:
                self._build(chunks, micro_batch)
                assert self._step is not None
                start = time.perf_counter()
                losses = self._step.run()
                device.synchronise()
                loss = float(torch.stack([one.detach().float() for one in losses]).sum()) if losses else None
                del losses
                watch.restart()
                if self.group.broadcast(self._is_late(time.perf_counter() - start)):
                    return RankTrial(RankReport(self.work.rank, "late"), self.work.own_parts, budget, 0.0)
                start = time.perf_counter()
                self._step.run()
                device.synchronise()
                warm_step_s = time.perf_counter() - start
            except USER_ERRORS as error:
                report = failure_report(self.work.rank, error, watch, budget.budget_bytes, "pipeline")
                raise PipelineLostError(report, chunks) from error
            report = counted_report(self.work.rank, watch, budget.budget_bytes, "pipeline")
            reserved = watch.reserved_bytes
        device.cap(budget.budget_bytes)
        self._take_operations()
        return RankTrial(report, self.work.own_parts, budget, warm_step_s, reserved, None, loss)

    def block(self, chunks: int, micro_batch: int, steps: int) -> list[Timed]:
        """Timed steps at M, on every rank; the first step after a change of M is not timed."""
        if self._step is None or (self._step.chunks, self._step.micro_batch) != (chunks, micro_batch):
            self._build(chunks, micro_batch)
            self._run_one()
            self._take_operations()
        return self.group.gather(self._timed(steps))

    def _run_one(self) -> None:
        assert self._step is not None
        try:
            self._step.run()
            self.work.device.synchronise()
        except USER_ERRORS as error:
            budget = self.work.budget().budget_bytes
            report = failure_report(self.work.rank, error, None, budget, "pipeline")
            raise PipelineLostError(report, self._step.chunks) from error

    def _timed(self, count: int, *, keep: bool = False) -> Timed:
        """Steps one after the other from a common start, as in training: no barrier between them."""
        assert self._step is not None
        log, ends = self._step.operations, []
        marks = []
        self.group.barrier()
        start, origin = time.perf_counter(), self.work.device.mark()
        for _ in range(count):
            self._run_one()
            ends.append(time.perf_counter() - start)
            marks.append(log.cut())  # read after the last step: between two, reading would make them longer
        operations = [log.read(one, origin) for one in marks]
        return Timed(
            ends_s=tuple(ends),
            busy_s=tuple(sum(one.seconds for one in step) for step in operations),
            forward_s=_per_chunk(operations, ("forward", "loss"), self._step.chunks),
            backward_s=_per_chunk(operations, ("backward", "input", "weight"), self._step.chunks),
            operations=tuple(operations[-1]) if keep else (),
        )

    def _build(self, chunks: int, micro_batch: int) -> None:
        """A step at another M over the same weights: stages and schedule are new, the rest stays."""
        self._step = None
        self._trainer = self._trainer or Trainer(self.work)
        self._step = TrainingStep(self._trainer, chunks, micro_batch, rehearsal=False)

    def _take_operations(self) -> list[Operation]:
        return self._step.operations.take() if self._step is not None else []

    def _drop(self) -> None:
        self._step = self._trainer = None
        self.work.device.cap(None)
        self.work.device.release()

    def layer_seconds(self, micro_batch: int, repeats: int = 3) -> list[float]:
        """Forward and backward seconds of every layer at b samples; each rank measures every K-th layer.

        Raises UserCodeError, on every rank, where a layer raises or does not fit.
        """
        merged: dict[int, float] = {}
        for share in self.group.gather(self._own_layer_seconds(micro_batch, repeats)):
            if isinstance(share, RankReport):
                raise UserCodeError(
                    f'pipeline.partition = "time": {share.reason}, while layers were timed at b = {micro_batch}; '
                    'use partition = "parameters"'
                )
            merged |= share
        return [merged[layer] for layer in range(self.work.layer_count())]

    def _own_layer_seconds(self, micro_batch: int, repeats: int) -> dict[int, float] | RankReport:
        place, work = self.group.place, self.work
        budget = work.budget().budget_bytes
        own = range(place.rank, work.layer_count(), place.ranks)
        try:
            with work.device.enforce(budget, SLACK_BYTES):
                return {layer: work.layer_seconds(layer, micro_batch, repeats) for layer in own}
        except USER_ERRORS as error:
            report = failure_report(place.rank, error, None, budget, "rehearsal")
            error.__traceback__ = None
            return report


class PipelineLostError(Exception):
    """The real pipeline raised on this rank: stage, schedule and process group are dead."""

    def __init__(self, report: RankReport, chunks: int) -> None:
        super().__init__(report.reason)
        self.report = report
        self.chunks = chunks


def _per_chunk(steps: Sequence[Sequence[Operation]], kinds: tuple[str, ...], chunks: int) -> float:
    totals = [sum(one.seconds for one in step if one.kind in kinds) for step in steps]
    return statistics.median(totals) / chunks


def step_seconds(ranks: Sequence[Timed]) -> list[float]:
    """Seconds of each step of the whole pipeline, from the last rank's end of one to that of the next."""
    ends = [max(rank.ends_s[index] for rank in ranks) for index in range(len(ranks[0].ends_s))]
    return [end - start for start, end in zip([0.0, *ends], ends, strict=False)]


def visiting_order(values: Sequence[int], round_index: int) -> list[int]:
    """A B in even rounds, B A in odd ones, so that a drift of the machine favours nobody."""
    return list(values) if round_index % 2 == 0 else list(reversed(values))
