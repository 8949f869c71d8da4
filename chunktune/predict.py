"""A step's seconds from rehearsed operations, and the runtime's overheads fitted from steps that were measured. Pure.

    step(M) = simulated(operations (1 + contention); overhead an operation, seconds a byte between ranks) + constant

These four are what a rehearsal, which has no peer, cannot see; they come from trials other than the predicted one.
Contention, what peers on the same machine and the transfers take from an operation, is measured: what the ranks were
busy with in the real step, over the same operations rehearsed. The three overheads are fitted by least squares of
relative errors, none below zero, with a prior: a step that the machine's noise has moved by a tenth must not be laid
to an overhead of 30 ms an operation. The prior of the overhead is three times what the runtime took in the rehearsals,
without peers; the others start from zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from statistics import fmean, median

from chunktune import schedules
from chunktune.results import PartSeconds, Predicted, Trial
from chunktune.simulate import Durations, Simulated, simulate

_PROBE = 1e-3
"""Share of an operation by which an overhead is moved to see what a step makes of it."""
_NOISE = 0.01
"""Relative error of a measured step against its rehearsal on a quiet machine."""
_OVERHEAD_PRIOR = 3.0
"""Prior, and its spread, of the overhead over what the runtime takes without peers; gloo on a loopback takes 2 to 5."""
_LEAST_OVERHEAD_S = 2e-5
_SLOWEST_BYTE_S = 1e-9
"""Prior of seconds a byte: 1 GB/s, what gloo reaches on a loopback."""
_CONSTANT_SPREAD = 10.0
"""Prior of the seconds a step: as many overheads."""
_UNCONTENDED = 1
"""Prior of the contention: as many trials without any."""


@dataclass(frozen=True)
class Shape:
    """A pipeline as the simulator knows it."""

    schedule: str
    stages: int
    virtual_stages: int

    @property
    def ranks_of_parts(self) -> tuple[int, ...]:
        """The rank that holds each of the K V parts."""
        owner = {
            part: rank
            for rank in range(self.stages)
            for part in schedules.parts_of_rank(self.schedule, self.stages, self.virtual_stages, rank)
        }
        return tuple(owner[part] for part in range(len(owner)))


@dataclass(frozen=True)
class Overhead:
    """What the pipeline adds to rehearsed operations: seconds to each, to a byte between two ranks, to a step.

    `contention`: the share by which an operation itself takes longer. `fitted_from`: values of M.
    """

    overhead_s: float = 0.0
    transfer_s_per_byte: float = 0.0
    constant_s: float = 0.0
    contention: float = 0.0
    fitted_from: tuple[int, ...] = ()


@dataclass(frozen=True)
class Operations:
    """Seconds of a step's operations as a rehearsal found them, and the bytes that cross between parts."""

    parts: tuple[PartSeconds, ...]
    update_s: tuple[float, ...]
    boundary_bytes: tuple[int, ...]

    @classmethod
    def of(cls, predicted: Predicted) -> Operations | None:
        """Those that a prediction rests on; None for one without operations (a record of schema version 1)."""
        if not predicted.parts:
            return None
        return cls(predicted.parts, predicted.update_s, predicted.boundary_bytes)


def durations(shape: Shape, operations: Operations, overhead: Overhead) -> Durations:
    """What the simulator plays: a part's whole backward is the sum of its halves where only these were run."""
    owner = shape.ranks_of_parts
    between = zip(operations.boundary_bytes, owner, owner[1:], strict=False)
    parts, longer = operations.parts, 1 + overhead.contention
    halves = [
        backward_s(part) / 2 if half_s is None else half_s for part in parts for half_s in (part.input_s, part.weight_s)
    ]
    return Durations(
        forward_s=tuple(longer * part.forward_s for part in parts),
        backward_s=tuple(longer * backward_s(part) for part in parts),
        input_s=tuple(longer * half_s for half_s in halves[::2]),
        weight_s=tuple(longer * half_s for half_s in halves[1::2]),
        transfer_s=tuple(
            overhead.transfer_s_per_byte * size if source != target else 0.0 for size, source, target in between
        ),
        update_s=operations.update_s,
        overhead_s=overhead.overhead_s,
    )


