"""Records whose step can be shown: with operations to simulate it from, or with a recorded time line."""

from __future__ import annotations

from typing import Any

from sample_record import ok_trial, record, spec

from chunktune import schedules
from chunktune.results import PartSeconds, Predicted, RankTimeline, Record, Timeline

STAGES, CHUNKS = 2, 4


def predicted(schedule: str = "1f1b", stages: int = STAGES, seconds: float = 0.01, **changes: Any) -> Predicted:
    virtual = schedules.default_virtual_stages(schedule)
    parts = tuple(
        PartSeconds(part=part, forward_s=seconds, backward_s=2 * seconds, input_s=seconds, weight_s=seconds)
        for part in range(stages * virtual)
    )
    fields: dict[str, Any] = {
        "parts": parts,
        "update_s": (seconds / 2,) * stages,
        "boundary_bytes": (8,) * (len(parts) - 1),
        "overhead_s": seconds / 10,
    }
    return Predicted(**{"step_s": None, "peak_bytes": (), **fields, **changes})


def simulable(schedule: str = "1f1b", stages: int = STAGES, chunks: int = CHUNKS, **changes: Any) -> Record:
    """A record whose chosen M = 4 has operations; `changes` are the prediction's."""
    trial = ok_trial(4).model_copy(update={"chunks": chunks, "predicted": predicted(schedule, stages, **changes)})
    pipeline = {"stages": stages, "schedule": schedule, "virtual_stages": schedules.default_virtual_stages(schedule)}
    return record(spec={**spec(), "pipeline": pipeline}, trials=(trial,), confirmation=None)


def recorded(*ranks: RankTimeline, **changes: Any) -> Record:
    """A record whose chosen M = 4 was confirmed with this time line."""
    return record(confirmation=ok_trial(4).model_copy(update={"timeline": Timeline(ranks=ranks), **changes}))


def a_rank(
    rank: int = 0, start_s: tuple[float, ...] = (0.0, 1.0, 3.0), end_s: tuple[float, ...] = (1.0, 2.0, 3.5)
) -> RankTimeline:
    return RankTimeline(
        rank=rank, kinds=("F", "B", "U"), parts=(rank, rank, -1), chunks=(0, 0, -1), start_s=start_s, end_s=end_s
    )
