"""Several records side by side: a row each with its answer, then what differs between their settings. Pure."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

from rich.cells import cell_len

from chunktune.report import format_rate, or_dash, peak_text, plain, trial_of, wrap
from chunktune.report.summary import (
    CSV_COLUMNS,
    LONGEST_CELL,
    differences,
    settings_of,
    shown_setting,
    summaries,
    summary,
)
from chunktune.report.tabular import guarded, markdown_table
from chunktune.report.trials import draw, fit, step_cell
from chunktune.results import Record
from chunktune.units import format_share, shorten

# What a narrow terminal does without, the dearest last; record, M, limit and samples/s always stay.
_DISPENSABLE = ("N", "b", "bubble", "step", "confidence", "peak of budget")
_HEADING = "differs"
_SAME = "nothing differs between their settings and environments"


def to_text(records: Sequence[Record], names: Sequence[str], width: int | None = None) -> str:
    """The table of records, then the table of what differs: at most `width` columns wide (None: unlimited)."""
    headings, rows = record_cells(records, names)
    kept, dropped = fit(headings, rows, width, _DISPENSABLE)
    table = draw([headings[i] for i in kept], [[row[i] for i in kept] for row in rows], left="record")
    left_out = wrap(f"(no room for: {', '.join(dropped)})", width) if dropped else []
    return "\n".join([table, *left_out, "", *_differing_lines(records, names, width)]) + "\n"


def to_markdown(records: Sequence[Record], names: Sequence[str]) -> str:
    """Both tables as GitHub tables."""
    headings, rows = record_cells(records, names)
    differing = differing_cells(records, names)
    below = markdown_table([_HEADING, *names], differing) if differing else _SAME
    return f"{markdown_table(headings, rows)}\n\n{below}\n"


def to_csv(records: Sequence[Record], names: Sequence[str]) -> str:
    """One line a record below CSV_COLUMNS; what differs is in `to_json` alone."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for each in summaries(records, names):
        values = [getattr(each, name) for name in CSV_COLUMNS]
        writer.writerow([guarded(value) if isinstance(value, str) else value for value in values])
    return text.getvalue()


def to_json(records: Sequence[Record], names: Sequence[str]) -> str:
    """A list of summaries, with the keys of `Summary`; null where not known."""
    found = [each.model_dump(mode="json") for each in summaries(records, names)]
    return json.dumps(found, indent=2, allow_nan=False) + "\n"


def record_cells(records: Sequence[Record], names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """(headings, rows) of the table of records, formatted for people; "-" where not known."""
    rows = [_cells(record, name) for record, name in zip(records, names, strict=True)]
    return list(rows[0]) if rows else [], [list(row.values()) for row in rows]


def differing_cells(records: Sequence[Record], names: Sequence[str]) -> list[list[str]]:
    """A row a dotted key that differs, a column a record; empty where nothing does."""
    differing = differences([settings_of(record) for record in records])
    return [[plain(key), *(shown_setting(value) for value in values)] for key, values in differing.items()]


def _cells(record: Record, name: str) -> dict[str, str]:
    each = summary(record, name)
    trial = trial_of(record, each.chunks)
    return {
        "record": shorten(each.record, LONGEST_CELL),
        "M": _answer(record),
        "b": or_dash(each.micro_batch, str),
        "N": or_dash(each.mini_batch, str),
        "limit": f"{each.limit or '-'}{', below' if each.limit_side == 'below' else ''}",
        "samples/s": or_dash(each.throughput_samples_per_s, format_rate),
        "step": "-" if trial is None else step_cell(trial),
        "bubble": or_dash(each.bubble, format_share),
        "peak of budget": peak_text(each.peak_bytes, each.peak_rank, each.budget_bytes),
        "confidence": each.confidence or "-",
    }


def _answer(record: Record) -> str:
    if record.verdict is None:
        return "no verdict"
    return "no M" if record.verdict.chunks is None else str(record.verdict.chunks)


def _differing_lines(records: Sequence[Record], names: Sequence[str], width: int | None) -> list[str]:
    """A table where there is room for one, else a line a key that names the records of each value."""
    rows = differing_cells(records, names)
    if not rows:
        return wrap(_SAME, width)
    headings = [_HEADING, *(shorten(plain(name), LONGEST_CELL) for name in names)]
    table = draw(headings, rows, left=_HEADING)
    if width is None or max(map(cell_len, table.split("\n"))) <= width:
        return [table]
    return [line for row in rows for line in wrap(_one_line(row, headings), width)]


def _one_line(row: Sequence[str], headings: Sequence[str]) -> str:
    holders: dict[str, list[str]] = {}
    for value, name in zip(row[1:], headings[1:], strict=True):
        holders.setdefault(value, []).append(name)
    return f"{row[0]}: " + "; ".join(f"{value} ({', '.join(held)})" for value, held in holders.items())
