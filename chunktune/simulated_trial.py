"""What a simulated step says where a trial would say what was measured. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from chunktune import schedules
from chunktune.predict import Shape, ideal_bubble
from chunktune.results import Bubble, StageFigures
from chunktune.simulate import Durations, Simulated

Sizes = tuple[int | None, int | None]
"""(capacity, budget) of a rank in bytes; None where nobody knows them."""

_LEAST_S = 1e-12  # a rank without any work would have infinite speed, and a record holds no infinity


def step_figures(
    shape: Shape,
    chunks: int,
    mini_batch: int,
    durations: Durations,
    simulated: Simulated,
    step_s: float,
    peak_bytes: Sequence[int],
    sizes: Sequence[Sizes],
) -> dict[str, object]:
    """The fields of a `Trial` that a step of `step_s` seconds fills, `simulated` with these durations.

    `mini_batch`: N in samples. `peak_bytes`: of every rank, empty where nobody knows them; `sizes` likewise.
    """
    stages = tuple(
        _stage(
            shape, rank, durations, busy_s, step_s, mini_batch, peak_bytes[rank] if peak_bytes else None, sizes[rank]
        )
        for rank, busy_s in enumerate(simulated.busy_s)
    )
    return {
        "step_s": (step_s,),
        "step_median_s": step_s,
        "throughput_samples_per_s": mini_batch / step_s,
        "bubble": Bubble(measured=fmean(stage.idle_share for stage in stages), ideal=ideal_bubble(shape, chunks)),
        "stages": stages,
    }


def _stage(
    shape: Shape,
    rank: int,
    durations: Durations,
    busy_s: float,
    step_s: float,
    mini_batch: int,
    peak_bytes: int | None,
    sizes: Sizes,
) -> StageFigures:
    parts = schedules.parts_of_rank(shape.schedule, shape.stages, shape.virtual_stages, rank)
    split = schedules.SCHEDULES[shape.schedule].splits_backward
    capacity_bytes, budget_bytes = sizes
    return StageFigures(
        rank=rank,
        parts=parts,
        forward_s=sum(durations.forward_s[part] for part in parts),
        backward_s=sum(
            durations.input_s[part] + durations.weight_s[part] if split else durations.backward_s[part]
            for part in parts
        ),
        busy_s=busy_s,
        idle_share=max(0.0, 1 - busy_s / step_s),
        samples_per_s=mini_batch / max(busy_s, _LEAST_S),
        peak_bytes=peak_bytes,
        reserved_bytes=None,
        capacity_bytes=capacity_bytes,
        budget_bytes=budget_bytes,
    )
