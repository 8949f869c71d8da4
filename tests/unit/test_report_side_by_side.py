from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from sample_record import MIB, NASTY, every_record, infeasible_record, ok_trial, record, spec, stage, verdict

from chunktune.report.side_by_side import differing_cells, record_cells, to_csv, to_json, to_markdown, to_text
from chunktune.report.summary import CSV_COLUMNS, differences, fullest_known, settings_of, summary
from chunktune.results import Record


def other(**changes: Any) -> Record:
    altered = spec()
    altered["pipeline"] = {"stages": 4, "schedule": "1f1b"}
    return record("memory", **{"spec": altered, "environment": {"torch": "2.14.1", "cores": 2}, **changes})


def cells(made: Record) -> dict[str, str]:
    headings, rows = record_cells([made], ["a"])
    return dict(zip(headings, rows[0], strict=True))


def devices(*names: str) -> dict[str, Any]:
    return {
        "devices": [
            {"rank": rank, "pid": 100 + rank, "overhead_bytes": rank, "name": name, "host": "h"}
            for rank, name in enumerate(names)
        ]
    }


# --- a row a record


def test_a_row_holds_the_answer_and_the_figures_of_its_m() -> None:
    assert cells(record()) == {
        "record": "a",
        "M": "4",
        "b": "8",
        "N": "32",
        "limit": "throughput",
        "samples/s": "400",
        "step": "80 [79.2, 80.8] ms",
        "bubble": "25%",
        "peak of budget": "86.1%, 900 MiB, rank 0",
        "confidence": "clear",
    }


def test_what_bound_from_below_is_said() -> None:
    assert cells(record("memory", "below"))["limit"] == "memory, below"


def test_records_without_an_answer_have_rows_too() -> None:
    assert cells(infeasible_record())["M"] == "no M"
    assert cells(infeasible_record())["samples/s"] == "-"
    made = cells(record(verdict=None, trials=(), status="interrupted"))
    assert (made["M"], made["limit"], made["confidence"]) == ("no verdict", "-", "-")


def test_a_peak_without_a_budget_is_the_highest() -> None:
    unknown = {"budget_bytes": None, "capacity_bytes": None}
    stages = (
        stage(0, 4).model_copy(update=unknown),
        stage(1, 4).model_copy(update={**unknown, "peak_bytes": 950 * MIB}),
    )
    trial = ok_trial(4).model_copy(update={"stages": stages})
    assert cells(record(trials=(trial,)))["peak of budget"] == "950 MiB, rank 1"
    bare = ok_trial(4).model_copy(update={"stages": tuple(s.model_copy(update={"peak_bytes": None}) for s in stages)})
    assert fullest_known(bare) is None
    assert cells(record(trials=(bare,)))["peak of budget"] == "-"


@pytest.mark.parametrize("made", every_record())
def test_every_record_stands_beside_another(made: Record) -> None:
    pair, names = [made, record()], ["a", "b"]
    assert "| a" in to_text(pair, names)
    assert len(json.loads(to_json(pair, names))) == 2
    assert "NaN" not in to_json(pair, names)
    assert len(to_csv(pair, names).splitlines()) == 3


# --- what differs


def test_what_differs_has_a_column_a_record() -> None:
    rows = differing_cells([record(), other(quick=True)], ["a", "b"])
    assert rows == [
        ["quick", "false", "true"],
        ["spec.pipeline.stages", "2", "4"],
        ["environment.torch", "2.13.0", "2.14.1"],
    ]


def test_what_is_the_same_is_left_out() -> None:
    assert differing_cells([record(), record("memory")], ["a", "b"]) == []
    assert "nothing differs" in to_text([record(), record()], ["a", "b"])
    assert "nothing differs" in to_markdown([record(), record()], ["a", "b"])


def test_an_absent_key_is_a_null() -> None:
    assert differences([{"a": None, "b": 1}, {"b": 1}]) == {}
    assert differences([{"b": 1}, {"a": 2}]) == {"b": (1, None), "a": (None, 2)}


