"""Throughput and memory against M as inline SVG: no script, no font and no file from elsewhere. Pure.

Values of M stand side by side at equal distances, since a sweep doubles them. Colours are CSS classes of the page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from chunktune.report import format_rate, is_chosen, plain
from chunktune.report.limit import why_not
from chunktune.report.summary import fullest_known, state_word
from chunktune.results import Record, Trial
from chunktune.units import format_bytes, format_share

_LEFT, _RIGHT, _TOP, _BOTTOM = 84.0, 16.0, 18.0, 44.0
_PLOT_HEIGHT = 220.0
_SLOT_WIDTH, _LEAST_WIDTH = 46.0, 560.0
_TICKS = 4
# No step is over sooner, and dividing by less may leave no number to draw.
_BRIEFEST_S = 1e-12


@dataclass(frozen=True)
class _Frame:
    """The plot area: `count` slots from left to right, values from 0 at the foot to `ticks` times `step`."""

    count: int
    step: float
    ticks: int

    @classmethod
    def reaching(cls, reach: float, step: float, count: int) -> _Frame:
        """With as many ticks as `reach` needs."""
        return cls(count, step, max(1, math.ceil(reach / step)))

    @property
    def plot_width(self) -> float:
        return max(_LEAST_WIDTH, _SLOT_WIDTH * self.count)

    @property
    def slot(self) -> float:
        return self.plot_width / max(1, self.count)

    @property
    def foot(self) -> float:
        return _TOP + _PLOT_HEIGHT

    def x(self, index: float) -> float:
        """The middle of a slot."""
        return _LEFT + self.slot * (index + 0.5)

    def y(self, value: float) -> float:
        """The height of a value."""
        return self.foot - _PLOT_HEIGHT * (value / (self.step * self.ticks))


def throughput_chart(record: Record) -> str:
    """Samples/s against M: a point a trial with its interval, the chosen one marked, states where nothing ran."""
    trials = record.trials
    rates = [_rate(trial) for trial in trials]
    ends = [_rate_interval(trial) for trial in trials]
    reach = max((high for _, high in ends), default=0.0)
    frame = _Frame.reaching(reach, _decimal_step(reach), len(trials))
    shown = [(index, rate) for index, rate in enumerate(rates) if rate is not None]
    points = " ".join(f"{frame.x(index):.1f},{frame.y(rate):.1f}" for index, rate in shown)
    parts = [
        *_axes(frame, trials, format_rate),
        f'<polyline class="line" points="{points}"/>' if len(shown) > 1 else "",
        *(_point(record, trials[index], frame, index, rate, ends[index]) for index, rate in shown),
        *_states(frame, trials, [rate is None for rate in rates]),
    ]
    return _svg(frame, "Throughput in samples/s against the chunk count M", parts)


def memory_chart(record: Record) -> str:
    """Peak bytes of the fullest rank against M: a bar a trial, with what it may use and its capacity as lines.

    Empty where no trial knows bytes.
    """
    sizes = [_Size.of(trial) for trial in record.trials]
    reach = max((size.reach for size in sizes), default=0)
    if not reach:
        return ""
    frame = _Frame.reaching(reach, _binary_step(reach), len(sizes))
    parts = [
        *_axes(frame, record.trials, format_bytes),
        *(
            _bar(record, trial, frame, i, size)
            for i, (trial, size) in enumerate(zip(record.trials, sizes, strict=True))
        ),
        *_levels("budget", frame, [size.budget_bytes for size in sizes]),
        *_levels("capacity", frame, [size.capacity_bytes for size in sizes]),
        *_states(frame, record.trials, [not size.used_bytes for size in sizes]),
    ]
    return _svg(frame, "Peak memory of the fullest rank against the chunk count M", parts)


@dataclass(frozen=True)
class _Size:
    """The bytes of one trial: used by the fullest rank, or needed where it did not fit; what it may use and has."""

    used_bytes: int | None = None
    budget_bytes: int | None = None
    capacity_bytes: int | None = None
    text: str = ""

    @classmethod
    def of(cls, trial: Trial) -> _Size:
        stage, short = fullest_known(trial), trial.shortage
        if stage is not None and stage.peak_bytes is not None:
            share = (
                ""
                if not stage.budget_bytes
                else f", {format_share(stage.peak_bytes / stage.budget_bytes)} of what it may use"
            )
            text = f"rank {stage.rank}: {format_bytes(stage.peak_bytes)}{share}"
            return cls(stage.peak_bytes, stage.budget_bytes, stage.capacity_bytes, text)
        if short is not None:
            return cls(short.needed_bytes, short.budget_bytes, None, why_not(trial))
        return cls()

    @property
    def reach(self) -> int:
        return max(self.used_bytes or 0, self.budget_bytes or 0, self.capacity_bytes or 0)


def _rate(trial: Trial) -> float | None:
    return trial.throughput_samples_per_s if trial.fits else None


def _rate_interval(trial: Trial) -> tuple[float, float]:
    """The interval of the step as samples/s, low and high; the rate itself where there is none."""
    rate = _rate(trial) or 0.0
    low_s, high_s = trial.step_interval_s or (0.0, 0.0)
    if not (_BRIEFEST_S < low_s <= high_s):
        return rate, rate
    return min(rate, trial.mini_batch / high_s), max(rate, trial.mini_batch / low_s)


# --- drawing


def _point(record: Record, trial: Trial, frame: _Frame, index: int, rate: float, ends: tuple[float, float]) -> str:
    chosen = is_chosen(record, trial)
    x, y = frame.x(index), frame.y(rate)
    whisker = (
        f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.y(ends[0]):.1f}" y2="{frame.y(ends[1]):.1f}"/>'
    )
    title = f"M = {trial.chunks}: {format_rate(rate)} samples/s{', chosen' if chosen else ''}"
    dot = f'<circle class="{"chosen" if chosen else "dot"}" cx="{x:.1f}" cy="{y:.1f}" r="{7 if chosen else 4}"/>'
    return f"<g>{_title(title)}{whisker}{dot}</g>"


def _bar(record: Record, trial: Trial, frame: _Frame, index: int, size: _Size) -> str:
    if not size.used_bytes:
        return ""
    kind = "chosen" if is_chosen(record, trial) else "dot" if trial.fits else "short"
    width, y = frame.slot * 0.6, frame.y(size.used_bytes)
    place = f'x="{frame.x(index) - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{frame.foot - y:.1f}"'
    return f'<g>{_title(f"M = {trial.chunks}: {size.text}")}<rect class="{kind}" {place}/></g>'


def _levels(kind: str, frame: _Frame, values: Sequence[int | None]) -> list[str]:
    """One line from edge to edge where all known values are the same, else one in the slot of each."""
    known = {value for value in values if value is not None}
    if len(known) == 1:
        return [_level(kind, frame, 0, len(values), known.pop())]
    return [_level(kind, frame, i, i + 1, value) for i, value in enumerate(values) if value is not None]


def _level(kind: str, frame: _Frame, first: int, end: int, value: int) -> str:
    y, left, right = frame.y(value), frame.x(first - 0.5), frame.x(end - 0.5)
    return f'<line class="{kind}" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _states(frame: _Frame, trials: Sequence[Trial], bare: Sequence[bool]) -> Iterable[str]:
    """The state, upright, where a value of M has nothing to draw."""
    for index, (trial, empty) in enumerate(zip(trials, bare, strict=True)):
        if empty:
            x, y = frame.x(index) + 4, frame.foot - 8
            word = state_word(trial)
            yield f'<text class="state" x="{x:.1f}" y="{y:.1f}" transform="rotate(-90 {x:.1f} {y:.1f})">{word}</text>'


def _axes(frame: _Frame, trials: Sequence[Trial], form: Callable[[float], str]) -> Iterable[str]:
    for tick in range(frame.ticks + 1):
        y = frame.y(tick * frame.step)
        yield f'<line class="grid" x1="{_LEFT:.0f}" x2="{_LEFT + frame.plot_width:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{_LEFT - 8:.0f}" y="{y + 4:.1f}">{html.escape(form(tick * frame.step))}</text>'
    for index, trial in enumerate(trials):
        yield f'<text class="value" x="{frame.x(index):.1f}" y="{frame.foot + 18:.1f}">{trial.chunks}</text>'
    yield f'<text class="value" x="{_LEFT + frame.plot_width / 2:.1f}" y="{frame.foot + 38:.1f}">chunks M</text>'


def _decimal_step(reach: float) -> float:
    """A distance of ticks of 1, 2, 2.5 or 5 times a power of ten."""
    least = reach / _TICKS if reach > 1e-12 else 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= least), 10 * power)


def _binary_step(reach: float) -> float:
    """A distance of ticks that reads well in binary units: a power of two."""
    return 2.0 ** math.ceil(math.log2(max(reach, 1) / _TICKS))


def _title(text: str) -> str:
    return f"<title>{html.escape(plain(text))}</title>"


def _svg(frame: _Frame, label: str, parts: Iterable[str]) -> str:
    width, height = _LEFT + frame.plot_width + _RIGHT, frame.foot + _BOTTOM
    inside = "\n".join(part for part in parts if part)
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="min-width:{width * 0.75:.0f}px" role="img" '
        f'aria-label="{html.escape(label)}">\n{inside}\n</svg>'
    )
