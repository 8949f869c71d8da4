"""The gate for CI: a record held to conditions and to a baseline; a finding a check. Pure, no torch."""

from __future__ import annotations

from chunktune.gate.chunks import chunks
from chunktune.gate.differences import differences
from chunktune.gate.finding import Conditions, Finding, Gate, Outcome
from chunktune.gate.memory import memory
from chunktune.gate.sound import baseline_refusals, sound
from chunktune.gate.throughput import throughput
from chunktune.results import Record

__all__ = ["Conditions", "Finding", "Gate", "Outcome", "baseline_refusals", "check"]

_ORDER: tuple[Outcome, ...] = ("failed", "warning", "passed", "noted")


def check(record: Record, conditions: Conditions, baseline: Record | None = None) -> tuple[Finding, ...]:
    """Every check of the record, those that failed first, then warnings, what passed, and notes.

    `baseline`: a record that `baseline_refusals` has nothing against. A record against itself passes, where its
    confidence is clear and the conditions are those of a baseline alone. Raises nothing.
    """
    found = [
        *chunks(record, conditions, baseline),
        *([] if baseline is None else throughput(record, conditions, baseline)),
        *memory(record, conditions, baseline),
        *sound(record, conditions, baseline),
        *([] if baseline is None else differences(record, baseline, conditions.allowed)),
    ]
    return tuple(sorted(found, key=lambda finding: _ORDER.index(finding.outcome)))
