"""The peak memory of every rank of a training step that nobody has run, from a profile of single layers. Pure.

    layers (chunktune.pipeline.profile)  ->  parts (`parts`)  ->  ranks (`ranks`), in the order of `chunktune.orders`

Bytes are those of tensors from the second step on, as `chunktune sweep` counts them: weights, gradients, optimizer
state, the batch, activations in flight, receive buffers for every chunk, tensors held for sends. Not in them is what
lies outside the allocator on a GPU, and the fragmentation inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from chunktune.memory.pipeline import AtSize, Pipeline
from chunktune.results import LayerProfile

__all__ = ["Breakdown", "Moment", "Pipeline", "beyond_profile", "breakdowns", "memory_curve", "peak_bytes"]


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

    `kind`: F, L (the loss), B, I, W or U (the optimizer's step, part and chunk -1).
    """

    kind: str
    part: int
    chunk: int
    peak_bytes: int
    after_bytes: int


def peak_bytes(layers: Sequence[LayerProfile], pipeline: Pipeline) -> tuple[int, ...]:
    """The peak of every rank, rank 0 first; raises as `breakdowns` does."""
    return tuple(rank.total for rank in breakdowns(layers, pipeline))


def breakdowns(layers: Sequence[LayerProfile], pipeline: Pipeline) -> tuple[Breakdown, ...]:
    """Every rank at its peak, rank 0 first.

    At a b that was not profiled: affine between the two profiled sizes around it, the outermost piece beyond them;
    from a single profiled size in proportion to b. Raises ValueError for a (K, M, V) that torch refuses, or counts
    that do not fit the profile.
    """
    sizes = [(AtSize(layers, pipeline, index), weight) for index, weight in _weights(layers, pipeline.micro_batch)]
    return tuple(
        Breakdown(*_mixed([(_parts_of_peak(size, rank), weight) for size, weight in sizes]))
        for rank in range(pipeline.stages)
    )


def memory_curve(layers: Sequence[LayerProfile], pipeline: Pipeline, rank: int) -> tuple[Moment, ...]:
    """Every operation of one rank's step, in order; interpolates and raises as `breakdowns` does."""
    curves = []
    for index, weight in _weights(layers, pipeline.micro_batch):
        size = AtSize(layers, pipeline, index)
        curves.append((_levels(size, rank), weight))
    places = size.points(rank)
    mixed = [_mixed([(levels[at], weight) for levels, weight in curves]) for at in range(len(places))]
    return tuple(Moment(at.kind, at.part, at.chunk, *levels) for at, levels in zip(places, mixed, strict=True))


def _levels(size: AtSize, rank: int) -> list[tuple[int, int]]:
    """(highest, afterwards) of each operation; after the last one the gradients of the weights are gone."""
    standing, points = sum(size.standing(rank)), size.points(rank)
    before = [standing + sum(point.peak) - point.peak.workspace for point in points]
    after = [*before[1:], before[-1] - points[-1].peak.gradients]
    return [(standing + sum(point.peak), level) for point, level in zip(points, after, strict=True)]


def beyond_profile(layers: Sequence[LayerProfile], micro_batch: int) -> bool:
    """Whether b lies outside the profiled sizes, so that what is said about it is extrapolated."""
    sizes = _sizes(layers)
    return not sizes[0] <= micro_batch <= sizes[-1]


def _sizes(layers: Sequence[LayerProfile]) -> list[int]:
    return [figures.micro_batch for figures in layers[0].figures]


def _weights(layers: Sequence[LayerProfile], micro_batch: int) -> list[tuple[int | None, float]]:
    """The profiled sizes, by index, whose weighted sum stands for b; None is b = 0, where only weights are left."""
    sizes = _sizes(layers)
    if micro_batch in sizes:
        return [(sizes.index(micro_batch), 1.0)]
    if len(sizes) == 1:
        share = micro_batch / sizes[0]
        return [(0, share), (None, 1 - share)]
    above = next((index for index, size in enumerate(sizes) if size > micro_batch), len(sizes) - 1)
    low = max(0, above - 1)
    share = (micro_batch - sizes[low]) / (sizes[low + 1] - sizes[low])
    return [(low, 1 - share), (low + 1, share)]


def _mixed(rows: Sequence[tuple[Sequence[int], float]]) -> list[int]:
    """The weighted sum of rows of numbers, whole and never below zero."""
    if len(rows) == 1:
        return list(rows[0][0])
    columns = zip(*(row for row, _ in rows), strict=True)
    weights = [weight for _, weight in rows]
    return [max(0, round(sum(n * w for n, w in zip(column, weights, strict=True)))) for column in columns]


def _parts_of_peak(size: AtSize, rank: int) -> tuple[int, ...]:
    """The fields of a `Breakdown`."""
    standing, moving = size.standing(rank), size.peak(rank)
    return (
        standing.weights,
        moving.gradients,
        standing.optimizer,
        moving.activations,
        standing.receive_buffers,
        moving.held_sends,
        standing.batch,
        moving.workspace,
    )
