from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_record import failed_trial, infeasible_record, record
from sample_timelines import STAGES, a_rank, recorded, simulable

from chunktune import orders, schedules
from chunktune.errors import UsageError
from chunktune.record import read_record
from chunktune.results import PartSeconds, RankTimeline, Record, Trial
from chunktune.simulate import Span
from chunktune.timelines import MOST_OPERATIONS, available, timeline

DATA = Path(__file__).parents[1] / "data"


def check_order(spans: tuple[Span, ...]) -> None:
    """No operation begins before the one before it on its rank has ended, and ranks follow each other."""
    assert all((one.rank, one.end_s) <= (other.rank, other.start_s) for one, other in pairwise(spans))


@pytest.mark.parametrize("name", schedules.SCHEDULES)
@pytest.mark.parametrize(("stages", "chunks"), [(1, 2), (2, 4), (3, 6), (4, 8)])
def test_a_simulated_step_holds_every_operation_of_its_schedule_once(name: str, stages: int, chunks: int) -> None:
    shown = timeline(simulable(name, stages, chunks), chunks)
    virtual = schedules.default_virtual_stages(name)
    expected = orders.computes(name, stages=stages, chunks=chunks, virtual_stages=virtual)
    wanted = [(rank, step.kind, step.part, step.chunk) for rank, steps in enumerate(expected) for step in steps]
    wanted += [(rank, "U", -1, -1) for rank in range(stages)]
    assert Counter((span.rank, span.kind, span.part, span.chunk) for span in shown.spans) == Counter(wanted)
    assert (shown.source, shown.chunks) == ("simulated", chunks)
    assert shown.step_s == max(span.end_s for span in shown.spans)
    check_order(shown.spans)


def test_the_length_of_a_simulated_step_is_what_was_foretold() -> None:
    made = read_record(DATA / "record_v2.json")
    for trial in (trial for trial in made.trials if trial.fits):
        assert trial.predicted is not None and trial.predicted.step_s is not None
        assert timeline(made, trial.chunks).step_s == pytest.approx(
            trial.predicted.step_s - (trial.predicted.constant_s or 0), rel=0.02
        )


def test_the_chosen_m_is_shown_where_none_is_named() -> None:
    made = read_record(DATA / "record_v2.json")
    assert made.verdict is not None
    assert timeline(made) == timeline(made, made.verdict.chunks)
    assert timeline(made).chunks == made.verdict.chunks


def test_what_was_recorded_goes_before_what_can_be_simulated() -> None:
    made = simulable()
    confirmed = recorded(a_rank()).confirmation
    both = made.model_copy(update={"confirmation": confirmed})
    assert available(both) == {4: "measured"}
    shown = timeline(both)
    assert (shown.source, shown.step_s) == ("measured", 3.5)
    wanted = Span(0, "F", 0, 0, 0.0, 1.0), Span(0, "B", 0, 0, 1.0, 2.0), Span(0, "U", -1, -1, 3.0, 3.5)
    assert shown.spans == wanted


def test_what_a_whatif_foretold_is_shown_with_its_transfers() -> None:
    slow = timeline(simulable("gpipe", transfer_s=(0.5,)))
    quick = timeline(simulable("gpipe", transfer_s=(0.0,)))
    assert slow.step_s > quick.step_s + 0.9


def test_rounded_events_of_a_device_are_put_in_order() -> None:
    shown = timeline(recorded(a_rank(1, start_s=(0.0, 0.99999, 3.0)), a_rank(0)))
    assert [span.rank for span in shown.spans] == [0, 0, 0, 1, 1, 1]
    assert [span.start_s for span in shown.spans[3:]] == [0.0, 1.0, 3.0]
    check_order(shown.spans)


# --- where there is none


def refusal(made: Record, chunks: int | None = None) -> str:
    with pytest.raises(UsageError) as raised:
        timeline(made, chunks)
    return str(raised.value)


def test_a_record_of_the_first_schema_has_none() -> None:
    text = refusal(read_record(DATA / "record_v1.json"))
    assert "does not say how long the operations of M = 2 took" in text
    assert "schema version 2" in text
    assert "no M of this record has a time line" in text


def test_an_m_without_one_names_those_that_have_one() -> None:
    made = read_record(DATA / "record_v2.json")
    those = "M with a time line: 1 (simulated), 2 (simulated), 4 (simulated), 8 (simulated)"
    assert refusal(made, 3) == f"M = 3 was not tried; {those}"
    assert "its state is skipped: " in refusal(made, 16)
    assert refusal(made, 16).endswith(those)
    assert refusal(made, -1).startswith("M = -1 was not tried")


