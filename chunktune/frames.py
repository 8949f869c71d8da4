"""Records as pandas data frames, for notebooks: `frames.trials(load_record(Path("runs/mine")))`.

Columns carry their units in their names, as in the record. pandas is imported when a frame is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from chunktune.results import Record, Trial

if TYPE_CHECKING:
    import pandas as pd

_PLAIN = ("chunks", "micro_batch", "mini_batch", "state", "reason", "step_median_s", "throughput_samples_per_s", "loss")


def trials(record: Record) -> pd.DataFrame:
    """A row each M, ascending; missing values are NaN or None.

    Columns: chunks, micro_batch, mini_batch, state, reason, step_median_s, step_low_s, step_high_s (its interval),
    throughput_samples_per_s, loss, bubble, ideal_bubble, predicted_step_s, peak_bytes (of the rank whose peak is
    highest), chosen.
    """
    chosen = record.chosen
    return _frame(_trial(trial) | {"chosen": trial.chunks == chosen} for trial in record.trials)


def stages(record: Record) -> pd.DataFrame:
    """A row each M and rank: chunks and the fields of `results.StageFigures`."""
    return _frame({"chunks": trial.chunks, **stage.model_dump()} for trial in record.trials for stage in trial.stages)


def comparisons(record: Record) -> pd.DataFrame:
    """A row each M compared with the best: fields of `results.Comparison`, the interval as ratio_low, ratio_high."""
    rows = []
    for one in record.comparisons:
        low, high = one.interval or (None, None)
        rows.append(one.model_dump(exclude={"interval"}) | {"ratio_low": low, "ratio_high": high})
    return _frame(rows)


def timeline(record: Record) -> pd.DataFrame:
    """A row each operation of the confirmed step: rank, kind, part, chunk, start_s, end_s; empty without one."""
    found = None if record.confirmation is None else record.confirmation.timeline
    columns = ("rank", "kind", "part", "chunk", "start_s", "end_s")
    rows = [
        dict(zip(columns, (rank.rank, *one), strict=True))
        for rank in (found.ranks if found else ())
        for one in zip(rank.kinds, rank.parts, rank.chunks, rank.start_s, rank.end_s, strict=True)
    ]
    return _frame(rows, columns)


def _trial(trial: Trial) -> dict[str, Any]:
    low, high = trial.step_interval_s or (None, None)
    peaks = [stage.peak_bytes for stage in trial.stages if stage.peak_bytes is not None]
    return {name: getattr(trial, name) for name in _PLAIN} | {
        "step_low_s": low,
        "step_high_s": high,
        "bubble": None if trial.bubble is None else trial.bubble.measured,
        "ideal_bubble": None if trial.bubble is None else trial.bubble.ideal,
        "predicted_step_s": None if trial.predicted is None else trial.predicted.step_s,
        "peak_bytes": max(peaks, default=None),
    }


def _frame(rows: Iterable[Mapping[str, Any]], columns: Iterable[str] | None = None) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(list(rows), columns=None if columns is None else list(columns))
