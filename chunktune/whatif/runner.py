"""The search's runner that predicts: a simulated step and counted bytes in place of processes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from chunktune import schedules
from chunktune.candidates import Candidates
from chunktune.costs import Costs, Setting
from chunktune.errors import UsageError
from chunktune.predict import Shape
from chunktune.results import Block, PartSeconds, Predicted, Round, Shortage, Trial
from chunktune.simulate import Durations, Simulated
from chunktune.simulated_trial import step_figures
from chunktune.units import format_bytes
from chunktune.whatif.setting import Room

CostsAt = Callable[[int], Costs]
"""b -> the costs of the setting there."""
Simulate = Callable[[int, Durations], Simulated]
"""M and durations -> a step of the setting, the constant left out."""
Peaks = Callable[[int, int], tuple[int, ...]]
"""M and b -> the peak bytes of every rank; empty where nobody knows them."""


@dataclass
class PredictedRunner:
    """Implements `search.Runner`. `measured`: (M, b) -> what a record ran there. `notes`: of all costs asked."""

    setting: Setting
    candidates: Candidates
    costs_at: CostsAt
    simulate: Simulate
    peaks: Peaks
    room: Room
    measured: Mapping[tuple[int, int], Trial] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    _trials: dict[int, Trial] = field(default_factory=dict)

    def trial(self, chunks: int) -> Trial:
        """The prediction at M: "ok", or "oom" where a rank's peak is above its budget.

        Raises UsageError for costs that are all zero, and what the source raises.
        """
        self._trials[chunks] = self._predict(chunks)
        return self._trials[chunks]

    def rounds(self, values: Sequence[int], count: int) -> Sequence[Round]:
        """`count` equal rounds: a prediction has no noise, so every comparison is decided by its ratio."""
        blocks = tuple(self._block(self._trials[chunks]) for chunks in values)
        return [Round(blocks=blocks)] * count

    def confirm(self, chunks: int) -> Trial:
        """The same again."""
        return self._trials[chunks]

    def remaining_s(self) -> float:
        """Without end."""
        return float("inf")

    def _predict(self, chunks: int) -> Trial:
        micro_batch, mini_batch = self.candidates.batch_of(chunks)
        costs = self.costs_at(micro_batch)
        self.notes.update(dict.fromkeys(costs.notes))
        predicted = Predicted(
            step_s=None,
            peak_bytes=self.peaks(chunks, micro_batch),
            parts=self._parts(costs.durations),
            update_s=costs.durations.update_s,
            transfer_s=costs.durations.transfer_s,
            overhead_s=costs.durations.overhead_s,
            constant_s=costs.constant_s,
            basis=costs.basis,
        )
        ran = self.measured.get((chunks, micro_batch))
        trial = Trial(
            chunks=chunks,
            micro_batch=micro_batch,
            mini_batch=mini_batch,
            state="ok",
            predicted=predicted,
            measured_step_s=None if ran is None else ran.step_median_s,
            measured_peak_bytes=() if ran is None else _known_peaks(ran),
        )
        shortage = short_of(predicted.peak_bytes, self.room)
        if shortage is not None:
            return trial.model_copy(update=_does_not_fit(shortage))
        return trial.model_copy(update=self._figures(trial, predicted, costs))

    def _parts(self, durations: Durations) -> tuple[PartSeconds, ...]:
        split = self._schedule.splits_backward
        return tuple(
            PartSeconds(
                part=part,
                forward_s=forward_s,
                backward_s=None if split else durations.backward_s[part],
                input_s=durations.input_s[part] if split else None,
                weight_s=durations.weight_s[part] if split else None,
            )
            for part, forward_s in enumerate(durations.forward_s)
        )

    def _figures(self, trial: Trial, predicted: Predicted, costs: Costs) -> dict[str, object]:
        """What a trial that fits holds besides."""
        simulated = self.simulate(trial.chunks, costs.durations)
        step_s = simulated.step_s + costs.constant_s
        if step_s <= 0 or max(simulated.busy_s) <= 0:
            raise UsageError("the costs of every operation are 0 seconds; a step has to take some time to be compared")
        shape = Shape(self._schedule.name, self.setting.stages, self.setting.virtual_stages)
        sizes = [(self.room.capacity_bytes, self.room.budget_bytes)] * shape.stages
        figures = step_figures(
            shape, trial.chunks, trial.mini_batch, costs.durations, simulated, step_s, predicted.peak_bytes, sizes
        )
        return {"predicted": predicted.model_copy(update={"step_s": step_s}), **figures}

    @property
    def _schedule(self) -> schedules.Schedule:
        return schedules.SCHEDULES[self.setting.spec.pipeline.schedule]

    def _block(self, trial: Trial) -> Block:
        busy_s = tuple(stage.busy_s for stage in trial.stages)
        return Block(chunks=trial.chunks, mini_batch=trial.mini_batch, step_s=trial.step_s[0], busy_s=busy_s)


def short_of(peaks: Sequence[int], room: Room) -> Shortage | None:
    """The rank whose predicted peak exceeds what it may use by most; None where all fit or nobody knows."""
    if not peaks or room.budget_bytes is None or room.limit_bytes is None or max(peaks) <= room.budget_bytes:
        return None
    rank = max(range(len(peaks)), key=lambda index: (peaks[index], -index))
    return Shortage(
        rank=rank,
        needed_bytes=peaks[rank],
        budget_bytes=room.budget_bytes,
        within_capacity=peaks[rank] <= room.limit_bytes,
        where="prediction",
    )


def _does_not_fit(shortage: Shortage) -> dict[str, object]:
    need = f"rank {shortage.rank} needs {format_bytes(shortage.needed_bytes or 0)}"
    reason = f"{need}, may use {format_bytes(shortage.budget_bytes)}"
    return {"state": "oom", "reason": reason, "rank": shortage.rank, "shortage": shortage}


def _known_peaks(trial: Trial) -> tuple[int, ...]:
    peaks = [stage.peak_bytes for stage in trial.stages]
    return tuple(peak for peak in peaks if peak is not None) if None not in peaks else ()
