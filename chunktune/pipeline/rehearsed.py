"""K stages on fewer devices: every rank rehearses in turn, the schedule between them is simulated.

What is real are the operations, the memory and its limit; what nobody has seen are the communication and what the
ranks do to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chunktune.pipeline.leading import Leading
from chunktune.pipeline.live import trial_without_steps
from chunktune.pipeline.rehearsal import RankReport
from chunktune.pipeline.timing import RankSeconds
from chunktune.predict import Overhead, play, played, simulated
from chunktune.replay import Fresh, Task
from chunktune.results import Block, Predicted, Round, Trial
from chunktune.simulated_trial import step_figures

RESAMPLES = 12


@dataclass
class RehearsedPipeline(Leading):
    """Implements `replay.LiveRunner` by rehearsals alone.

    A round plays the schedule with operations drawn anew from those measured, so that the interval of a comparison
    says how sure they are.
    """

    _seconds: dict[int, list[RankSeconds]] = field(default_factory=dict)
    _overheads: dict[int, Overhead] = field(default_factory=dict)
    _visits: dict[int, int] = field(default_factory=dict)

    def trial(self, chunks: int) -> Trial:
        """Every rank's rehearsal at M, and the step that they make."""
        reports = self.rehearse(chunks)
        if any(report.state != "ok" for report in reports):
            return trial_without_steps(self.plan, chunks, reports)
        predicted = self.foretell(chunks, reports)
        self._keep(chunks, reports, predicted)
        trial = self._as_predicted(chunks, reports, predicted)
        self.trials[chunks] = trial.model_copy(update={"step_s": (), "predicted": None})
        return self.book.counted(trial)

    def _as_predicted(self, chunks: int, reports: Sequence[RankReport], predicted: Predicted) -> Trial:
        """The trial as the prediction has it: its step stands where the measured ones would."""
        step_s, durations = predicted.step_s, played(self.shape, predicted)
        assert step_s is not None and durations is not None
        micro_batch, mini_batch = self.plan.candidates.batch_of(chunks)
        bare = Trial(chunks=chunks, micro_batch=micro_batch, mini_batch=mini_batch, state="ok", predicted=predicted)
        sizes = [(rank.budget.capacity_bytes, rank.budget.budget_bytes) for rank in reports if rank.budget is not None]
        step = play(self.shape, chunks, durations)
        figures = step_figures(self.shape, chunks, mini_batch, durations, step, step_s, predicted.peak_bytes, sizes)
        return bare.model_copy(update={**figures, "step_interval_s": (step_s, step_s)})

    def _keep(self, chunks: int, reports: Sequence[RankReport], predicted: Predicted) -> None:
        self._seconds[chunks] = [report.seconds for report in reports if report.seconds is not None]
        self._overheads[chunks] = Overhead(overhead_s=predicted.overhead_s or 0.0)

    def rounds(self, values: Sequence[int], count: int) -> Sequence[Round]:
        """`count` rounds over the values, simulated."""
        for chunks in values:
            if chunks not in self._seconds:  # rehearsed by a group that is gone
                self.trial(chunks)
        return [Round(blocks=tuple(self._block(chunks) for chunks in values)) for _ in range(count)]

    def _block(self, chunks: int) -> Block:
        visit = self._visits.get(chunks, 0)
        self._visits[chunks] = visit + 1
        ranks = self._seconds[chunks]
        drawn = [rank.resampled[visit % len(rank.resampled)] for rank in ranks]
        step = simulated(self.shape, chunks, self.operations(chunks, ranks, drawn), self._overheads[chunks])
        _, mini_batch = self.plan.candidates.batch_of(chunks)
        return Block(chunks=chunks, mini_batch=mini_batch, step_s=step.step_s, busy_s=step.busy_s)

    def confirm(self, chunks: int) -> Trial:
        """Never asked: there is no pipeline to run."""
        raise NotImplementedError

    def freshness(self) -> Fresh:
        """Of no meaning without a confirmation."""
        return "fresh processes"

    def deadline_s(self, task: Task, values: Sequence[int]) -> float:
        """Seconds that one command of the task may take."""
        return self.command_deadline_s(values)
