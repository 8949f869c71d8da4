"""What is measured and decided: the values that travel from the workers to the record. Pure data, no torch.

Everything is frozen, in seconds and bytes, with plain plurals for counts. M is `chunks`, N is `mini_batch`,
b is `micro_batch`. The JSON Schema of a record is generated from these classes.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

SCHEMA_VERSION = 3

Basis = Literal["given", "measured", "interpolated", "extrapolated", "estimated"]
"""How a cost is known; the weakest of several counts: estimated < extrapolated < interpolated < measured < given."""
State = Literal["ok", "oom", "illegal", "killed", "timeout", "error", "skipped"]
OperationKind = Literal["F", "L", "B", "I", "W", "U"]
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
    counted and no allocation failed. `within_capacity`: predicted to fit what the device has, but to leave less than
    the headroom free.
    """

    rank: int
    needed_bytes: int | None
    budget_bytes: int
    asked_bytes: int | None = None
    within_capacity: bool = False
    where: Literal["rehearsal", "pipeline", "prediction"]


class StageFigures(Frozen):
    """What one rank measured at one M.

    `forward_s`, `backward_s`: seconds a micro-batch, summed over the rank's parts. `busy_s`: seconds of one
    step spent in operations (loss and optimizer included). `idle_share`: 1 - busy_s / step. `samples_per_s`:
    N / busy_s. Peaks are read from the second optimizer step on. `reserved_bytes` is null on CPU.
    `budget_bytes` is the capacity less headroom and reserve. Where a prediction knows a peak or a capacity not, it is
    null. `flops_per_s`: the model's floating-point operations
    of one step over the step's seconds, recomputation left out; `recompute_flops_per_s`: what recomputation adds.
    """

    rank: int
    parts: tuple[int, ...]
    forward_s: Finite
    backward_s: Finite
    busy_s: Finite
    idle_share: Finite
    samples_per_s: Finite
    peak_bytes: int | None
    reserved_bytes: int | None
    capacity_bytes: int | None
    budget_bytes: int | None
    flops_per_s: Finite | None = None
    recompute_flops_per_s: Finite | None = None


class Bubble(Frozen):
    """Idle share of a step: the mean measured over the ranks, and the ideal for equal stages (null if unknown)."""

    measured: Finite | None
    ideal: Finite | None


class PartSeconds(Frozen):
    """Seconds of one part's operations on one micro-batch, waiting left out; the last part's forward holds the loss.

    `backward_s` is the whole gradient, `input_s` and `weight_s` its two halves where a schedule splits it; what
    the schedule never runs is null.
    """

    part: int
    forward_s: Finite
    backward_s: Finite | None = None
    input_s: Finite | None = None
    weight_s: Finite | None = None


class Predicted(Frozen):
    """What was foretold before the timed steps, and from what.

    `step_s`: seconds a step. `peak_bytes`: one value a rank. From the rehearsal: `parts`, the operations, a part each;
    `update_s`, the optimizer's, a rank each. `boundary_bytes`: the tensor between part p and p + 1. `overhead_s`:
    seconds that the runtime adds to each operation, `transfer_s_per_byte` to each byte that crosses between ranks,
    `constant_s` to each step, `contention` the share by which an operation takes longer than rehearsed, all from the
    trials named in `fitted_from` alone; where there are none the overhead is what the runtime took in the rehearsal,
    without peers. `basis`: how the costs of a `whatif` are known; its
    `transfer_s` are seconds between part p and p + 1, where a sweep has bytes and seconds a byte.
    """

    step_s: Finite | None
    peak_bytes: tuple[int, ...]
    parts: tuple[PartSeconds, ...] = ()
    update_s: tuple[Finite, ...] = ()
    boundary_bytes: tuple[int, ...] = ()
    overhead_s: Finite | None = None
    transfer_s_per_byte: Finite | None = None
    constant_s: Finite | None = None
    contention: Finite | None = None
    rehearsed_overhead_s: Finite | None = None
    fitted_from: tuple[int, ...] = ()
    transfer_s: tuple[Finite, ...] = ()
    basis: Basis | None = None


class OperationBytes(Frozen):
    """What one operation of one layer holds of its own, weights, optimizer state and boundary tensors left out.

    The boundary tensors, which neighbours may hold as well, have letters: x the input, y the output, g the gradient
    of the output, c what the layer before left behind in the weight gradient.

    `peaks`: (bytes, letters), the highest levels and which boundary tensors the layer held just then; of two with the
    same letters only the higher. `left_bytes`: what the layer has when the operation is over, for a gradient of
    weights without one before it these gradients included. `holds`: the letters held then; a: the output is the
    input's own storage; p: the gradient of the input is that of the output. `extra_bytes`: what goes soon afterwards:
    the forward's weights cast by autocast, at the end of the part's forward; of the input gradient what is dropped
    where the layer ends a part (within `left_bytes`); of the weight gradient the last gradients, when the next ones
    are there.
    """

    peaks: tuple[tuple[int, str], ...] = ()
    left_bytes: int = 0
    extra_bytes: int = 0
    holds: str = ""


class LayerBytes(Frozen):
    """A layer's operations: forward, whole backward, and its two halves under a split backward.

    `first_...`: the same where no gradient of the weights is there yet, as in the first chunk of a step.
    `ending_...`: the same where the layer ends a part.
    """

    forward: OperationBytes
    backward: OperationBytes
    first_backward: OperationBytes
    input: OperationBytes
    weight: OperationBytes
    first_weight: OperationBytes
    ending_weight: OperationBytes
    first_ending_weight: OperationBytes


