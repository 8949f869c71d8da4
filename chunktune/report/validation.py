"""A validation for people (text, Markdown) and for programs (CSV, JSON). Pure functions to text."""

from __future__ import annotations

import csv
import io

from chunktune.report import wrap
from chunktune.report.trials import draw
from chunktune.validate import Mark, Row, Table, Validation

CSV_COLUMNS = (
    *("table", "unit", "what", "stages", "chunks", "published", "predicted", "error", "errors", "calibrated"),
    *("low", "high", "straight_line", "source"),
)


def to_text(validation: Validation, width: int | None = None) -> str:
    """Every table with its errors and what was calibrated, then the pass marks; tables keep their own width."""
    blocks = [_table_text(table, width) for table in validation.tables]
    marks = [line for mark in validation.marks for line in wrap(_mark(mark), width)]
    return "\n\n".join([*blocks, "\n".join(["Pass marks", *marks])]) + "\n"


def to_markdown(validation: Validation) -> str:
    """The same as GitHub tables."""
    blocks = [_table_markdown(table) for table in validation.tables]
    marks = "\n".join(f"- {_mark(mark)}" for mark in validation.marks)
    return "\n\n".join([*blocks, f"### Pass marks\n\n{marks}"]) + "\n"


def to_csv(validation: Validation) -> str:
    """One line a comparison below CSV_COLUMNS, numbers in the table's unit, empty where a row has none."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for table in validation.tables:
        shared = {"table": table.name, "unit": table.unit, "errors": table.errors, "source": table.source}
        writer.writerows({**row.model_dump(), **shared} for row in table.rows)
    return text.getvalue()


def to_json(validation: Validation) -> str:
    """All of it, as the classes have it."""
    return validation.model_dump_json(indent=2)


def _table_text(table: Table, width: int | None) -> str:
    headings, rows = _cells(table)
    return "\n".join(
        [
            *wrap(f"{table.title} [{table.unit}; {table.source}]", width),
            draw(headings, rows, left="what"),
            *(line for text in _below(table) for line in wrap(text, width)),
        ]
    )


def _table_markdown(table: Table) -> str:
    headings, rows = _cells(table)
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    grid = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    below = "\n".join(f"- {text}" for text in _below(table))
    return f"### {table.title}\n\n{table.unit}; {table.source}\n\n{grid}\n\n{below}"


def _below(table: Table) -> list[str]:
    foretold = sum(not row.calibrated for row in table.rows)
    mean, worst = _error(table, table.mean_error).removeprefix("+"), _error(table, table.worst_error)
    count = "1 prediction" if foretold == 1 else f"{foretold} predictions"
    return [f"error over {count}: mean {mean}, worst {worst}", f"calibrated: {table.calibration}", *table.notes]


def _cells(table: Table) -> tuple[list[str], list[list[str]]]:
    headings = ["what", "K", "M", "published", "predicted", "error"]
    bounded = any(row.low is not None for row in table.rows)
    rows = [_row_cells(table, row) + (_bound_cells(table, row) if bounded else []) for row in table.rows]
    return headings + (["interval", "straight line", "its error"] if bounded else []), rows


def _row_cells(table: Table, row: Row) -> list[str]:
    error = "calibrated" if row.calibrated else _error(table, row.error)
    values = [_value(table, row.published), _value(table, row.predicted)]
    return [row.what, str(row.stages), str(row.chunks), *values, error]


def _bound_cells(table: Table, row: Row) -> list[str]:
    if row.low is None or row.high is None or row.straight_line is None:
        return ["-", "-", "-"]
    interval = f"{_value(table, row.low)} to {_value(table, row.high)}"
    return [interval, _value(table, row.straight_line), _error(table, row.straight_line / row.published - 1)]


def _value(table: Table, value: float) -> str:
    if table.unit in ("share", "ratio"):
        return f"{value:.4f}"
    return f"{value:.2f}"


def _error(table: Table, error: float) -> str:
    return f"{error:+z.5f}" if table.errors == "absolute" else f"{100 * error:+z.2f}%"


def _mark(mark: Mark) -> str:
    return f"{'holds' if mark.holds else 'FAILS'}: {mark.name}: {mark.detail}"
