"""The state of a sweep as a terminal shows it: lines, a memory bar a rank, and both for rich. Pure, without a clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from chunktune.report import format_rate, plain, share_of_budget
from chunktune.report.live import Seen, remaining
from chunktune.results import StageFigures, Trial
from chunktune.units import format_bytes, format_seconds, format_share

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_BARS = 8
"""Ranks with a bar of their own; of more ranks the fullest have one."""


def status_lines(seen: Seen, elapsed_s: float) -> list[str]:
    """The task in hand, the time, and the best so far, in a line each."""
    lines = [_in_hand(seen, elapsed_s), f"elapsed {_clock(elapsed_s)}{_left_text(seen, elapsed_s)}"]
    return [*lines, _best_text(seen)] if seen.trials else lines


def _in_hand(seen: Seen, elapsed_s: float) -> str:
    if seen.task is None:
        return seen.pending
    values = ", ".join(map(str, seen.task.values))
    word = _WORDS.get(seen.task.kind, plain(seen.task.kind))
    return f"{word} M = {values}, {_clock(elapsed_s - seen.task.began_s)}"


_WORDS = {"trial": "trying", "rounds": "comparing", "confirm": "confirming"}


def _left_text(seen: Seen, elapsed_s: float) -> str:
    left = remaining(seen, elapsed_s)
    if left is None:
        return ""
    if left.how == "about":
        return f", about {_clock(left.seconds)} left"
    return f", at most {_clock(left.seconds)} left by sweep.budget" if left.seconds > 0 else ", sweep.budget is spent"


def _best_text(seen: Seen) -> str:
    if seen.best is None:
        return "best so far: no M fits yet"
    rate = seen.best.throughput_samples_per_s
    return f"best so far: M = {seen.best.chunks}" + ("" if rate is None else f", {format_rate(rate)} samples/s")


def _clock(seconds: float) -> str:
    """Whole seconds: what is shown four times a second should not flicker."""
    return format_seconds(seconds) if seconds >= 119.5 else f"{max(0.0, seconds):.0f} s"


class MemoryBar(NamedTuple):
    """A rank's peak as a share of what it may use; null where the line stands for several ranks."""

    label: str
    share: float | None
    text: str


def memory_bars(trial: Trial) -> list[MemoryBar]:
    """A bar a rank whose share is known; of more than MOST_BARS the fullest, and a line for the others.

    A trial that ran out of memory has one, where the bytes that it needed are known.
    """
    known = [(share, stage) for stage in trial.stages if (share := share_of_budget(stage)) is not None]
    if not known:
        return _shortage_bar(trial)
    if len(known) <= MOST_BARS:
        return [_bar(share, stage) for share, stage in known]
    known.sort(key=lambda each: (-each[0], each[1].rank))
    others = known[MOST_BARS:]
    text = f"{len(others)} more ranks: at most {format_share(others[0][0])}"
    return [*(_bar(share, stage) for share, stage in known[:MOST_BARS]), MemoryBar("", None, text)]


def _bar(share: float, stage: StageFigures) -> MemoryBar:
    return MemoryBar(f"rank {stage.rank}", share, f"{format_share(share)} of {format_bytes(stage.budget_bytes or 0)}")


def _shortage_bar(trial: Trial) -> list[MemoryBar]:
    short = trial.shortage
    if short is None or short.needed_bytes is None:
        return []
    share = short.needed_bytes / max(1, short.budget_bytes)
    return [MemoryBar(f"rank {short.rank}", share, f"{format_share(share)} of {format_bytes(short.budget_bytes)}")]


# --- for rich

_BAR_COLUMNS = 40
_BESIDE_THE_BAR = 32
_FULL, _NEARLY = 1.0, 0.9


def panel(seen: Seen, elapsed_s: float, columns: int) -> RenderableType:
    """The state `elapsed_s` seconds after the start of the sweep, for rich, on a terminal of so many columns."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(line) for line in status_lines(seen, elapsed_s)]
    bars = [] if seen.latest is None else memory_bars(seen.latest)
    if seen.latest is not None and bars:
        parts.append(Text(f"memory at M = {seen.latest.chunks}, peak of what a rank may use"))
        parts += _bar_grid([bar for bar in bars if bar.share is not None], columns)
        parts += [Text(bar.text) for bar in bars if bar.share is None]
    return Group(*parts)


def _bar_grid(bars: Sequence[MemoryBar], columns: int) -> list[RenderableType]:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    width = max(0, min(_BAR_COLUMNS, columns - _BESIDE_THE_BAR))
    grid = Table.grid(padding=(0, 1))
    for bar in bars:
        share = bar.share or 0.0
        style = "red" if share > _FULL else "yellow" if share > _NEARLY else "green"
        drawn = ProgressBar(total=1.0, completed=share, width=width, complete_style=style, finished_style=style)
        grid.add_row(bar.label, *([drawn] if width else []), bar.text)
    return [grid]
