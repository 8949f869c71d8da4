"""How rank 0 leads: the commands that all workers obey together, their deadlines, and the rehearsal of one M."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from chunktune.journal import Event
from chunktune.pipeline.counted import LayerBook
from chunktune.pipeline.measure import Measurer, RankTrial, Timed
from chunktune.pipeline.plan import Plan
from chunktune.pipeline.rehearsal import RankReport
from chunktune.pipeline.timing import RankSeconds
from chunktune.predict import Operations, Shape, predict
from chunktune.results import PartSeconds, Predicted, Trial

FIRST_DEADLINE_S = 600.0
LEAST_DEADLINE_S = 120.0
DEADLINE_STEPS = 100


@dataclass(frozen=True)
class Command:
    """What rank 0 asks of every rank. `steps`: timed steps of a block. `left_s`: of the sweep's budget."""

    task: Literal["rehearsal", "trial", "block", "stop", "reopen"]
    chunks: int = 0
    micro_batch: int = 0
    steps: int = 0
    deadline_s: float = LEAST_DEADLINE_S
    left_s: float = math.inf


def obey(measurer: Measurer, command: Command) -> list[RankTrial] | list[RankReport] | list[Timed]:
    """Do this rank's share of a command; every rank gets every rank's result."""
    note = {"chunks": command.chunks}
    measurer.until_s = time.perf_counter() + command.left_s
    with measurer.group.deadline(command.deadline_s, note):
        if command.task == "rehearsal":
            return measurer.rehearsal(command.chunks, command.micro_batch)
        if command.task == "trial":
            return measurer.trial(command.chunks, command.micro_batch)
        return measurer.block(command.chunks, command.micro_batch, command.steps)


@dataclass
class Leading:
    """What the live pipeline and the rehearsed one have in common.

    `append` journals an event. `trials`: what ran by M, that of an earlier group included. `left_s`: seconds left of
    the budget now.
    """

    measurer: Measurer
    plan: Plan
    send: Callable[[Command], Command]
    append: Callable[[Event], None]
    book: LayerBook
    trials: dict[int, Trial] = field(default_factory=dict)
    measured: bool = False
    left_s: Callable[[], float] = lambda: math.inf

    @property
    def shape(self) -> Shape:
        """The pipeline as the simulator knows it."""
        return shape_of(self.plan)

    def rehearse(self, chunks: int) -> list[RankReport]:
        """The reports of all K ranks at M."""
        micro_batch, _ = self.plan.candidates.batch_of(chunks)
        reports: list[RankReport] = self.call(  # type: ignore[assignment]
            Command("rehearsal", chunks, micro_batch, 0, self.command_deadline_s([chunks]))
        )
        return reports

    def foretell(self, chunks: int, reports: Sequence[RankReport]) -> Predicted:
        """What the rehearsal foretells for M, overheads from the other trials; journaled at once."""
        seconds = [report.seconds for report in reports if report.seconds is not None]
        predicted = predict(
            self.shape,
            chunks,
            self.operations(chunks, seconds, [rank.parts for rank in seconds]),
            [report.peak_bytes for report in reports],
            self.trials.values(),
            statistics.median(rank.overhead_s for rank in seconds),
        )
        self.append({"event": "predicted", "chunks": chunks, "predicted": predicted.model_dump(mode="json")})
        return predicted

    def operations(
        self, chunks: int, ranks: Sequence[RankSeconds], parts: Sequence[Sequence[PartSeconds]]
    ) -> Operations:
        """The operations of all ranks as the simulator wants them; `parts` of every rank."""
        micro_batch, _ = self.plan.candidates.batch_of(chunks)
        return Operations(
            parts=tuple(sorted((part for of_rank in parts for part in of_rank), key=lambda part: part.part)),
            update_s=tuple(rank.update_s for rank in ranks),
            boundary_bytes=self.measurer.work.boundary_bytes(micro_batch),
        )

    def command_deadline_s(self, values: Sequence[int]) -> float:
        """Seconds that one command over these values of M may take."""
        asked = self.plan.spec.sweep.trial_timeout
        if asked != "auto":
            return float(asked)
        if not self.step_s:
            return FIRST_DEADLINE_S
        known, slowest_s = max(self.step_s.items(), key=lambda item: item[1])
        samples = self.plan.candidates.batch_of
        growth = max(1.0, samples(max(values))[1] / samples(known)[1])
        return max(LEAST_DEADLINE_S, DEADLINE_STEPS * slowest_s * growth)

    @property
    def step_s(self) -> dict[int, float]:
        """Seconds a step by M, of what ran."""
        return {m: trial.step_median_s for m, trial in self.trials.items() if trial.step_median_s is not None}

    def call(self, command: Command) -> list[RankTrial] | list[RankReport] | list[Timed]:
        """Have every rank do its share."""
        self.measured = True
        self.measurer.group.remember(command.chunks)
        return obey(self.measurer, self.send(replace(command, left_s=self.left_s())))


def unfinished_trial(plan: Plan, chunks: int) -> Trial:
    """The trial of an M in which the budget ran out: it says nothing of this M."""
    micro_batch, mini_batch = plan.candidates.batch_of(chunks)
    reason = "sweep.budget was spent in the middle of it"
    return Trial(chunks=chunks, micro_batch=micro_batch, mini_batch=mini_batch, state="skipped", reason=reason)


def shape_of(plan: Plan) -> Shape:
    """The pipeline of a plan, as the simulator knows it."""
    return Shape(plan.spec.pipeline.schedule, plan.stages, plan.virtual_stages)
