"""A whole pipeline: its parts, its ranks, and each rank's step, shortened where it repeats. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from chunktune import orders, partition, schedules
from chunktune.memory.parts import PartBytes, Piece
from chunktune.memory.ranks import Point, RankParts, Sizes, receive_buffers, rules_of
from chunktune.memory.sizes import figures_at
from chunktune.orders import Compute, loops
from chunktune.orders.steps import Size
from chunktune.results import LayerProfile

_LOOPS = {"gpipe": loops.gpipe, "1f1b": loops.one_f_one_b}


@dataclass(frozen=True)
class Pipeline:
    """What is asked about: K ranks (`stages`), M micro-batches (`chunks`) of b samples, V parts a rank.

    `counts`: layers of each of the K V parts, first part first.
    """

    schedule: str
    stages: int
    chunks: int
    virtual_stages: int
    micro_batch: int
    counts: tuple[int, ...]
    recompute: Literal["none", "full"] = "none"


Known = dict[Hashable, Sizes]
"""Peaks of ranks, by all that they depend on."""


class Standing(NamedTuple):
    """Bytes of one rank that stay for the whole step."""

    weights: int
    optimizer: int
    receive_buffers: int
    batch: int


class Whole:
    """A pipeline and the layers that it is made of.

    Raises ValueError for a (K, M, V) that torch refuses, or counts that do not fit the profile.
    """

    def __init__(self, layers: Sequence[LayerProfile], pipeline: Pipeline, known: Known | None = None) -> None:
        self._pipeline = pipeline
        self._known: Known = {} if known is None else known
        own = [profile for profile in layers if not profile.loss]
        self._loss = next((profile for profile in layers if profile.loss), None)
        self._layers = [profile for profile in own for _ in range(profile.count)]
        _check(pipeline, len(self._layers))
        self._slices = partition.layers_of_parts(pipeline.counts)
        self._parts = self._build_parts()
        self._played: dict[tuple[int, int], tuple[Point, ...]] = {}
        self._orders: dict[int, tuple[tuple[Compute, ...], ...]] = {}

    def _build_parts(self) -> list[PartBytes]:
        """Every part; equal ones are one object."""
        known: dict[tuple[int, ...], PartBytes] = {}
        pieces = {id(profile): self._piece(profile) for profile in self._layers}
        parts = []
        for part, layers in enumerate(self._slices):
            last = part == len(self._slices) - 1
            key = (last, *(id(self._layers[layer]) for layer in layers))
            if key not in known:
                loss = [self._piece(self._loss)] if last and self._loss is not None else []
                known[key] = PartBytes([*(pieces[id(self._layers[layer])] for layer in layers), *loss])
            parts.append(known[key])
        return parts

    def _piece(self, profile: LayerProfile) -> Piece:
        figures = figures_at(profile, self._pipeline.micro_batch)
        recomputed = figures.recomputed if self._pipeline.recompute == "full" else None
        return Piece(figures, recomputed or figures.plain, profile.loss)

    def _own(self, rank: int) -> tuple[int, ...]:
        pipeline = self._pipeline
        return schedules.parts_of_rank(pipeline.schedule, pipeline.stages, pipeline.virtual_stages, rank)

    def _profiles(self, parts: Sequence[int]) -> list[LayerProfile]:
        return [self._layers[layer] for part in parts for layer in self._slices[part]]

    def standing(self, rank: int) -> Standing:
        """What the rank holds besides what moves."""
        parts, chunks = self._own(rank), self._pipeline.chunks
        profiles = self._profiles(parts)
        splits = schedules.SCHEDULES[self._pipeline.schedule].splits_backward
        return Standing(
            weights=sum(profile.weight_bytes for profile in profiles),
            optimizer=sum(profile.optimizer_bytes for profile in profiles),
            receive_buffers=chunks * receive_buffers(self._parts, parts, splits),
            batch=chunks * sum(self._parts[part].batch_bytes for part in parts),
        )

    def points(self, rank: int) -> tuple[Point, ...]:
        """The rank's whole step."""
        return self._play(rank, self._pipeline.chunks)

    def peak(self, rank: int) -> Sizes:
        """The rank at its peak, without what stands."""
        if self._pipeline.schedule not in _LOOPS:
            return self._found_peak(rank)
        key = self._alike(rank)
        if key not in self._known:
            self._known[key] = self._found_peak(rank)
        return self._known[key]

    def _alike(self, rank: int) -> Hashable:
        """Under GPipe and 1F1B, all that a rank's peak depends on: equal ranks of any pipelines share one play."""
        pipeline, stages = self._pipeline, self._pipeline.stages
        after, chunks = stages - rank, pipeline.chunks
        if pipeline.schedule == "gpipe":
            after = min(after, 2)
        elif after > 1:
            chunks = min(chunks, _chunks_that_show_all(pipeline, rank) + 2)
        own = self._rank(rank)
        return (
            pipeline.schedule,
            rank == 0,
            after,
            chunks,
            own.own[rank].whole_levels,
            own.gradients[rank],
            own.update_bytes,
        )

    def _found_peak(self, rank: int) -> Sizes:
        chunks, few = self._pipeline.chunks, _chunks_that_show_all(self._pipeline, rank)
        if chunks <= few + 1:
            return max((point.peak for point in self.points(rank)), key=sum)
        if self._pipeline.schedule == "1f1b" and rank < self._pipeline.stages - 1:
            # Without losses nothing that moves depends on M.
            return max((point.peak for point in self._play(rank, few)), key=sum)
        shorter, longer = (_by_place(self._play(rank, n), n, few // 2) for n in (few, few + 1))
        levels = [_carried_on(shorter[place], longer[place], chunks - few) for place in shorter]
        return max(levels, key=sum)

    def _play(self, rank: int, chunks: int) -> tuple[Point, ...]:
        if (rank, chunks) not in self._played:
            rules = rules_of(self._pipeline.schedule)(self._rank(rank), chunks)
            self._played[rank, chunks] = tuple(rules.play(self._order(rank, chunks)))
        return self._played[rank, chunks]

    def _order(self, rank: int, chunks: int) -> Iterable[Compute]:
        """What the rank computes; the loops of GPipe and 1F1B run for it alone."""
        pipeline = self._pipeline
        size = Size(pipeline.stages, chunks, pipeline.virtual_stages)
        if pipeline.schedule in _LOOPS:
            nothing: list[loops.Transfers] = [()] * chunks
            steps = _LOOPS[pipeline.schedule](size, rank, loops.Moves(nothing, nothing, nothing, nothing))
            return (step for step in steps if isinstance(step, Compute))
        if chunks not in self._orders:
            self._orders[chunks] = orders.computes(
                pipeline.schedule, stages=pipeline.stages, chunks=chunks, virtual_stages=pipeline.virtual_stages
            )
        return self._orders[chunks][rank]

    def _rank(self, rank: int) -> RankParts:
        parts = self._own(rank)
        return RankParts(
            parts=len(self._parts),
            own={part: self._parts[part] for part in parts},
            gradients={part: sum(p.gradient_bytes for p in self._profiles([part])) for part in parts},
            update_bytes=_update_bytes(self._profiles(parts)),
        )


def _check(pipeline: Pipeline, layers: int) -> None:
    refused = schedules.refusal(
        pipeline.schedule,
        stages=pipeline.stages,
        chunks=pipeline.chunks,
        virtual_stages=pipeline.virtual_stages,
    )
    if refused:
        raise ValueError(refused)
    parts = pipeline.stages * pipeline.virtual_stages
    if len(pipeline.counts) != parts or sum(pipeline.counts) != layers:
        raise ValueError(
            f"counts = {list(pipeline.counts)} place {sum(pipeline.counts)} layers in {len(pipeline.counts)} parts; "
            f"the profile has {layers} layers and K V = {parts} parts"
        )


def _update_bytes(profiles: Sequence[LayerProfile]) -> int:
    """What the optimizer's step over these layers takes: one weight after the other, or all at once."""
    if any(profile.updates_together for profile in profiles):
        return sum(profile.update_peak_bytes for profile in profiles)
    peak = left = 0
    for profile in profiles:
        if profile.gradient_bytes:
            peak = max(peak, left + profile.update_first_bytes, profile.update_peak_bytes)
            left = profile.update_left_bytes
    return peak


def _chunks_that_show_all(pipeline: Pipeline, rank: int) -> int:
    """An M from which on a rank only repeats itself under GPipe and 1F1B; for the other schedules, M."""
    if pipeline.schedule == "gpipe":
        return 4
    if pipeline.schedule != "1f1b":
        return pipeline.chunks
    # A rank before the last is full once it has begun as many chunks as there are ranks from it on.
    after = pipeline.stages - rank
    return after + 4 if after > 1 else 6


Place = tuple[str, int]


def _by_place(points: Sequence[Point], chunks: int, near: int) -> dict[Place, Sizes]:
    """Peaks by operation and chunk, chunks but for the first few counted from the end.

    Between the first and the last chunks levels change by the same amount from chunk to chunk, so that one of them
    is the highest.
    """
    return {
        (point.kind, point.chunk if point.chunk < near else point.chunk - chunks - 1): point.peak for point in points
    }


def _carried_on(shorter: Sizes, longer: Sizes, more: int) -> Sizes:
    """A level that grows by the same amount with every chunk, `more` chunks on from `shorter`."""
    return Sizes(*(a + (b - a) * more for a, b in zip(shorter, longer, strict=True)))
