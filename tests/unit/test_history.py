from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_record import NASTY, every_record, infeasible_record, ok_trial, record, spec, verdict

from chunktune.record import migrated, read_record
from chunktune.report.bars import BLOCKS
from chunktune.report.history import Row, entry, history, moment, spec_key
from chunktune.report.history_table import (
    CSV_COLUMNS,
    LONGEST_TREND,
    history_cells,
    to_csv,
    to_json,
    to_markdown,
    to_text,
    trends,
)
from chunktune.results import Record

EVEN = "2026-01-0{}T00:00:00+00:00"


def with_spec(**tables: Any) -> dict[str, Any]:
    """A whole spec, with some keys of some tables changed or added."""
    whole = spec(hidden=64, heads=2, vocab=128)
    return {name: {**whole.get(name, {}), **tables.get(name, {})} for name in {**whole, **tables}}


def made(mode: str = "measured", **changes: Any) -> Record:
    return record(**{"spec": with_spec(), **changes}).model_copy(update={"mode": mode})


def at(day: int, rate: float = 100.0, mode: str = "measured", **changes: Any) -> Record:
    """A record of that day that chose M = 4 at so many samples/s."""
    trial = ok_trial(4).model_copy(update={"throughput_samples_per_s": rate})
    return made(mode, **{"trials": (trial,), "started_at": EVEN.format(day), **changes})


def rows_of(*records: Record) -> list[Row]:
    return history(entry(each, f"r{number}") for number, each in enumerate(records))


# --- order, groups, changes


def test_rows_are_ordered_by_time_whatever_its_zone() -> None:
    west = at(2, started_at="2026-01-01T20:00:00-06:00")  # the second of January, two in the morning, in UTC
    assert [row.record for row in rows_of(at(3), west, at(2), at(1))] == ["r3", "r2", "r1", "r0"]
    naive, broken = at(1, started_at="2026-01-01T12:00:00"), at(1, started_at="yesterday")
    assert [row.record for row in rows_of(broken, at(2), naive, at(1))] == ["r3", "r2", "r1", "r0"]


def test_changes_are_counted_from_the_row_before_of_the_same_spec() -> None:
    other = with_spec(pipeline={"schedule": "gpipe"})
    rows = rows_of(at(1, 100.0), at(2, 50.0, spec=other), at(3, 110.0), at(4, 55.0, spec=other))
    assert [row.spec for row in rows] == [1, 2, 1, 2]
    assert [row.against for row in rows] == [None, None, "r0", "r1"]
    assert [row.throughput_change for row in rows] == [None, None, pytest.approx(0.1), pytest.approx(0.1)]


def test_a_change_of_m_is_named() -> None:
    trial = ok_trial(8).model_copy(update={"throughput_samples_per_s": 90.0})
    later = at(2, trials=(trial,), verdict=verdict("throughput", chunks=8, micro_batch=4))
    rows = rows_of(at(1, 100.0), later)
    assert rows[1].chunks_change == 4
    headings, cells = history_cells(rows)
    assert cells[1][headings.index("change")] == "-10.0%, M was 4"
    assert cells[0][headings.index("change")] == "-"


def test_a_prediction_is_not_compared_with_a_measurement() -> None:
    rows = rows_of(at(1, 100.0), at(2, 500.0, mode="predicted"), at(3, 110.0), at(4, 505.0, mode="predicted"))
    assert [row.against for row in rows] == [None, None, "r0", "r1"]


def test_what_chose_no_m_is_a_row_and_nothing_is_counted_from_it() -> None:
    failed = infeasible_record().model_copy(update={"started_at": EVEN.format(2), "spec": with_spec()})
    stopped = at(3, verdict=None, trials=(), status="interrupted")
    rows = rows_of(at(1), failed, stopped, at(4))
    assert [row.chunks for row in rows] == [4, None, None, 4]
    assert [row.against for row in rows] == [None, None, None, "r0"]
    headings, cells = history_cells(rows)
    assert [row[headings.index("M")] for row in cells] == ["4", "no M", "no verdict", "4"]
    assert cells[2][headings.index("kind")] == "measured, interrupted"


