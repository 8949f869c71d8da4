"""Every chunktune command in README.md and docs/ runs: in their order, in a directory that has what they name.

`sweep` is shown what it would do (`--dry-run`): that it measures is tested elsewhere, with the same specs.
The two set-up commands are what the CI runs; see .ci/run.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from chunktune.cli.app import app, main

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/ci/README.md")
RECORD = ROOT / "tests" / "data" / "record_v3.json"
LONG = ("doctor", "validate")
"""Commands that take seconds and are run by tests of their own."""


def commands(page: str) -> list[list[str]]:
    """Words of every command line in the page's fenced blocks that starts chunktune, or hands it to torchrun."""
    text = (ROOT / page).read_text()
    found = []
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        if language not in ("", "console", "sh"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            for part in line.split("&&"):
                words = shlex.split(part, comments=True)
                if words[:1] == ["chunktune"]:
                    found.append(words[1:])
                elif "chunktune" in words and words[0] in ("torchrun", "srun"):
                    found.append(words[words.index("chunktune") + 1 :])
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a reader has by then: the repository's configs, a sweep or three, a spec of one's own."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("mine", "monday", "tuesday"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        shutil.copy(RECORD, tmp_path / "runs" / name / "record.json")
    (tmp_path / "ci").mkdir()
    for name in ("spec.toml", "ci/pipeline.toml"):
        shutil.copy(ROOT / "configs" / "throughput_bound.toml", tmp_path / name)
    for name in ("out", "chunktune-sweep"):
        (tmp_path / name).mkdir()
        shutil.copy(RECORD, tmp_path / name / "record.json")
    shutil.copy(RECORD, tmp_path / "ci" / "baseline.json")
    shutil.copy(ROOT / "tests" / "data" / "journal.jsonl", tmp_path / "runs" / "mine" / "journal.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    return tmp_path


def tried(words: list[str]) -> list[str]:
    """The command as it is run here: nothing is measured."""
    if words[0] == "sweep":
        kept = list(itertools.takewhile(lambda word: not word.startswith(("$", "--output-dir")), words))
        return [*kept, "--dry-run"]
    return words


@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs(page: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    found = commands(page)
    assert found, "no command was found"
    for words in found:
        assert words[0] in known, words
        if words[0] in LONG or "--resume" in words or "--rehearse" in words:
            continue
        code = main(tried(words))
        assert code == 0, (words, code, capsys.readouterr().err)


def test_every_command_is_shown() -> None:
    shown = {words[0] for words in commands("README.md")}
    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert known <= shown


def test_the_trace_opens_and_the_export_is_what_it_says(place: Path) -> None:
    for words in commands("README.md"):
        if words[0] in ("report", "export") and ("--trace" in words or "--output" in words):
            assert main(words) == 0
    assert json.loads((place / "trace.json").read_text())["traceEvents"]
    assert tomllib.loads((place / "pipeline.toml").read_text())


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in (*PAGES, "docs/faults.md", "docs/kill-suite.md"):
        text = (ROOT / page).read_text()
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if "://" not in target:
                assert (ROOT / page).parent.joinpath(target).exists(), (page, target)
