"""The table of trials in plain characters, as wide as there is room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.cells import cell_len

from chunktune.report import (
    format_rate,
    fullest_stage,
    is_chosen,
    or_dash,
    share_of_budget,
    slowest_stage,
    tokens_per_sample,
    wrap,
)
from chunktune.report.limit import trial_reason
from chunktune.results import Bubble, Record, Trial
from chunktune.units import format_bytes, format_seconds, format_share

# What a narrow terminal does without, the dearest last; M, state and samples/s always stay.
_DISPENSABLE = (
    *("loss", "predicted peak", "measured peak", "N", "tokens/s", "ideal", "slowest stage", "b", "of best"),
    *("predicted step", "measured step", "bubble", "peak of budget", "step"),
)


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
    kept, dropped = fit(headings, rows, width, _DISPENSABLE)
    lines = [draw([headings[i] for i in kept], [[row[i] for i in kept] for row in rows])]
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
        "state": f"{_state(trial, record)}, chosen" if is_chosen(record, trial) else _state(trial, record),
        "of best": _of_best(trial, record),
        "step": step_cell(trial),
        "samples/s": or_dash(rate, format_rate),
    }
    if tokens is not None:
        cells["tokens/s"] = or_dash(None if rate is None else rate * tokens, format_rate)
    cells |= {
        "bubble": or_dash(bubble.measured, format_share),
        "ideal": or_dash(bubble.ideal, format_share),
        "peak of budget": peak_cell(trial),
        "slowest stage": _slowest(trial),
    }
    if record.mode != "predicted":
        cells["loss"] = or_dash(trial.loss, "{:.6g}".format)
    return {**cells, **comparison_cells(trial, record)}


def _state(trial: Trial, record: Record) -> str:
    """The state; for a prediction what it says of memory, where it says it."""
    if record.mode != "predicted" or trial.state not in ("ok", "oom"):
        return trial.state
    if trial.shortage is not None:
        return "TIGHT" if trial.shortage.within_capacity else "OOM"
    return "ok" if fullest_stage(trial) is None else "FITS"


def comparison_cells(trial: Trial, record: Record) -> dict[str, str]:
    """What was predicted beside what was measured, or the other way round, with the error of the prediction.

    Columns that no trial of the record fills are not there.
    """
    measures = record.mode == "measured"
    other = "predicted" if measures else "measured"
    cells = {}
    if any(step_pair(each, measures) is not None for each in record.trials):
        cells[f"{other} step"] = _pair_cell(step_pair(trial, measures), format_seconds, measures)
    if any(peak_pair(each, measures) is not None for each in record.trials):
        rank, pair = peak_pair(trial, measures) or (None, None)
        cells[f"{other} peak"] = _pair_cell(pair, format_bytes, measures) + ("" if rank is None else f", rank {rank}")
    return cells


def step_pair(trial: Trial, measures: bool) -> tuple[float, float] | None:
    """Seconds a step, predicted and measured; None where one is not known. `measures`: the record does."""
    predicted = None if trial.predicted is None else trial.predicted.step_s
    measured = trial.step_median_s if measures else trial.measured_step_s
    return (predicted, measured) if predicted and measured else None


def peak_pair(trial: Trial, measures: bool) -> tuple[int, tuple[int, int]] | None:
    """The rank with the highest measured peak and its bytes, predicted and measured; None where one is not known."""
    foretold = () if trial.predicted is None else trial.predicted.peak_bytes
    measured = [stage.peak_bytes for stage in trial.stages] if measures else list(trial.measured_peak_bytes)
    known = [(peak, rank) for rank, peak in enumerate(measured) if peak]
    if not known or len(foretold) != len(measured):
        return None
    peak, rank = max(known)
    return rank, (foretold[rank], peak)


def _pair_cell(pair: tuple[float, float] | None, form: Callable[[float], str], measures: bool) -> str:
    """The one of the two that has no column of its own, and the prediction's error."""
    if pair is None:
        return "-"
    predicted, measured = pair
    return f"{form(predicted if measures else measured)} ({100 * (predicted / measured - 1):+.1f}%)"


def _of_best(trial: Trial, record: Record) -> str:
    """Throughput as a share of the best, from the paired rounds: what the choice goes by."""
    if not trial.fits or not record.comparisons:
        return "-"
    against = [comparison for comparison in record.comparisons if comparison.chunks == trial.chunks]
    if not against:
        return "best"
    low, high = against[0].interval or (against[0].ratio, against[0].ratio)
    if record.mode == "predicted":
        return f"{100 * against[0].ratio:.1f}%"
    return f"{100 * against[0].ratio:.1f} [{100 * low:.1f}, {100 * high:.1f}]%"


def step_cell(trial: Trial) -> str:
    """The median step with its interval, "-" where none was timed."""
    if trial.step_median_s is None:
        return "-"
    factor, unit = (1e3, "ms") if trial.step_median_s < 1 else (1.0, "s")
    median, *ends = (f"{factor * each_s:.3g}" for each_s in (trial.step_median_s, *(trial.step_interval_s or ())))
    return f"{median} [{', '.join(ends)}] {unit}" if ends else f"{median} {unit}"


def peak_cell(trial: Trial) -> str:
    """The fullest rank's peak as a share of what it may use, "-" where none is known."""
    stage, short = fullest_stage(trial), trial.shortage
    share = None if stage is None else share_of_budget(stage)
    if stage is not None and share is not None:
        return f"{format_share(share)}, rank {stage.rank}"
    if short is None or short.where != "prediction" or short.needed_bytes is None:
        return "-"
    return f"{format_share(short.needed_bytes / max(1, short.budget_bytes))}, rank {short.rank}"


def _slowest(trial: Trial) -> str:
    stage = slowest_stage(trial)
    return "-" if stage is None else f"rank {stage.rank}, {format_seconds(stage.busy_s)}"


def fit(
    headings: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, dispensable: Sequence[str]
) -> tuple[list[int], list[str]]:
    """The columns that `width` has room for, and the names of those left out, the first of `dispensable` first."""
    kept = list(range(len(headings)))
    dropped: list[str] = []
    for name in dispensable:
        if width is None or _table_columns(headings, rows, kept) <= width:
            break
        if name in headings:
            kept.remove(headings.index(name))
            dropped.append(name)
    return kept, dropped


def _table_columns(headings: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int]) -> int:
    widths = [max(cell_len(row[i]) for row in [headings, *rows]) for i in kept]
    return sum(widths) + 3 * len(widths) + 1


def draw(headings: Sequence[str], rows: Sequence[Sequence[str]], left: str = "state") -> str:
    """Rows of cells as a table in plain characters; the column named `left` is set to the left, all others right."""
    widths = [max(cell_len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    lefts = [heading == left for heading in headings]
    edge = f"+{'-' * (sum(widths) + 3 * len(widths) - 1)}+"
    rule = f"|{'+'.join('-' * (width + 2) for width in widths)}|"
    lines = [f"| {' | '.join(map(_padded, row, widths, lefts))} |" for row in [headings, *rows]]
    return "\n".join([edge, lines[0], rule, *lines[1:], edge])


def _padded(cell: str, width: int, left: bool) -> str:
    """`cell` in `width` columns; a character may take none or two of them."""
    space = " " * (width - cell_len(cell))
    return cell + space if left else space + cell
