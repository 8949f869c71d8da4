from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace

import pytest

from chunktune import published
from chunktune.report import validation as report
from chunktune.validate import Table, Validation, bigscience, memory, tables, validate, zero_bubble


@pytest.fixture(scope="module")
def found() -> Validation:
    return validate()


def table_of(found: Validation, name: str) -> Table:
    return next(table for table in found.tables if table.name == name)


# --- the published figures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "rows"), [("zero_bubble", 72), ("bigscience_181b", 10), ("torch_1f1b_memory", 8)])
def test_every_figure_has_a_source(name: published.Name, rows: int) -> None:
    points = published.measurements(name)
    assert len(points) == rows
    assert all(point.source and point.value > 0 and point.stages > 1 for point in points)


def test_the_samples_of_a_step_agree_with_the_global_batch() -> None:
    for point in published.measurements("bigscience_181b"):
        replicas = 384 // (8 * point.stages)
        assert point.micro_batch is not None
        assert point.chunks * point.micro_batch * replicas == point.global_batch == 2048


# --- Zero Bubble -------------------------------------------------------------------------------------------


def test_the_1f1b_rates_are_within_the_mark(found: Validation) -> None:
    rows = table_of(found, "zero-bubble-rates-1f1b").rows
    assert len(rows) == 6
    assert all(abs(row.predicted - row.published) <= 1e-4 for row in rows)


def test_a_rate_follows_from_the_hops_that_do_not_overlap() -> None:
    """At K = 8 a step of 1F1B is (M+7)(F+B+W) and 14 + 7/4 (M-1) transfers long."""
    times = zero_bubble.Times(0.018522, 0.018086, 0.009337, 0.000601)
    expected_s = 31 * times.work_s + (14 + 1.75 * 23) * times.transfer_s
    assert zero_bubble.cost_s("1f1b", 8, 24, 1, times) == pytest.approx(expected_s, rel=1e-3)


def test_zb_h1_is_torchs_interleaved_zero_bubble(found: Validation) -> None:
    rows = [row for row in table_of(found, "zero-bubble-rates-others").rows if row.what.startswith("ZB-H1")]
    assert len(rows) == 6
    assert all(abs(row.error) <= 1e-4 for row in rows)


def test_the_interleaved_rates_are_near(found: Validation) -> None:
    rows = [row for row in table_of(found, "zero-bubble-rates-others").rows if row.what.startswith("1F1B-I")]
    assert len(rows) == 6
    assert all(abs(row.error) <= 4e-3 for row in rows)


def test_one_rate_at_sixteen_ranks_is_calibrated_and_gives_the_others(found: Validation) -> None:
    table = table_of(found, "zero-bubble-rates-16")
    calibrated = [row for row in table.rows if row.calibrated]
    assert [(row.what, row.chunks) for row in calibrated] == [("1F1B, GPT 6.2B", 48)]
    assert calibrated[0].error == pytest.approx(0, abs=1e-6)
    assert {row.what.partition(",")[0] for row in table.rows} == {"1F1B", "1F1B-I", "ZB-H1", "ZB-V"}
    assert abs(table.worst_error) < 6e-3


def test_throughput_is_predicted_high_and_its_ratios_closely(found: Validation) -> None:
    throughput, ratios = table_of(found, "zero-bubble-throughput"), table_of(found, "zero-bubble-ratios")
    assert (len(throughput.rows), len(ratios.rows)) == (18, 12)
    assert all(0 < row.error < 0.13 for row in throughput.rows)
    assert all(row.error < 0.06 for row in throughput.rows if row.what.startswith("1F1B,"))
    assert abs(ratios.worst_error) < 0.019


def test_a_ratio_is_of_neighbours_in_one_series(found: Validation) -> None:
    first = table_of(found, "zero-bubble-ratios").rows[4]
    assert (first.what, first.chunks) == ("1F1B, GPT 1.5B, over M = 24", 32)
    assert first.published == pytest.approx(12.5 / 11.8)


# --- BigScience --------------------------------------------------------------------------------------------


def point(chunks: int, micro_batch: int, seconds: float) -> published.Measurement:
    some = published.measurements("bigscience_181b")[0]
    return replace(some, chunks=chunks, micro_batch=micro_batch, value=seconds)


