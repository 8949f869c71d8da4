"""The table of trials in plain characters, as wide as there is room."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from chunktune.report import format_rate, fullest_stage, is_chosen, slowest_stage, tokens_per_sample, wrap
from chunktune.report.limit import trial_reason
from chunktune.results import Bubble, Record, Trial
from chunktune.units import format_seconds, format_share

# What a narrow terminal does without, the dearest last; M, state and samples/s always stay.
_DISPENSABLE = ("loss", "N", "tokens/s", "ideal", "slowest stage", "b", "of best", "bubble", "peak of budget", "step")


def trial_cells(record: Record) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(headings, rows) of the table of trials, one row a trial, formatted for people; "-" where not known.

    A rate of tokens has a column where the model has a sequence.
    """
    tokens = tokens_per_sample(record)
    rows = [_cells(trial, tokens, record) for trial in record.trials]
    headings = tuple(rows[0]) if rows else ()
    return headings, [tuple(row.values()) for row in rows]


def trial_table(record: Record, width: int | None = None, *, reasons: bool = True) -> str:
    """The table of trials as text; columns that `width` has no room for are left out and named below it.

    `reasons`: say below the table why each M that did not run did not.
    """
    headings, rows = trial_cells(record)
    if not rows:
        return "no value of M was tried"
    kept, dropped = _fit(headings, rows, width)
    lines = [_draw([headings[i] for i in kept], [[row[i] for i in kept] for row in rows])]
    if dropped:
        lines += wrap(f"(no room for: {', '.join(dropped)})", width)
    failed = [trial_reason(trial) for trial in record.trials if reasons and not trial.fits]
    return "\n".join([*lines, *(line for text in failed for line in wrap(text, width))])


def _cells(trial: Trial, tokens: int | None, record: Record) -> dict[str, str]:
    rate = trial.throughput_samples_per_s
    bubble = trial.bubble or Bubble(measured=None, ideal=None)
    cells = {
        "M": str(trial.chunks),
        "b": str(trial.micro_batch),
        "N": str(trial.mini_batch),
        "state": f"{trial.state}, chosen" if is_chosen(record, trial) else trial.state,
        "of best": _of_best(trial, record),
        "step": step_cell(trial),
        "samples/s": _or_dash(rate, format_rate),
    }
    if tokens is not None:
        cells["tokens/s"] = _or_dash(None if rate is None else rate * tokens, format_rate)
    cells |= {
        "bubble": _or_dash(bubble.measured, format_share),
        "ideal": _or_dash(bubble.ideal, format_share),
        "peak of budget": peak_cell(trial),
        "slowest stage": _slowest(trial),
        "loss": _or_dash(trial.loss, "{:.6g}".format),
    }
    return cells


def _of_best(trial: Trial, record: Record) -> str:
    """Throughput as a share of the best, from the paired rounds: what the choice goes by."""
    if not trial.fits or not record.comparisons:
        return "-"
    against = [comparison for comparison in record.comparisons if comparison.chunks == trial.chunks]
    if not against:
        return "best"
    low, high = against[0].interval or (against[0].ratio, against[0].ratio)
    return f"{100 * against[0].ratio:.1f} [{100 * low:.1f}, {100 * high:.1f}]%"


def step_cell(trial: Trial) -> str:
    """The median step with its interval, "-" where none was timed."""
    if trial.step_median_s is None:
        return "-"
    factor, unit = (1e3, "ms") if trial.step_median_s < 1 else (1.0, "s")
    median, *ends = (f"{factor * each_s:.3g}" for each_s in (trial.step_median_s, *(trial.step_interval_s or ())))
    return f"{median} [{', '.join(ends)}] {unit}" if ends else f"{median} {unit}"


def peak_cell(trial: Trial) -> str:
    """The fullest rank's peak as a share of what it may use, "-" where none was read."""
    stage = fullest_stage(trial)
    if stage is None:
        return "-"
    return f"{format_share(stage.peak_bytes / max(1, stage.budget_bytes))}, rank {stage.rank}"


def _slowest(trial: Trial) -> str:
    stage = slowest_stage(trial)
    return "-" if stage is None else f"rank {stage.rank}, {format_seconds(stage.busy_s)}"


def _fit(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> tuple[list[int], list[str]]:
    kept = list(range(len(headings)))
    dropped: list[str] = []
    for name in _DISPENSABLE:
        if width is None or _table_columns(headings, rows, kept) <= width:
            break
        if name in headings:
            kept.remove(headings.index(name))
            dropped.append(name)
    return kept, dropped


def _table_columns(headings: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int]) -> int:
    widths = [max(cell_len(row[i]) for row in [headings, *rows]) for i in kept]
    return sum(widths) + 3 * len(widths) + 1


def _draw(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = Table(box=box.ASCII)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "state" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    # Every switch is set: rich would otherwise read FORCE_COLOR, COLUMNS and the like.
    console = Console(
        file=text,
        force_terminal=False,
        force_jupyter=False,
        color_system=None,
        no_color=True,
        markup=False,
        emoji=False,
        highlight=False,
        width=_table_columns(headings, rows, range(len(headings))),
    )
    console.print(table)
    return text.getvalue().rstrip("\n")


def _or_dash(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)