@pytest.mark.parametrize(
    ("tables", "same"),
    [
        ({"device": {"memory": "1GiB"}}, True),
        ({"sweep": {"patience": 3, "budget": 5.0}}, True),
        ({"hardware": {"name": "h100-80gb"}}, True),
        ({"training": {"precision": "float32"}}, True),  # what it is anyway
        ({"training": {"precision": "bfloat16"}}, False),
        ({"batch": {"mini_batch": 64}}, False),
        ({"pipeline": {"recompute": "full"}}, False),
        ({"model": {"layers": 9}}, False),
    ],
)
def test_device_and_sweep_are_not_what_specs_are_told_apart_by(tables: dict[str, Any], same: bool) -> None:
    assert (spec_key(made(spec=with_spec(**tables))) == spec_key(made())) is same


def test_of_a_prediction_the_hardware_counts() -> None:
    tables = with_spec(hardware={"name": "a100-80gb"})
    assert spec_key(made("predicted", spec=tables)) != spec_key(made("predicted"))


def test_a_spec_that_is_none_is_compared_as_it_stands() -> None:
    odd = {"model": "?", "pipeline": 3}
    assert spec_key(record(spec=odd)) == spec_key(record(spec=dict(reversed(odd.items()))))
    assert spec_key(record(spec=odd)) != spec_key(record(spec={}))
    row = rows_of(record(spec=odd, environment={"devices": ["?", {"kind": 3}], "torch": 2}))[0]
    assert (row.stages, row.schedule, row.torch, row.device) == (None, None, None, "2 x unknown")


def test_a_record_of_an_older_schema_has_the_same_spec() -> None:
    older = made().model_dump(mode="json") | {"schema_version": 1}
    newer = with_spec(hardware={"name": None, "efficiency": 1.0}, training={"seed": 0, "optimizer": "adamw"})
    assert spec_key(Record.model_validate(migrated(older))) == spec_key(made(spec=newer))


def test_devices_are_counted_by_kind_and_name() -> None:
    devices = [{"kind": "cuda", "name": "H200"}] * 2 + [{"kind": "cpu"}]
    assert rows_of(record(environment={"devices": devices}))[0].device == "2 x cuda H200, 1 x cpu"
    assert rows_of(record(environment={}))[0].device is None


def test_a_moment_without_a_zone_is_utc_and_nonsense_is_none() -> None:
    assert moment("2026-01-01T00:00:00") == moment("2026-01-01T01:00:00+01:00")
    assert moment("soon") is None
    assert moment("0001-01-01T00:00:00+23:00") is None


def test_a_change_beyond_all_numbers_is_not_known() -> None:
    rows = rows_of(at(1, 5e-324), at(2, 1e12), at(3, 0.0), at(4, 1.0))
    assert [row.throughput_change for row in rows] == [None] * 4
    assert json.loads(to_json(rows))[1]["throughput_change"] is None


# --- renderings


def test_the_table_says_what_and_when() -> None:
    text = to_text(rows_of(at(1, 100.0), at(2, 110.0, quick=True)))
    lines = text.splitlines()
    assert "2026-01-01 00:00" in lines[3] and "2026-01-02 00:00" in lines[4]
    assert "+10.0%" in lines[4] and "measured, quick" in lines[4]
    assert "86.1%, 900 MiB" in lines[3]
    assert lines[-1] == "spec 1: 100 to 110 samples/s, oldest first: _#"
    assert text.isascii()


def test_the_trend_has_blocks_where_there_are_some() -> None:
    rows = rows_of(at(1, 100.0), at(2, 110.0), at(3, 104.0), at(4, 500.0, mode="predicted"))
    assert trends(rows, BLOCKS) == ["spec 1: 100 to 110 samples/s, oldest first: ▁█▄"]
    level = rows_of(at(1), at(2))
    assert trends(level) == ["spec 1: 100 to 100 samples/s, oldest first: ##"]
    predictions = rows_of(at(1, mode="predicted"), at(2, mode="predicted"))
    assert trends(predictions)[0].startswith("spec 1, predicted: ")


