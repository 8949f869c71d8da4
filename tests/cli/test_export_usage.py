from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
from asking import imported

from chunktune.cli.app import main
from chunktune.export import FRAMEWORKS
from chunktune.record import read_record, record_json

Capture = pytest.CaptureFixture[str]
DATA = Path(__file__).parents[1] / "data"
GPIPE, ONE_F_ONE_B = DATA / "record_v2.json", DATA / "record_v1.json"


def altered(directory: Path, source: Path = ONE_F_ONE_B, **changes: Any) -> str:
    """A golden record with some fields changed; those of the verdict as `verdict__...`."""
    data = json.loads(record_json(read_record(source)))
    verdict = {name.removeprefix("verdict__"): value for name, value in changes.items() if name.startswith("verdict__")}
    rest = {name: value for name, value in changes.items() if not name.startswith("verdict__")}
    path = directory / "altered.json"
    path.write_text(json.dumps({**data, **rest, **({"verdict": {**data["verdict"], **verdict}} if verdict else {})}))
    return str(path)


def export(*arguments: object) -> int:
    return main(["export", *map(str, arguments)])


# --- the answer


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("record", [GPIPE, ONE_F_ONE_B])
def test_the_answer_is_on_stdout_and_the_notes_on_stderr(framework: str, record: Path, capsys: Capture) -> None:
    assert export(record, "--to", framework) == 0
    out, err = capsys.readouterr()
    assert out
    assert all(line.startswith(("warning: ", "not translated: ", "note: ")) for line in err.splitlines())
    if framework != "deepspeed":
        assert out.startswith(f"# {FRAMEWORKS[framework].title} ")
        assert all(f"# {line}" in out.splitlines() for line in err.splitlines())


def test_versions_and_formats_can_be_named(capsys: Capture) -> None:
    given = ("--to", "accelerate", "--framework-version", "1.0", "--format")
    assert export(ONE_F_ONE_B, *given, "flags") == 0
    assert "--megatron_lm_num_micro_batches 2" in capsys.readouterr().out
    assert export(ONE_F_ONE_B, *given, "yaml") == 0
    assert "megatron_lm_num_micro_batches: 2" in capsys.readouterr().out


def test_replicas_multiply_the_global_batch_alone(capsys: Capture) -> None:
    assert export(ONE_F_ONE_B, "--to", "deepspeed", "--replicas", 3) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["train_batch_size"] == 24
    assert (answer["train_micro_batch_size_per_gpu"], answer["gradient_accumulation_steps"]) == (4, 2)
    assert answer["pipeline"]["stages"] == 2


def test_a_shell_reads_the_flags(capsys: Capture) -> None:
    assert export(ONE_F_ONE_B, "--to", "megatron-lm") == 0
    script = "printf '%s\\n' start " + "\\\n" + capsys.readouterr().out.split("\n\n", 1)[1]
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert words == [
        "start",
        *("--micro-batch-size", "4", "--global-batch-size", "8", "--pipeline-model-parallel-size", "2"),
    ]


def test_the_head_says_where_it_comes_from(capsys: Capture) -> None:
    assert export(ONE_F_ONE_B, "--to", "torch") == 0
    head = capsys.readouterr().out.split("\n\n")[0]
    for words in (
        "record_v1",
        "M = 2 chunks of b = 4: N = 8",
        "K = 2",
        "limit schedule, from below",
        "confidence clear",
    ):
        assert words in head