def played(shape: Shape, predicted: Predicted) -> Durations | None:
    """What the simulator played for this prediction; None for one without operations (schema version 1)."""
    operations = Operations.of(predicted)
    if operations is None:
        return None
    overhead = Overhead(
        overhead_s=predicted.overhead_s or 0.0,
        transfer_s_per_byte=predicted.transfer_s_per_byte or 0.0,
        contention=predicted.contention or 0.0,
    )
    found = durations(shape, operations, overhead)
    return replace(found, transfer_s=predicted.transfer_s) if predicted.transfer_s else found


def backward_s(part: PartSeconds) -> float:
    """Seconds of the whole gradient of one micro-batch."""
    if part.backward_s is not None:
        return part.backward_s
    return (part.input_s or 0.0) + (part.weight_s or 0.0)


def simulated(shape: Shape, chunks: int, operations: Operations, overhead: Overhead) -> Simulated:
    """A step at M, the constant left out."""
    return play(shape, chunks, durations(shape, operations, overhead))


def play(shape: Shape, chunks: int, durations: Durations) -> Simulated:
    """A step at M of these durations."""
    return simulate(
        shape.schedule,
        stages=shape.stages,
        chunks=chunks,
        virtual_stages=shape.virtual_stages,
        durations=durations,
    )


def predict(
    shape: Shape,
    chunks: int,
    operations: Operations,
    peak_bytes: Sequence[int],
    trials: Iterable[Trial],
    rehearsed_overhead_s: float,
) -> Predicted:
    """The step at M from its rehearsal; overheads from `trials`, of which one at the same M is left out."""
    others = [trial for trial in trials if trial.chunks != chunks]
    overhead = fit_overhead(shape, others, rehearsed_overhead_s)
    return Predicted(
        step_s=simulated(shape, chunks, operations, overhead).step_s + overhead.constant_s,
        peak_bytes=tuple(peak_bytes),
        parts=operations.parts,
        update_s=operations.update_s,
        boundary_bytes=operations.boundary_bytes,
        overhead_s=overhead.overhead_s,
        transfer_s_per_byte=overhead.transfer_s_per_byte,
        constant_s=overhead.constant_s,
        contention=overhead.contention,
        rehearsed_overhead_s=rehearsed_overhead_s,
        fitted_from=overhead.fitted_from,
    )


@lru_cache(maxsize=4096)
def ideal_bubble(shape: Shape, chunks: int) -> float:
    """Idle share of a step for equal stages and free communication: in closed form, or simulated (F = I = W = 1)."""
    k, v = shape.stages, shape.virtual_stages
    closed = schedules.ideal_bubble(shape.schedule, stages=k, chunks=chunks, virtual_stages=v)
    if closed is not None:
        return closed
    one, two = (1.0,) * (k * v), (2.0,) * (k * v)
    equal = Durations(one, two, one, one, (0.0,) * (k * v - 1), (0.0,) * k)
    return simulate(shape.schedule, stages=k, chunks=chunks, virtual_stages=v, durations=equal).bubble


def fit_overhead(shape: Shape, trials: Iterable[Trial], rehearsed_s: float | None = None) -> Overhead:
    """The overheads that the measured steps of these trials show.

    `rehearsed_s`: what the runtime takes an operation without peers; where not given, what the trials started from.
    Trials without operations or without a measured step say nothing; without any the overhead is its prior.
    """
    ran = list(trials)
    prior_s = max(_LEAST_OVERHEAD_S, _rehearsed_s(ran) if rehearsed_s is None else rehearsed_s)
    rows = [row for trial in ran if (row := _row(shape, trial)) is not None]
    if not rows:
        return Overhead(overhead_s=_OVERHEAD_PRIOR * (rehearsed_s or 0.0))
    found = _least_squares([*rows, *_prior(prior_s)], ("overhead", "constant", "bytes"))
    return Overhead(
        overhead_s=found.get("overhead", 0.0),
        transfer_s_per_byte=found.get("bytes", 0.0),
        constant_s=found.get("constant", 0.0),
        contention=_contention(shape, ran),
        fitted_from=tuple(sorted(row.chunks for row in rows)),
    )


def _contention(shape: Shape, trials: Sequence[Trial]) -> float:
    """The share by which the ranks were busy for longer than rehearsed, the median over trials, none below zero."""
    shares = [share for trial in trials if (share := _busier(shape, trial)) is not None]
    if not shares:
        return 0.0
    return max(0.0, median(shares)) * len(shares) / (len(shares) + _UNCONTENDED)


