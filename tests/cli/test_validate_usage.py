from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import chunktune
import chunktune.validate as validation
from chunktune.cli.app import main
from chunktune.validate import Mark, Validation, validate

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def found() -> Validation:
    return validate()


@pytest.fixture(autouse=True)
def known(found: Validation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command answers with what was computed once."""
    monkeypatch.setattr(validation, "validate", lambda: found)


def test_the_tables_go_to_stdout(capsys: Capture) -> None:
    assert main(["validate"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "Bubble rates of 1F1B at K = 8" in out
    assert "holds: BigScience: the winning M: M = 128 is predicted to win, M = 128 won" in out


def test_json_alone_goes_to_stdout(capsys: Capture) -> None:
    assert main(["validate", "--json", "-"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["tool"] == {"name": "chunktune", "version": chunktune.__version__}
    assert all(mark["holds"] for mark in answer["marks"])


def test_every_format_is_written(tmp_path: Path, capsys: Capture) -> None:
    files = {flag: tmp_path / f"out{flag}" for flag in ("--json", "--csv", "--markdown")}
    assert main(["validate", *(str(word) for pair in files.items() for word in pair)]) == 0
    out, err = capsys.readouterr()
    assert "Pass marks" in out
    assert [line for line in err.splitlines() if not line.startswith("Wrote ")] == []
    assert json.loads(files["--json"].read_text())["tables"]
    assert len(list(csv.reader(io.StringIO(files["--csv"].read_text())))) > 70
    assert files["--markdown"].read_text().startswith("### ")


def test_two_formats_cannot_share_stdout(capsys: Capture) -> None:
    assert main(["validate", "--json", "-", "--csv", "-"]) == 2
    assert "would share stdout" in capsys.readouterr().err


def test_a_mark_that_fails_exits_with_4(found: Validation, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    broken = found.model_copy(update={"marks": (*found.marks, Mark(name="a mark", holds=False, detail="3 is not 4"))})
    monkeypatch.setattr(validation, "validate", lambda: broken)
    assert main(["validate"]) == 4
    out, err = capsys.readouterr()
    assert "FAILS: a mark: 3 is not 4" in out
    assert err == "error: 1 of 4 pass marks do not hold:\n  a mark: 3 is not 4\n"


def test_torch_and_pandas_are_never_imported() -> None:
    script = (
        "import sys\n"
        "from chunktune.cli.app import main\n"
        "code = main(['validate', '--csv', '-'])\n"
        "print(code, sorted(set(sys.modules) & {'torch', 'pandas'}), file=sys.stderr)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(chunktune.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr.strip()) == (0, "0 []")
    assert ended.stdout.startswith("table,unit,what,")
