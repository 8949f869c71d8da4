"""The peak memory of every rank of a training step that nobody has run, from a profile of single layers. Pure.

    layers (chunktune.pipeline.profile)  ->  parts (`parts`)  ->  ranks (`ranks`), in the order of `chunktune.orders`

Bytes are those of tensors from the second step on, as `chunktune sweep` counts them: weights, gradients, optimizer
state, the batch, activations in flight, receive buffers for every chunk, tensors held for sends. Not in them is what
lies outside the allocator on a GPU, and the fragmentation inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from chunktune.memory.pipeline import Known, Pipeline, Whole
from chunktune.memory.sizes import figures_at, profiled_sizes
from chunktune.results import LayerProfile

__all__ = [
    "Breakdown",
    "Moment",
    "Pipeline",
    "beyond_profile",
    "breakdowns",
    "figures_at",
    "memory_curve",
    "peak_bytes",
]


@dataclass(frozen=True)
class Breakdown:
    """The bytes of one rank at its peak, by what they are for; `total` is their sum.

    `activations`: kept from forward to backward, the losses included. `receive_buffers`: a chunk and direction each.
    `held_sends`: kept for a send alone. `batch`: inputs and targets. `workspace`: what the operation at the peak
    takes besides, until it is over.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    receive_buffers: int
    held_sends: int
    batch: int
    workspace: int

    @property
    def total(self) -> int:
        """The peak."""
        return sum(getattr(self, one.name) for one in fields(self))


@dataclass(frozen=True)
class Moment:
    """One operation of a rank and its level in bytes: the highest while it runs, and when it is over.

    "Over" is when the next one begins. `kind`: F, L (the loss), B, I, W or U (the optimizer's step, part and chunk -1).
    """

    kind: str
    part: int
    chunk: int
    peak_bytes: int
    after_bytes: int


def peak_bytes(layers: Sequence[LayerProfile], pipeline: Pipeline, known: Known | None = None) -> tuple[int, ...]:
    """The peak of every rank, rank 0 first; raises as `breakdowns` does."""
    return tuple(rank.total for rank in breakdowns(layers, pipeline, known))


def breakdowns(layers: Sequence[LayerProfile], pipeline: Pipeline, known: Known | None = None) -> tuple[Breakdown, ...]:
    """Every rank at its peak, rank 0 first.

    `known`: peaks of ranks that were played before, for who asks about many pipelines; it is added to.
    `layers`: with the loss last, as `chunktune.pipeline.profile` makes them; a b that was not profiled is met as
    `figures_at` says. Raises ValueError for a (K, M, V) that torch refuses, or counts that do not fit the profile.
    """
    whole = Whole(layers, pipeline, known)
    return tuple(_breakdown(whole, rank) for rank in range(pipeline.stages))


def memory_curve(layers: Sequence[LayerProfile], pipeline: Pipeline, rank: int) -> tuple[Moment, ...]:
    """Every operation of one rank's step, in order; raises as `breakdowns` does."""
    whole = Whole(layers, pipeline)
    standing, points = sum(whole.standing(rank)), whole.points(rank)
    before = [standing + sum(point.peak) - point.peak.workspace for point in points]
    after = [*before[1:], before[-1] - points[-1].peak.gradients]
    return tuple(
        Moment(point.kind, point.part, point.chunk, standing + sum(point.peak), level)
        for point, level in zip(points, after, strict=True)
    )


def beyond_profile(layers: Sequence[LayerProfile], micro_batch: int) -> bool:
    """Whether b lies outside the profiled sizes, so that what is said about it is extrapolated."""
    sizes = profiled_sizes(layers)
    return not sizes[0] <= micro_batch <= sizes[-1]


def _breakdown(whole: Whole, rank: int) -> Breakdown:
    standing, moving = whole.standing(rank), whole.peak(rank)
    return Breakdown(
        weights=standing.weights,
        gradients=moving.gradients,
        optimizer=standing.optimizer,
        activations=moving.activations,
        receive_buffers=standing.receive_buffers,
        held_sends=moving.held_sends,
        batch=standing.batch,
        workspace=moving.workspace,
    )
