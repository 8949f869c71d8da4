"""Events of a sweep under way, folded into a state; how long it may still take; what the panel shows. No clock."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from sample_record import (
    MIB,
    STEP_S,
    a_round,
    begin_event,
    candidates,
    failed_trial,
    lost_event,
    ok_trial,
    shortage,
    spec,
    start_event,
)

from chunktune.report.live import Left, Seen, remaining
from chunktune.report.panel import MOST_BARS, memory_bars, panel, status_lines
from chunktune.results import Trial

Event = dict[str, Any]


def trial_event(trial: Trial, elapsed_s: float, kind: str = "trial") -> Event:
    return {"event": kind, "trial": trial.model_dump(mode="json"), "elapsed_s": elapsed_s}


def rounds_event(values: Sequence[int], elapsed_s: float, count: int = 3) -> Event:
    rounds = [a_round(values).model_dump(mode="json") for _ in range(count)]
    return {"event": "rounds", "values": list(values), "rounds": rounds, "elapsed_s": elapsed_s}


# A climb over 2, 4, 8, 16, 32: a value takes ten seconds, of which the trial takes seven.
CLIMB: list[Event] = [
    start_event(elapsed_s=0.0),
    {"event": "group", "generation": 0, "kind": "processes", "pids": [1, 2], "elapsed_s": 1.0},
    begin_event("trial", [2], 2.0),
    trial_event(ok_trial(2), 9.0),
    begin_event("trial", [4], 12.0),
    trial_event(ok_trial(4), 19.0),
    begin_event("rounds", [4, 2], 19.0),
    rounds_event([4, 2], 22.0),
    begin_event("trial", [8], 22.0),
]


def seen_of(events: Sequence[Event], budget_s: float | None = 600.0) -> Seen:
    seen = Seen(budget_s=budget_s)
    for event in events:
        seen = seen.add(event)
    return seen


def shown(seen: Seen, elapsed_s: float, columns: int = 80, lines: int = 40, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    console = Console(file=file, width=columns, height=lines, color_system=None)
    console.print(panel(seen, elapsed_s, columns))
    file.flush()
    return file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined, no-any-return]


# --- the state


def test_before_the_first_event_only_the_budget_is_known() -> None:
    assert status_lines(Seen(budget_s=600.0), 3.2) == [
        "starting the workers",
        "elapsed 3 s, at most 9 min 57 s left by sweep.budget",
    ]
    assert status_lines(Seen(), 3.2)[1] == "elapsed 3 s"


def test_the_task_in_hand_is_named() -> None:
    assert status_lines(seen_of(CLIMB), 25.4)[0] == "trying M = 8, 3 s"
    assert status_lines(seen_of(CLIMB[:7]), 20.0)[0] == "comparing M = 4, 2, 1 s"
    assert status_lines(seen_of(CLIMB[:6]), 20.0)[0] == "preparing what comes next"
    lost = [*CLIMB, lost_event("trial", [8], "killed", 23.0)]
    assert status_lines(seen_of(lost), 24.0)[0] == "starting the workers again"
    assert status_lines(seen_of([*CLIMB, begin_event("confirm", [4], 30.0)]), 31.0)[0] == "confirming M = 4, 1 s"
    assert status_lines(seen_of([*CLIMB, {"event": "resumed", "elapsed_s": 22.0}]), 22.0)[0] == "starting the workers"


def test_the_best_so_far_is_that_of_the_search() -> None:
    assert "best so far: M = 4, 400 samples/s" in status_lines(seen_of(CLIMB), 25.0)
    # In the trials alone M = 2 is faster here, and in the rounds, which cancel drift, M = 4 is.
    fast = ok_trial(2).model_copy(update={"throughput_samples_per_s": 900.0})
    before = [CLIMB[0], trial_event(fast, 9.0), trial_event(ok_trial(4), 19.0)]
    assert "best so far: M = 2, 900 samples/s" in status_lines(seen_of(before), 20.0)
    assert "best so far: M = 4, 400 samples/s" in status_lines(seen_of([*before, rounds_event([4, 2], 22.0)]), 23.0)


def test_nothing_fits_yet() -> None:
    seen = seen_of([CLIMB[0], trial_event(failed_trial(2, "oom"), 5.0)])
    assert status_lines(seen, 6.0)[-1] == "best so far: no M fits yet"


def test_a_value_lost_for_good_is_no_best() -> None:
    lost = lost_event("rounds", [4, 2], "killed", 30.0)
    assert "M = 4" in status_lines(seen_of([*CLIMB[:8], lost]), 31.0)[-1]  # sudden death has two tries
    assert "best so far: M = 2" in status_lines(seen_of([*CLIMB[:8], lost, lost]), 31.0)[-1]
    failed = trial_event(failed_trial(4, "oom"), 30.0, "confirm")
    assert "best so far: M = 2" in status_lines(seen_of([*CLIMB[:8], failed]), 31.0)[-1]


@pytest.mark.parametrize("event", [{}, {"event": "trial"}, {"event": "begin", "task": "trial", "values": 3}])
def test_an_event_of_another_form_is_an_error(event: Event) -> None:
    with pytest.raises((LookupError, TypeError, ValueError)):
        seen_of(CLIMB).add(event)


# --- how long it may take


def test_what_values_took_says_what_the_climb_may_still_take() -> None:
    # In hand 10 - 3 s, then 16 and 32 at 10 s each, as much to settle, then a confirmation like the trials, 7 s.
    assert remaining(seen_of(CLIMB), 25.0) == Left("about", 7.0 + 20.0 + 10.0 + 7.0)
    assert remaining(seen_of(CLIMB), 40.0) == Left("about", 0.0 + 20.0 + 10.0 + 7.0)


def test_a_quick_run_confirms_nothing() -> None:
    quick = [{**CLIMB[0], "quick": True}, *CLIMB[1:]]
    rehearsed = [{**CLIMB[0], "mode": "rehearsed"}, *CLIMB[1:]]
    assert remaining(seen_of(quick), 25.0) == remaining(seen_of(rehearsed), 25.0) == Left("about", 37.0)


def test_the_budget_bounds_the_estimate() -> None:
    assert remaining(seen_of(CLIMB, budget_s=60.0), 25.0) == Left("at most", 35.0)
    assert remaining(seen_of(CLIMB, budget_s=None), 25.0) == Left("about", 44.0)
    assert status_lines(seen_of(CLIMB, budget_s=20.0), 25.0)[1] == "elapsed 25 s, sweep.budget is spent"


def test_before_a_value_is_done_and_after_the_climb_only_the_budget_is_known() -> None:
    assert remaining(seen_of(CLIMB[:3]), 5.0) == Left("at most", 595.0)
    refined = [*CLIMB, trial_event(ok_trial(8), 30.0), begin_event("trial", [6], 31.0)]
    joint = [*CLIMB, trial_event(ok_trial(8), 30.0), begin_event("rounds", [2, 4, 8], 31.0)]
    neighbours = [*CLIMB, trial_event(ok_trial(8), 30.0), begin_event("rounds", [2, 4], 31.0)]
    for events in (refined, joint, neighbours):
        assert remaining(seen_of(events), 40.0) == Left("at most", 560.0)
    assert remaining(seen_of(refined, budget_s=None), 40.0) is None


def test_a_confirmation_takes_about_what_its_trial_took() -> None:
    assert remaining(seen_of([*CLIMB, begin_event("confirm", [4], 30.0)]), 32.0) == Left("about", 5.0)


def test_the_last_rung_ahead_of_its_turn_is_still_the_climb() -> None:
    ahead = [*CLIMB, trial_event(failed_trial(8, "error"), 32.0), begin_event("trial", [32], 32.0)]
    done = [*ahead, trial_event(ok_trial(32), 39.0), begin_event("trial", [16], 42.0)]
    left = remaining(seen_of(done), 42.0)
    assert left is not None and left.how == "about"
    assert left.seconds == pytest.approx(40 / 3 + 40 / 3 + 7.75)


def test_a_second_try_began_with_the_first() -> None:
    again = [*CLIMB, lost_event("trial", [8], "killed", 25.0), begin_event("trial", [8], 30.0)]
    assert remaining(seen_of(again), 31.0) == Left("about", 1.0 + 20.0 + 10.0 + 7.0)


def test_of_many_divisors_the_climb_visits_the_ladder() -> None:
    values = [2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 16, 18, 20, 24]
    seen = seen_of([start_event(candidates=[c.model_dump(mode="json") for c in candidates(values)])])
    assert seen.rungs == (2, 4, 8, 16, 24)
    listed = {**spec(), "batch": {"mini_batch": 720, "micro_batch": None, "chunks": values}}
    seen = seen_of([start_event(candidates=[c.model_dump(mode="json") for c in candidates(values)], spec=listed)])
    assert seen.rungs == tuple(values)


# --- memory


def crowd(ranks: int) -> Trial:
    stage = ok_trial(8).stages[0]
    sizes = {rank: (500 + (37 * rank) % 101) * MIB for rank in range(ranks)}
    stages = tuple(stage.model_copy(update={"rank": r, "peak_bytes": size}) for r, size in sizes.items())
    return ok_trial(8).model_copy(update={"stages": stages})


def test_a_bar_a_rank() -> None:
    bars = memory_bars(ok_trial(8))
    assert [(bar.label, bar.text) for bar in bars] == [
        ("rank 0", "86.1% of 1.02 GiB"),
        ("rank 1", "76.6% of 1.02 GiB"),
    ]
    assert bars[0].share == pytest.approx(900 / 1045)


def test_of_many_ranks_the_fullest_have_bars() -> None:
    trial = crowd(64)
    bars = memory_bars(trial)
    *drawn, rest = bars
    shares = sorted(((stage.peak_bytes or 0) / (stage.budget_bytes or 1) for stage in trial.stages), reverse=True)
    assert [bar.share for bar in drawn] == shares[:MOST_BARS]
    assert (rest.share, rest.text) == (None, f"56 more ranks: at most {100 * shares[MOST_BARS]:.3g}%")


def test_a_shortage_has_the_bar_of_its_rank() -> None:
    (bar,) = memory_bars(failed_trial(8, "oom"))
    assert (bar.label, bar.text) == ("rank 1", "115% of 1.02 GiB")
    unknown = failed_trial(8, "oom").model_copy(update={"shortage": shortage(needed_bytes=None)})
    assert memory_bars(unknown) == memory_bars(failed_trial(8, "killed")) == []


def test_unknown_peaks_have_no_bar() -> None:
    stage = ok_trial(8).stages[0].model_copy(update={"peak_bytes": None})
    assert memory_bars(ok_trial(8).model_copy(update={"stages": (stage,)})) == []


def test_the_panel_shows_the_latest_trial_that_tells_memory() -> None:
    text = shown(seen_of([*CLIMB, trial_event(failed_trial(8, "killed"), 30.0)]), 31.0)
    assert "memory at M = 4, peak of what a rank may use" in text
    assert "rank 0 ━" in text
    assert "86.1% of 1.02 GiB" in text
    assert "memory at M = 8" in shown(seen_of([*CLIMB, trial_event(failed_trial(8, "oom"), 30.0)]), 31.0)


def test_the_panel_in_a_terminal_without_other_characters() -> None:
    assert "rank 0 ---" in shown(seen_of(CLIMB), 25.0, encoding="ascii")


@pytest.mark.parametrize("columns", [1, 2, 7, 20, 33, 80, 400])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    lines = shown(seen_of([*CLIMB, trial_event(crowd(64), 30.0)]), 31.0, columns).splitlines()
    assert max(map(len, lines)) <= columns


# --- any journal

CHUNKS = st.sampled_from(sorted(STEP_S))
TIMES = st.floats(0, 1e6)
TRIALS = st.one_of(
    CHUNKS.map(ok_trial),
    st.builds(failed_trial, CHUNKS, st.sampled_from(["oom", "killed", "timeout", "error", "skipped", "illegal"])),
    st.integers(1, 20).map(crowd),
)
VALUES = st.lists(CHUNKS, min_size=1, max_size=4, unique=True)
EVENTS = st.one_of(
    st.builds(lambda mode, t: start_event(mode, elapsed_s=t), st.sampled_from(["mini_batch", "micro_batch"]), TIMES),
    st.builds(begin_event, st.sampled_from(["trial", "rounds", "confirm"]), VALUES, TIMES),
    st.builds(trial_event, TRIALS, TIMES, st.sampled_from(["trial", "confirm"])),
    st.builds(rounds_event, VALUES, TIMES, st.integers(0, 3)),
    st.builds(
        lost_event,
        st.sampled_from(["trial", "rounds", "confirm"]),
        VALUES,
        st.sampled_from(["oom", "killed", "timeout", "error"]),
        TIMES,
    ),
    st.sampled_from([{"event": "group", "pids": []}, {"event": "warning", "text": "a"}, {"event": "unheard of"}]),
    TIMES.map(lambda t: {"event": "resumed", "elapsed_s": t}),
    TIMES.map(lambda t: {"event": "end", "status": "complete", "elapsed_s": t}),
)


@given(st.lists(EVENTS, max_size=12), TIMES, st.integers(1, 120), st.none() | st.floats(0.1, 1e6))
def test_any_journal_can_be_shown(events: list[Event], elapsed_s: float, columns: int, budget_s: float | None) -> None:
    seen = Seen(budget_s=budget_s)
    for event in events:
        seen = seen.add(event)
        left = remaining(seen, elapsed_s)
        assert left is None or 0 <= left.seconds <= (budget_s or float("inf"))
    shown(seen, elapsed_s, columns)
