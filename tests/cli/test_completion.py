from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import chunktune
from chunktune.cli.app import main
from chunktune.cli.completion import complete_from, complete_record, join_bash_words
from chunktune.datasheets import DATASHEETS
from chunktune.schedules import SCHEDULES
from chunktune.tables import FAMILIES

ROOT = Path(chunktune.__file__).parents[1]


def bash_words(line: str) -> list[str]:
    """The words of a line as bash splits them: `=` is one of its own, and the last is under the cursor."""
    words: list[str] = []
    for word in line.split(" "):
        parts = word.replace("=", " = ").split() or [""]
        words += parts
    return words


Offered = Callable[[str], list[str]]


def bash_variables(line: str) -> dict[str, str]:
    words = bash_words(line)
    place = str(len(words) - 1)
    return {"_CHUNKTUNE_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(words), "COMP_CWORD": place}


def fish_variables(line: str) -> dict[str, str]:
    action = "get-args"
    return {
        "_CHUNKTUNE_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": action,
        "_TYPER_COMPLETE_ARGS": line,
    }


@pytest.fixture(params=[bash_variables])
def offered(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offered:
    """What is offered behind a line, by typer's completion protocol."""

    def ask(line: str) -> list[str]:
        environ = {**os.environ, **request.param(line)}
        monkeypatch.setattr(os, "environ", environ)
        with pytest.raises(SystemExit):
            main([])
        out, err = capsys.readouterr()
        assert err == ""
        return [text for text in out.split("\n") if text]

    return ask


def test_nothing_heavy_is_imported() -> None:
    script = (
        "import atexit, sys\n"
        "heavy = {'torch', 'pandas', 'numpy', 'rich.table'}\n"
        "atexit.register(lambda: print(sorted(set(sys.modules) & heavy), file=sys.stderr))\n"
        "from chunktune.cli.app import main\n"
        "main([])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **bash_variables("chunktune whatif x --vary schedule=gp")},
        timeout=120,
        check=False,
    )
    assert (ended.stdout, ended.stderr) == ("gpipe\n", "[]\n")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("chunktune sweep x --schedule ", list(SCHEDULES)),
        ("chunktune sweep x --schedule=gp", ["gpipe"]),
        ("chunktune whatif x --recompute ", ["none", "full"]),
        ("chunktune sweep x --partition pa", ["parameters"]),
        ("chunktune sweep x --device c", ["cuda", "cpu"]),
        ("chunktune whatif x --device ", list(DATASHEETS)),
        ("chunktune sweep x --set sweep.cr", ["sweep.criterion=pipeline", "sweep.criterion=stage"]),
        ("chunktune sweep x --set training.", ["training.optimizer=", "training.precision=", "training.seed="]),
        # bash replaces only what stands behind the "=".
        ("chunktune sweep x --set pipeline.schedule=", list(SCHEDULES)),
        ("chunktune sweep x --set pipeline.schedule=z", ["zbv-zero-bubble"]),
        ("chunktune whatif x --vary K", ["K="]),
        ("chunktune whatif x --vary recompute=n", ["none"]),
        ("chunktune whatif x --vary schedule=gpipe,1", ["gpipe,1f1b"]),
        ("chunktune whatif x --vary recompute=none,", ["none,full"]),
        ("chunktune whatif x --vary nothing=", []),
        ("chunktune init --family ", list(FAMILIES)),
        ("chunktune schema ", ["spec", "record"]),
        ("chunktune do", ["doctor"]),
    ],
)
def test_what_bash_is_offered(offered: Offered, line: str, expected: list[str]) -> None:
    assert offered(line) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("chunktune sweep x --set pipeline.schedule=gp", ["pipeline.schedule=gpipe"]),
        ("chunktune whatif x --vary schedule=gpipe,lo", ["schedule=gpipe,looped-bfs"]),
        ("chunktune sweep x --optimizer s", ["sgd"]),
    ],
)
@pytest.mark.parametrize("offered", [fish_variables], indirect=True)
def test_other_shells_are_offered_whole_words(offered: Offered, line: str, expected: list[str]) -> None:
    assert offered(line) == expected


def test_keys_of_the_model_are_those_of_its_family(
    offered: Offered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('[model]\nfamily = "mlp"\n')
    names = offered("chunktune sweep mine.toml --set model.")
    assert names == ["model.family=", "model.layers=", "model.hidden=", "model.features=", "model.classes="]


def test_names_may_come_late() -> None:
    assert complete_from(lambda: ["torch", "torchtitan", "nemo"])("to") == ["torch", "torchtitan"]
    assert complete_from(("a", "b"))("") == ["a", "b"]


def test_records_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("base.json", "runs/a/record.json", "runs/b/record.json", "runs/b/other.json", "c/record.json"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}")
    Path("notes.txt").write_text("")
    assert complete_record("") == ["base.json", "c/record.json", "runs/a/record.json", "runs/b/record.json"]
    assert complete_record("ru") == ["runs/a/record.json", "runs/b/record.json"]
    assert complete_record("runs/b") == ["runs/b/record.json"]
    assert complete_record("runs/b/") == ["runs/b/other.json", "runs/b/record.json"]
    assert complete_record(f"{tmp_path}/b") == [f"{tmp_path}/base.json"]
    assert complete_record("nowhere/") == []


def test_names_that_a_shell_would_run_are_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a$(reboot).json", "a;b.json", "a b.json", "a\x1b[31m.json", "a'.json", "a`b`.json", "ok-1.json"):
        Path(name).write_text("{}")
    assert complete_record("") == ["ok-1.json"]


@pytest.mark.parametrize(
    ("words", "place", "joined", "now"),
    [
        (["c", "s", "--set", "a", "=", "b"], 5, ["c", "s", "--set", "b"], 3),
        (["c", "s", "--set", "a", "="], 4, ["c", "s", "--set"], 3),
        (["c", "s", "--x", "=", "b"], 4, ["c", "s", "--x", "b"], 3),
        (["c", "s", "a", "b"], 3, ["c", "s", "a", "b"], 3),
        (["c", "=", "b"], 2, ["c", "=", "b"], 2),
        ([], 0, [""], 0),
    ],
)
def test_words_that_bash_split_are_joined(words: list[str], place: int, joined: list[str], now: int) -> None:
    environ = {
        "_CHUNKTUNE_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(place),
    }
    join_bash_words(environ)
    assert (environ["COMP_WORDS"].split("\n"), environ["COMP_CWORD"]) == (joined, str(now))


@pytest.mark.parametrize(
    "environ", [{}, {"_CHUNKTUNE_COMPLETE": "complete_zsh"}, {"_CHUNKTUNE_COMPLETE": "complete_bash"}]
)
def test_nothing_is_joined_that_is_not_bash(environ: dict[str, str]) -> None:
    before = dict(environ)
    join_bash_words(environ)
    assert environ == before