def test_a_file_is_written_whole(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "pipeline.toml"
    assert export(ONE_F_ONE_B, "--to", "torchtitan", "--framework-version", "v0.2.2", "--output", path) == 0
    out, err = capsys.readouterr()
    assert out == "" and err.endswith(f"Wrote {path}\n")
    assert tomllib.loads(path.read_text())["parallelism"]["pipeline_parallel_microbatch_size"] == 4


def test_a_directory_and_stdin_hold_records_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "record.json").write_bytes(ONE_F_ONE_B.read_bytes())
    assert export(tmp_path, "--to", "torch") == 0
    ast.parse(capsys.readouterr().out)
    stream = types.SimpleNamespace(buffer=io.BytesIO(ONE_F_ONE_B.read_bytes()), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", stream)
    assert export("-", "--to", "torch") == 0
    assert "from the record stdin" in capsys.readouterr().out


# --- what is not right


def test_what_has_no_counterpart_is_said_and_strict_refuses_it(tmp_path: Path, capsys: Capture) -> None:
    assert export(GPIPE, "--to", "deepspeed") == 0
    said = "not translated: schedule gpipe: DeepSpeed has none such and will run 1F1B; M = 2 was chosen under it"
    assert said in capsys.readouterr().err
    path = tmp_path / "ds.json"
    assert export(GPIPE, "--to", "deepspeed", "--strict", "--output", path) == 5
    out, err = capsys.readouterr()
    assert out == "" and not path.exists()
    assert said in err and err.endswith(
        "error: 1 setting has no counterpart in DeepSpeed 0.19, under --strict; see above\n"
    )
    assert export(ONE_F_ONE_B, "--to", "deepspeed", "--strict") == 0


def test_an_unclear_choice_warns_and_strict_refuses_it(tmp_path: Path, capsys: Capture) -> None:
    path = altered(tmp_path, verdict__confidence="unclear", verdict__confidence_reasons=["\x1b[31mnoise"])
    assert export(path, "--to", "torch") == 0
    out, err = capsys.readouterr()
    assert "warning: the choice is unclear: noise\n" in err
    assert "# warning: the choice is unclear: noise\n" in out
    assert export(path, "--to", "torch", "--strict") == 5
    out, err = capsys.readouterr()
    assert out == "" and "M = 2 is unclear under --strict" in err and "\x1b" not in err


@pytest.mark.parametrize(
    ("change", "words"), [({"quick": True}, "a quick sweep"), ({"mode": "predicted"}, "a prediction")]
)
def test_a_quick_or_predicted_record_warns(change: dict[str, Any], words: str, tmp_path: Path, capsys: Capture) -> None:
    assert export(altered(tmp_path, **change), "--to", "nemo") == 0
    out, err = capsys.readouterr()
    assert words in err and words in out


def test_a_record_without_a_choice_is_infeasible(tmp_path: Path, capsys: Capture) -> None:
    path = altered(tmp_path, verdict__chunks=None, verdict__micro_batch=None, verdict__mini_batch=None)
    assert export(path, "--to", "torch") == 3
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: no M can be chosen")


def test_an_interrupted_record_has_no_choice(tmp_path: Path, capsys: Capture) -> None:
    assert export(altered(tmp_path, verdict=None, status="interrupted"), "--to", "torch") == 6
    out, err = capsys.readouterr()
    assert out == "" and err == "error: the sweep ended without a verdict, status interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--to", "megatron"), "--to megatron is unknown; known: torch, torchtitan, megatron-lm"),
        (("--to", "Torch"), "(did you mean torch?)"),
        (("--to", "\x1b[31m"), "--to \\x1b[31m is unknown"),
        (("--to", "torchtitan", "--framework-version", "0.3"), "known: 8b737fe (2025-04-07), 0.1, 0.2, 9810191"),
        (("--to", "deepspeed", "--format", "yaml"), "--format yaml of deepspeed 0.19 is unknown; known: json"),
        (("--to", "torch", "--replicas", "0"), "--replicas 0: must be 1 to 2147483647 (did you mean 1?)"),
        (("--to", "torch", "--replicas", "-3"), "did you mean 1?"),
        (("--to", "torch", "--replicas", str(10**12)), "did you mean 2147483647?"),
        (("--to", "torch", "--replicas", "two"), "--replicas"),
        ((), "--to"),
        (("--to", "torch", "--output", "missing/file.py"), "missing"),
    ],
)
def test_a_wrong_command_line_is_one_clear_error(arguments: tuple[str, ...], words: str, capsys: Capture) -> None:
    assert export(ONE_F_ONE_B, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and "Traceback" not in err and "\x1b" not in err


def test_the_command_line_is_checked_before_the_record(capsys: Capture) -> None:
    assert export("no-such-record.json", "--to", "torch", "--output", "missing/file.py") == 2
    assert "no-such-record" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "record.json"])
def test_the_record_is_not_overwritten(name: str, tmp_path: Path, capsys: Capture) -> None:
    held = tmp_path / "record.json"
    held.write_bytes(ONE_F_ONE_B.read_bytes())
    assert export(tmp_path / name, "--to", "torch", "--output", held) == 2
    assert "would overwrite the record" in capsys.readouterr().err
    assert held.read_bytes() == ONE_F_ONE_B.read_bytes()


def test_a_spec_that_makes_no_sense_is_one_clear_error(tmp_path: Path, capsys: Capture) -> None:
    assert export(altered(tmp_path, spec={"pipeline": {"stages": "\x1b[31mmany"}}), "--to", "torch") == 2
    out, err = capsys.readouterr()
    assert out == "" and "pipeline.stages" in err and "\x1b" not in err and err.count("\n") == 1


def test_nothing_heavy_is_imported() -> None:
    codes, modules = imported(["export", str(ONE_F_ONE_B), "--to", "torch"])
    assert (codes, modules & {"torch", "pandas", "numpy", "rich.console", "yaml"}) == ([0], set())
