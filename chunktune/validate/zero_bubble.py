"""Zero Bubble (Qi et al. 2023, arXiv 2401.10241): bubble rates and throughput from the times that were profiled.

The authors' cost of a step is the largest execution time over the ranks, from a rank's first start to its last end,
and the bubble rate is (cost - M (F + B + W)) / cost. A transfer sets out as soon as it is sent: "asynchronous" in
`chunktune.simulate`, which gives the published rates; torch's own rendezvous would give larger ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from chunktune.published import Measurement, measurements
from chunktune.simulate import Durations, active_s, timeline
from chunktune.validate.tables import Mark, Row, Table, row, table

RATE_TOLERANCE = 1e-4

_TABLE_4, _TABLE_5, _TABLE_8, _TABLE_9 = (f"arXiv 2401.10241 Table {number}" for number in (4, 5, 8, 9))
# What torch has in the place of the paper's schedules; ZB-H2 and ZB-2p have no counterpart.
_COUNTERPARTS = {
    "1F1B": "1f1b",
    "1F1B-I": "interleaved-1f1b",
    "ZB-H1": "interleaved-zero-bubble",
    "ZB-1p": "interleaved-zero-bubble",
    "ZB-V": "zbv-zero-bubble",
}
_COUNTERPART_NOTE = "ZB-H1 and ZB-1p are torch's InterleavedZeroBubble at V = 1, ZB-V is its ZBVZeroBubble"
_INTERLEAVED_NOTE = (
    "1F1B-I is torch's Interleaved1F1B with one layer a part, as in the paper, which does not say how it counted"
    " transfers for this schedule"
)


@dataclass(frozen=True)
class Times:
    """Seconds of one micro-batch in one stage: forward, input gradient, weight gradient, and one transfer."""

    forward_s: float
    input_s: float
    weight_s: float
    transfer_s: float

    @property
    def work_s(self) -> float:
        """Seconds that a rank computes for one micro-batch."""
        return self.forward_s + self.input_s + self.weight_s


def tables() -> list[Table]:
    """Bubble rates of 1F1B and of the others, at K = 8 and 16; throughput; throughput from one M to the next."""
    return [_rates_1f1b(), _rates_of_others(), _rates_16(), _throughput(), _ratios()]


def marks() -> list[Mark]:
    """Every bubble rate of 1F1B at K = 8 is within RATE_TOLERANCE."""
    found = _rates_1f1b()
    holds = abs(found.worst_error) <= RATE_TOLERANCE
    detail = f"worst error {found.worst_error:+.1e} of {len(found.rows)} rates, at most {RATE_TOLERANCE:g}"
    return [Mark(name="Zero Bubble: 1F1B bubble rates", holds=holds, detail=detail)]


@cache
def cost_s(schedule: str, stages: int, chunks: int, virtual_stages: int, times: Times) -> float:
    """The paper's cost of a step, in seconds: the largest execution time over the ranks."""
    durations = _durations(stages, virtual_stages, times)
    spans, _ = timeline(
        schedule,
        stages=stages,
        chunks=chunks,
        virtual_stages=virtual_stages,
        durations=durations,
        transfers="asynchronous",
    )
    return max(active_s(spans))


def _durations(stages: int, virtual_stages: int, times: Times) -> Durations:
    """A stage's times cut evenly over its V parts."""
    parts = stages * virtual_stages
    return Durations(
        forward_s=(times.forward_s / virtual_stages,) * parts,
        backward_s=((times.input_s + times.weight_s) / virtual_stages,) * parts,
        input_s=(times.input_s / virtual_stages,) * parts,
        weight_s=(times.weight_s / virtual_stages,) * parts,
        transfer_s=(times.transfer_s,) * (parts - 1),
        update_s=(0.0,) * stages,
    )


def _cost_of(point: Measurement, times: Times) -> float:
    schedule = _COUNTERPARTS[point.schedule]
    return cost_s(schedule, point.stages, point.chunks, _virtual_stages(point), times)


def _rate(point: Measurement, times: Times) -> float:
    cost = _cost_of(point, times)
    return (cost - point.chunks * times.work_s) / cost


def _virtual_stages(point: Measurement) -> int:
    """V: two for ZB-V; for 1F1B-I one layer a part, first and last stage counted as if they held one layer more."""
    if point.schedule == "ZB-V":
        return 2
    if point.schedule != "1F1B-I":
        return 1
    layers = re.search(r"\bL=(\d+)", point.model)
    if layers is None:
        raise ValueError(f"{point.model!r} does not say L")
    return (int(layers[1]) + 2) // point.stages


def _profiled(model: str, chunks: int) -> Times:
    """Table 9's times at K = 8."""
    seconds = {
        point.metric: point.value / 1e3
        for point in measurements("zero_bubble")
        if point.source == _TABLE_9 and (point.model, point.chunks) == (model, chunks)
    }
    return Times(seconds["T_F_ms"], seconds["T_B_ms"], seconds["T_W_ms"], seconds["T_comm_ms"])