def _busier(shape: Shape, trial: Trial) -> float | None:
    """The mean over the ranks; None where the trial does not say it."""
    operations = None if trial.predicted is None else Operations.of(trial.predicted)
    if operations is None or not trial.step_s or len(trial.stages) != shape.stages:
        return None
    rehearsed_s = simulated(shape, trial.chunks, operations, Overhead()).busy_s
    if min(rehearsed_s) <= 0:
        return None
    return fmean(stage.busy_s / busy_s - 1 for stage, busy_s in zip(trial.stages, rehearsed_s, strict=True))


def _rehearsed_s(trials: Sequence[Trial]) -> float:
    known = [trial.predicted.rehearsed_overhead_s for trial in trials if trial.predicted is not None]
    return median(values) if (values := [value for value in known if value is not None]) else _LEAST_OVERHEAD_S


def _prior(rehearsed_s: float) -> list[_Row]:
    """What is believed before any trial, as rows among the others: each unknown with its spread."""
    likely_s = _OVERHEAD_PRIOR * rehearsed_s
    return [
        _Row(0, 1.0, {"overhead": 1 / likely_s}),
        _Row(0, 0.0, {"bytes": 1 / _SLOWEST_BYTE_S}),
        _Row(0, 0.0, {"constant": 1 / (_CONSTANT_SPREAD * rehearsed_s)}),
    ]


@dataclass(frozen=True)
class _Row:
    """One measured step: what is missing of it, and what each overhead adds, in units of its noise."""

    chunks: int
    missing: float
    slopes: dict[str, float]


def _row(shape: Shape, trial: Trial) -> _Row | None:
    operations = None if trial.predicted is None else Operations.of(trial.predicted)
    step_s = trial.step_median_s
    if operations is None or step_s is None or step_s <= 0:
        return None
    bare = Overhead(contention=_busier(shape, trial) or 0.0)  # as it was in this trial, or an overhead takes it up
    bare_s = simulated(shape, trial.chunks, operations, bare).step_s
    crossing = max(operations.boundary_bytes, default=0)
    move_s = max(1e-9, _PROBE * max(part.forward_s for part in operations.parts))

    noise_s = step_s * max(_NOISE, _half_range(trial.step_s) / step_s)

    def slope(moved: Overhead, by: float) -> float:
        return (simulated(shape, trial.chunks, operations, moved).step_s - bare_s) / by / noise_s

    per_byte = move_s / crossing if crossing else 0.0
    return _Row(
        trial.chunks,
        (step_s - bare_s) / noise_s,
        {
            "overhead": slope(replace(bare, overhead_s=move_s), move_s),
            "bytes": slope(replace(bare, transfer_s_per_byte=per_byte), per_byte) if crossing else 0.0,
            "constant": 1 / noise_s,
        },
    )


def _half_range(samples: Sequence[float]) -> float:
    return (max(samples) - min(samples)) / 2 if samples else 0.0


def _least_squares(rows: Sequence[_Row], names: Sequence[str]) -> dict[str, float]:
    """Non-negative least squares over a few unknowns: the best of all sets that may be above zero."""
    best: tuple[float, dict[str, float]] = (sum(row.missing**2 for row in rows), {})
    for size in range(1, len(names) + 1):
        for chosen in combinations(names, size):
            found = _solved(rows, chosen)
            if found is not None and min(found.values()) >= 0:
                best = min(best, (_residual(rows, found), found), key=lambda pair: pair[0])
    return best[1]


def _residual(rows: Sequence[_Row], found: dict[str, float]) -> float:
    return sum(
        (row.missing - sum(row.slopes.get(name, 0.0) * value for name, value in found.items())) ** 2 for row in rows
    )


def _solved(rows: Sequence[_Row], names: Sequence[str]) -> dict[str, float] | None:
    """The unconstrained solution, None where the rows cannot tell the unknowns apart."""
    import numpy as np

    matrix = np.array([[row.slopes.get(name, 0.0) for name in names] for row in rows])
    scale = np.abs(matrix).max(axis=0)
    if not scale.all():
        return None
    values, _, rank, _ = np.linalg.lstsq(matrix / scale, np.array([row.missing for row in rows]), rcond=1e-9)
    return dict(zip(names, (values / scale).tolist(), strict=True)) if rank == len(names) else None
