from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_record import failed_trial, lost_event, ok_trial, record, start_event

from chunktune import reading
from chunktune.errors import UsageError
from chunktune.journal import Journal
from chunktune.reading import load_record, load_records, record_names
from chunktune.record import record_json, write_record


def journal(directory: Path, *events: dict[str, Any]) -> Path:
    with Journal(directory / "journal.jsonl") as written:
        for event in (start_event(), *events):
            written.append(event)
    return directory


def trial_event(chunks: int) -> dict[str, Any]:
    return {"event": "trial", "trial": ok_trial(chunks).model_dump(mode="json"), "elapsed_s": 2.5}


class Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data))
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def test_a_file_and_its_directory_are_the_same_record(tmp_path: Path) -> None:
    write_record(record(), tmp_path / "record.json")
    assert load_record(tmp_path / "record.json") == record()
    assert load_record(tmp_path) == record()


def test_stdin_is_read_for_a_dash_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(record_json(record()).encode()))
    assert load_record(Path("-")) == record()
    with pytest.raises(UsageError, match="no such file"):
        load_record(Path("./-x"))


@pytest.mark.parametrize("stdin", [None, Stdin(b"", terminal=True)])
def test_a_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, stdin: Stdin | None) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(UsageError, match="stdin is a terminal"):
        load_record(Path("-"))


def test_stdin_holds_one_record() -> None:
    with pytest.raises(UsageError, match="more than once"):
        load_records([Path("-"), Path("a"), Path("-")])


def test_a_journal_alone_is_an_interrupted_record(tmp_path: Path) -> None:
    made = load_record(journal(tmp_path, trial_event(4), lost_event("trial", [8], "error", 3.0)))
    assert (made.status, made.verdict) == ("interrupted", None)
    assert [(trial.chunks, trial.state) for trial in made.trials] == [(4, "ok"), (8, "error")]
    assert load_record(tmp_path / "journal.jsonl") == made
    write_record(record(), tmp_path / "record.json")
    assert load_record(tmp_path).verdict is not None


def test_a_journal_of_a_sweep_that_ended_keeps_its_status(tmp_path: Path) -> None:
    ended = {"event": "end", "status": "complete", "elapsed_s": 9.0, "verdict": None}
    assert load_record(journal(tmp_path, trial_event(4), ended)).status == "complete"


@pytest.mark.parametrize(
    "event",
    [
        {**trial_event(4), "elapsed_s": "soon"},
        {**trial_event(4), "elapsed_s": 10**400},
        {**trial_event(4), "trial": {}},
        {**trial_event(4), "trial": 7},
        {**lost_event("trial", [1], "error", 1.0), "values": []},
        {"event": "trial", "elapsed_s": 1.0},
    ],
)
def test_a_damaged_journal_is_one_line_with_its_name(tmp_path: Path, event: dict[str, Any]) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (start_event(), event)))
    with pytest.raises(UsageError) as caught:
        load_record(tmp_path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_journal_without_a_start_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").touch()
    with pytest.raises(UsageError, match=r"journal\.jsonl: the journal holds no .start. event"):
        load_record(tmp_path)


def test_a_directory_without_either_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no record\.json and no journal\.jsonl"):
        load_record(tmp_path)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    started = time.monotonic()
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(UsageError, match=r"not a regular file; .*give - and redirect"):
            load_record(path)
    assert time.monotonic() - started < 60  # a FIFO would keep it waiting for ever
    with pytest.raises(UsageError, match="no such file"):
        load_record(tmp_path / "nothing.json")
    with pytest.raises(UsageError, match="cannot be read"):
        load_record(tmp_path / ("x" * 300))
    with pytest.raises(UsageError, match="cannot be read"):
        load_record(Path("a\0b"))


def test_a_directory_whose_record_is_a_fifo_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "record.json")
    with pytest.raises(UsageError, match="not a regular file"):
        load_record(tmp_path)


def test_what_is_too_large_is_refused_with_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "record.json").open("wb") as file:
        file.truncate(300 * 2**20)  # sparse
    with pytest.raises(UsageError, match="holds 300 MiB; a record has 256 MiB at most"):
        load_record(tmp_path)
    monkeypatch.setattr(reading, "MAX_BYTES", 1000)
    monkeypatch.setattr(sys, "stdin", Stdin(b" " * 1001))
    with pytest.raises(UsageError, match="stdin: holds more than 1000 B"):
        load_record(Path("-"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a record: not JSON"),
        (b"\xff", "not UTF-8"),
        (b"[]", 'has no "schema_version"'),
        (b'{"schema_version": 99}', "reads up to"),
        (b'{"schema_version": NaN}', "NaN"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"schema_version": 3, "spec": ' + b'{"a":' * 900 + b"1" + b"}" * 901, "recursion|nested|missing|required"),
    ],
)
def test_what_is_no_record_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "record.json").write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        load_record(tmp_path)
    assert "\n" not in str(caught.value)


def with_number(path: str, value: float) -> bytes:
    data = json.loads(record_json(record(trials=(ok_trial(4), failed_trial(8, "oom")))))
    *parents, last = path.split(".")
    place: Any = data
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[int(last) if isinstance(place, list) else last] = value
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    "place",
    [
        *("elapsed_s", "trials.0.step_median_s", "trials.0.chunks", "trials.0.stages.1.peak_bytes"),
        *("trials.1.shortage.budget_bytes", "confirmation.step_median_s", "verdict.chunks", "candidates.0.chunks"),
    ],
)
@pytest.mark.parametrize("value", [-1, 2**63, 10**400])
def test_impossible_numbers_are_refused_by_their_place(tmp_path: Path, place: str, value: int) -> None:
    (tmp_path / "record.json").write_bytes(with_number(place, value))
    with pytest.raises(UsageError, match=f"{place}: .*(0 to 9223372036854775807|valid|finite)"):
        load_record(tmp_path)


@pytest.mark.parametrize(
    "place", ["trials.0.step_s.0", "trials.0.step_interval_s.1", "trials.0.predicted.peak_bytes.1"]
)
def test_so_are_those_in_lists(tmp_path: Path, place: str) -> None:
    (tmp_path / "record.json").write_bytes(with_number(place, -3))
    with pytest.raises(UsageError, match=r"trials\.0: is -3(\.0)?; durations, sizes"):
        load_record(tmp_path)


@pytest.mark.parametrize("version", [1, 2])
def test_golden_records_load(version: int) -> None:
    path = Path(__file__).parents[1] / "data" / f"record_v{version}.json"
    assert load_record(path).verdict is not None


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_a_record_or_a_usage_error(data: bytes) -> None:
    original, sys.stdin = sys.stdin, Stdin(data)
    try:
        load_record(Path("-"))
    except UsageError as error:
        assert "\n" not in str(error)
    finally:
        sys.stdin = original


def test_names_are_short_where_they_can_be(tmp_path: Path) -> None:
    assert record_names([tmp_path / "a/record.json", tmp_path / "b", Path("c.json"), Path("-")]) == [
        "a",
        "b",
        "c",
        "stdin",
    ]
    twice = [tmp_path / "x/a/record.json", tmp_path / "y/a", Path("b.json")]
    assert record_names(twice) == [str(twice[0]), str(twice[1]), "b"]
    assert record_names([Path()]) == [Path.cwd().name]
