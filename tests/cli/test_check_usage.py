from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asking import imported

import chunktune
from chunktune.cli.app import main
from chunktune.record import read_record, record_json
from chunktune.results import Record

Capture = pytest.CaptureFixture[str]
ROOT = Path(chunktune.__file__).parents[1]
GOLDEN = Path(__file__).parents[1] / "data" / "record_v2.json"
HEAVY = ("torch", "pandas", "numpy", "rich.console")
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(autouse=True)
def off_github(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT", "TORCHELASTIC_RUN_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    # Under GITHUB_ACTIONS `main` sets it for good: given here, it is taken away at the end.
    monkeypatch.setenv("_TYPER_FORCE_DISABLE_TERMINAL", "")
    monkeypatch.delenv("_TYPER_FORCE_DISABLE_TERMINAL")


def golden() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(record_json(read_record(GOLDEN)))
    return data


def altered(path: Path, *changes: Change) -> Path:
    """The golden record with some changes, in a file."""
    data = golden()
    for change in changes:
        change(data)
    path.write_text(json.dumps(data))
    return path


def put(**fields: Any) -> Change:
    return lambda data: data.update(fields)


def chose(chunks: int) -> Change:
    def change(data: dict[str, Any]) -> None:
        trial = next(trial for trial in data["trials"] if trial["chunks"] == chunks)
        data["verdict"] |= {key: trial[key] for key in ("chunks", "micro_batch", "mini_batch")}
        data["confirmation"] = None

    return change


def slowed(factor: float) -> Change:
    def change(data: dict[str, Any]) -> None:
        for trial in [*data["trials"], data["confirmation"]]:
            if trial and trial["state"] == "ok":
                trial["step_s"] = [step * factor for step in trial["step_s"]]
                trial["step_median_s"] *= factor
                trial["step_interval_s"] = [end * factor for end in trial["step_interval_s"]]

    return change


def unclear(data: dict[str, Any]) -> None:
    data["verdict"] |= {"confidence": "unclear", "confidence_reasons": ["noise\n::error::injected"]}


# --- the gate


def test_a_record_passes_against_itself(capsys: Capture) -> None:
    assert main(["check", str(GOLDEN), "--baseline", str(GOLDEN)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("chunktune check: passed, 11 checks")
    assert err == ""


def test_without_conditions_a_clear_choice_is_enough(capsys: Capture) -> None:
    assert main(["check", str(GOLDEN)]) == 0
    assert capsys.readouterr().out.startswith("chunktune check: passed, 3 checks")


def test_a_changed_m_ends_in_4_with_the_table_on_stdout(tmp_path: Path, capsys: Capture) -> None:
    baseline = altered(tmp_path / "base.json", chose(8))
    assert main(["check", str(GOLDEN), "--baseline", str(baseline)]) == 4
    out, err = capsys.readouterr()
    assert out.startswith("chunktune check: FAILED, 1 of 12 checks (")
    assert "| chunks " in out.splitlines()[5]
    assert "FAILED" in out.splitlines()[5]
    assert err.startswith(
        "error: 1 of 12 checks failed:\n  chunks: M = 2 was chosen, and the baseline's M = 8 is slower"
    )


def test_a_slowdown_ends_in_4_and_a_wider_limit_lets_it_pass(tmp_path: Path, capsys: Capture) -> None:
    record = str(altered(tmp_path / "new.json", slowed(1.2)))
    assert main(["check", record, "--baseline", str(GOLDEN)]) == 4
    assert "16.7% slower than the baseline" in capsys.readouterr().out
    for limit in ("25%", "0.25"):
        assert main(["check", record, "--baseline", str(GOLDEN), "--max-slowdown", limit]) == 0


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--expect-chunks", "2"], 0),
        (["--expect-chunks", "8"], 4),
        (["--max-peak", "1MiB"], 0),
        (["--max-peak", "1000"], 4),
        (["--min-headroom", "50%"], 0),
        (["--min-headroom", "0.99999999999"], 4),
    ],
)
def test_conditions_stand_without_a_baseline(flags: list[str], code: int) -> None:
    assert main(["check", str(GOLDEN), *flags]) == code


def test_an_unclear_choice_needs_leave(tmp_path: Path, capsys: Capture) -> None:
    record = str(altered(tmp_path / "new.json", unclear))
    assert main(["check", record]) == 4
    err = capsys.readouterr().err
    assert "  confidence: M = 2 is unclear: noise ::error::injected" in err
    assert not any(line.startswith("::") for line in err.splitlines())
    assert main(["check", record, "--allow-unclear"]) == 0


def test_another_torch_fails_unless_allowed(tmp_path: Path, capsys: Capture) -> None:
    baseline = altered(tmp_path / "base.json", lambda data: data["environment"].update(torch="2.12.1"))
    arguments = ["check", str(GOLDEN), "--baseline", str(baseline)]
    assert main(arguments) == 4
    assert "--allow-different torch lets it pass" in capsys.readouterr().err
    assert main([*arguments, "--allow-different", "torch"]) == 0


@pytest.mark.parametrize("changes", [{"verdict": None, "trials": [], "status": "interrupted"}, {"status": "failed"}])
def test_a_sweep_that_came_to_nothing_fails(changes: dict[str, Any], tmp_path: Path) -> None:
    record = altered(tmp_path / "new.json", put(**changes))
    assert main(["check", str(record)]) == 4
    assert main(["check", str(record), "--baseline", str(GOLDEN)]) == 4


def test_a_quick_record_fails_against_a_baseline(tmp_path: Path, capsys: Capture) -> None:
    record = str(altered(tmp_path / "new.json", put(quick=True)))
    assert main(["check", record]) == 0
    assert "warning: mode: the record is a quick run" in capsys.readouterr().out
    assert main(["check", record, "--baseline", str(GOLDEN)]) == 4


def test_an_output_directory_is_a_record_and_so_is_stdin(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_bytes(GOLDEN.read_bytes())
    assert main(["check", str(tmp_path), "--baseline", str(tmp_path)]) == 0
    ended = run("check", "-", "--baseline", str(tmp_path), stdin=GOLDEN.read_text())
    assert (ended.returncode, ended.stderr) == (0, "")


# --- formats


def test_every_format_is_written(tmp_path: Path, capsys: Capture) -> None:
    flags = ("--json", "--markdown", "--junit", "--benchmark-json")
    files = {flag: tmp_path / f"out{flag}" for flag in flags}
    words = [str(word) for pair in files.items() for word in pair]
    assert main(["check", str(GOLDEN), "--baseline", str(GOLDEN), *words]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("chunktune check: passed")
    assert err.splitlines() == [f"Wrote {files[flag]}" for flag in flags]
    assert json.loads(files["--json"].read_text())["passed"] is True
    assert files["--markdown"].read_text().startswith("### chunktune check: passed")
    assert len(list(ET.parse(files["--junit"]).iter("testcase"))) == 11
    assert len(json.loads(files["--benchmark-json"].read_text())) == 3


@pytest.mark.parametrize(
    ("flag", "start"), [("--json", "{"), ("--markdown", "### "), ("--junit", "<?xml"), ("--benchmark-json", "[")]
)
def test_stdout_has_the_format_alone(flag: str, start: str, capsys: Capture) -> None:
    assert main(["check", str(GOLDEN), flag, "-", "--expect-chunks", "8"]) == 4
    out, err = capsys.readouterr()
    assert out.startswith(start)
    assert "chunktune check: FAILED" not in out or flag in ("--markdown", "--junit")
    assert err.startswith("chunktune check: FAILED, 1 of 3 checks")


# --- the baseline


def test_a_missing_baseline_says_how_to_make_one_and_that_makes_one(tmp_path: Path, capsys: Capture) -> None:
    baseline = tmp_path / "base.json"
    assert main(["check", str(GOLDEN), "--baseline", str(baseline)]) == 2
    err = capsys.readouterr().err
    assert f"chunktune check {GOLDEN} --baseline {baseline} --update makes one" in err
    assert main(["check", str(GOLDEN), "--baseline", str(baseline), "--update"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{baseline}: there was no baseline\n")
    assert err.endswith(f"Wrote {baseline}\n")
    assert read_record(baseline) == read_record(GOLDEN)
    assert main(["check", str(GOLDEN), "--baseline", str(baseline)]) == 0


def test_an_update_says_what_differs_and_exits_with_0(tmp_path: Path, capsys: Capture) -> None:
    baseline = altered(tmp_path / "base.json", chose(8), slowed(0.5))
    assert main(["check", str(GOLDEN), "--baseline", str(baseline), "--update"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "FAILED: chunks: M = 2 was chosen, and the baseline's M = 8 is slower" in err
    assert read_record(baseline) == read_record(GOLDEN)
    assert [path.name for path in tmp_path.iterdir()] == ["base.json"]


def test_an_update_replaces_what_may_be_no_baseline_but_nothing_that_is_no_record(
    tmp_path: Path, capsys: Capture
) -> None:
    baseline = altered(tmp_path / "base.json", put(quick=True))
    assert main(["check", str(GOLDEN), "--baseline", str(baseline), "--update"]) == 0
    assert "is not compared: it is a quick run" in capsys.readouterr().err
    baseline.write_text("# notes")
    assert main(["check", str(GOLDEN), "--baseline", str(baseline), "--update"]) == 2
    assert baseline.read_text() == "# notes"


REFUSED: list[tuple[Change, str]] = [
    (put(quick=True), "it is a quick run"),
    (put(mode="rehearsed"), "it is rehearsed, not measured"),
    (put(mode="predicted"), "it is predicted, not measured"),
    (put(status="interrupted"), "its sweep is interrupted"),
    (put(verdict=None), "it has no verdict"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_what_may_be_no_baseline_is_refused(change: Change, reason: str, tmp_path: Path, capsys: Capture) -> None:
    other = str(altered(tmp_path / "other.json", change))
    assert main(["check", str(GOLDEN), "--baseline", other]) == 2
    assert reason in capsys.readouterr().err
    assert main(["check", other, "--baseline", str(tmp_path / "base.json"), "--update"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "may be no baseline" in err
    assert not (tmp_path / "base.json").exists()


def test_an_unclear_record_becomes_the_baseline_only_with_leave(tmp_path: Path, capsys: Capture) -> None:
    record, baseline = str(altered(tmp_path / "new.json", unclear)), str(tmp_path / "base.json")
    assert main(["check", record, "--baseline", baseline, "--update"]) == 2
    assert "its confidence is unclear" in capsys.readouterr().err
    assert main(["check", record, "--baseline", baseline, "--update", "--allow-unclear"]) == 0
    assert main(["check", str(GOLDEN), "--baseline", baseline]) == 0
    assert "warning: baseline: " in capsys.readouterr().out


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'RECORD'"),
        (["nothing.json"], "nothing.json: there is no such file"),
        ([str(GOLDEN), "--baseline", "nothing.json"], "nothing.json: there is no such file; a baseline is a record"),
        ([str(GOLDEN), "--update"], "--update is about a baseline, and none is given"),
        ([str(GOLDEN), "--max-slowdown", "5%"], "--max-slowdown is about a baseline"),
        ([str(GOLDEN), "--baseline", str(GOLDEN), "--max-slowdown", "5"], "--max-slowdown is 5.0; a share is"),
        ([str(GOLDEN), "--min-headroom", "nan"], "--min-headroom is nan; a share is"),
        ([str(GOLDEN), "--min-headroom", "much"], '--min-headroom is "much"; a share is'),
        ([str(GOLDEN), "--max-peak", "80 G iB"], '--max-peak is "80 G iB"; a size is'),
        ([str(GOLDEN), "--max-peak", "-1"], "--max-peak is -1; a size is 0 to"),
        ([str(GOLDEN), "--expect-chunks", "0"], "Invalid value for '--expect-chunks'"),
        (
            [str(GOLDEN), "--baseline", str(GOLDEN), "--allow-different", "torhc"],
            "--allow-different torhc is unknown; it takes one of torch, device, driver, cuda, nccl, spec, "
            "or a key or table of the spec such as pipeline.stages (did you mean torch?)",
        ),
        (["-", "--baseline", "-"], "stdin holds one record"),
        ([str(GOLDEN), "--baseline", "-", "--update"], "--baseline - is stdin"),
        ([str(GOLDEN), "--baseline", str(GOLDEN), "--update"], "is the record itself"),
        ([str(GOLDEN), "--baseline", str(GOLDEN.parent), "--update"], "is a directory; it takes a file"),
        ([str(GOLDEN), "--baseline", "no/such/base.json", "--update"], "there is no directory no/such"),
        ([str(GOLDEN), "--json", "-", "--junit", "-"], "would share stdout"),
        ([str(GOLDEN), "--json", str(GOLDEN)], "would overwrite a record that is read"),
        (["nothing.json", "--junit", "no/such/place.xml"], "there is no directory no/such"),
    ],
)
def test_mistakes_are_one_message(arguments: list[str], message: str, capsys: Capture) -> None:
    before = GOLDEN.read_bytes()
    assert main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert GOLDEN.read_bytes() == before


# --- GitHub Actions


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """$GITHUB_STEP_SUMMARY and $GITHUB_OUTPUT."""
    summary, output = tmp_path / "summary.md", tmp_path / "output"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("GITHUB_OUTPUT", str(output))
    return summary, output


def test_under_actions_summary_outputs_and_annotations_are_written(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    files[0].write_text("before")
    assert main(["check", str(GOLDEN), "--expect-chunks", "8"]) == 4
    out, err = capsys.readouterr()
    assert not any(line.startswith("::") for line in out.splitlines())
    assert [line.split("::")[1] for line in err.splitlines() if line.startswith("::")] == [
        "error title=chunktune check%3A chunks"
    ]
    assert files[0].read_text().startswith("before\n### chunktune check: FAILED, 1 of 3 checks")
    assert "chunks<<chunktune_" in files[1].read_text()
    assert f"\n{GOLDEN}\n" in files[1].read_text()


@pytest.mark.parametrize(("actions", "flag", "written"), [("true", "--no-github", False), ("", "--github", True)])
def test_the_flag_stands_above_the_environment(
    actions: str, flag: str, written: bool, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", actions)
    assert main(["check", str(GOLDEN), flag]) == 0
    assert [file.exists() for file in files] == [written, written]


def test_what_cannot_be_written_there_is_noted_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path))
    assert main(["check", str(GOLDEN), "--github"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "note: GITHUB_STEP_SUMMARY is not set; nothing is written there",
        "note: GITHUB_OUTPUT cannot be written: Is a directory",
    ]


def test_an_update_annotates_no_failure(files: tuple[Path, Path], tmp_path: Path, capsys: Capture) -> None:
    baseline = altered(tmp_path / "base.json", chose(8))
    assert main(["check", str(GOLDEN), "--baseline", str(baseline), "--update", "--github"]) == 0
    assert not any(line.startswith("::") for line in capsys.readouterr().err.splitlines())
    assert all(file.exists() for file in files)


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


def test_a_prediction_is_published_too_and_may_be_checked(
    files: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    spec, predicted = tmp_path / "spec.toml", tmp_path / "predicted.json"
    spec.write_text(COSTS)
    assert main(["whatif", str(spec), "--json", str(predicted), "--github"]) == 0
    assert files[0].read_text().startswith("### chunktune whatif\n\n**M = ")
    assert f"\n{predicted}\n" in files[1].read_text()
    chunks = read_record(predicted).verdict
    assert chunks is not None
    assert main(["check", str(predicted), "--expect-chunks", str(chunks.chunks)]) == 0
    assert "the record is predicted, not measured" in capsys.readouterr().out
    assert main(["whatif", str(spec), "--vary", "K=1,2", "--github"]) == 2
    assert "--github publishes one answer" in capsys.readouterr().err


# --- streams


def run(*arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    command = [sys.executable, "-m", "chunktune", *arguments]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, env=environment, timeout=120, check=False
    )


def test_nothing_heavy_is_ever_imported(tmp_path: Path) -> None:
    formats = [
        part for name in ("json", "markdown", "junit", "benchmark-json") for part in (f"--{name}", f"{tmp_path / name}")
    ]
    codes, modules = imported(["check", str(GOLDEN), "--baseline", str(GOLDEN), "--github", *formats])
    assert (codes, modules & set(HEAVY)) == ([0], set())


def test_help_shows_groups_and_examples() -> None:
    text = run("check", "--help", COLUMNS="200").stdout
    assert all(f"─ {title}" in text for title in ("Baseline", "Conditions", "Output", "Running"))
    assert "chunktune check runs/a-sweep --baseline ci/baseline.json --update" in text


def test_the_golden_record_may_be_a_baseline() -> None:
    """What the tests above rest on."""
    record: Record = read_record(GOLDEN)
    assert (record.mode, record.quick, record.status) == ("measured", False, "complete")
    assert record.verdict is not None
    assert (record.verdict.chunks, record.verdict.confidence) == (2, "clear")