def test_a_record_without_a_choice_asks_for_an_m() -> None:
    assert "no M was chosen" in refusal(infeasible_record())
    interrupted = simulable().model_copy(update={"verdict": None, "status": "interrupted"})
    assert refusal(interrupted).endswith("give --chunks M; M with a time line: 4 (simulated)")
    assert timeline(interrupted, 4).chunks == 4


def test_a_reason_cannot_write_to_the_terminal() -> None:
    made = record(trials=(failed_trial(4, "killed", reason="\x1b[31mred\nline"),), confirmation=None)
    assert "\x1b" not in refusal(made) and "\n" not in refusal(made)


@pytest.mark.parametrize(
    ("ranks", "fact"),
    [
        ((a_rank(), a_rank()), "a rank stands in it twice"),
        ((a_rank(-1),), "a rank stands in it twice, or below 0"),
        ((a_rank(start_s=(0.0, 1.0)),), "the columns of rank 0 differ in length"),
        ((a_rank(start_s=(0.0, 0.5, 3.0)),), "operation 1 of rank 0 runs from 0.5 to 2 s"),
        ((a_rank(start_s=(-1.0, 1.0, 3.0)),), "operation 0 of rank 0 runs from -1 to 1 s"),
        ((a_rank(end_s=(1.0, 2.0, 2.5)),), "operation 2 of rank 0 runs from 3 to 2.5 s"),
        ((a_rank(end_s=(1.0, 2.0, 1e300)),), "operation 2 of rank 0"),
    ],
)
def test_a_damaged_time_line_is_said(ranks: tuple[RankTimeline, ...], fact: str) -> None:
    assert fact in refusal(recorded(*ranks))


@pytest.mark.parametrize(
    ("pipeline", "fact"),
    [
        ({"schedule": "new"}, 'spec.pipeline.schedule is "new"'),
        ({"stages": 3}, "operations of 2 ranks and 2 parts; its spec has stages = 3"),
        ({"stages": 10**12}, "its spec has stages = 1000000000000"),
        ({"virtual_stages": "two"}, 'virtual_stages = "two"'),
        ({"schedule": "zbv-zero-bubble", "virtual_stages": 1}, "holds two parts a rank"),
    ],
)
def test_a_spec_of_another_pipeline_is_said(pipeline: dict[str, Any], fact: str) -> None:
    made = simulable()
    altered = {**made.spec, "pipeline": {**made.spec["pipeline"], **pipeline}}
    assert fact in refusal(made.model_copy(update={"spec": altered}))
    assert "spec.pipeline.schedule is None" in refusal(made.model_copy(update={"spec": {}}))


def test_an_m_that_the_schedule_refuses_is_said() -> None:
    assert "M must be at least K = 2" in refusal(simulable(chunks=1), 1)


@pytest.mark.parametrize("changes", [{"overhead_s": -1.0}, {"transfer_s": (1e300,)}, {"seconds": -0.01}])
def test_impossible_durations_are_said(changes: dict[str, Any]) -> None:
    assert "an operation of the record takes" in refusal(simulable(**changes))


def test_a_step_too_long_to_show_names_one_that_is_not() -> None:
    text = refusal(simulable(chunks=10**9), 10**9)
    assert f"at most {MOST_OPERATIONS:,} are shown; give --chunks {MOST_OPERATIONS // 4} or fewer" in text


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(list(schedules.SCHEDULES)),
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
    st.floats(0, 0.1),
)
def test_no_rank_does_two_things_at_once(name: str, seconds: list[float], overhead_s: float) -> None:
    parts = tuple(
        PartSeconds(part=part, forward_s=value, backward_s=2 * value, input_s=value, weight_s=value)
        for part, value in enumerate(seconds[: STAGES * schedules.default_virtual_stages(name)])
    )
    shown = timeline(simulable(name, parts=parts, overhead_s=overhead_s))
    check_order(shown.spans)
    assert all(0 <= span.start_s <= span.end_s <= shown.step_s for span in shown.spans)


def test_a_trial_that_did_not_fit_is_no_time_line() -> None:
    made = simulable()
    trial: Trial = made.trials[0].model_copy(update={"state": "oom"})
    assert available(made.model_copy(update={"trials": (trial,)})) == {}
