"""Throughput and memory against M as bars of characters, as wide as the terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from chunktune.report import format_rate, is_chosen, share_of_budget, wrap
from chunktune.report.summary import fullest_known, state_word
from chunktune.results import Record, StageFigures, Trial
from chunktune.units import format_bytes, format_share

OFF_TERMINAL_COLUMNS = 100
_SMALLEST_BAR = 8
_WIDEST_BAR = 72
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class Marks:
    """The characters that bars are drawn with."""

    full: str
    short: str
    budget: str
    capacity: str
    eighths: str


BLOCKS = Marks(full="█", short="░", budget="┊", capacity="│", eighths=_EIGHTHS)
ASCII = Marks(full="#", short="x", budget=":", capacity="|", eighths="")


@dataclass(frozen=True)
class _Bar:
    """One row: what is left of the bar, its value, what is right of it; all values of a chart in one unit.

    `short`: the value is what was needed and not there. `budget`, `capacity`: where the two lines stand.
    """

    label: str
    value: float
    text: str
    short: bool = False
    budget: float | None = None
    capacity: float | None = None

    @property
    def reach(self) -> float:
        """The farthest that the row has to draw."""
        return max(self.value, self.budget or 0, self.capacity or 0)


def marks_for(encoding: str | None) -> Marks:
    """Blocks where the stream's encoding has them, plain ASCII where not."""
    try:
        "".join((BLOCKS.full, BLOCKS.short, BLOCKS.budget, BLOCKS.capacity, BLOCKS.eighths)).encode(encoding or "ascii")
    except (UnicodeError, LookupError):
        return ASCII
    return BLOCKS


def render_bars(record: Record, width: int | None = None, marks: Marks = BLOCKS) -> str:
    """Both charts, a row a trial, at most `width` columns wide (None: OFF_TERMINAL_COLUMNS).

    Memory is that of the fullest rank, with its budget and its capacity marked; where a value of M did not run its
    state stands there, and what it needed where that is known. Empty for a record without trials.
    """
    if not record.trials:
        return ""
    columns = width or OFF_TERMINAL_COLUMNS
    rates = [_rate_bar(record, trial) for trial in record.trials]
    sizes = [_memory_bar(record, trial) for trial in record.trials]
    lines = ["samples/s against M", *_draw(rates, columns, marks)]
    if any(bar.reach for bar in sizes):
        lines += ["", *wrap(_memory_heading(sizes, marks), width), *_draw(sizes, columns, marks)]
    return "\n".join([*lines, ""])


def _memory_heading(bars: Sequence[_Bar], marks: Marks) -> str:
    lines = []
    if any(bar.budget is not None for bar in bars):
        lines.append(f"{marks.budget} what it may use")
    if any(bar.capacity is not None for bar in bars):
        lines.append(f"{marks.capacity} its capacity")
    if any(bar.short for bar in bars):
        lines.append(f"{marks.short} needed and not there")
    return ", ".join(["peak memory of the fullest rank against M", *lines])


def _rate_bar(record: Record, trial: Trial) -> _Bar:
    rate = trial.throughput_samples_per_s
    if not trial.fits or rate is None:
        return _Bar(_label(trial), 0, state_word(trial))
    chosen = ", chosen" if is_chosen(record, trial) else ""
    return _Bar(_label(trial), rate, f"{format_rate(rate)}{chosen}")


def _memory_bar(record: Record, trial: Trial) -> _Bar:
    stage = fullest_known(trial)
    if stage is not None:
        return _Bar(
            _label(trial),
            stage.peak_bytes or 0,
            _size_text(stage) + (", chosen" if is_chosen(record, trial) else ""),
            budget=stage.budget_bytes,
            capacity=stage.capacity_bytes,
        )
    return _shortage_bar(trial)


def _shortage_bar(trial: Trial) -> _Bar:
    """What a trial that did not fit needed; its state alone where nobody knows."""
    word, short = state_word(trial), trial.shortage
    if short is None:
        return _Bar(_label(trial), 0, word)
    needed = f"{format_bytes(short.needed_bytes)}, " if short.needed_bytes is not None else ""
    text = f"{needed}rank {short.rank}, {word}"
    return _Bar(_label(trial), short.needed_bytes or 0, text, short=True, budget=short.budget_bytes)


def _size_text(stage: StageFigures) -> str:
    share = share_of_budget(stage)
    of_budget = "" if share is None else f" ({format_share(share)})"
    return f"{format_bytes(stage.peak_bytes or 0)}{of_budget}, rank {stage.rank}"


def _label(trial: Trial) -> str:
    return f"M = {trial.chunks}"


# --- drawing


def _draw(bars: Sequence[_Bar], columns: int, marks: Marks) -> list[str]:
    """A line a bar: label, bar, text. The bars share one scale, and give way to the texts where there is no room."""
    labels = max(cell_len(bar.label) for bar in bars)
    texts = max(cell_len(bar.text) for bar in bars)
    cells = min(_WIDEST_BAR, columns - labels - texts - 4)
    if cells < _SMALLEST_BAR:
        return [line for bar in bars for line in wrap(bar.text, columns, f"{bar.label.rjust(labels)}  ")]
    scale = max(bar.reach for bar in bars) or 1.0
    return [f"{bar.label.rjust(labels)}  {_cells(bar, scale, cells, marks)}  {bar.text}" for bar in bars]


def _cells(bar: _Bar, scale: float, cells: int, marks: Marks) -> str:
    """The bar, `cells` wide, of which `scale` fills all; lines stand in the cell in which their value lies."""
    drawn = list(_filled(bar.value / scale * cells, marks.short if bar.short else marks.full, marks).ljust(cells))
    for value, mark in ((bar.budget, marks.budget), (bar.capacity, marks.capacity)):
        if value is not None:
            drawn[min(cells - 1, int(value / scale * cells))] = mark
    return "".join(drawn)


def _filled(length: float, full: str, marks: Marks) -> str:
    """`length` cells of `full`, the last one in eighths where there are such; something above nothing is seen."""
    if length <= 0:
        return ""
    whole, rest = int(length), length - int(length)
    if full != marks.full or not marks.eighths:
        return full * max(1, round(length))
    eighth = marks.eighths[int(8 * rest)].strip()
    return (full * whole + eighth) or marks.eighths[1]
