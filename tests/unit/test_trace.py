"""The trace against the rules of the Trace Event Format, and against what Perfetto needs besides."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_record import NASTY
from sample_timelines import a_rank, predicted, recorded, simulable

from chunktune import schedules
from chunktune.errors import UsageError
from chunktune.record import read_record
from chunktune.report.trace import LANES, TICKS_PER_US, to_trace
from chunktune.results import PartSeconds, RankTimeline, Record
from chunktune.timelines import timeline

DATA = Path(__file__).parents[1] / "data"
# What the format requires of an event, by its phase; "X" is a complete event, "M" metadata.
REQUIRED = {"X": {"name", "cat", "ph", "ts", "dur", "pid", "tid"}, "M": {"name", "ph", "pid", "tid", "args"}}
METADATA = {
    "process_name": "name",
    "process_labels": "labels",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}
# Reserved names of trace-viewer's colour scheme, tracing/tracing/base/color_scheme.html of catapult.
PALETTE = {"rail_response", "rail_animation", "thread_state_running", "good", "olive", "yellow", "grey"}

Event = dict[str, Any]


def trace_of(record: Record, chunks: int | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(to_trace(record, chunks), parse_constant=pytest.fail)
    return found


def check_rules(trace: dict[str, Any]) -> None:
    """Every rule of the format that a trace can break."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = trace["traceEvents"]
    for event in events:
        assert REQUIRED[event["ph"]] <= set(event), event
        assert all(isinstance(event[key], int) and event[key] > 0 for key in ("pid", "tid")), event
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "M":
            assert list(event["args"]) == [METADATA[event["name"]]]
        else:
            assert event["ts"] >= 0 and event["dur"] >= 0, event
            assert event["cname"] in PALETTE
    phases = [phase for phase, _ in groupby(event["ph"] for event in events)]
    assert phases == ["M", "X"], "metadata first"
    check_tracks(events)


def check_tracks(events: list[Event]) -> None:
    """Complete events are sorted, do not overlap in a track, and each track has its names."""
    spans = [event for event in events if event["ph"] == "X"]
    assert spans == sorted(spans, key=lambda event: event["ts"])
    free: dict[tuple[int, int], float] = {}
    for event in spans:
        track = event["pid"], event["tid"]
        # Exactly, with a reader's own arithmetic: no rounding to hide behind.
        assert event["ts"] >= free.get(track, 0.0), event
        assert (event["ts"] * TICKS_PER_US).is_integer() and (event["dur"] * TICKS_PER_US).is_integer()
        free[track] = event["ts"] + event["dur"]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert set(free) <= named
    threads: dict[int, int] = {}
    for pid, tid in named:
        assert threads.setdefault(tid, pid) == pid, "Perfetto takes the id of a thread for unique"


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_the_rules_hold_for_every_schedule(name: str) -> None:
    check_rules(trace_of(simulable(name)))


def test_the_rules_hold_for_what_was_recorded() -> None:
    loss = RankTimeline(
        rank=0,
        kinds=("F", "L", "I", "W", "B", "U"),
        parts=(0, 0, 0, 0, 0, -1),
        chunks=(0, 0, 0, 0, 1, -1),
        start_s=(0.0, 0.1, 0.1, 0.4, 0.5, 0.7),
        end_s=(0.1, 0.1, 0.3, 0.5, 0.7, 0.9),
    )
    trace = trace_of(recorded(loss, a_rank(1)))
    check_rules(trace)
    assert trace["otherData"]["source"] == "measured"
    names = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 10]
    assert names == ["F 0", "L 0", "I 0", "idle", "W 0", "B 1", "optimizer", "idle"]


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(list(schedules.SCHEDULES)),
    st.lists(st.floats(0, 1e-5) | st.floats(0, 10), min_size=4, max_size=4),
    st.floats(0, 1e-6),
)
def test_no_rounding_makes_an_overlap(name: str, seconds: list[float], overhead_s: float) -> None:
    parts = tuple(
        PartSeconds(part=part, forward_s=value, backward_s=2 * value, input_s=value, weight_s=value)
        for part, value in enumerate(seconds[: 2 * schedules.default_virtual_stages(name)])
    )
    check_rules(trace_of(simulable(name, parts=parts, overhead_s=overhead_s)))


def test_every_operation_is_an_event_with_its_place() -> None:
    made = simulable("interleaved-1f1b")
    spans = timeline(made).spans
    events = [event for event in trace_of(made)["traceEvents"] if event["ph"] == "X" and event["name"] != "idle"]
    found = Counter((event["pid"], event["name"], event["args"].get("part", -1)) for event in events)
    names = {span: "optimizer" if span.kind == "U" else f"{span.kind} {span.chunk}" for span in spans}
    assert found == Counter((10 * (span.rank + 1), names[span], span.part) for span in spans)
    first = min(spans, key=lambda span: (span.start_s, span.rank))
    assert events[0]["dur"] == pytest.approx(1e6 * (first.end_s - first.start_s), abs=1 / TICKS_PER_US)
    assert all(event["args"]["chunk"] == int(event["name"].split()[1]) for event in events if event["args"])


def test_the_tracks_are_named_after_ranks_and_lanes() -> None:
    events = trace_of(simulable("zbv-zero-bubble"))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0 (parts 0, 3)", "rank 1 (parts 1, 2)"]
    lanes = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert lanes == [*LANES, *LANES]
    assert {event["args"]["labels"] for event in events if event["name"] == "process_labels"} == {"simulated"}


def test_work_and_idleness_fill_the_step_of_every_rank() -> None:
    made = simulable("gpipe")
    shown = timeline(made)
    filled: Counter[int] = Counter()
    for event in trace_of(made)["traceEvents"]:
        filled[event["pid"]] += round(event.get("dur", 0) * TICKS_PER_US)
    assert set(filled.values()) == {round(1e6 * shown.step_s * TICKS_PER_US)}


def test_the_other_data_says_what_is_shown() -> None:
    other = trace_of(read_record(DATA / "record_v2.json"))["otherData"]
    assert other["source"] == "simulated"
    assert (other["chunks"], other["micro_batch"], other["mini_batch"]) == (2, 8, 16)
    assert (other["stages"], other["schedule"], other["model"]) == (2, "gpipe", "sleep")
    assert other["tool"] == "chunktune 0.1.0"
    assert other["step_s"] == pytest.approx(0.118, abs=0.001)


def test_names_from_elsewhere_are_cleaned() -> None:
    made = simulable()
    spec = {**made.spec, "model": {"family": NASTY}}
    text = to_trace(made.model_copy(update={"spec": spec, "tool": {"version": NASTY}, "started_at": NASTY}))
    assert "\\u001b" not in text and "\\u202e" not in text
    check_rules(json.loads(text))


def test_the_longest_times_are_still_numbers() -> None:
    check_rules(trace_of(simulable(seconds=1e5)))


def test_a_step_without_any_length_is_a_trace() -> None:
    made = simulable(parts=predicted(seconds=0.0).parts, update_s=(0.0, 0.0), overhead_s=0.0)
    check_rules(trace_of(made))


def test_what_cannot_be_shown_is_said() -> None:
    with pytest.raises(UsageError, match="M = 3 was not tried"):
        to_trace(simulable(), 3)
