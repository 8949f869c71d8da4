"""Throughput against a baseline's, with the noise of both. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from chunktune.gate.finding import Conditions, Finding
from chunktune.results import Record, Trial
from chunktune.units import format_seconds, format_share

_FEWEST_SAMPLES = 2  # one sample says nothing of its own noise

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Ratio:
    """Throughput over the baseline's. `interval`: from every pair of ends of the two 95 % intervals of the median
    step, so at least 95 %; None where one of them is not known. `by_confirmation`: both from fresh processes.
    """

    found: Trial
    base: Trial
    ratio: float
    interval: tuple[float, float] | None
    by_confirmation: bool


def measured_at(record: Record, chunks: int | None) -> Trial | None:
    """The trial of an M with a step time above 0, None where there is none."""
    return next((trial for trial in record.trials if trial.chunks == chunks and _is_timed(trial)), None)


def throughput(record: Record, conditions: Conditions, baseline: Record) -> tuple[Finding, ...]:
    """The throughput of the two choices; where they differ, also that of the baseline's M in both records."""
    mine, theirs = record.chosen, baseline.chosen
    if mine is None or theirs is None:
        return ()
    findings = [_finding("throughput", ratio_of(record, mine, baseline, theirs), conditions.max_slowdown)]
    if mine != theirs and measured_at(record, theirs) and measured_at(baseline, theirs):
        same = ratio_of(record, theirs, baseline, theirs)
        findings.append(_finding(f"throughput at M = {theirs}", same, conditions.max_slowdown))
    return tuple(findings)


def ratio_of(record: Record, chunks: int, baseline: Record, base_chunks: int) -> Ratio | None:
    """The throughput of `chunks` over that of `base_chunks` in the baseline, None where a step time is not known.

    From the confirmations in fresh processes where both records have one, else from the trials.
    """
    pair = _confirmed_at(record, chunks), _confirmed_at(baseline, base_chunks)
    confirmed = None not in pair
    found, base = pair if confirmed else (measured_at(record, chunks), measured_at(baseline, base_chunks))
    if found is None or base is None:
        return None
    ratio = _quotient(_rate(found, found.step_median_s), _rate(base, base.step_median_s))
    return None if ratio is None else Ratio(found, base, ratio, _interval(found, base), confirmed)


def _finding(check: str, ratio: Ratio | None, max_slowdown: float) -> Finding:
    if ratio is None:
        return Finding(check=check, outcome="failed", unit="samples/s", words="the step time is not known in both")
    least = (1 - max_slowdown) * (1 - _ROUNDING)
    within = "not more than" if ratio.ratio >= least else "more than"
    words = f"{_change(ratio)}, {within} the {format_share(max_slowdown)} allowed"
    beyond = ratio.ratio < least
    decided = ratio.interval is not None and ratio.interval[1] < least
    if beyond and not decided:
        words += "; not decided: " + ("no interval is known" if ratio.interval is None else "within the noise of both")
    expected = least * (_rate(ratio.base, ratio.base.step_median_s) or 0.0)
    found = _rate(ratio.found, ratio.found.step_median_s) or 0.0
    return Finding(
        check=check,
        outcome="failed" if beyond and decided else "warning" if beyond else "passed",
        words=words,
        expected=expected,
        found=found,
        unit="samples/s",
        relation="at least",
        by=found - expected,
        ratio=ratio.ratio,
        ratio_interval=ratio.interval,
    )


def _change(ratio: Ratio) -> str:
    """ "12% slower than the baseline [10% to 14%]", and the two steps."""
    faster = ratio.ratio >= 1
    ends = sorted(_percent(end, faster) for end in ratio.interval or ())
    interval = f" [{ends[0]:.1f}% to {ends[1]:.1f}%]" if ends else ""
    by = f"{_percent(ratio.ratio, faster):.1f}% {'faster' if faster else 'slower'} than the baseline{interval}"
    steps = f"{_step(ratio.found)} a step against {_step(ratio.base)}"
    return f"{by}: {steps}{', both in fresh processes' if ratio.by_confirmation else ''}"


def _step(trial: Trial) -> str:
    return f"{format_seconds(trial.step_median_s or 0.0)} at M = {trial.chunks}"


def _percent(ratio: float, faster: bool) -> float:
    return round(100 * (ratio - 1 if faster else 1 - ratio), 1) + 0.0  # never "-0.0"


def _interval(found: Trial, base: Trial) -> tuple[float, float] | None:
    """(slowest new over fastest old, fastest new over slowest old)."""
    ends, base_ends = _ends(found), _ends(base)
    if ends is None or base_ends is None:
        return None
    low = _quotient(_rate(found, ends[1]), _rate(base, base_ends[0]))
    high = _quotient(_rate(found, ends[0]), _rate(base, base_ends[1]))
    return None if low is None or high is None else (low, high)


def _ends(trial: Trial) -> tuple[float, float] | None:
    return trial.step_interval_s if len(trial.step_s) >= _FEWEST_SAMPLES else None


def _rate(trial: Trial, step_s: float | None) -> float | None:
    """Samples/s of a step that takes so long; None where that is no number above 0."""
    return None if not step_s else _quotient(float(trial.mini_batch), step_s)


def _quotient(above: float | None, below: float | None) -> float | None:
    """A quotient of two numbers above 0; None where one is not known, or it is beyond what a float can hold."""
    if not above or not below:
        return None
    quotient = above / below
    return quotient if 0 < quotient < math.inf else None


def _is_timed(trial: Trial) -> bool:
    return trial.fits and _rate(trial, trial.step_median_s) is not None


def _confirmed_at(record: Record, chunks: int) -> Trial | None:
    trial = record.confirmation
    return trial if trial is not None and trial.chunks == chunks and _is_timed(trial) else None
