"""A grid of predictions, and predictions beside measurements: text, Markdown, CSV and JSON. Pure functions to text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from chunktune import __version__
from chunktune.report import format_rate, or_dash, peak_text, plain, wrap
from chunktune.report.tabular import escaped, guarded
from chunktune.report.trials import draw, fit
from chunktune.units import format_bytes, format_seconds, format_share
from chunktune.whatif.calibration import Foretold, mean_and_worst
from chunktune.whatif.grid import SYMBOLS, Grid, Row

# What a narrow terminal does without, the dearest last; the varied keys, M and samples/s a device always stay.
_DISPENSABLE = ("N", "step", "basis", "b", "bubble", "peak of budget", "limit", "samples/s", "memory")
_NAMES = {key: symbol for symbol, key in SYMBOLS.items()}
_MOST_REASONS = 64

CSV_COLUMNS = tuple(name for name in Row.model_fields if name != "settings")
"""After one column a varied key: a row each, in seconds, bytes and samples/s, empty where not known."""


def grid_text(grid: Grid, width: int | None = None) -> str:
    """The head, the table of combinations that have an M, the others with their reasons, and the warnings."""
    head = f"chunktune {__version__}, predicted from {grid.costs}, nothing was run"
    blocks = [*wrap(plain(head), width), "", *_table(grid, width)]
    unfit = [row for row in grid.rows if row.chunks is None]
    if unfit:
        blocks += ["", *(line for row in unfit[:_MOST_REASONS] for line in wrap(_without(grid, row), width))]
    if len(unfit) > _MOST_REASONS:
        blocks.append(f"and {len(unfit) - _MOST_REASONS} more without an M; --json and --csv hold all of them")
    blocks += ["", *(line for line in _answer(grid, width))]
    blocks += [line for text in grid.warnings for line in wrap(plain(text), width, "warning        ")]
    return "\n".join(blocks) + "\n"


def grid_markdown(grid: Grid) -> str:
    """Every combination as a row of a GitHub table, those without an M with their reason."""
    headings, rows = grid_cells(grid, grid.rows)
    lines = [[*headings, "reason"], ["---"] * (len(headings) + 1)]
    lines += [[*row, each.reason or ""] for row, each in zip(rows, grid.rows, strict=True)]
    table = "\n".join(f"| {' | '.join(escaped(cell) for cell in line)} |" for line in lines)
    return f"**Predicted from {escaped(grid.costs)}; nothing was run**\n\n{table}\n"


def grid_csv(grid: Grid) -> str:
    """One line a combination: its varied keys, dotted, then CSV_COLUMNS."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*grid.varied, *CSV_COLUMNS])
    for row in grid.rows:
        fields = row.model_dump(mode="json")
        writer.writerow(
            [_csv_cell(row.settings.get(key)) for key in grid.varied]
            + [_csv_cell(fields[name]) for name in CSV_COLUMNS]
        )
    return text.getvalue()


def grid_json(grid: Grid) -> str:
    """{"mode": "predicted", "costs", "varied": [dotted keys], "rows": [...], "warnings": [...]}.

    A row has the keys of `whatif.grid.Row`, "settings" being the varied keys with their values; null where not known.
    """
    return json.dumps(grid.model_dump(mode="json"), indent=2, allow_nan=False) + "\n"


def calibration_lines(rows: Sequence[Foretold]) -> list[str]:
    """One line a measured trial with its prediction, made without it, then the mean and the worst error."""
    lines = [
        f"M = {row.chunks} (b = {row.micro_batch}): predicted {format_seconds(row.predicted_s)}, measured "
        f"{format_seconds(row.measured_s)}, {_percent(row.error)}{_peak_words(row)}"
        for row in rows
    ]
    if rows:
        mean, worst = mean_and_worst(tuple(rows))
        lines.append(
            f"error of a step predicted without its own trial: mean {100 * mean:.1f}%, worst {_percent(worst)}"
        )
    return lines


def grid_cells(grid: Grid, rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(headings, rows) of the table, formatted for people; "-" where not known."""
    cells = [_cells(grid, row) for row in rows]
    headings = tuple(cells[0]) if cells else ()
    return headings, [tuple(row.values()) for row in cells]


def name_of(key: str) -> str:
    """A varied key as people write it: its symbol, or its last part."""
    return _NAMES.get(key, key.rpartition(".")[2])


def _table(grid: Grid, width: int | None) -> list[str]:
    headings, rows = grid_cells(grid, [row for row in grid.rows if row.chunks is not None])
    if not rows:
        return ["no combination has an M that fits"]
    kept, dropped = fit(headings, rows, width, _DISPENSABLE)
    lines = [draw([headings[i] for i in kept], [[row[i] for i in kept] for row in rows], left="limit")]
    return lines + (wrap(f"(no room for: {', '.join(dropped)})", width) if dropped else [])


def _cells(grid: Grid, row: Row) -> dict[str, str]:
    cells = {name_of(key): _shown(row.settings.get(key)) for key in grid.varied}
    own: Mapping[str, str] = {
        "M": or_dash(row.chunks, str),
        "b": or_dash(row.micro_batch, str),
        "N": or_dash(row.mini_batch, str),
        "limit": f"{row.limit or '-'}{', below' if row.limit_side == 'below' else ''}",
        "samples/s": or_dash(row.throughput_samples_per_s, format_rate),
        "a device": or_dash(row.samples_per_s_a_device, format_rate),
        "step": or_dash(row.step_s, format_seconds),
        "bubble": or_dash(row.bubble, format_share),
        "peak of budget": peak_text(row.peak_bytes, row.peak_rank, row.budget_bytes),
        "memory": row.memory or "-",
        "basis": row.basis or "-",
    }
    return cells | {name: cell for name, cell in own.items() if name not in cells}


def _without(grid: Grid, row: Row) -> str:
    return plain(f"{settings_words(grid, row)}: {row.memory + ': ' if row.memory else ''}{row.reason or 'no M'}")


def settings_words(grid: Grid, row: Row) -> str:
    """The varied keys of a row with their values."""
    return ", ".join(f"{name_of(key)} = {_shown(row.settings.get(key))}" for key in grid.varied)


def _answer(grid: Grid, width: int | None) -> list[str]:
    best = grid.best
    if best is None or best.samples_per_s_a_device is None:
        return wrap("no combination has an M that fits", width, "best".ljust(15))
    rate = f"{format_rate(best.samples_per_s_a_device)} samples/s a device"
    text = f"{settings_words(grid, best)}: M = {best.chunks} (b = {best.micro_batch}, N = {best.mini_batch}), {rate}"
    return wrap(plain(text), width, "best".ljust(15))


def _shown(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:
        return str(value[0])
    return str(value)


def _csv_cell(value: Any) -> Any:
    if isinstance(value, (list, dict)):
        return json.dumps(value)
    return guarded(value) if isinstance(value, str) else value


def _peak_words(row: Foretold) -> str:
    if row.peaks is None:
        return ""
    rank, foretold, measured = row.peaks
    return f"; rank {rank} {format_bytes(foretold)} of {format_bytes(measured)}, {_percent(foretold / measured - 1)}"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f}%"
