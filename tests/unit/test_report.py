from __future__ import annotations

import csv
import io
import os
import pty
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_record import (
    ABOVE,
    BELOW,
    MODES,
    NASTY,
    a_round,
    batch_of,
    begin_event,
    comparison,
    every_record,
    failed_trial,
    infeasible_record,
    lost_event,
    ok_trial,
    record,
    shortage,
    spec,
    start_event,
    verdict,
)

from chunktune.report import plain, wrap
from chunktune.report.tabular import CSV_COLUMNS, to_csv, to_markdown
from chunktune.report.terminal import limit_sentence, print_record, progress_line, render, verdict_line, verdict_rows
from chunktune.results import ByRule, Floor, LimitDetail, Record


def rows(made: Record) -> dict[str, str]:
    return dict(verdict_rows(made))


# --- the limit ---------------------------------------------------------------------------------------------

ABOVE_SENTENCES = {
    "memory": "memory: M = 8 does not fit: rank 1 needs at least 1.17 GiB and may use 1.02 GiB, 155 MiB too little",
    "throughput": "throughput: M = 8 is 4.0% slower than M = 4 [3.0% to 5.0%]; rank 1 lost most: its work went from "
    "66.0 ms to 70.0 ms a step",
    "failed": "failed: M = 8 did not run: killed on rank 1: what happened at 8",
    "schedule": "schedule: 1f1b admits no M above 4: reason for schedule",
    "range": "range: M = 4 is the largest in the range that was searched (batch.chunks = auto)",
    "plateau": "plateau: the next doubling of M can gain 0.2 % at most, less than the tolerance of 1%, and a larger "
    "batch is not free (M = 8 is 0.4% faster than M = 4 [-0.6% to 1.4%])",
    "budget": "budget: the time (10 min 00 s) ran out after 61.5 s: reason for budget",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", ABOVE_SENTENCES)
def test_each_limit_above_is_one_sentence_with_its_numbers(limit, mode: str) -> None:
    assert limit_sentence(record(limit, "above", mode)).startswith(ABOVE_SENTENCES[limit])


def test_the_batch_limit_names_b_and_n() -> None:
    answer = verdict("batch", chunks=32, micro_batch=1, mini_batch=32, next_chunks=None)
    made = record("batch", verdict=answer, trials=(ok_trial(16), ok_trial(32)))
    assert limit_sentence(made) == "batch: b is 1 at M = 32: N = 32 cannot be cut further"


BELOW_SENTENCES = {
    "memory": "M = 4 is the smallest that fits, M = 2 does not: rank 1 needs at least 1.17 GiB",
    "failed": "M = 4 is the smallest that runs, M = 2 did not: killed on rank 1: what happened at 2",
    "schedule": "M = 4 is the smallest that 1f1b admits: floor of schedule",
    "range": "M = 4 is the smallest in the range that was searched: floor of range",
    "budget": "M = 4 is the smallest that was tried before the time ran out: floor of budget",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", BELOW)
def test_each_limit_below_names_the_floor(limit, mode: str) -> None:
    made = record(limit, "below", mode)
    assert limit_sentence(made).startswith(
        f"{limit}, from below: no larger M was shown to be faster, and {BELOW_SENTENCES[limit]}"
    )
    assert rows(made)["floor"].startswith(BELOW_SENTENCES[limit])


def test_the_tables_of_this_test_hold_every_limit() -> None:
    assert {*ABOVE_SENTENCES, "batch"} == set(ABOVE)
    assert set(BELOW_SENTENCES) == set(BELOW)


def test_a_memory_limit_without_a_number_of_bytes() -> None:
    short = shortage(needed_bytes=None, where="pipeline")
    made = record("memory", trials=(ok_trial(4), failed_trial(8, "oom").model_copy(update={"shortage": short})))
    assert "rank 1 may use 1.02 GiB and ran out in the real pipeline, asking for 64.0 MiB more" in limit_sentence(made)
    made = record("memory", trials=(ok_trial(4),), verdict=verdict("memory", limit_detail=LimitDetail()))
    assert limit_sentence(made) == "memory: M = 8 does not fit: rank 1 ran out of memory"


def test_a_floor_of_memory_under_another_limit_keeps_its_own_numbers() -> None:
    floor = Floor(chunks=4, limit="memory", stage=0, reason=None)
    answer = verdict("throughput", floor=floor)
    made = record(trials=(failed_trial(2, "oom"), ok_trial(4), ok_trial(8)), verdict=answer)
    assert "M = 2 does not: rank 1 needs at least 1.17 GiB" in rows(made)["floor"]
    assert "less does not: rank 0 ran out of memory" in rows(record(verdict=answer, trials=(ok_trial(4),)))["floor"]
    assert rows(record())["floor"] == "none: M = 1 is feasible"


def test_an_undecided_comparison_is_called_so_and_seen_from_the_next_m() -> None:
    turned = comparison(4, 8, 1.25, interval=(1.0, 2.0), outcome="undecided")
    made = record(verdict=verdict("throughput", limit_detail=LimitDetail(comparison=turned)))
    assert "M = 8 is 20.0% slower than M = 4 [0.0% to 50.0%], not decided at a tolerance of 1%" in limit_sentence(made)


def test_a_throughput_limit_without_a_comparison_falls_back_on_the_trials() -> None:
    made = record(verdict=verdict("throughput", limit_detail=LimitDetail(), limit_stage=None))
    assert limit_sentence(made) == "throughput: M = 8 is slower (384.2 samples/s against 400 at M = 4)"


def test_limits_without_their_usual_numbers_still_have_a_sentence() -> None:
    for limit, words in (
        ("plateau", "past M = 4 the next doubling"),
        ("budget", "M = 8 was not tried"),
        ("failed", ""),
    ):
        made = record(limit, trials=(ok_trial(4),), verdict=verdict(limit, limit_detail=LimitDetail()))
        assert limit_sentence(made).startswith(f"{limit}: ")
        assert words in limit_sentence(made)


def test_no_feasible_m_and_no_verdict() -> None:
    assert limit_sentence(infeasible_record()).startswith(
        "memory: no value of M is feasible; at M = 2 rank 1 needs at least"
    )
    made = record(verdict=None, status="interrupted")
    assert limit_sentence(made) == "none: no verdict, the sweep was interrupted before it could decide"


# --- the verdict block -------------------------------------------------------------------------------------


def test_the_block_says_all_that_was_decided() -> None:
    block = rows(record())
    assert block["chosen"] == "M = 4 (b = 8, N = 32)"
    assert block["throughput"] == "400 samples/s, 51,200 tokens/s"
    assert block["bubble"].startswith("25% measured, ideal 20%")
    assert block["fullest stage"] == "rank 0: 900 MiB at the peak of 1.02 GiB usable (86.1%)"
    assert block["slowest stage"] == "rank 1: busy 66.0 ms of a step of 80.0 ms, 484.8 samples/s while busy"
    assert block["rules"] == "pipeline and stage both name M = 4"
    assert block["smallest M"] == "M = 4 is the smallest within 1% of the best"
    assert block["confidence"] == "clear"
    assert block["confirmed"] == "in fresh processes: M = 4 ran at 80.0 ms a step"
    assert (block["finding"], block["advice"]) == ("the loss agrees", "use fewer stages")
    assert block["warning"] == "4 stages on 2 cores"


def test_rules_that_differ_say_what_the_difference_buys() -> None:
    made = record(verdict=verdict("throughput", by_rule=ByRule(pipeline=4, stage=2)))
    assert rows(made)["rules"] == (
        "pipeline names M = 4, stage names M = 2: M = 4 gives 400 samples/s, 25.0% more than the 320 of M = 2; "
        "while busy its slowest stage does 484.8 samples/s, that of M = 2 500"
    )
    made = record(verdict=verdict("throughput", by_rule=ByRule(pipeline=4, stage=None)))
    assert rows(made)["rules"] == "pipeline names M = 4, stage names no M"


def test_tokens_only_where_the_model_has_a_sequence() -> None:
    made = record(spec=spec(sequence=None))
    assert rows(made)["throughput"] == "400 samples/s"
    assert "tokens/s" not in render(made)
    assert "tokens/s" in render(record())


def test_an_unclear_unconfirmed_verdict_says_so() -> None:
    reasons = ("M = 8 against M = 4 is undecided", "3 rounds only")
    made = record(verdict=verdict("throughput", confidence="unclear", confidence_reasons=reasons, confirmed="no"))
    assert rows(made)["confidence"] == "unclear: M = 8 against M = 4 is undecided; 3 rounds only"
    assert rows(made)["confirmed"] == "no"
    made = record(verdict=verdict("throughput", confirmed="re-initialised group"), confirmation=None)
    assert rows(made)["confirmed"] == "in a re-initialised group"


def test_where_nothing_is_feasible_every_candidate_has_its_reason_once() -> None:
    text = render(infeasible_record())
    for line in (
        "M = 2: out of memory: rank 1 needs at least",
        "M = 4: killed on rank 1: what happened at 4",
        "M = 8: timed out on rank 1: what happened at 8",
        "M = 1: illegal: 1f1b needs M >= K = 2",
        "M = 16, 32: not tried",
    ):
        assert text.count(line) == 1
    assert "no M is feasible" in text


def test_notes_for_what_is_no_plain_measured_sweep() -> None:
    made = record(quick=True, status="interrupted", group_restarts=2).model_copy(update={"mode": "predicted"})
    notes = [text for label, text in verdict_rows(made) if label == "note"]
    assert [note.split()[0:3] for note in notes] == [
        ["these", "figures", "are"],
        ["a", "quick", "run:"],
        ["the", "sweep", "was"],
        ["the", "worker", "group"],
    ]
    assert all(label != "note" for label, _ in verdict_rows(record()))


# --- text --------------------------------------------------------------------------------------------------


def test_reasons_of_failed_trials_stand_below_the_table() -> None:
    assert "\nM = 8: out of memory: rank 1 needs at least 1.17 GiB" in render(record("memory"))


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for made in every_record():
        lines = render(made, width).splitlines()
        table = [line for line in lines if line.startswith(("|", "+"))]
        assert max(map(len, lines)) <= max(width, max(map(len, table), default=0))
        assert max(map(len, table), default=0) <= max(width, 35)
        dropped = [line for line in lines if line.startswith("(no room for: ")]
        assert len(dropped) <= 1


def test_a_common_terminal_has_room_for_what_matters() -> None:
    table = render(record(), 80).splitlines()[3]
    assert all(heading in table for heading in ("M", "state", "step", "samples/s", "bubble", "peak of budget"))


def test_off_a_terminal_nothing_wraps_and_no_column_is_left_out() -> None:
    text = render(record("memory", warnings=("long " * 100,)))
    assert "no room" not in text
    assert len([line for line in text.splitlines() if "long long" in line]) == 1


def test_records_without_figures_are_rendered_too() -> None:
    assert "no value of M was tried" in render(record(verdict=None, trials=(), status="failed"))
    bare = record(spec={}, tool={}, environment={}, trials=(), confirmation=None, candidates=())
    assert "not known" in render(bare)
    assert limit_sentence(bare).startswith("throughput: M = 8")


def test_names_cannot_bring_control_characters_or_colours() -> None:
    nasty = record(
        "failed",
        trials=(ok_trial(4), failed_trial(8, "error", reason=NASTY)),
        warnings=(NASTY,),
        spec=spec() | {"pipeline": {"schedule": NASTY, "stages": 2}},
        tool={"version": NASTY},
        verdict=verdict("failed", advice=(NASTY,), findings=(NASTY,), limit_detail=LimitDetail(reason=NASTY)),
    )
    for text in (render(nasty), render(nasty, 80), to_csv(nasty), to_markdown(nasty), limit_sentence(nasty)):
        assert not [char for char in text if not char.isprintable() and char != "\n"]
        assert "[31m" not in text
    assert "red a|b next `code` txt" in render(nasty)


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_plain_text_is_one_printable_line(text: str) -> None:
    made = plain(text)
    assert made == plain(made)
    assert made.isprintable()
    assert all(len(line) <= 40 for line in wrap(made, 40, "label "))


def test_off_a_terminal_no_code_is_written_whatever_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("COLUMNS", "20")
    file = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    print_record(record(), file)
    text = file.buffer.getvalue().decode()
    assert "\x1b" not in text
    assert text == render(record())


def test_a_terminal_gets_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as file:
        print_record(record("memory"), file)
    text = os.read(master, 100_000).decode().replace("\r\n", "\n")
    os.close(master)
    assert text == render(record("memory"), 70)


def test_a_narrow_encoding_is_no_crash() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_record(record(warnings=("größe \N{SNOWMAN}",)), file)
    assert b"gr\\xf6\\xdfe \\u2603" in file.buffer.getvalue()


def test_without_foreign_names_all_is_ascii() -> None:
    for made in every_record():
        assert render(made).isascii()


# --- progress ----------------------------------------------------------------------------------------------


def dump(value) -> dict:
    return value.model_dump(mode="json")


def test_a_finished_trial_is_one_line() -> None:
    line = progress_line({"event": "trial", "trial": dump(ok_trial(4)), "elapsed_s": 1.0})
    assert line == (
        "M = 4: b = 8, N = 32, step 80 [79.2, 80.8] ms, 400 samples/s, bubble 25%, peak of budget 86.1%, rank 0"
    )
    line = progress_line({"event": "trial", "trial": dump(failed_trial(8, "oom")), "elapsed_s": 1.0})
    assert line is not None and line.startswith("M = 8: out of memory: rank 1 needs at least 1.17 GiB")


def test_rounds_tell_the_ratio() -> None:
    event = {"event": "rounds", "values": [4, 8], "rounds": [dump(a_round([4, 8])), dump(a_round([4, 8], 2.0))]}
    assert progress_line(event) == "compared M = 4, 8 in 2 rounds: M = 4 runs at 104% of the speed of M = 8"
    event = {"event": "rounds", "values": [2, 4, 8], "rounds": [dump(a_round([2, 4, 8]))]}
    assert progress_line(event) == (
        "compared M = 2, 4, 8 in 1 round: M = 2 runs at 83.3%, M = 4 runs at 104% of the speed of M = 8"
    )
    assert progress_line({**event, "rounds": []}) is None, "the budget ended in the first of them"


def test_confirmation_loss_and_warning_are_one_line_each() -> None:
    confirm = {"event": "confirm", "trial": dump(ok_trial(4)), "fresh": "fresh processes", "elapsed_s": 1.0}
    assert str(progress_line(confirm)).startswith("confirmation in fresh processes: M = 4: b = 8")
    lost = lost_event("rounds", [4, 8], "killed", 1.0)
    assert progress_line(lost) == "worker group lost during rounds of M = 4, 8: killed on rank 1: signal 6"
    assert progress_line({"event": "warning", "text": "a\nb\x1b[0m"}) == "warning: a b"


@pytest.mark.parametrize(
    "event", [start_event(), begin_event("trial", [4], 1.0), {"event": "group"}, {"event": "end"}, {"event": "new"}]
)
def test_other_events_have_no_line(event: dict) -> None:
    assert progress_line(event) is None


# --- tables for programs -----------------------------------------------------------------------------------


def test_csv_holds_plain_numbers_in_seconds_and_bytes() -> None:
    made = list(csv.DictReader(io.StringIO(to_csv(record("memory")))))
    assert tuple(made[0]) == CSV_COLUMNS
    assert [row["chunks"] for row in made] == ["2", "4", "8"]
    assert [row["chosen"] for row in made] == ["False", "True", "False"]
    assert made[1]["step_median_s"] == "0.08"
    assert made[1]["fullest_peak_bytes"] == str(900 * 2**20)
    assert made[1]["throughput_tokens_per_s"] == "51200"
    assert made[1]["step_s"] == "0.0808 0.08 0.0792"
    assert (made[2]["state"], made[2]["reason"], made[2]["rank"]) == ("oom", "what happened at 8", "1")
    assert made[2]["step_median_s"] == made[2]["fullest_peak_bytes"] == made[2]["loss"] == ""


def test_csv_agrees_with_the_record_in_every_cell_that_both_have() -> None:
    for made in every_record():
        table = list(csv.DictReader(io.StringIO(to_csv(made))))
        assert [int(row["chunks"]) for row in table] == [trial.chunks for trial in made.trials]
        for row, trial in zip(table, made.trials, strict=True):
            assert (int(row["micro_batch"]), int(row["mini_batch"])) == (trial.micro_batch, trial.mini_batch)
            rate = trial.throughput_samples_per_s
            assert (float(row["throughput_samples_per_s"]) if rate else None) == pytest.approx(rate)


def test_csv_of_no_trial_is_its_heading() -> None:
    assert to_csv(record(verdict=None, trials=())) == ",".join(CSV_COLUMNS) + "\n"


def test_a_spreadsheet_runs_no_message() -> None:
    made = record(trials=(failed_trial(8, "error", reason='=HYPERLINK("x")'),), verdict=None)
    assert next(csv.DictReader(io.StringIO(to_csv(made))))["reason"] == '\'=HYPERLINK("x")'


def test_markdown_has_the_verdict_above_a_table_of_the_trials() -> None:
    lines = to_markdown(record("memory")).splitlines()
    assert lines[0].startswith("**M = 4 (b = 8, N = 32): 400 samples/s, 51,200 tokens/s. Limit: memory: M = 8 does not")
    assert lines[1] == ""
    assert len(lines) == 4 + 3
    assert all(line.count("|") == lines[2].count("|") for line in lines[2:])
    assert "out of memory" in lines[6]


def test_markdown_cells_cannot_break_out() -> None:
    reason = "a|b\nc\\|d <b> `x` [y](z) & *"
    made = record(trials=(ok_trial(4), failed_trial(8, "error", reason=reason)))
    line = to_markdown(made).splitlines()[-1]
    assert "a\\|b c\\\\\\|d &lt;b> \\`x\\` \\[y\\](z) &amp; \\*" in line
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == len(re.findall(r"\|", to_markdown(made).splitlines()[2]))


def test_markdown_without_trials_or_verdict() -> None:
    text = to_markdown(record(verdict=None, trials=(), status="interrupted"))
    assert text.startswith("**no verdict. Limit: none: no verdict, the sweep was interrupted")
    assert "no value of M was tried" in text


def test_the_verdict_line_is_one_line_for_every_record() -> None:
    for made in every_record():
        assert "\n" not in verdict_line(made)
    assert batch_of(4) == (8, 32)
