"""What a check found, and the conditions it was held to. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from chunktune.results import Finite, Frozen

Outcome = Literal["failed", "warning", "passed", "noted"]
"""`warning`: passed, and somebody should know why; `noted`: a difference that is no condition."""
Unit = Literal["", "chunks", "samples/s", "bytes", "share"]
Relation = Literal["equal", "at least", "at most"]


class Finding(Frozen):
    """One check. `expected` and `found` are in `unit`; null where not known, or where the check has no such value.

    `relation`: what `found` has to be to `expected`. `by`: found - expected, in `unit`. `ratio`: throughput over
    the baseline's, with its interval at `ratio_interval`. `words`: the same as a sentence with its numbers.
    """

    check: str
    outcome: Outcome
    words: str
    expected: Any = None
    found: Any = None
    unit: Unit = ""
    relation: Relation = "equal"
    by: Finite | None = None
    ratio: Finite | None = None
    ratio_interval: tuple[Finite, Finite] | None = None

    @property
    def passed(self) -> bool:
        """Whether the check holds."""
        return self.outcome != "failed"


@dataclass(frozen=True)
class Conditions:
    """What a record is held to. Shares are fractions.

    `max_slowdown`: of the baseline's throughput. `min_headroom`: capacity left free on the fullest rank; where it is
    None a baseline's spec says it. `expect_chunks`: M, without a baseline or besides it. `allowed`: what may be
    another than the baseline's, keys that `difference.unknown_key` knows.
    """

    max_slowdown: float = 0.05
    min_headroom: float | None = None
    expect_chunks: int | None = None
    max_peak_bytes: int | None = None
    allow_unclear: bool = False
    allowed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gate:
    """All findings on one record. `record`, `baseline`: what people call them; `baseline` is None without one."""

    record: str
    baseline: str | None
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The checks that do not hold."""
        return tuple(finding for finding in self.findings if not finding.passed)

    def count(self, *outcomes: Outcome) -> int:
        """How many findings have one of these outcomes."""
        return sum(finding.outcome in outcomes for finding in self.findings)
