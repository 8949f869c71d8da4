"""Measurements that others published, one CSV a source, to hold predictions against. Every row names its source."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

Name = Literal["zero_bubble", "bigscience_181b", "torch_1f1b_memory"]


@dataclass(frozen=True)
class Measurement:
    """One published figure: `value` in the unit that `metric` names, at K = `stages`, M = `chunks`, b = `micro_batch`.

    `micro_batch` and `global_batch` (samples over all replicas) are null where the source does not give them.
    """

    system: str
    model: str
    hardware: str
    stages: int
    chunks: int
    schedule: str
    metric: str
    value: float
    micro_batch: int | None
    global_batch: int | None
    source: str
    note: str


@cache
def measurements(name: Name) -> tuple[Measurement, ...]:
    """All rows of one table, in its order. Raises FileNotFoundError for a name that there is no table of."""
    text = files(__package__).joinpath(f"{name}.csv").read_text(encoding="utf-8")
    return tuple(_measurement(row) for row in csv.DictReader(text.splitlines()))


def _measurement(row: dict[str, str]) -> Measurement:
    return Measurement(
        system=row["system"],
        model=row["model"],
        hardware=row["hardware"],
        stages=int(row["stages"]),
        chunks=int(row["chunks"]),
        schedule=row["schedule"],
        metric=row["metric"],
        value=float(row["value"]),
        micro_batch=int(row["micro_batch"]) if row["micro_batch"] else None,
        global_batch=int(row["global_batch"]) if row["global_batch"] else None,
        source=row["source"],
        note=row["note"],
    )