class LayerFigures(Frozen):
    """One layer alone at one micro-batch size b: bytes and floating-point operations of its forward and backward.

    Bytes are sums of whole storages, each rounded up as the device's allocator does. `input_bytes`: the tensor that
    a rank receives for this layer. `output_bytes`: the storage that the layer returns. `gradient_bytes`: the gradient
    of the input, 0 where it has none. `batch_bytes`: what the layer takes from the batch, the model's inputs or the
    targets. `forward_flops`, `backward_flops`: without recomputation. `plain`: bytes without recomputation,
    `recomputed`: with all of the layer recomputed (null for the loss, which never is). `recompute_flops`: of one
    recomputation, which stops once it has all that the backward needs; null where not known. `weight_forwards`: how
    often the weight gradient of a split backward recomputes (a whole one and the input gradient do it once): torch
    takes it group by group of weights, and the checkpoint recomputes for each (`stage_backward_weight` in
    torch.distributed.pipelining._backward).
    """

    micro_batch: int
    input_bytes: int
    output_bytes: int
    gradient_bytes: int
    batch_bytes: int
    forward_flops: int
    backward_flops: int
    recompute_flops: int | None = None
    weight_forwards: int = 1
    plain: LayerBytes
    recomputed: LayerBytes | None


class LayerProfile(Frozen):
    """`count` equal consecutive layers: what one of them holds as long as it lives, and its figures, by b ascending.

    The last profile of a model is its loss (`loss` is true), which is no layer of any part. `gradient_bytes`: of the
    trained weights. `optimizer_bytes`: the optimizer's state. The optimizer's step takes above that
    `update_peak_bytes` for this layer alone, `update_first_bytes` of them for its first weight, and leaves
    `update_left_bytes` behind until the next layer's first weight is done; where `updates_together`, it takes the
    peaks of all layers at once instead.
    """

    count: int
    loss: bool = False
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    update_peak_bytes: int = 0
    update_first_bytes: int = 0
    update_left_bytes: int = 0
    updates_together: bool = False
    figures: tuple[LayerFigures, ...]


class RankTimeline(Frozen):
    """The operations of one rank in one step, in the order in which they ran: columns of equal length.

    `kinds`: F forward, L loss, B backward, I and W the two halves of a split backward, U the optimizer's update.
    `parts`, `chunks`: which part, and which chunk of it; -1 for the update. `start_s`, `end_s`: seconds from the
    start of the step; none begins before the one before it has ended.
    """

    rank: int
    kinds: tuple[OperationKind, ...]
    parts: tuple[int, ...]
    chunks: tuple[int, ...]
    start_s: tuple[Finite, ...]
    end_s: tuple[Finite, ...]


class Timeline(Frozen):
    """The last timed step of a trial, rank by rank. The step starts with the first operation of any rank.

    Starts are counted from a barrier of all ranks, on each rank's own clock: between ranks they are as exact as that
    barrier.
    """

    ranks: tuple[RankTimeline, ...]


class Trial(Frozen):
    """One value of M, tried. Fields of a state other than "ok" are null or empty beyond `reason`.

    A predicted trial has its prediction in `step_s`, what it rests on in `predicted`, and, where a record of the same
    setting had run this M, what that measured: median seconds a step, and the peak of every rank. `timeline`: of a
    confirmation alone, null where it would have more operations than a record should hold. `loss`: of the first step,
    null where it is NaN or infinite, which `loss_is_finite` tells.
    """

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
    loss_is_finite: bool | None = None
    bubble: Bubble | None = None
    predicted: Predicted | None = None
    stages: tuple[StageFigures, ...] = ()
    measured_step_s: Finite | None = None
    measured_peak_bytes: tuple[int, ...] = ()
    timeline: Timeline | None = None

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


class Alternative(Frozen):
    """Another setting, and what the predictor says of it at its best M.

    `change` in words; `settings`: dotted key -> value, over the spec. `replicas`: pipelines side by side;
    `devices`: ranks of all of them. `throughput_samples_per_s`: of all replicas, what they exchange left out.
    `share`: that over the same predictor's throughput of the choice as it is, null where it has none. `peak_bytes`,
    `budget_bytes`: of the fullest rank; `fits` is null where no capacity is known.
    """

    change: str
    settings: dict[str, Any]
    replicas: int = 1
    devices: int
    chunks: int
    micro_batch: int
    mini_batch: int
    throughput_samples_per_s: Finite
    share: Finite | None
    peak_rank: int | None = None
    peak_bytes: int | None = None
    budget_bytes: int | None = None
    fits: bool | None = None
    basis: Basis


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
    alternatives: tuple[Alternative, ...] = ()
    findings: tuple[str, ...] = ()


class Record(Frozen):
    """One sweep, whole: what was asked, where it ran, what was measured, what was decided.

    `group_restarts`: groups of workers that were lost. `resumes`: how often the command was cut off and went on.
    """

    schema_version: int
    tool: dict[str, str]
    mode: Literal["measured", "predicted", "rehearsed"]
    status: Literal["complete", "interrupted", "failed"]
    quick: bool
    spec: dict[str, Any]
    sources: dict[str, str]
    environment: dict[str, Any]
    layers_per_part: tuple[int, ...] = ()
    layers: tuple[LayerProfile, ...] = ()
    candidates: tuple[Candidate, ...]
    trials: tuple[Trial, ...]
    comparisons: tuple[Comparison, ...]
    confirmation: Trial | None = None
    group_restarts: int = 0
    resumes: int = 0
    warnings: tuple[str, ...] = ()
    verdict: Verdict | None
    started_at: str
    elapsed_s: Finite

    @property
    def chosen(self) -> int | None:
        """The M that was chosen; None without a verdict, or where nothing is feasible."""
        return None if self.verdict is None else self.verdict.chunks
