from __future__ import annotations

import csv
import io
import json
import os
import pty
import subprocess
import sys
import types
from pathlib import Path

import pytest
from asking import imported

import chunktune
from chunktune.cli.app import main
from chunktune.record import read_record, record_json
from chunktune.report.terminal import render
from chunktune.results import Record

Capture = pytest.CaptureFixture[str]
ROOT = Path(chunktune.__file__).parents[1]
DATA = Path(__file__).parents[1] / "data"
GOLDEN = DATA / "record_v2.json"
HEAVY = ("torch", "pandas", "numpy", "rich.console")


def altered(directory: Path, **changes: object) -> Path:
    """The golden record with some fields changed, as a sweep's output directory."""
    directory.mkdir(exist_ok=True)
    data = json.loads(record_json(read_record(GOLDEN)))
    (directory / "record.json").write_text(json.dumps({**data, **changes}))
    return directory


def without_choice(directory: Path) -> Path:
    made = read_record(GOLDEN)
    assert made.verdict is not None
    answer = made.verdict.model_dump(mode="json") | {"chunks": None, "micro_batch": None, "mini_batch": None}
    return altered(directory, verdict=answer)


def run(*arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    command = [sys.executable, "-m", "chunktune", *arguments]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, env=environment, timeout=120, check=False
    )


def golden() -> Record:
    return read_record(GOLDEN)


# --- one record


@pytest.mark.parametrize("version", [1, 2])
def test_one_record_is_what_sweep_prints_and_then_bars(version: int, capsys: Capture) -> None:
    path = DATA / f"record_v{version}.json"
    assert main(["report", str(path)]) == 0
    out, err = capsys.readouterr()
    shown = render(read_record(path))
    assert out.startswith(shown)
    assert "samples/s against M" in out.removeprefix(shown)
    assert "its capacity" in out
    assert err == ""


