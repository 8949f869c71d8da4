from __future__ import annotations

from pathlib import Path

import pytest

from chunktune import frames
from chunktune.record import read_record
from chunktune.results import RankTimeline, Timeline

DATA = Path(__file__).parents[1] / "data"


def test_trials_are_rows_with_their_units_in_the_names() -> None:
    record = read_record(DATA / "record_v2.json")
    frame = frames.trials(record)
    assert list(frame.chunks) == [trial.chunks for trial in record.trials]
    assert record.verdict is not None
    assert list(frame.chunks[frame.chosen]) == [record.verdict.chunks]
    chosen = frame[frame.chosen].iloc[0]
    trial = next(trial for trial in record.trials if trial.chunks == chosen.chunks)
    assert chosen.step_median_s == trial.step_median_s
    assert chosen.peak_bytes == max(stage.peak_bytes or 0 for stage in trial.stages)
    assert frame.step_median_s.isna().sum() == sum(trial.step_median_s is None for trial in record.trials)


def test_stages_and_comparisons_have_a_row_each() -> None:
    record = read_record(DATA / "record_v2.json")
    assert len(frames.stages(record)) == sum(len(trial.stages) for trial in record.trials)
    compared = frames.comparisons(record)
    assert list(compared.chunks) == [one.chunks for one in record.comparisons]
    assert (compared.ratio_low <= compared.ratio).all()


@pytest.mark.parametrize("known", [True, False])
def test_the_time_line_is_a_table_of_operations(known: bool) -> None:
    record = read_record(DATA / "record_v2.json")
    assert record.confirmation is not None
    rank = RankTimeline(rank=1, kinds=("F", "B"), parts=(1, 1), chunks=(0, 0), start_s=(0.0, 1.0), end_s=(1.0, 3.0))
    timeline = Timeline(ranks=(rank,)) if known else None
    confirmation = record.confirmation.model_copy(update={"timeline": timeline})
    frame = frames.timeline(record.model_copy(update={"confirmation": confirmation}))
    assert list(frame.columns) == ["rank", "kind", "part", "chunk", "start_s", "end_s"]
    assert list(frame.kind) == (["F", "B"] if known else [])
