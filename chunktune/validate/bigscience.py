"""BigScience's 181-billion-parameter runs at fixed global batch: which M wins, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from chunktune import theory
from chunktune.published import Measurement, measurements
from chunktune.validate.tables import Mark, Table, row, table

_SOURCE = "BigScience tr11 prequel (chronicles-prequel.md)"
_STAGES, _HALF_STAGES = 12, 6


def tables() -> list[Table]:
    """Seconds an iteration at K = 12 and 6, and each M's against the winner's."""
    twelve, six = _series(_STAGES), _series(_HALF_STAGES)
    costs = calibrate(*_ends(twelve))
    return [_seconds(twelve, costs), _margins(twelve, costs), _fewer_stages(six, costs)]


def marks() -> list[Mark]:
    """The M that is predicted to win at K = 12 is the one that won."""
    series = _series(_STAGES)
    costs = calibrate(*_ends(series))
    published, predicted = _winner(series), _predicted_winner(series, costs)
    detail = f"M = {predicted.chunks} is predicted to win, M = {published.chunks} won"
    return [Mark(name="BigScience: the winning M", holds=predicted == published, detail=detail)]


def calibrate(first: Measurement, second: Measurement) -> tuple[float, float]:
    """(a, c) in seconds of T = (M+K-1)(a + c b) through two points of different b; a step constant is left at 0.

    T has a term c N that does not change with M either, so a constant can only be told from it by a third point.
    Raises ValueError where the two have the same b.
    """
    (b1, one), (b2, two) = _per_pass(first), _per_pass(second)
    if b1 == b2:
        raise ValueError(f"both points have b = {b1:g}; calibration takes two points of different b")
    seconds_per_sample = (one - two) / (b1 - b2)
    return one - seconds_per_sample * b1, seconds_per_sample


def _per_pass(point: Measurement) -> tuple[float, float]:
    """b, and T/(M+K-1) in seconds."""
    return float(_micro_batch(point)), point.value / (point.chunks + point.stages - 1)


def _micro_batch(point: Measurement) -> int:
    if point.micro_batch is None:
        raise ValueError(f"the measurement at K = {point.stages}, M = {point.chunks} does not state b")
    return point.micro_batch


def _predict_s(point: Measurement, costs: tuple[float, float]) -> float:
    """T at the point's K and M; a stage of half as many ranks has twice the layers."""
    a_s, c_s = costs
    layers = _STAGES / point.stages
    mini_batch = point.chunks * _micro_batch(point)
    return theory.step_s(point.stages, point.chunks, mini_batch, layers * a_s, layers * c_s)


def _series(stages: int) -> list[Measurement]:
    points = measurements("bigscience_181b")
    return [each for each in points if each.stages == stages and each.metric == "seconds_per_iteration"]


def _ends(series: Sequence[Measurement]) -> tuple[Measurement, Measurement]:
    """The points of the largest and of the smallest M: the others lie between."""
    ordered = sorted(series, key=lambda point: point.chunks)
    return ordered[-1], ordered[0]


def _winner(series: Sequence[Measurement]) -> Measurement:
    return min(series, key=lambda point: point.value)


def _predicted_winner(series: Sequence[Measurement], costs: tuple[float, float]) -> Measurement:
    return min(series, key=lambda point: _predict_s(point, costs))


def _label(point: Measurement) -> str:
    return f"b = {point.micro_batch}"


def _seconds(series: Sequence[Measurement], costs: tuple[float, float]) -> Table:
    ends = _ends(series)
    rows = [row(p, _label(p), _predict_s(p, costs), "relative", calibrated=p in ends) for p in series]
    title = f"Seconds an iteration at fixed batch, K = {_STAGES}"
    notes = [_other_pairs(series), _repeats()]
    return table(
        "bigscience-seconds", title, _SOURCE, "s", "relative", rows, calibration=_calibration(ends, costs), notes=notes
    )


def _margins(series: Sequence[Measurement], costs: tuple[float, float]) -> Table:
    """T over that of the winner: by how much it wins."""
    best, ends = _winner(series), _ends(series)
    best_s = _predict_s(best, costs)
    rows = [
        row(p, f"M = {p.chunks} over M = {best.chunks}", _predict_s(p, costs) / best_s, "relative", published=ratio)
        for p in series
        if p is not best
        for ratio in [p.value / best.value]
    ]
    note = "where M itself was calibrated, the prediction is of the winner's time alone"
    title = f"How much slower the other M are than the winner, K = {_STAGES}"
    calibration = _calibration(ends, costs)
    return table("bigscience-margins", title, _SOURCE, "ratio", "relative", rows, calibration=calibration, notes=[note])


def _fewer_stages(series: Sequence[Measurement], costs: tuple[float, float]) -> Table:
    rows = [row(p, _label(p), _predict_s(p, costs), "relative") for p in series]
    published, predicted = _winner(series), _predicted_winner(series, costs)
    notes = [f"M = {predicted.chunks} is predicted to win, M = {published.chunks} won"]
    calibration = f"nothing at K = {_HALF_STAGES}: a and c are twice those of K = {_STAGES}, as the layers a stage"
    title = f"The same model on K = {_HALF_STAGES}, twice the replicas"
    return table("bigscience-half", title, _SOURCE, "s", "relative", rows, calibration=calibration, notes=notes)


def _calibration(ends: tuple[Measurement, Measurement], costs: tuple[float, float]) -> str:
    a_s, c_s = costs
    fit = f"a = {a_s:.4f} s, c = {c_s:.4f} s of T = (M+K-1)(a + c b)"
    return f"{fit}, on M = {ends[0].chunks} and {ends[1].chunks}; a step constant needs a third point and is left at 0"


def _other_pairs(series: Sequence[Measurement]) -> str:
    best, ends = _winner(series), set(_ends(series))
    pairs = [pair for pair in combinations(series, 2) if set(pair) != ends]
    agree = sum(_predicted_winner(series, calibrate(*pair)) == best for pair in pairs)
    return f"calibrated on any other pair of points, M = {best.chunks} is named in {agree} of {len(pairs)} cases"


def _repeats() -> str:
    points = measurements("bigscience_181b")
    again = [p for p in points if p.metric == "seconds_per_iteration_repeated"]
    first = _winner(_series(_STAGES))
    times = [first.value, *(p.value for p in again if p.chunks == first.chunks)]
    spread = max(times) / min(times) - 1
    shown = ", ".join(f"{each_s:g}" for each_s in times)
    return f"the same settings measured again: {shown} s at M = {first.chunks}, a spread of {100 * spread:.1f}%"
