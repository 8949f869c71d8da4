from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from asking import imported

import chunktune
from chunktune.cli.app import main
from chunktune.record import read_record, record_json

Capture = pytest.CaptureFixture[str]
ROOT = Path(chunktune.__file__).parents[1]
DATA = Path(__file__).parents[1] / "data"
GOLDEN = DATA / "record_v2.json"


def saved(directory: Path, day: int, **changes: object) -> Path:
    """The golden record as the output directory of a sweep of that day."""
    directory.mkdir(parents=True, exist_ok=True)
    data = json.loads(record_json(read_record(GOLDEN)))
    started_at = f"2026-01-{day:02}T00:00:00+00:00"
    (directory / "record.json").write_text(json.dumps({**data, "started_at": started_at, **changes}))
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three sweeps, not in the order of their names, one of them deeper, and one that was cut off."""
    below = tmp_path / "runs"
    saved(below / "c", 1)
    saved(below / "more" / "a", 2, quick=True)
    saved(below / "b", 3)
    made = read_record(GOLDEN)
    start = {
        **made.model_dump(mode="json", include={"tool", "spec", "sources", "environment", "candidates", "quick"}),
        "event": "start",
        "schema_version": 2,
        "warnings": [],
        "started_at": "2026-01-04T00:00:00+00:00",
    }
    (below / "d").mkdir()
    (below / "d" / "journal.jsonl").write_text(f'{json.dumps(start)}\n{{"event": "tri')
    return below


def run(*arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, env=environment, timeout=120, check=False
    )


def test_every_record_below_a_directory_is_a_row_oldest_first(runs: Path, capsys: Capture) -> None:
    assert main(["history", str(runs), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert [row["record"] for row in rows] == ["c", "a", "b", "d"]
    assert [row["spec"] for row in rows] == [1, 1, 1, 1]
    assert [row["against"] for row in rows] == [None, "c", "a", None]
    assert [row["status"] for row in rows] == ["complete", "complete", "complete", "interrupted"]
    assert err == ""


def test_the_table_goes_to_stdout(runs: Path, capsys: Capture) -> None:
    assert main(["history", str(runs)]) == 0
    out, err = capsys.readouterr()
    assert "| 2026-01-02 00:00 |    1 | a " in out
    assert "measured, quick" in out and "measured, interrupted" in out and "no verdict" in out
    assert "spec 1: 136.1 to 136.1 samples/s, oldest first: " in out
    assert err == ""


def test_every_format_is_written(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    files = {flag: tmp_path / f"out{flag}" for flag in ("--json", "--csv", "--markdown")}
    assert main(["history", str(runs), *(str(word) for pair in files.items() for word in pair)]) == 0
    out, err = capsys.readouterr()
    assert "oldest first" in out
    assert err.splitlines() == [f"Wrote {path}" for path in files.values()]
    assert len(json.loads(files["--json"].read_text())) == 4
    assert len(list(csv.reader(io.StringIO(files["--csv"].read_text())))) == 5
    assert files["--markdown"].read_text().startswith("| when | spec | record |")


def test_a_record_named_twice_is_one_row(runs: Path, capsys: Capture) -> None:
    named = [str(runs), str(runs / "b"), str(runs / "b" / "record.json"), str(GOLDEN)]
    assert main(["history", *named, "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["record"] for row in rows] == ["c", "a", "b", "d", "record_v2"]


def test_a_record_may_come_through_stdin(runs: Path) -> None:
    ended = run("-m", "chunktune", "history", "-", str(runs / "c"), "--json", "-", stdin=GOLDEN.read_text())
    assert [row["record"] for row in json.loads(ended.stdout)] == ["c", "stdin"]


def test_what_cannot_be_read_is_named_and_left_out(runs: Path, capsys: Capture) -> None:
    (runs / "b" / "record.json").write_text("{")
    saved(runs / "new", 5, schema_version=99)
    (runs / "empty").mkdir()
    (runs / "empty" / "journal.jsonl").write_text("")
    nothing = str(runs / "nothing.json")
    assert main(["history", str(runs), nothing, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert [row["record"] for row in json.loads(out)] == ["c", "a", "d"]
    notes = err.splitlines()
    assert all(note.startswith("left out: ") for note in notes)
    said = {"b/record.json: not a record", "new/record.json: schema_version is 99", "empty/journal.jsonl: ", nothing}
    assert len(notes) == len(said)
    assert all(any(words in note for note in notes) for words in said), err


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_nothing_readable_is_a_usage_error(name: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["history", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith(f"error: no record can be read from {tmp_path / name}; a record is ")


def test_a_directory_that_cannot_be_entered_is_named(runs: Path) -> None:
    closed = runs / "closed"
    closed.mkdir(mode=0)
    if os.access(closed, os.R_OK):
        pytest.skip("this user may enter every directory")
    ended = run("-m", "chunktune", "history", str(runs))
    assert ended.returncode == 0
    assert f"left out: {closed}: " in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'DIR|RECORD...'"),
        (["-", "-"], "- is given more than once"),
        ([str(GOLDEN), "--json", "-", "--csv", "-"], "would share stdout"),
        (["nothing.json", "--csv", "no/such/place.csv"], "there is no directory no/such"),
        ([str(GOLDEN), "--csv", str(GOLDEN)], "would overwrite a record that is read"),
    ],
)
def test_mistakes_are_one_message(arguments: list[str], message: str, capsys: Capture) -> None:
    before = GOLDEN.read_bytes()
    assert main(["history", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err and "Traceback" not in err
    assert GOLDEN.read_bytes() == before


@pytest.mark.parametrize("target", ["b/record.json", "d/journal.jsonl"])
def test_an_output_never_overwrites_what_is_read(target: str, runs: Path, capsys: Capture) -> None:
    before = (runs / target).read_bytes()
    assert main(["history", str(runs), "--csv", str(runs / target)]) == 2
    assert "would overwrite a record that is read" in capsys.readouterr().err
    assert (runs / target).read_bytes() == before


def test_a_hostile_name_does_not_reach_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    saved(tmp_path / "runs" / "a\x1b[31m\nb", 1)
    (tmp_path / "runs" / "a\x1b[31m").mkdir()
    (tmp_path / "runs" / "a\x1b[31m" / "record.json").write_text("\x1b[31m")
    assert main(["history", str(tmp_path / "runs")]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out and "\x1b" not in err
    assert len(err.splitlines()) == 1


def test_a_stream_that_lacks_the_characters_gets_others(tmp_path: Path) -> None:
    saved(tmp_path / "é", 1)
    saved(tmp_path / "f", 2)
    ended = run("-m", "chunktune", "history", str(tmp_path), PYTHONIOENCODING="ascii")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.isascii() and "\\xe9" in ended.stdout
    assert "█" in run("-m", "chunktune", "history", str(tmp_path), PYTHONIOENCODING="utf-8").stdout


def test_nothing_heavy_is_ever_imported(runs: Path, tmp_path: Path) -> None:
    formats = [word for name in ("json", "csv", "markdown") for word in (f"--{name}", str(tmp_path / name))]
    codes, modules = imported(["history", str(runs), *formats])
    assert (codes, modules & {"torch", "pandas", "numpy", "rich.console"}) == ([0], set())


def test_the_help_has_examples() -> None:
    text = run("-m", "chunktune", "history", "--help", COLUMNS="200").stdout
    assert "─ Output" in text
    assert "chunktune history runs --csv history.csv" in text
    assert "device and sweep tables left out" in text, "nothing is taken for markup"
