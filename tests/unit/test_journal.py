from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from sample_record import full_journal, start_event

import chunktune.journal as journal_module
from chunktune.errors import EnvironmentFailedError
from chunktune.journal import Event, Journal, read_events
from chunktune.results import SCHEMA_VERSION


def write_journal(path: Path, events: list[Event]) -> bytes:
    with Journal(path) as journal:
        for event in events:
            journal.append(event)
    return path.read_bytes()


def without_at(events: list[Event]) -> list[Event]:
    return [{key: value for key, value in event.items() if key != "at"} for event in events]


def test_what_is_appended_is_read_back_in_order_with_the_time(tmp_path: Path) -> None:
    write_journal(tmp_path / "journal.jsonl", full_journal())
    events = read_events(tmp_path / "journal.jsonl")
    assert without_at(events) == full_journal()
    assert all(event["at"].endswith("+00:00") and "." in event["at"] for event in events)


def test_every_append_reaches_the_disk_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    monkeypatch.setattr(journal_module.os, "fsync", lambda fd: synced.append(path.read_bytes()))
    journal.append({"event": "warning", "text": "a"})
    journal.append({"event": "warning", "text": "b"})
    assert [data.count(b"\n") for data in synced] == [1, 2]


def test_a_journal_torn_at_every_byte_is_read_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module.os, "fsync", lambda fd: None)  # hundreds of them take a while
    path = tmp_path / "journal.jsonl"
    written: list[Event] = [{"event": "group", "generation": number} for number in range(4)]
    data = write_journal(path, written)
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        whole, torn = data[:size].count(b"\n"), not data[:size].endswith(b"\n") and size > 0
        events = read_events(path)
        reported = [event for event in events if event["event"] == "warning"]
        assert without_at(events)[:whole] == written[:whole]
        assert len(reported) == (torn and whole > 0) == len(events) - whole
        with Journal(path) as journal:
            journal.append({"event": "after"})
        again = read_events(path)
        assert [e["event"] for e in again] == [e["event"] for e in events] + ["after"]
        assert path.read_bytes().startswith(data[: data[:size].rfind(b"\n") + 1])


def test_nan_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal, pytest.raises(ValueError, match="not JSON compliant"):
        journal.append({"event": "trial", "x": float("nan")})
    assert (tmp_path / "j").read_bytes() == b""


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_an_environment_failure_and_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "journal.jsonl"
    real_write = os.write
    with Journal(path) as journal:
        journal.append({"event": "warning", "text": "first"})
        calls: list[int] = []

        def fails(fd: int, data: bytes = b"") -> int:
            calls.append(fd)
            if call == "write" and len(calls) == 1:
                return real_write(fd, bytes(data)[:5])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(journal_module.os, call, fails)
            with pytest.raises(EnvironmentFailedError, match=r"bytes were not written \(No space left on device\)"):
                journal.append({"event": "warning", "text": "second"})
        journal.append({"event": "warning", "text": "third"})
    assert [event["text"] for event in read_events(path)] == ["first", "third"]


def test_a_journal_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailedError, match="cannot be opened"):
        Journal(tmp_path / "missing" / "journal.jsonl")
    with pytest.raises(EnvironmentFailedError, match="cannot be opened"):
        Journal(tmp_path)
    with pytest.raises(EnvironmentFailedError, match="cannot be read"):
        read_events(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken}", r"line 1 is not an event: not JSON \(line 1, column 2"),
        (b"[1]", 'line 1 is not an event: an object with "event"'),
        (b'{"event": 3}', 'an object with "event"'),
        (b"\xff\xfe", "not UTF-8"),
        (b"\x00\x00", "not JSON"),
        (b'{"event": "trial", "x": NaN}', "NaN is not a number"),
        (b'{"event": "trial", "x": 1e999}', "beyond what a float can hold"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"event": "lost", "task": "trial"}', 'the event "lost" lacks values, state, elapsed_s'),
    ],
)
def test_a_bad_whole_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "j"
    path.write_bytes(line + b"\n")
    with pytest.raises(EnvironmentFailedError, match=message):
        read_events(path)


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 99])
def test_a_newer_journal_is_refused(tmp_path: Path, version: int) -> None:
    write_journal(tmp_path / "j", [start_event(schema_version=version)])
    with pytest.raises(
        EnvironmentFailedError, match=f"schema_version is {version}; this chunktune reads up to {SCHEMA_VERSION}"
    ):
        read_events(tmp_path / "j")
