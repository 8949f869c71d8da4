"""The history of records as a table with its trends, for people and for programs. Pure functions to text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

from chunktune.report import format_rate, or_dash, wrap
from chunktune.report.bars import ASCII, Marks
from chunktune.report.history import Row, moment
from chunktune.report.tabular import guarded, markdown_table
from chunktune.report.trials import draw, fit
from chunktune.units import format_bytes, format_share, shorten

CSV_COLUMNS = tuple(Row.model_fields)
"""One row a record, in seconds, bytes, samples/s and shares, empty where not known."""
LONGEST_TREND = 60
_LONGEST_NAME = 40
_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.:-=+*#"
# What a narrow terminal does without, the dearest last; when, spec, M and samples/s always stay.
_DISPENSABLE = (
    *("schedule", "N", "b", "K", "torch", "device", "kind", "confidence", "peak of budget"),
    *("limit", "record", "change"),
)


def to_text(rows: Sequence[Row], width: int | None = None, marks: Marks = ASCII) -> str:
    """The table, at most `width` columns wide (None: unlimited), then a line a spec with how its throughput went."""
    headings, cells = history_cells(rows)
    kept, dropped = fit(headings, cells, width, _DISPENSABLE)
    table = draw([headings[i] for i in kept], [[row[i] for i in kept] for row in cells], left="record")
    left_out = wrap(f"(no room for: {', '.join(dropped)})", width) if dropped else []
    below = [line for text in trends(rows, marks) for line in wrap(text, width)]
    return "\n".join([table, *left_out, *below]) + "\n"


def to_markdown(rows: Sequence[Row]) -> str:
    """The table as a GitHub table."""
    headings, cells = history_cells(rows)
    return markdown_table(headings, cells) + "\n"


def to_csv(rows: Sequence[Row]) -> str:
    """One line a record below CSV_COLUMNS, oldest first."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in rows:
        values = [getattr(row, name) for name in CSV_COLUMNS]
        writer.writerow([guarded(value) if isinstance(value, str) else value for value in values])
    return text.getvalue()


def to_json(rows: Sequence[Row]) -> str:
    """A list of objects with the keys of `Row`, oldest first; null where not known."""
    return json.dumps([row.model_dump(mode="json") for row in rows], indent=2, allow_nan=False) + "\n"


def history_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """(headings, rows) formatted for people; "-" where not known."""
    cells = [_cells(row) for row in rows]
    return list(cells[0]) if cells else [], [list(row.values()) for row in cells]


def trends(rows: Sequence[Row], marks: Marks = ASCII) -> list[str]:
    """A line each spec and mode with two rates or more: the range, and one character a record, oldest first."""
    rates: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        if row.throughput_samples_per_s is not None:
            rates.setdefault((row.spec, row.mode), []).append(row.throughput_samples_per_s)
    return [_trend(*group, values, marks) for group, values in rates.items() if len(values) > 1]


def _trend(spec: int, mode: str, rates: Sequence[float], marks: Marks) -> str:
    low, high = min(rates), max(rates)
    levels = _ASCII if marks is ASCII else _BLOCKS
    top = len(levels) - 1
    shown = rates[-LONGEST_TREND:]
    line = "".join(levels[round(top * (rate - low) / (high - low)) if high > low else top] for rate in shown)
    how = "" if mode == "measured" else f", {mode}"
    earlier = f"the last {len(shown)} of {len(rates)}: " if len(rates) > len(shown) else ""
    return f"spec {spec}{how}: {format_rate(low)} to {format_rate(high)} samples/s, oldest first: {earlier}{line}"


def _cells(row: Row) -> dict[str, str]:
    return {
        "when": _when(row.started_at),
        "spec": str(row.spec),
        "record": shorten(row.record, _LONGEST_NAME),
        "schedule": row.schedule or "-",
        "K": or_dash(row.stages, str),
        "M": _answer(row),
        "b": or_dash(row.micro_batch, str),
        "N": or_dash(row.mini_batch, str),
        "limit": f"{row.limit or '-'}{', below' if row.limit_side == 'below' else ''}",
        "samples/s": or_dash(row.throughput_samples_per_s, format_rate),
        "change": _change(row),
        "peak of budget": _peak(row),
        "confidence": row.confidence or "-",
        "torch": row.torch or "-",
        "device": row.device or "-",
        "kind": _kind(row),
    }


def _when(started_at: str) -> str:
    found = moment(started_at)
    return shorten(started_at, 20) if found is None else f"{found:%Y-%m-%d %H:%M}"


def _answer(row: Row) -> str:
    if row.limit is None:
        return "no verdict"
    return "no M" if row.chunks is None else str(row.chunks)


def _change(row: Row) -> str:
    """Against the record before of the same spec: of the throughput, and M where it is another."""
    rate = [] if row.throughput_change is None else [f"{100 * row.throughput_change:+.1f}%"]
    was = [f"M was {(row.chunks or 0) - row.chunks_change}"] if row.chunks_change else []
    return ", ".join([*rate, *was]) or "-"


def _peak(row: Row) -> str:
    if row.peak_bytes is None:
        return "-"
    size = format_bytes(row.peak_bytes)
    return size if row.peak_share is None else f"{format_share(row.peak_share)}, {size}"


def _kind(row: Row) -> str:
    quick = ["quick"] if row.quick else []
    cut_off = [] if row.status == "complete" else [row.status]
    return ", ".join([row.mode, *quick, *cut_off])