def test_every_format_is_written(tmp_path: Path, capsys: Capture) -> None:
    flags = ("--json", "--csv", "--markdown", "--html")
    files = {flag: tmp_path / f"out{flag}" for flag in flags}
    assert main(["report", str(GOLDEN), *(str(word) for pair in files.items() for word in pair)]) == 0
    out, err = capsys.readouterr()
    assert "samples/s against M" in out
    assert err.splitlines() == [f"Wrote {files[flag]}" for flag in flags]
    assert Record.model_validate_json(files["--json"].read_text(), strict=True) == golden()
    assert len(list(csv.reader(io.StringIO(files["--csv"].read_text())))) == 1 + len(golden().trials)
    assert files["--markdown"].read_text().startswith("**M = ")
    assert files["--html"].read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("flag", "start"), [("--json", "{"), ("--csv", "chunks,"), ("--markdown", "**M"), ("--html", "<!DOCTYPE")]
)
def test_stdout_has_the_format_alone(flag: str, start: str, capsys: Capture) -> None:
    assert main(["report", str(GOLDEN), flag, "-"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(start)
    assert "against M\n" not in out
    assert err.startswith("M = 2 (b = 8, N = 16)")


def test_print_chunks_prints_m_alone(capsys: Capture) -> None:
    assert main(["report", str(GOLDEN), "--print", "chunks"]) == 0
    assert capsys.readouterr().out == "2\n"


def test_a_record_without_a_choice_is_shown_but_has_no_chunks_to_print(tmp_path: Path, capsys: Capture) -> None:
    path = str(without_choice(tmp_path / "a"))
    assert main(["report", path]) == 0
    assert "no M is feasible" in capsys.readouterr().out
    assert main(["report", path, "--print", "chunks"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: no M can be chosen")


def test_an_interrupted_record_is_shown(tmp_path: Path, capsys: Capture) -> None:
    path = str(altered(tmp_path / "a", verdict=None, trials=[], status="interrupted"))
    assert main(["report", path]) == 0
    out = capsys.readouterr().out
    assert "no value of M was tried" in out
    assert "the sweep was interrupted" in out
    assert "against M" not in out
    assert main(["report", path, "--print", "chunks"]) == 6


def test_a_directory_with_a_journal_alone_is_an_interrupted_sweep(tmp_path: Path, capsys: Capture) -> None:
    made = golden()
    start = {
        **made.model_dump(mode="json", include={"tool", "spec", "sources", "environment", "candidates", "quick"}),
        "event": "start",
        "schema_version": 2,
        "warnings": [],
        "started_at": made.started_at,
    }
    trial = {"event": "trial", "trial": made.trials[0].model_dump(mode="json"), "elapsed_s": 3.5}
    (tmp_path / "journal.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(trial)}\n" + '{"event": "tri')
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "the sweep was interrupted after 3.50 s" in out
    assert "M = 1  " in out
    assert main(["report", str(tmp_path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "interrupted"


def test_a_record_may_come_through_stdin() -> None:
    ended = run("report", "-", "--print", "chunks", stdin=GOLDEN.read_text())
    assert (ended.returncode, ended.stdout) == (0, "2\n")


@pytest.mark.parametrize(("arguments", "chunks"), [([], None), (["--chunks", "4"], 4)])
def test_a_trace_is_asked_for_with_its_m(
    arguments: list[str], chunks: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    asked = []
    stand_in = types.ModuleType("chunktune.report.trace")
    stand_in.__dict__["to_trace"] = lambda record, chunks: asked.append((record, chunks)) or '{"traceEvents": []}'
    monkeypatch.setitem(sys.modules, "chunktune.report.trace", stand_in)
    assert main(["report", str(GOLDEN), "--trace", str(tmp_path / "trace.json"), *arguments]) == 0
    assert asked == [(golden(), chunks)]
    assert (tmp_path / "trace.json").read_text() == '{"traceEvents": []}\n'
    assert f"Wrote {tmp_path / 'trace.json'}" in capsys.readouterr().err


# --- several


def test_several_records_stand_side_by_side(tmp_path: Path, capsys: Capture) -> None:
    paths = [str(altered(tmp_path / "monday")), str(altered(tmp_path / "tuesday", quick=True)), str(GOLDEN)]
    assert main(["report", *paths]) == 0
    out, err = capsys.readouterr()
    assert all(f"| {name} " in out for name in ("monday", "tuesday", "record_v2"))
    assert "| quick " in out
    assert err == ""
    assert main(["report", *paths, "--json", "-"]) == 0
    summaries = json.loads(capsys.readouterr().out)
    assert [each["differs"] for each in summaries] == [{"quick": False}, {"quick": True}, {"quick": False}]
    assert [each["chunks"] for each in summaries] == [2, 2, 2]


def test_several_records_have_csv_and_markdown(tmp_path: Path, capsys: Capture) -> None:
    table, text = tmp_path / "a.csv", tmp_path / "a.md"
    pair = [str(GOLDEN), str(DATA / "record_v1.json")]
    assert main(["report", *pair, "--csv", str(table), "--markdown", str(text)]) == 0
    assert capsys.readouterr().err.splitlines() == [f"Wrote {table}", f"Wrote {text}"]
    assert [row["record"] for row in csv.DictReader(table.open())] == ["record_v2", "record_v1"]
    assert text.read_text().startswith("| record | M |")


@pytest.mark.parametrize("flags", [["--html", "a.html"], ["--trace", "a.json"], ["--print", "chunks"]])
def test_what_shows_one_record_refuses_several(flags: list[str], capsys: Capture) -> None:
    assert main(["report", str(GOLDEN), str(GOLDEN), *flags]) == 2
    assert "shows one record, and 2 are given" in capsys.readouterr().err
    assert not Path(flags[1]).exists()


# --- the other commands that take --html

COSTS = """
[model]
family = "costs"
micro_batch = 2
forward_s = 0.01
backward_s = 0.02
[pipeline]
stages = 2
[batch]
micro_batch = 2
chunks = "2:16"
"""


def test_a_prediction_may_be_a_page_too(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "spec.toml").write_text(COSTS)
    page = tmp_path / "a.html"
    assert main(["whatif", str(tmp_path / "spec.toml"), "--html", str(page)]) == 0
    assert f"Wrote {page}" in capsys.readouterr().err
    assert "predicted" in page.read_text()


def test_a_grid_has_no_page(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "spec.toml").write_text(COSTS)
    assert main(["whatif", str(tmp_path / "spec.toml"), "--vary", "K=1,2", "--html", "-"]) == 2
    assert "--html shows one record" in capsys.readouterr().err


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'RECORD...'"),
        (["nothing.json"], "nothing.json: there is no such file"),
        ([str(DATA.parent / "unit")], "holds no record.json and no journal.jsonl"),
        ([str(GOLDEN), "--print", "limit"], "--print limit is unknown"),
        ([str(GOLDEN), "--chunks", "4"], "--chunks 4 is the M of --trace, which is not given"),
        ([str(GOLDEN), "--json", "-", "--html", "-"], "would share stdout"),
        ([str(GOLDEN), "--html", "no/such/place.html"], "there is no directory no/such"),
        (["-", "-"], "- is given more than once"),
        (["nothing.json", "--html", "no/such/place.html"], "there is no directory no/such"),
    ],
)
def test_mistakes_are_one_message(arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(["report", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("given", ["", "record.json"])
def test_an_output_never_overwrites_the_record(given: str, tmp_path: Path, capsys: Capture) -> None:
    altered(tmp_path)
    before = (tmp_path / "record.json").read_bytes()
    assert main(["report", str(tmp_path / given), "--csv", str(tmp_path / "record.json")]) == 2
    assert "would overwrite the record" in capsys.readouterr().err
    assert (tmp_path / "record.json").read_bytes() == before


def test_a_hostile_name_does_not_reach_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a\x1b[31m\nb"
    assert main(["report", str(path)]) == 2
    assert "\x1b" not in capsys.readouterr().err
    altered(path)
    assert main(["report", str(path), str(GOLDEN)]) == 0
    assert "\x1b" not in capsys.readouterr().out


# --- streams


def test_nothing_heavy_is_ever_imported(tmp_path: Path) -> None:
    formats = [part for name in ("json", "csv", "markdown", "html") for part in (f"--{name}", str(tmp_path / name))]
    codes, modules = imported(["report", str(GOLDEN), *formats], ["report", str(GOLDEN), str(GOLDEN)])
    assert (codes, modules & set(HEAVY)) == ([0, 0], set())


def test_where_there_are_no_blocks_the_bars_are_ascii() -> None:
    assert run("report", str(GOLDEN), PYTHONIOENCODING="ascii").stdout.isascii()
    assert "█" in run("report", str(GOLDEN), PYTHONIOENCODING="utf-8").stdout


def test_a_name_that_stdout_cannot_spell_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "größe").mkdir()
    (tmp_path / "größe" / "record.json").write_bytes(GOLDEN.read_bytes())
    ended = run("report", str(tmp_path / "größe"), str(GOLDEN), PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "gr\\xf6\\xdfe" in ended.stdout


def test_on_a_terminal_all_fits_its_width() -> None:
    controller, terminal = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "60", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "chunktune", "report", str(GOLDEN)]
    with subprocess.Popen(command, stdout=terminal, stderr=subprocess.DEVNULL, env=environment) as process:
        os.close(terminal)
        received = b""
        while True:
            try:
                data = os.read(controller, 65536)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            received += data
    os.close(controller)
    assert process.returncode == 0
    lines = received.decode().splitlines()
    assert any("█" in line for line in lines)
    assert max(map(len, lines)) <= 60
    assert "\x1b" not in received.decode()


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = f"{sys.executable} -m chunktune report {GOLDEN} --json - | head -c 1"
    ended = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
        check=False,
    )
    assert "Traceback" not in ended.stderr


def test_help_shows_groups_and_examples() -> None:
    text = run("report", "--help", COLUMNS="200").stdout
    assert "─ Output" in text
    assert "chunktune report runs/a-sweep --html report.html" in text