def test_a_long_trend_is_cut_and_says_so() -> None:
    found = trends(rows_of(*(at(1, float(rate)) for rate in range(1, LONGEST_TREND + 11))))
    assert f"the last {LONGEST_TREND} of {LONGEST_TREND + 10}: " in found[0]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_narrow_terminal_names_what_it_has_no_room_for(width: int) -> None:
    text = to_text(rows_of(at(1, 100.0), at(2, 110.0)), width)
    assert max(map(len, text.splitlines())) <= max(width, 47), "when, spec, M and samples/s always stay"
    assert "no room for:" in text
    assert "samples/s" in text


def test_programs_get_seconds_bytes_and_shares() -> None:
    rows = rows_of(at(1, 100.0), at(2, 110.0))
    table = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert list(table[0]) == list(CSV_COLUMNS)
    assert [float(row["throughput_samples_per_s"]) for row in table] == [100.0, 110.0]
    assert table[0]["throughput_change"] == "" and float(table[1]["throughput_change"]) == pytest.approx(0.1)
    assert int(table[0]["peak_bytes"]) == 900 * 2**20
    data = json.loads(to_json(rows))
    assert [Row.model_validate(each, strict=True) for each in data] == rows


def test_every_kind_of_record_is_a_row_in_every_format() -> None:
    rows = rows_of(*every_record())
    assert len(rows) == len(every_record())
    assert len(to_markdown(rows).splitlines()) == 2 + len(rows)
    assert len(list(csv.reader(io.StringIO(to_csv(rows))))) == 1 + len(rows)
    assert all(text in to_text(rows) for text in ("no M", "no verdict", "below"))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.floats(1, 1e6), st.sampled_from(["1f1b", "gpipe"])), max_size=8))
def test_every_change_is_from_an_earlier_row_of_the_same_spec(drawn: list[tuple[int, float, str]]) -> None:
    rows = rows_of(*(at(day, rate, spec=with_spec(pipeline={"schedule": name})) for day, rate, name in drawn))
    assert [row.started_at for row in rows] == sorted(row.started_at for row in rows)
    for index, row in enumerate(rows):
        earlier = [each for each in rows[:index] if each.spec == row.spec]
        assert row.against == (earlier[-1].record if earlier else None)
        if earlier:
            before, now = earlier[-1].throughput_samples_per_s, row.throughput_samples_per_s
            assert before is not None and now is not None and row.throughput_change is not None
            assert before * (1 + row.throughput_change) == pytest.approx(now)


def test_nothing_from_elsewhere_reaches_the_terminal_or_a_table() -> None:
    environment = {"torch": NASTY, "devices": [{"kind": NASTY, "name": NASTY}]}
    nasty = record(environment=environment, started_at=NASTY, spec=with_spec(pipeline={"schedule": NASTY}))
    rows = history([entry(nasty, NASTY), entry(record(), "=HYPERLINK(1)")])
    for text in (to_text(rows), to_markdown(rows), to_csv(rows), to_json(rows)):
        assert "\x1b" not in text and "\u202e" not in text
        assert "\x07" not in text
    assert "a\\|b" in to_markdown(rows) and "| a|b" not in to_markdown(rows)
    assert "'=HYPERLINK" in to_csv(rows)


def test_a_spec_nested_deeply_is_still_a_spec(tmp_path: Any) -> None:
    nested: Any = 1
    for _ in range(150):
        nested = {"a": nested}
    deep = {**spec(), "model": {"family": "python", "factory": "a:b", "arguments": nested}}
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**record().model_dump(mode="json"), "spec": deep}))
    assert rows_of(read_record(path))[0].spec == 1
