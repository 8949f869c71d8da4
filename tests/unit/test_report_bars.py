from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from sample_record import MIB, every_record, failed_trial, infeasible_record, ok_trial, record, shortage, stage, verdict

from chunktune.report.bars import ASCII, BLOCKS, Marks, marks_for, render_bars
from chunktune.results import Record, Trial

FULL = 72  # columns of the longest bar where there is room


def trial(chunks: int, rate: float, *peaks: int | None, budget: int | None = 80 * MIB) -> Trial:
    """A trial of `rate` samples/s whose ranks peak at `peaks`, each with a budget and 100 MiB of capacity."""
    capacity = None if budget is None else 100 * MIB
    stages = tuple(
        stage(rank, 4).model_copy(update={"peak_bytes": peak, "budget_bytes": budget, "capacity_bytes": capacity})
        for rank, peak in enumerate(peaks)
    )
    return ok_trial(4).model_copy(update={"chunks": chunks, "throughput_samples_per_s": rate, "stages": stages})


def charts(made: Record, marks: Marks = ASCII, width: int | None = 200) -> tuple[dict[int, str], dict[int, str]]:
    """M -> line, of throughput and of memory."""
    rates, _, sizes = render_bars(made, width, marks).partition("\n\n")
    found = [
        {int(line.split()[2]): line for line in part.splitlines() if line.lstrip().startswith("M =")}
        for part in (rates, sizes)
    ]
    return found[0], found[1]


