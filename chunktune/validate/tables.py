"""The values that a validation is made of: rows of published against predicted, their errors, pass marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from chunktune.published import Measurement
from chunktune.results import Finite, Frozen

Unit = Literal["share", "ratio", "samples/s a GPU", "s", "GiB"]
Errors = Literal["absolute", "relative"]


class Row(Frozen):
    """One comparison at K = `stages`, M = `chunks`, in the table's unit.

    `error`: predicted - published, or that over published (`Table.errors`). `calibrated`: the model was fitted to
    this published value, so that it is no prediction. `low`, `high`: the interval where the data support no point,
    `predicted` then being the end that a plan has to allow for. `straight_line`: what a line through the
    calibration points says, where that is shown beside.
    """

    what: str
    stages: int
    chunks: int
    published: Finite
    predicted: Finite
    error: Finite
    calibrated: bool = False
    low: Finite | None = None
    high: Finite | None = None
    straight_line: Finite | None = None


class Table(Frozen):
    """Rows of one kind from one source.

    `calibration` says what was fitted to which points. `mean_error` (of the magnitudes) and `worst_error` (the
    largest magnitude, with its sign) are over the rows that are predictions.
    """

    name: str
    title: str
    source: str
    unit: Unit
    errors: Errors
    calibration: str
    rows: tuple[Row, ...]
    mean_error: Finite
    worst_error: Finite
    notes: tuple[str, ...] = ()


class Mark(Frozen):
    """A condition that has to hold, whether it does, and the numbers."""

    name: str
    holds: bool
    detail: str


class Validation(Frozen):
    """Every table and every pass mark."""

    tool: dict[str, str]
    tables: tuple[Table, ...]
    marks: tuple[Mark, ...]

    @property
    def failed(self) -> tuple[Mark, ...]:
        """The marks that do not hold."""
        return tuple(mark for mark in self.marks if not mark.holds)


def row(
    measured: Measurement,
    what: str,
    predicted: float,
    errors: Errors,
    *,
    published: float | None = None,
    calibrated: bool = False,
    interval: tuple[float, float] | None = None,
    straight_line: float | None = None,
) -> Row:
    """A row for a measurement; `published` where that is not the measured value itself but derived from it."""
    value = measured.value if published is None else published
    difference = predicted - value
    low, high = interval or (None, None)
    return Row(
        what=what,
        stages=measured.stages,
        chunks=measured.chunks,
        published=value,
        predicted=predicted,
        error=difference if errors == "absolute" else difference / value,
        calibrated=calibrated,
        low=low,
        high=high,
        straight_line=straight_line,
    )


def table(
    name: str,
    title: str,
    source: str,
    unit: Unit,
    errors: Errors,
    rows: Sequence[Row],
    *,
    calibration: str = "nothing",
    notes: Sequence[str] = (),
) -> Table:
    """A table with its mean and worst error. Raises ValueError where every row is calibrated."""
    foretold = [each.error for each in rows if not each.calibrated]
    if not foretold:
        raise ValueError(f"table {name} has {len(rows)} rows and all are calibrated; at least one must be a prediction")
    return Table(
        name=name,
        title=title,
        source=source,
        unit=unit,
        errors=errors,
        calibration=calibration,
        rows=tuple(rows),
        mean_error=sum(map(abs, foretold)) / len(foretold),
        worst_error=max(foretold, key=abs),
        notes=tuple(notes),
    )