def test_two_points_give_back_the_costs_that_made_them() -> None:
    a_s, c_s = 0.07, 0.2
    points = [point(m, 512 // m, (m + 11) * (a_s + c_s * 512 / m)) for m in (512, 64)]
    assert bigscience.calibrate(*points) == pytest.approx((a_s, c_s))


def test_two_points_of_one_b_are_refused() -> None:
    with pytest.raises(ValueError, match="both points have b = 1; calibration takes two points of different b"):
        bigscience.calibrate(point(512, 1, 143.0), point(256, 1, 80.0))


def test_the_calibrated_points_are_hit_and_not_counted(found: Validation) -> None:
    table = table_of(found, "bigscience-seconds")
    assert [row.chunks for row in table.rows if row.calibrated] == [512, 64]
    assert all(abs(row.error) < 1e-9 for row in table.rows if row.calibrated)
    errors = [row.error for row in table.rows if not row.calibrated]
    assert table.mean_error == pytest.approx(sum(map(abs, errors)) / 2)
    assert table.worst_error == max(errors, key=abs)
    assert abs(table.worst_error) < 0.05


def test_m_128_wins_published_and_predicted(found: Validation) -> None:
    rows = table_of(found, "bigscience-seconds").rows
    assert min(rows, key=lambda row: row.published).chunks == min(rows, key=lambda row: row.predicted).chunks == 128
    margins = table_of(found, "bigscience-margins").rows
    assert all(row.published > 1 and row.predicted > 1 for row in margins)
    assert {row.chunks: round(row.published, 3) for row in margins} == {512: 1.159, 256: 1.084, 64: 1.045}


def test_no_choice_of_the_two_points_names_another_m(found: Validation) -> None:
    notes = table_of(found, "bigscience-seconds").notes
    assert "calibrated on any other pair of points, M = 128 is named in 5 of 5 cases" in notes


def test_half_the_stages_follow_without_a_calibration_of_their_own(found: Validation) -> None:
    table = table_of(found, "bigscience-half")
    assert len(table.rows) == 3
    assert not any(row.calibrated for row in table.rows)
    assert abs(table.worst_error) < 0.03


# --- torch's memory ----------------------------------------------------------------------------------------


def last_rank(chunks: int, gib: float) -> published.Measurement:
    some = published.measurements("torch_1f1b_memory")[0]
    return replace(some, chunks=chunks, value=gib)


def test_memory_lies_in_the_interval_that_the_line_leaves(found: Validation) -> None:
    rows = [row for row in table_of(found, "torch-memory-last").rows if not row.calibrated]
    assert [row.chunks for row in rows] == [8, 16]
    for row in rows:
        assert row.low is not None
        assert row.low == row.straight_line < row.published < row.high == row.predicted
    assert rows[-1].straight_line == pytest.approx(65.47 * (1 - 0.174), rel=1e-3)


def test_the_bound_holds_wherever_the_hinge_is() -> None:
    output, buffer = memory.OUTPUT_GIB, memory.BOUNDARY_GIB
    for freed in (4 * output, 5 * output, 9 * output, math.inf):
        truth = {m: 38 + (output + buffer) * m + max(0.0, output * m - freed) for m in (2, 4, 8, 16)}
        first, second = last_rank(2, truth[2]), last_rank(4, truth[4])
        assert all(memory.upper_gib(first, second, m) >= truth[m] - 1e-9 for m in (8, 16))


def test_points_above_the_hinge_are_refused() -> None:
    first, second = last_rank(8, 50.0), last_rank(16, 66.0)
    with pytest.raises(ValueError, match=r"rises by 2\.000 GiB a chunk between M = 8 and 16; the bound starts from"):
        memory.upper_gib(first, second, 32)


def test_the_first_rank_follows_from_one_buffer_a_chunk(found: Validation) -> None:
    assert abs(table_of(found, "torch-memory-first").worst_error) < 1e-3


# --- marks and renderings ----------------------------------------------------------------------------------


def test_all_marks_hold(found: Validation) -> None:
    assert [mark.name for mark in found.marks] == [
        "Zero Bubble: 1F1B bubble rates",
        "BigScience: the winning M",
        "torch 1F1B: memory not under-predicted",
    ]
    assert found.failed == ()


def test_a_table_without_a_prediction_is_refused(found: Validation) -> None:
    rows = [row for row in table_of(found, "torch-memory-last").rows if row.calibrated]
    with pytest.raises(ValueError, match="has 2 rows and all are calibrated"):
        tables.table("none", "title", "source", "GiB", "relative", rows)


def test_the_text_has_every_table_plain(found: Validation) -> None:
    text = report.to_text(found)
    assert all(table.title in text for table in found.tables)
    assert text.count("error over ") == len(found.tables) == 10
    assert text.count("holds: ") == 3
    assert "\x1b" not in text
    assert text.isascii()
    assert "-17.38%" in text


def test_the_prose_fits_the_width_and_the_tables_keep_theirs(found: Validation) -> None:
    lines = report.to_text(found, 60).splitlines()
    assert all(len(line) <= 60 for line in lines if not line.startswith(("|", "+")))


def test_the_csv_has_a_line_a_comparison(found: Validation) -> None:
    lines = list(csv.DictReader(io.StringIO(report.to_csv(found))))
    assert len(lines) == sum(len(table.rows) for table in found.tables)
    assert tuple(lines[0]) == report.CSV_COLUMNS
    last = next(line for line in lines if line["table"] == "torch-memory-last" and line["chunks"] == "16")
    assert float(last["low"]) < float(last["published"]) < float(last["high"])
    assert (lines[0]["low"], lines[0]["unit"], lines[0]["errors"]) == ("", "share", "absolute")


def test_the_json_reads_back(found: Validation) -> None:
    text = report.to_json(found)
    assert Validation.model_validate_json(text) == found
    assert set(json.loads(text)) == {"tool", "tables", "marks"}


def test_the_markdown_has_github_tables(found: Validation) -> None:
    text = report.to_markdown(found)
    assert text.count("### ") == len(found.tables) + 1
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {7, 10}
