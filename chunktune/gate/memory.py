"""Memory of the choice: what stays free on the fullest rank, and the highest peak. Pure."""

from __future__ import annotations

from chunktune.gate.finding import Conditions, Finding, Outcome
from chunktune.results import Record, StageFigures
from chunktune.units import format_bytes, format_share

_ROUNDING = 1e-9


def memory(record: Record, conditions: Conditions, baseline: Record | None) -> tuple[Finding, ...]:
    """Headroom and peak of the chosen M; nothing for a record that chose none."""
    if record.chosen is None:
        return ()
    findings = []
    if (least := _least_headroom(conditions, baseline)) is not None:
        findings.append(_headroom(record, least, asked=conditions.min_headroom is not None))
    if conditions.max_peak_bytes is not None:
        findings.append(_peak(record, conditions.max_peak_bytes))
    return (*findings, *([] if baseline is None else _peak_change(record, baseline)))


def headroom_of(record: Record) -> tuple[int, float] | None:
    """(rank, share of its capacity that stays free) of the rank with the least at the chosen M.

    Of the trial and the confirmation; None where a peak or a capacity is not known.
    """
    stages = _stages(record)
    free = [(_free(stage), stage.rank) for stage in stages if stage.peak_bytes is not None and stage.capacity_bytes]
    if not free or len(free) < len(stages):
        return None
    share, rank = min(free)
    return rank, share


def peak_of(record: Record) -> tuple[int, int] | None:
    """(rank, bytes) of the highest peak at the chosen M; None where a rank's is not known."""
    stages = _stages(record)
    peaks = [(stage.peak_bytes, -stage.rank) for stage in stages if stage.peak_bytes is not None]
    if not peaks or len(peaks) < len(stages):
        return None
    peak_bytes, rank = max(peaks)
    return -rank, peak_bytes


def _least_headroom(conditions: Conditions, baseline: Record | None) -> float | None:
    """The share asked for; else that of the baseline's spec, or what the baseline has itself where that is less."""
    if conditions.min_headroom is not None or baseline is None:
        return conditions.min_headroom
    table = baseline.spec.get("device")
    share = table.get("headroom") if isinstance(table, dict) else None
    if not isinstance(share, (int, float)) or not 0 <= share < 1:
        return None
    has = headroom_of(baseline)
    return share if has is None else max(0.0, min(share, has[1]))


def _headroom(record: Record, least: float, *, asked: bool) -> Finding:
    found = headroom_of(record)
    if found is None:
        outcome: Outcome = "failed" if asked else "noted"
        words, share = "a rank's peak or capacity is not known, so neither is what stays free", None
    else:
        rank, share = found
        outcome = "passed" if share >= least - _ROUNDING else "failed"
        words = f"rank {rank} keeps {format_share(share)} of its capacity free, at least {format_share(least)} is asked"
    return Finding(
        check="headroom",
        outcome=outcome,
        words=words,
        expected=least,
        found=share,
        unit="share",
        relation="at least",
        by=None if share is None else share - least,
    )


def _peak(record: Record, most_bytes: int) -> Finding:
    found = peak_of(record)
    if found is None:
        outcome: Outcome = "failed"
        words, peak_bytes = "a rank's peak is not known", None
    else:
        rank, peak_bytes = found
        outcome = "passed" if peak_bytes <= most_bytes else "failed"
        words = f"rank {rank} has {format_bytes(peak_bytes)} at the peak, at most {format_bytes(most_bytes)} is asked"
    return Finding(
        check="peak",
        outcome=outcome,
        words=words,
        expected=most_bytes,
        found=peak_bytes,
        unit="bytes",
        relation="at most",
        by=None if peak_bytes is None else float(peak_bytes - most_bytes),
    )


def _peak_change(record: Record, baseline: Record) -> list[Finding]:
    """How the highest peak moved: no condition, the headroom is."""
    found, base = peak_of(record), peak_of(baseline)
    if found is None or base is None or found[1] == base[1]:
        return []
    words = (
        f"{format_bytes(found[1])} at the peak of rank {found[0]}, {format_bytes(base[1])} of rank {base[0]} in the "
        f"baseline"
    )
    return [
        Finding(
            check="peak against the baseline",
            outcome="noted",
            words=words,
            expected=base[1],
            found=found[1],
            unit="bytes",
            by=float(found[1] - base[1]),
        )
    ]


def _stages(record: Record) -> list[StageFigures]:
    """What the ranks measured at the chosen M, in the sweep and in the confirmation."""
    chosen = record.chosen
    trials = [*record.trials, *([] if record.confirmation is None else [record.confirmation])]
    return [stage for trial in trials if trial.chunks == chosen and trial.fits for stage in trial.stages]


def _free(stage: StageFigures) -> float:
    return 1 - (stage.peak_bytes or 0) / (stage.capacity_bytes or 1)
