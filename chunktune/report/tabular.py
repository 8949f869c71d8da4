"""The trials as a table, one row a trial: CSV in seconds and bytes for programs, Markdown for people."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Any

from chunktune.report import fullest_stage, is_chosen, plain, slowest_stage, tokens_per_sample
from chunktune.report.limit import why_not
from chunktune.report.terminal import verdict_line
from chunktune.report.trials import trial_cells
from chunktune.results import Record, Trial

CSV_COLUMNS = (
    "chunks",
    "micro_batch",
    "mini_batch",
    "chosen",
    "state",
    "reason",
    "rank",
    "step_median_s",
    "step_low_s",
    "step_high_s",
    "throughput_samples_per_s",
    "throughput_tokens_per_s",
    "bubble_measured",
    "bubble_ideal",
    "fullest_rank",
    "fullest_peak_bytes",
    "fullest_reserved_bytes",
    "fullest_budget_bytes",
    "slowest_rank",
    "slowest_busy_s",
    "slowest_samples_per_s",
    "loss",
    "step_s",
    "predicted_step_s",
    "measured_step_s",
)
_SIGNIFICANT = "%.9g"
# A spreadsheet runs a cell that begins with one of these, and a message of the user's code may.
_FORMULA = ("=", "+", "-", "@")


def to_csv(record: Record) -> str:
    """One row a trial below the row of CSV_COLUMNS; seconds, bytes, plain numbers, empty where not known.

    `fullest_*` is the rank whose peak is the largest share of its budget, `slowest_*` the busiest one;
    `step_s` holds the raw samples in seconds, separated by spaces.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for trial in record.trials:
        writer.writerow({name: _csv_cell(value) for name, value in _row(record, trial).items()})
    return text.getvalue()


def to_markdown(record: Record) -> str:
    """The verdict in one line, then the trials as a GitHub table that names why a value of M did not run."""
    head = f"**{escaped(verdict_line(record))}**\n"
    headings, rows = trial_cells(record)
    if not rows:
        return f"{head}\nno value of M was tried\n"
    reasons = ["" if trial.fits else why_not(trial) for trial in record.trials]
    cells = [(*row, reason) for row, reason in zip(rows, reasons, strict=True)]
    return f"{head}\n{markdown_table((*headings, 'reason'), cells)}\n"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain texts as a GitHub table, every cell escaped; without a newline at the end."""
    cells = [[escaped(cell) for cell in row] for row in (headings, *rows)]
    cells.insert(1, ["---"] * len(headings))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _csv_cell(value: object) -> object:
    return _SIGNIFICANT % value if isinstance(value, float) else value


def _row(record: Record, trial: Trial) -> dict[str, Any]:
    rate, tokens = trial.throughput_samples_per_s, tokens_per_sample(record)
    low_s, high_s = trial.step_interval_s or (None, None)
    return {
        "chunks": trial.chunks,
        "micro_batch": trial.micro_batch,
        "mini_batch": trial.mini_batch,
        "chosen": is_chosen(record, trial),
        "state": trial.state,
        "reason": None if trial.reason is None else guarded(trial.reason),
        "rank": trial.rank,
        "step_median_s": trial.step_median_s,
        "step_low_s": low_s,
        "step_high_s": high_s,
        "throughput_samples_per_s": rate,
        "throughput_tokens_per_s": None if rate is None or tokens is None else rate * tokens,
        "bubble_measured": trial.bubble.measured if trial.bubble else None,
        "bubble_ideal": trial.bubble.ideal if trial.bubble else None,
        **_stage_columns(trial),
        "loss": trial.loss,
        "step_s": " ".join(_SIGNIFICANT % sample for sample in trial.step_s),
        "predicted_step_s": None if trial.predicted is None else trial.predicted.step_s,
        "measured_step_s": trial.step_median_s if record.mode == "measured" else trial.measured_step_s,
    }


def _stage_columns(trial: Trial) -> dict[str, Any]:
    fullest, slowest = fullest_stage(trial), slowest_stage(trial)
    columns: dict[str, Any] = {}
    if fullest is not None:
        columns["fullest_rank"] = fullest.rank
        columns["fullest_peak_bytes"] = fullest.peak_bytes
        columns["fullest_reserved_bytes"] = fullest.reserved_bytes
        columns["fullest_budget_bytes"] = fullest.budget_bytes
    if slowest is not None:
        columns["slowest_rank"] = slowest.rank
        columns["slowest_busy_s"] = slowest.busy_s
        columns["slowest_samples_per_s"] = slowest.samples_per_s
    return columns


def guarded(text: str) -> str:
    """`text` as one cell that no spreadsheet takes for a formula."""
    clean = plain(text)
    return f"'{clean}" if clean.startswith(_FORMULA) else clean


def escaped(text: str) -> str:
    """`text` as one cell of a GitHub table: on one line, nothing in it taken for a cell border or markup."""
    return re.sub(r"([\\|`*\[\]])", r"\\\1", plain(text)).replace("&", "&amp;").replace("<", "&lt;")
