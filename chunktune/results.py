"""What is measured and decided: the values that travel from the workers to the record. Pure data, no torch.

Everything is frozen, in seconds and bytes, with plain plurals for counts. M is `chunks`, N is `mini_batch`,
b is `micro_batch`. The JSON Schema of a record is generated from these classes.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

SCHEMA_VERSION = 1

State = Literal["ok", "oom", "illegal", "killed", "timeout", "error", "skipped"]
BatchMode = Literal["mini_batch", "micro_batch"]
Criterion = Literal["pipeline", "stage"]
Limit = Literal["memory", "throughput", "failed", "batch", "schedule", "range", "plateau", "budget"]
FloorLimit = Literal["memory", "schedule", "failed", "range", "budget"]
Confidence = Literal["clear", "unclear"]
Outcome = Literal["slower", "not slower", "undecided"]


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be finite: a record never holds NaN or infinity")
    return value


Finite = Annotated[float, AfterValidator(_finite)]


class Frozen(BaseModel):
    """A value: immutable, unknown fields forbidden."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Candidate(Frozen):
    """A value of M before it is tried. `reason` says why an illegal one is not offered."""

    chunks: int
    micro_batch: int | None
    mini_batch: int | None
    legal: bool
    reason: str | None = None


class Shortage(Frozen):
    """Why a value of M does not fit: the rank, the bytes it needed at least, and the bytes it may use.

    `asked_bytes` is the allocation that failed, null where the allocator said no number or where the peak was
    counted and no allocation failed.
    """

    rank: int
    needed_bytes: int | None
    budget_bytes: int
    asked_bytes: int | None = None
    where: Literal["rehearsal", "pipeline"]


class StageFigures(Frozen):
    """What one rank measured at one M.

    `forward_s`, `backward_s`: seconds a micro-batch, summed over the rank's parts. `busy_s`: seconds of one
    step spent in operations (loss and optimizer included). `idle_share`: 1 - busy_s / step. `samples_per_s`:
    N / busy_s. Peaks are read from the second optimizer step on. `reserved_bytes` is null on CPU.
    `budget_bytes` is the capacity less headroom and reserve.
    """

    rank: int
    parts: tuple[int, ...]
    forward_s: Finite
    backward_s: Finite
    busy_s: Finite
    idle_share: Finite
    samples_per_s: Finite
    peak_bytes: int
    reserved_bytes: int | None
    capacity_bytes: int
    budget_bytes: int


class Bubble(Frozen):
    """Idle share of a step: the mean measured over the ranks, and the ideal for equal stages (null if unknown)."""

    measured: Finite | None
    ideal: Finite | None


class Predicted(Frozen):
    """What the rehearsal foretold before the timed steps: bytes at the peak, one value a rank."""

    step_s: Finite | None
    peak_bytes: tuple[int, ...]


class Trial(Frozen):
    """One value of M, tried. Fields of a state other than "ok" are null or empty beyond `reason`."""

    chunks: int
    micro_batch: int
    mini_batch: int
    state: State
    reason: str | None = None
    rank: int | None = None
    shortage: Shortage | None = None
    step_s: tuple[Finite, ...] = ()
    step_median_s: Finite | None = None
    step_interval_s: tuple[Finite, Finite] | None = None
    throughput_samples_per_s: Finite | None = None
    loss: Finite | None = None
    bubble: Bubble | None = None
    predicted: Predicted | None = None
    stages: tuple[StageFigures, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether this M ran to the end."""
        return self.state == "ok"


class Block(Frozen):
    """Consecutive steps at one M inside a round: seconds a step, and busy seconds a step of every rank."""

    chunks: int
    mini_batch: int
    step_s: Finite
    busy_s: tuple[Finite, ...]

    def samples_per_s(self, criterion: Criterion) -> float:
        """Throughput under a criterion: of the whole step, or of the slowest stage while it is busy."""
        return self.mini_batch / (self.step_s if criterion == "pipeline" else max(self.busy_s))


class Round(Frozen):
    """One visit of each of several values of M, close together in time: the unit of every comparison."""

    blocks: tuple[Block, ...]


class Comparison(Frozen):
    """Throughput of `chunks` over that of `against`, paired by round.

    `outcome`: "slower" when the interval lies below 1 - tolerance, "not slower" when it lies above, else
    "undecided". `interval` is null with fewer than two rounds.
    """

    chunks: int
    against: int
    criterion: Criterion
    rounds: int
    ratio: Finite
    interval: tuple[Finite, Finite] | None
    tolerance: Finite
    outcome: Outcome

    @property
    def decided(self) -> bool:
        """Whether the interval excludes one of the two answers."""
        return self.outcome != "undecided"


class Floor(Frozen):
    """The smallest feasible M and why the next smaller one is not."""

    chunks: int
    limit: FloorLimit
    stage: int | None = None
    reason: str | None = None


class LimitDetail(Frozen):
    """The numbers behind the limit; which are set depends on the limit."""

    reason: str | None = None
    shortage: Shortage | None = None
    comparison: Comparison | None = None


class ByRule(Frozen):
    """The value of M that each rule names, from the same measurements."""

    pipeline: int | None
    stage: int | None


class Verdict(Frozen):
    """The answer. `chunks` is null when nothing is feasible; `limit` is defined for every input."""

    chunks: int | None
    micro_batch: int | None
    mini_batch: int | None
    limit: Limit
    limit_side: Literal["above", "below"]
    limit_stage: int | None
    limit_detail: LimitDetail
    next_chunks: int | None
    floor: Floor | None
    confidence: Confidence
    confidence_reasons: tuple[str, ...] = ()
    by_rule: ByRule
    smallest_within_tolerance: int | None
    confirmed: Literal["fresh processes", "re-initialised group", "no"]
    advice: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()


class Record(Frozen):
    """One sweep, whole: what was asked, where it ran, what was measured, what was decided."""

    schema_version: int
    tool: dict[str, str]
    mode: Literal["measured", "predicted", "rehearsed"]
    status: Literal["complete", "interrupted", "failed"]
    quick: bool
    spec: dict[str, Any]
    sources: dict[str, str]
    environment: dict[str, Any]
    layers_per_part: tuple[int, ...] = ()
    candidates: tuple[Candidate, ...]
    trials: tuple[Trial, ...]
    comparisons: tuple[Comparison, ...]
    confirmation: Trial | None = None
    group_restarts: int = 0
    warnings: tuple[str, ...] = ()
    verdict: Verdict | None
    started_at: str
    elapsed_s: Finite