def test_lengths_are_in_proportion() -> None:
    made = record(trials=(trial(2, 50, MIB), trial(4, 100, MIB), trial(8, 25, MIB)))
    rates, _ = charts(made)
    assert [rates[chunks].count("#") for chunks in (2, 4, 8)] == [FULL // 2, FULL, FULL // 4]
    assert rates[4].endswith("  100, chosen")
    assert rates[2].endswith("  50")


def test_memory_is_of_the_fullest_rank_between_budget_and_capacity() -> None:
    made = record(trials=(trial(4, 100, 10 * MIB, 40 * MIB, 20 * MIB),))
    _, sizes = charts(made)
    bar = sizes[4].removeprefix("M = 4  ")[:FULL]
    assert bar.count("#") == round(0.4 * FULL)
    assert (bar.index(":"), bar.index("|")) == (int(0.8 * FULL), FULL - 1)
    assert sizes[4].endswith("  40.0 MiB (50%), rank 1, chosen")


def test_a_peak_past_its_budget_passes_the_line() -> None:
    _, sizes = charts(record(trials=(trial(4, 100, 90 * MIB),)))
    bar = sizes[4].removeprefix("M = 4  ")[:FULL]
    assert bar.count("#") + 1 == round(0.9 * FULL)
    assert bar.rindex("#") > bar.index(":")


def test_what_did_not_run_has_its_state_and_what_it_needed() -> None:
    lacking = failed_trial(8, "oom").model_copy(
        update={"shortage": shortage(needed_bytes=200 * MIB, budget_bytes=80 * MIB)}
    )
    made = record(trials=(trial(4, 100, 50 * MIB), lacking, failed_trial(16, "killed"), failed_trial(32, "timeout")))
    rates, sizes = charts(made)
    assert [rates[chunks].split("  ")[-1] for chunks in (8, 16, 32)] == ["out of memory", "killed", "timed out"]
    assert sizes[8].count("x") == FULL - 1  # one cell is the budget's line
    assert sizes[8].endswith("  200 MiB, rank 1, out of memory")
    assert sizes[16].split("  ")[-1] == "killed"
    assert "needed and not there" in render_bars(made)


def test_a_shortage_of_unknown_size_shows_the_budget() -> None:
    lacking = failed_trial(8, "oom").model_copy(update={"shortage": shortage(needed_bytes=None, budget_bytes=80 * MIB)})
    _, sizes = charts(record(trials=(trial(4, 100, 50 * MIB), lacking)))
    assert sizes[8].count(":") == 1
    assert "#" not in sizes[8]


def test_what_fits_but_for_the_headroom_is_tight() -> None:
    tight = shortage(needed_bytes=90 * MIB, budget_bytes=80 * MIB, within_capacity=True, where="prediction")
    lacking = failed_trial(8, "oom").model_copy(update={"shortage": tight})
    rates, sizes = charts(record(trials=(trial(4, 100, 50 * MIB), lacking)))
    assert rates[8].endswith("  TIGHT")
    assert sizes[8].endswith("  90.0 MiB, rank 1, TIGHT")


def test_a_peak_without_a_budget_has_no_line() -> None:
    made = record(trials=(trial(4, 100, 40 * MIB, 50 * MIB, budget=None),))
    text = render_bars(made, 200, ASCII)
    assert "what it may use" not in text
    assert charts(made)[1][4].endswith("#  50.0 MiB, rank 1, chosen")


def test_without_any_bytes_there_is_no_chart_of_memory() -> None:
    made = record(trials=(trial(4, 100, None, None, budget=None),))
    assert "memory" not in render_bars(made)


def test_without_trials_there_is_nothing() -> None:
    assert render_bars(record(verdict=None, trials=(), status="interrupted")) == ""


def test_nothing_that_ran_has_labels_alone() -> None:
    rates, sizes = charts(infeasible_record())
    assert set(rates) == {2, 4, 8}
    assert not any("#" in line for line in (*rates.values(), *sizes.values()))


def test_a_bar_of_blocks_ends_in_eighths() -> None:
    made = record(trials=(trial(2, 100, MIB), trial(4, 100 * (10 + 3 / 8) / FULL, MIB)))
    rates, _ = charts(made, BLOCKS)
    assert rates[2].count("█") == FULL
    assert rates[4].removeprefix("M = 4  ").startswith("█" * 10 + "▍ ")


def test_something_is_never_drawn_as_nothing() -> None:
    made = record(trials=(trial(2, 1e6, 1), trial(4, 1, 1)))
    assert "▏" in charts(made, BLOCKS)[0][4]
    assert "#" in charts(made, ASCII)[0][4]


@pytest.mark.parametrize(
    ("encoding", "marks"),
    [
        ("utf-8", BLOCKS),
        ("UTF-16", BLOCKS),
        ("ascii", ASCII),
        ("latin-1", ASCII),
        ("cp437", ASCII),
        (None, ASCII),
        ("?", ASCII),
    ],
)
def test_blocks_only_where_the_encoding_has_them(encoding: str | None, marks: Marks) -> None:
    assert marks_for(encoding) is marks


@pytest.mark.parametrize("made", every_record())
@pytest.mark.parametrize("width", [None, 20, 40, 80, 250])
def test_every_record_fits_the_width(made: Record, width: int | None) -> None:
    for marks in (BLOCKS, ASCII):
        lines = render_bars(made, width, marks).splitlines()
        assert all(cell_len(line) <= max(width or 100, 30) for line in lines)
        assert all(line == line.rstrip() for line in lines)
    assert render_bars(made, width, ASCII).isascii()


sizes_bytes = st.integers(0, 2**63 - 1)


@given(
    st.lists(st.tuples(st.floats(0, 1e300), sizes_bytes, st.none() | sizes_bytes), min_size=1, max_size=6),
    st.integers(10, 200),
)
@settings(max_examples=100, deadline=None)
def test_bars_of_any_numbers_have_one_scale(rows: list[tuple[float, int, int | None]], width: int) -> None:
    trials = tuple(trial(index + 1, rate, peak, budget=budget) for index, (rate, peak, budget) in enumerate(rows))
    made = record(trials=trials, verdict=verdict("memory", chunks=1))
    lines = render_bars(made, width, ASCII).splitlines()
    assert all(len(line) <= max(width, 30) for line in lines)
    if width >= 100:
        rates, _ = charts(made, ASCII, width)
        drawn = [(rate, len(re.findall("#", rates[index + 1]))) for index, (rate, _, _) in enumerate(rows)]
        assert [count for _, count in sorted(drawn)] == sorted(count for _, count in drawn)
