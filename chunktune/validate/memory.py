"""torch's 1F1B with `return_outputs=True`: memory that grows with M where the textbook has it flat.

What one chunk adds to a rank's peak, from torch's code (torch/distributed/pipelining):

    l   last rank    the output that `stage.py: forward_one_chunk` appends to `output_chunks` till the step ends
    r   every rank   one receive buffer: an activation on the last rank, a gradient on the first
    l   last rank    `schedules.py: _merge_outputs` joins all outputs by `torch.cat` after the last backward, a copy
                     of M l; it takes the place of what the step has freed by then (D bytes, the loss's workspace) and
                     raises the peak only by what exceeds D

so that the last rank's peak is fixed + (l + r) M + max(0, l M - D): a line with a hinge at M = D / l.
"""

from __future__ import annotations

from collections.abc import Sequence

from chunktune.published import Measurement, measurements
from chunktune.validate.tables import Mark, Row, Table, row, table

_SOURCE = "discuss.pytorch.org 221886, pytorch/pytorch#159251"
_GIB = 2**30
_SEQUENCE, _HIDDEN, _VOCABULARY = 4096, 4096, 128256
_BYTES_OF_BF16 = 2
OUTPUT_GIB = _SEQUENCE * _VOCABULARY * _BYTES_OF_BF16 / _GIB
BOUNDARY_GIB = _SEQUENCE * _HIDDEN * _BYTES_OF_BF16 / _GIB


def tables() -> list[Table]:
    """Peak reserved memory of the last and of the first of two ranks."""
    return [_last_rank(), _first_rank()]


def marks() -> list[Mark]:
    """The last rank's planned peak is never below what was measured."""
    short = [each for each in _last_rows() if not each.calibrated and each.predicted < each.published]
    foretold = [each for each in _last_rows() if not each.calibrated]
    pairs = ", ".join(f"M = {e.chunks}: {e.predicted:.2f} for {e.published:.2f}" for e in foretold)
    return [Mark(name="torch 1F1B: memory not under-predicted", holds=not short, detail=f"{pairs} GiB")]


def upper_gib(first: Measurement, second: Measurement, chunks: int) -> float:
    """The most that the last rank may need at M = `chunks` above the second point: it plus (2 l + r) a chunk.

    The join shows in neither calibration point (`joined` is false), so the hinge lies at the second point or above
    it: that is where the bound bends. Raises ValueError where the join shows already; then the rise between the
    two is (2 l + r) a chunk itself and a line will do.
    """
    if joined(first, second):
        rise = f"{_slope(first, second):.3f} GiB a chunk between M = {first.chunks} and {second.chunks}"
        most = f"1.5 l + r = {1.5 * OUTPUT_GIB + BOUNDARY_GIB:.3f} GiB"
        raise ValueError(f"memory rises by {rise}; the bound starts from two points that rise by at most {most}")
    return second.value + (chunks - second.chunks) * (2 * OUTPUT_GIB + BOUNDARY_GIB)


def joined(first: Measurement, second: Measurement) -> bool:
    """Whether the copy of all outputs shows between two points: nearer to 2 l + r a chunk than to l + r."""
    return _slope(first, second) > 1.5 * OUTPUT_GIB + BOUNDARY_GIB


def _slope(first: Measurement, second: Measurement) -> float:
    return (second.value - first.value) / (second.chunks - first.chunks)


def _line(first: Measurement, second: Measurement, chunks: int) -> float:
    return second.value + (chunks - second.chunks) * _slope(first, second)


def _points(metric: str) -> list[Measurement]:
    points = [each for each in measurements("torch_1f1b_memory") if each.metric == metric]
    return sorted(points, key=lambda point: point.chunks)


def _last_rows() -> list[Row]:
    first, second, *others = _points("peak_reserved_gib_last_rank")
    known = [row(p, "last rank", p.value, "relative", calibrated=True) for p in (first, second)]
    return [*known, *(_bounded(first, second, point) for point in others)]


def _bounded(first: Measurement, second: Measurement, point: Measurement) -> Row:
    line, upper = _line(first, second, point.chunks), upper_gib(first, second, point.chunks)
    what = "last rank, upper end"
    return row(point, what, upper, "relative", interval=(line, upper), straight_line=line)


def _last_rank() -> Table:
    rows = _last_rows()
    first, second, *_ = _points("peak_reserved_gib_last_rank")
    sizes = f"l = {OUTPUT_GIB:.3f} GiB (bfloat16 logits), r = {BOUNDARY_GIB:.3f} GiB"
    rise = f"{_slope(first, second):.3f} GiB a chunk between M = {first.chunks} and {second.chunks}"
    notes = [
        f"known sizes: {sizes}; {rise}, so a chunk keeps one l and the joined copy does not show yet",
        f"the hinge lies anywhere above M = {second.chunks}: the data support an interval, from the straight line to"
        " (2 l + r) a chunk from there on, and a plan takes its upper end",
        _line_note(rows),
        "the post says GB, torchtitan reports GiB; reserved memory, so fragmentation is in it and not in the model",
        "with return_outputs=False, as in chunktune's own trials, outputs are neither kept nor joined",
    ]
    title = "Peak memory of the last rank under torch's 1F1B, K = 2, outputs kept"
    return table(
        "torch-memory-last", title, _SOURCE, "GiB", "relative", rows, calibration=_calibrated(rows), notes=notes
    )


def _line_note(rows: Sequence[Row]) -> str:
    errors = [(each.chunks, each.straight_line / each.published - 1) for each in rows if each.straight_line is not None]
    shown = ", ".join(f"{100 * error:+.1f}% at M = {chunks}" for chunks, error in errors)
    return f"the straight line through the two is off by {shown}"


def _first_rank() -> Table:
    first, *others = _points("peak_reserved_gib_first_rank")
    grown = [(point, first.value + (point.chunks - first.chunks) * BOUNDARY_GIB) for point in others]
    rows = [
        row(first, "first rank", first.value, "relative", calibrated=True),
        *(row(point, "first rank", value, "relative") for point, value in grown),
    ]
    note = f"one gradient buffer of {BOUNDARY_GIB:.3f} GiB a chunk, from its size alone"
    title = "Peak memory of the first rank under torch's 1F1B, K = 2"
    return table(
        "torch-memory-first", title, _SOURCE, "GiB", "relative", rows, calibration=_calibrated(rows), notes=[note]
    )


def _calibrated(rows: Sequence[Row]) -> str:
    return "the fixed part, on M = " + " and ".join(str(each.chunks) for each in rows if each.calibrated)
