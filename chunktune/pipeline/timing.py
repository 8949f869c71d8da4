"""Seconds of a rehearsed step's operations: what the simulator needs, from steps that no meter slows."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from chunktune.device import Device
from chunktune.pipeline.runtime import Operation
from chunktune.pipeline.work import TrainingStep
from chunktune.results import PartSeconds

FILL_S = 0.15
MOST_STEPS = 10
_TRIM = 0.1
"""Share of an operation's samples left out at either end, one at least: a rehearsal has no second look at a disturbed
one, and a single such sample among four moved a prediction by 17 %."""


@dataclass(frozen=True)
class RankSeconds:
    """One rank's operations on one micro-batch. `overhead_s`: what the runtime takes an operation, without peers.

    `resampled`: `parts` again from samples drawn anew among those measured, as often as was asked for.
    """

    parts: tuple[PartSeconds, ...]
    update_s: float
    overhead_s: float
    resampled: tuple[tuple[PartSeconds, ...], ...] = ()


def timed_rehearsal(
    step: TrainingStep, device: Device, resamples: int = 0, is_late: Callable[[], bool] = lambda: False
) -> RankSeconds:
    """Time a step that was rehearsed: once to settle, then for FILL_S, once at least; where late, the first counts.

    `resamples`: bootstrap samples (Efron 1979, Annals of Statistics 7) to tell how sure the means are; always the
    same for the same measurements.
    """
    walls = [_one(step, device)]
    steps = [step.operations.take()]
    if not is_late():
        count = max(1, min(MOST_STEPS, math.ceil(FILL_S / max(walls.pop(), 1e-9))))
        steps.clear()
        for _ in range(count):
            walls.append(_one(step, device))
            steps.append(step.operations.take())
    every = [operation for operations in steps for operation in operations]
    samples = {part: _samples(every, part) for part in sorted({one.part for one in every if one.part >= 0})}
    random = Random(0)
    return RankSeconds(
        parts=tuple(part_seconds(part, of_part) for part, of_part in samples.items()),
        update_s=statistics.median(one.seconds for one in every if one.kind == "optimizer"),
        overhead_s=statistics.median(_beside(wall, operations) for wall, operations in zip(walls, steps, strict=True)),
        resampled=tuple(
            tuple(part_seconds(part, _redrawn(of_part, random)) for part, of_part in samples.items())
            for _ in range(resamples)
        ),
    )


def _one(step: TrainingStep, device: Device) -> float:
    start = time.perf_counter()
    step.run()
    device.synchronise()
    return time.perf_counter() - start


def _beside(wall_s: float, operations: Sequence[Operation]) -> float:
    """Seconds of the step that lie in no operation, for each of its computes."""
    computes = sum(one.part >= 0 and one.kind != "loss" for one in operations)
    return max(0.0, wall_s - sum(one.seconds for one in operations)) / max(1, computes)


def _samples(operations: Iterable[Operation], part: int) -> dict[str, list[float]]:
    """Seconds of one part's operations, by kind."""
    samples: dict[str, list[float]] = {}
    for one in operations:
        if one.part == part:
            samples.setdefault(one.kind, []).append(one.seconds)
    return samples


def _redrawn(samples: Mapping[str, Sequence[float]], random: Random) -> dict[str, list[float]]:
    return {kind: random.choices(values, k=len(values)) for kind, values in samples.items()}


def part_seconds(part: int, samples: Mapping[str, Sequence[float]]) -> PartSeconds:
    """Mean seconds of one part's operations from samples by kind."""
    mean_s = {kind: _trimmed_mean(values) for kind, values in samples.items()}
    return PartSeconds(
        part=part,
        forward_s=mean_s["forward"] + mean_s.get("loss", 0.0),
        backward_s=mean_s.get("backward"),
        input_s=mean_s.get("input"),
        weight_s=mean_s.get("weight"),
    )


def _trimmed_mean(samples: Sequence[float]) -> float:
    cut = min(math.ceil(_TRIM * len(samples)), (len(samples) - 1) // 2)
    return statistics.fmean(sorted(samples)[cut : len(samples) - cut])