def test_devices_are_counted_by_what_describes_them() -> None:
    one = record(environment=devices("H100", "H100", "A100"))
    two = record(environment=devices("H100", "H100"))
    assert settings_of(one)["environment.devices.name"] == "2 x H100, 1 x A100"
    differing = {row[0]: row[1:] for row in differing_cells([one, two], ["a", "b"])}
    assert differing == {
        "environment.devices": ["3", "2"],
        "environment.devices.name": ["2 x H100, 1 x A100", "2 x H100"],
        "environment.devices.host": ["3 x h", "2 x h"],
    }
    again = {"devices": [{**device, "pid": 7, "overhead_bytes": 9} for device in devices("H100", "H100")["devices"]]}
    assert differing_cells([two, record(environment=again)], ["a", "b"]) == []


@pytest.mark.parametrize("strange", ["a text", 7, {"a": 1}, [1, 2], [[]], []])
def test_devices_of_a_strange_kind_do_not_stop_it(strange: object) -> None:
    pair = [record(environment={"devices": strange}), record()]
    assert to_text(pair, ["a", "b"])


def test_a_deep_setting_does_not_stop_it() -> None:
    deep: dict[str, Any] = {"a": 1}
    for _ in range(300):
        deep = {"a": deep}
    assert "spec.model" in to_text([record(spec={"model": deep}), record(spec={"model": {}})], ["a", "b"])


values = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["x", "y"])


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), values), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_a_key_is_shown_exactly_when_two_records_disagree(tables: list[dict[str, Any]]) -> None:
    found = differences(tables)
    for key in "abcd":
        held = [table.get(key) for table in tables]
        assert (key in found) == any(a != b for a in held for b in held)
        assert found.get(key, tuple(held)) == tuple(held)


# --- renderings


@pytest.mark.parametrize("width", [60, 80, 120, 400])
def test_the_text_fits_the_width(width: int) -> None:
    names = [f"a-sweep-with-a-name-{index}" for index in range(5)]
    made = [record(), other(), infeasible_record(), record(quick=True), other()]
    lines = to_text(made, names, width).splitlines()
    assert max(map(cell_len, lines)) <= max(width, 64)  # what always stays takes 64
    text = " ".join(lines)
    assert "spec.pipeline.stages" in text
    assert all(name in text for name in names)


def test_without_room_for_a_table_the_differences_are_lines() -> None:
    names = [f"record-{index}" for index in range(8)]
    made = [record() if index % 2 else other() for index in range(8)]
    text = " ".join(to_text(made, names, 80).split())
    assert "spec.pipeline.stages: 4 (record-0, record-2, record-4, record-6); 2 (record-1, record-3," in text


def test_csv_is_in_seconds_and_bytes() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv([record(), infeasible_record()], ["a", "b"]))))
    assert list(rows[0]) == list(CSV_COLUMNS)
    assert rows[0]["step_median_s"] == "0.08"
    assert rows[0]["peak_bytes"] == str(900 * MIB)
    assert rows[0]["budget_bytes"] == str(1045 * MIB)
    assert rows[1]["chunks"] == rows[1]["throughput_samples_per_s"] == ""


def test_json_is_a_list_of_summaries_with_what_differs() -> None:
    first, second = json.loads(to_json([record(), other()], ["a", "b"]))
    assert (first["record"], first["chunks"], first["limit"]) == ("a", 4, "throughput")
    assert first["differs"] == {"spec.pipeline.stages": 2, "environment.torch": "2.13.0"}
    assert second["differs"] == {"spec.pipeline.stages": 4, "environment.torch": "2.14.1"}
    assert first == {**summary(record(), "a").model_dump(mode="json"), "differs": first["differs"]}


def test_untrusted_texts_are_printable_and_escaped() -> None:
    nasty = record(
        spec={"model": {NASTY: NASTY}, "pipeline": {"schedule": "<script>|"}},
        environment={"torch": NASTY, "devices": [{"name": NASTY, NASTY: 1}]},
        verdict=verdict("memory", confidence="unclear"),
    )
    pair, names = [nasty, record()], [NASTY, "=SUM(A1)"]
    for text in (to_text(pair, names), to_text(pair, names, 60), to_markdown(pair, names), to_csv(pair, names)):
        assert not [char for char in text if not char.isprintable() and char != "\n"]
        assert "[31m" not in text
    assert "<script>" not in to_markdown(pair, names)
    tables = to_markdown(pair, names).split("\n\n")
    for table in tables:
        borders = {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in table.strip().split("\n")}
        assert len(borders) == 1
    assert "'=SUM(A1)" in to_csv(pair, names)