def _points(source: str, *, only: str | None = None, other_than: str | None = None) -> list[Measurement]:
    found = [point for point in measurements("zero_bubble") if point.source == source]
    return [point for point in found if only in (None, point.schedule) and point.schedule != other_than]


def _label(point: Measurement) -> str:
    return f"{point.schedule}, {_model(point)}"


def _model(point: Measurement) -> str:
    return point.model.partition(" (")[0]


def _rate_rows(points: Sequence[Measurement]) -> list[Row]:
    return [row(p, _label(p), _rate(p, _profiled(p.model, p.chunks)), "absolute") for p in points]


def _rates_1f1b() -> Table:
    rows = _rate_rows(_points(_TABLE_5, only="1F1B"))
    title = "Bubble rates of 1F1B at K = 8, from the times of Table 9"
    note = "checks the simulator, not reality: the authors calculated these too"
    return table("zero-bubble-rates-1f1b", title, _TABLE_5, "share", "absolute", rows, notes=[note])


def _rates_of_others() -> Table:
    rows = _rate_rows(_points(_TABLE_5, other_than="1F1B"))
    title = "Bubble rates of other schedules at K = 8, from the times of Table 9"
    notes = [_COUNTERPART_NOTE, _INTERLEAVED_NOTE]
    return table("zero-bubble-rates-others", title, _TABLE_5, "share", "absolute", rows, notes=notes)


def _rates_16() -> Table:
    points = _points(_TABLE_8)
    anchor = next(point for point in points if point.schedule == "1F1B")
    times = _times_of_rate(anchor)
    rows = [row(p, _label(p), _rate(p, times), "absolute", calibrated=p is anchor) for p in points]
    title = f"Bubble rates at K = {anchor.stages}, whose times were not published"
    calibration = (
        f"a transfer of {100 * times.transfer_s:.2f}% of F + B + W, on 1F1B at M = {anchor.chunks};"
        f" F : B : W as Table 9 has them at K = 8, M = {_shares_from(anchor)}"
    )
    return table(
        "zero-bubble-rates-16",
        title,
        _TABLE_8,
        "share",
        "absolute",
        rows,
        calibration=calibration,
        notes=[_COUNTERPART_NOTE, _INTERLEAVED_NOTE],
    )


def _shares_from(anchor: Measurement) -> int:
    return min(p.chunks for p in _points(_TABLE_9) if p.model == anchor.model)


def _times_of_rate(anchor: Measurement) -> Times:
    """Times with F + B + W = 1 whose transfer gives the anchor's rate: the secant on a cost that is almost a line."""
    known = _profiled(anchor.model, _shares_from(anchor))
    shares = (known.forward_s / known.work_s, known.input_s / known.work_s, known.weight_s / known.work_s)
    wanted = anchor.chunks / (1 - anchor.value)
    before, after = (0.0, _cost_of(anchor, Times(*shares, 0.0))), (0.01, _cost_of(anchor, Times(*shares, 0.01)))
    for _ in range(20):
        if abs(after[1] - wanted) < 1e-9 * wanted:
            break
        slope = (after[1] - before[1]) / (after[0] - before[0])
        transfer = after[0] + (wanted - after[1]) / slope
        before, after = after, (transfer, _cost_of(anchor, Times(*shares, transfer)))
    return Times(*shares, after[0])


def _samples_per_gpu_per_s(point: Measurement) -> float:
    if point.micro_batch is None:
        raise ValueError(f"{_label(point)}: the measurement at M = {point.chunks} does not state b")
    cost = _cost_of(point, _profiled(point.model, point.chunks))
    return point.chunks * point.micro_batch / point.stages / cost


def _throughput() -> Table:
    rows = [row(p, _label(p), _samples_per_gpu_per_s(p), "relative") for p in _points(_TABLE_4)]
    title = "Measured throughput at K = 8, from the times of Table 9"
    notes = [
        "the times were profiled under ZB-2p; optimizer, gradient exchange and the runtime's overhead are not in them:"
        " the predictions are high",
        _COUNTERPART_NOTE,
    ]
    return table("zero-bubble-throughput", title, _TABLE_4, "samples/s a GPU", "relative", rows, notes=notes)


def _ratios() -> Table:
    rows = [_ratio(before, after) for before, after in pairwise(_points(_TABLE_4)) if _same_series(before, after)]
    title = "Measured throughput of one M over the next smaller, K = 8"
    return table("zero-bubble-ratios", title, _TABLE_4, "ratio", "relative", rows)


def _same_series(one: Measurement, other: Measurement) -> bool:
    return (one.model, one.schedule) == (other.model, other.schedule)


def _ratio(before: Measurement, after: Measurement) -> Row:
    predicted = _samples_per_gpu_per_s(after) / _samples_per_gpu_per_s(before)
    what = f"{_label(after)}, over M = {before.chunks}"
    return row(after, what, predicted, "relative", published=after.value / before.value)
