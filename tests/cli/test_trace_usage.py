"""`chunktune report RECORD --trace FILE`, from the command line to the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from asking import imported

import chunktune
from chunktune.cli.app import main

Capture = pytest.CaptureFixture[str]
ROOT = Path(chunktune.__file__).parents[1]
DATA = Path(__file__).parents[1] / "data"
GOLDEN = DATA / "record_v2.json"


def test_a_trace_is_written_beside_the_table(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "trace.json"
    assert main(["report", str(GOLDEN), "--trace", str(path), "--chunks", "4"]) == 0
    out, err = capsys.readouterr()
    assert "chosen         M = 2" in out
    assert err == f"Wrote {path}\n"
    trace = json.loads(path.read_text())
    assert trace["otherData"]["chunks"] == 4
    assert {event["name"] for event in trace["traceEvents"]} >= {"F 3", "B 3", "optimizer", "process_name"}


def test_a_trace_alone_goes_to_stdout(capsys: Capture) -> None:
    assert main(["report", str(GOLDEN), "--trace", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["otherData"]["source"] == "simulated"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([str(GOLDEN), "--chunks", "3"], "M = 3 was not tried; M with a time line: 1 (simulated), 2 (simulated)"),
        ([str(DATA / "record_v1.json")], "does not say how long the operations of M = 2 took"),
    ],
)
def test_a_trace_that_cannot_be_is_a_usage_error(
    arguments: list[str], message: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "trace.json"
    assert main(["report", *arguments, "--trace", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert not path.exists()


def test_a_trace_needs_nothing_heavy() -> None:
    codes, modules = imported(["report", str(GOLDEN), "--trace", "-"])
    assert (codes, modules & {"torch", "pandas", "numpy", "rich.console"}) == ([0], set())
