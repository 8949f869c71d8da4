"""How far predictions are from what a record measured, each made without the trial that it predicts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from chunktune.predict import Operations, Shape, fit_overhead, simulated
from chunktune.results import Record, Trial
from chunktune.whatif.setting import recorded_pipeline


@dataclass(frozen=True)
class Foretold:
    """One measured trial: seconds a step, predicted without it and measured, and the fullest rank's bytes.

    `peaks`: (rank, predicted, measured) of the rank with the highest measured peak, null where one is not known.
    """

    chunks: int
    micro_batch: int
    predicted_s: float
    measured_s: float
    peaks: tuple[int, int, int] | None = None

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1


def foretold(record: Record) -> tuple[Foretold, ...]:
    """Every trial that the record measured and rehearsed, by M, predicted from its rehearsal.

    The overheads are fitted from the other trials.
    """
    if record.mode != "measured":
        return ()
    shape = shape_of(record)
    ran = [trial for trial in record.trials if trial.fits and trial.step_median_s]
    return tuple(made for trial in ran if (made := _foretold(shape, trial, ran)) is not None)


def mean_and_worst(rows: tuple[Foretold, ...]) -> tuple[float, float]:
    """Mean of the absolute errors, and the error farthest from 0, as shares; of at least one row."""
    return fmean(abs(row.error) for row in rows), max((row.error for row in rows), key=abs)


def shape_of(record: Record) -> Shape:
    """The pipeline that a record ran."""
    pipeline = recorded_pipeline(record)
    return Shape(str(pipeline["schedule"]), int(pipeline["stages"]), int(pipeline["virtual_stages"] or 1))


def _foretold(shape: Shape, trial: Trial, ran: list[Trial]) -> Foretold | None:
    operations = None if trial.predicted is None else Operations.of(trial.predicted)
    if trial.predicted is None or operations is None or not trial.step_median_s:
        return None
    others = [other for other in ran if other.chunks != trial.chunks]
    overhead = fit_overhead(shape, others, trial.predicted.rehearsed_overhead_s)
    predicted_s = simulated(shape, trial.chunks, operations, overhead).step_s + overhead.constant_s
    return Foretold(trial.chunks, trial.micro_batch, predicted_s, trial.step_median_s, _peaks(trial))


def _peaks(trial: Trial) -> tuple[int, int, int] | None:
    foretold_bytes = () if trial.predicted is None else trial.predicted.peak_bytes
    known = [(stage.peak_bytes, stage.rank) for stage in trial.stages if stage.peak_bytes is not None]
    if not known or len(foretold_bytes) != len(trial.stages):
        return None
    measured, rank = max(known)
    return rank, foretold_bytes[rank], measured
