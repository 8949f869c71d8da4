"""Whether a record can be relied on at all, and whether it may be a baseline. Pure."""

from __future__ import annotations

from chunktune.gate.finding import Conditions, Finding, Outcome
from chunktune.gate.throughput import measured_at
from chunktune.results import Record


def baseline_refusals(record: Record) -> tuple[str, ...]:
    """Why a record may be no baseline, a reason each; empty where it may."""
    verdict = record.verdict
    chosen = None if verdict is None else verdict.chunks
    nothing = "it has no verdict" if verdict is None else "its verdict chose no M"
    unmeasured = chosen is not None and not measured_at(record, chosen)
    reasons = {
        f"it is {record.mode}, not measured on the real pipeline": record.mode != "measured",
        "it is a quick run, which has few samples and no confirmation": record.quick,
        f"its sweep is {record.status}, not complete": record.status != "complete",
        nothing: chosen is None,
        f"it holds no step time of its own choice, M = {chosen}": unmeasured,
    }
    return tuple(reason for reason, holds in reasons.items() if holds)


def sound(record: Record, conditions: Conditions, baseline: Record | None) -> tuple[Finding, ...]:
    """The checks of the record alone: complete, measured, clear; and how clear the baseline was."""
    findings = [_status(record), *_mode(record, against=baseline is not None), *_confidence(record, conditions)]
    return (*findings, *_of_baseline(baseline))


def _status(record: Record) -> Finding:
    complete = record.status == "complete"
    words = "the sweep is complete" if complete else f"the sweep is {record.status}, so values of M may be missing"
    return Finding(
        check="status",
        outcome="passed" if complete else "failed",
        words=words,
        expected="complete",
        found=record.status,
    )


def _mode(record: Record, *, against: bool) -> list[Finding]:
    """How it was measured: a condition against a baseline, which is always measured; else said where it is less."""
    found = f"{record.mode}, quick" if record.quick else record.mode
    if record.mode == "measured" and not record.quick:
        why = "the record is measured, as a baseline is"
        return [Finding(check="mode", outcome="passed", words=why, expected="measured", found=found)] if against else []
    what = "a quick run, with few samples" if record.mode == "measured" else f"{record.mode}, not measured"
    end = "; a baseline is measured in full, so the two cannot be compared" if against else ""
    outcome: Outcome = "failed" if against else "warning"
    words = f"the record is {what}{end}"
    return [Finding(check="mode", outcome=outcome, words=words, expected="measured", found=found)]


def _confidence(record: Record, conditions: Conditions) -> list[Finding]:
    verdict = record.verdict
    if verdict is None or verdict.chunks is None:
        return []
    if verdict.confidence == "clear":
        words = "every comparison that the choice rests on is decided"
        return [Finding(check="confidence", outcome="passed", words=words, expected="clear", found="clear")]
    reasons = "; ".join(verdict.confidence_reasons) or "no reason was recorded"
    return [
        Finding(
            check="confidence",
            outcome="warning" if conditions.allow_unclear else "failed",
            words=f"M = {verdict.chunks} is unclear: {reasons}",
            expected="clear",
            found="unclear",
        )
    ]


def _of_baseline(baseline: Record | None) -> list[Finding]:
    if baseline is None or baseline.verdict is None or baseline.verdict.confidence == "clear":
        return []
    words = "the baseline's own choice is unclear; make one on a quieter machine, or with more time"
    return [Finding(check="baseline", outcome="warning", words=words, expected="clear", found="unclear")]
