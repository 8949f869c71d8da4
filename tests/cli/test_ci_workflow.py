"""The workflows under docs/ci, as a runner takes them: the steps of GitHub's are run in bash, one after the other."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

import chunktune
from chunktune.record import read_record

ROOT = Path(chunktune.__file__).parents[1]
WORKFLOWS = ROOT / "docs" / "ci"
INSTALL = "Install"  # the package under test is here already
SPEC = """
[model]
family = "sleep"
layers = 2
seconds_per_chunk = 0.008
seconds_per_sample = 0.001
[pipeline]
stages = 2
schedule = "gpipe"
[batch]
mini_batch = 4
chunks = [1, 4]
[device]
kind = "cpu"
"""


@dataclass
class Ran:
    """A step that was run: its exit code, what it printed, and what it wrote for the runner."""

    code: int
    out: str
    err: str
    outputs: dict[str, str]
    summary: str


@dataclass
class Runner:
    """What GitHub's runner does with the `run` steps of a job: variables, outputs, conditions."""

    directory: Path
    job: dict[str, Any]
    inputs: dict[str, bool] = field(default_factory=dict)
    ran: dict[str, Ran] = field(default_factory=dict)

    def run(self, *names: str) -> None:
        """Run the steps with these names, in the order of the workflow, until one fails."""
        for step in self.job["steps"]:
            if step.get("name") in names and self._is_due(step.get("if")):
                ran = self.ran[step["name"]] = self._step(step)
                if ran.code:
                    return

    def _is_due(self, condition: str | None) -> bool:
        if condition is None:
            return True
        found = re.fullmatch(r"\$\{\{ (!?)inputs\.(\w+) \}\}", condition)
        assert found is not None, condition
        return self.inputs.get(found[2], False) is not bool(found[1])

    def _step(self, step: dict[str, Any]) -> Ran:
        number = len(self.ran)
        summary, output = (self.directory / f".{kind}-{number}" for kind in ("summary", "output"))
        summary.write_text("")
        output.write_text("")
        variables = {**self.job["env"], **{key: self._expand(text) for key, text in step.get("env", {}).items()}}
        runner = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_OUTPUT": str(output)}
        ended = subprocess.run(
            ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]],
            cwd=self.directory,
            env={**_environment(self.directory), **variables, **runner},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        read = _outputs(output.read_text())
        return Ran(ended.returncode, ended.stdout, ended.stderr, read, summary.read_text())

    def _expand(self, text: str) -> str:
        """`${{ steps.<id>.outputs.<name> }}` as the runner fills it in."""

        def value(found: re.Match[str]) -> str:
            name = next(step["name"] for step in self.job["steps"] if step.get("id") == found[1])
            return self.ran[name].outputs[found[2]]

        expanded = re.sub(r"\$\{\{ steps\.(\w+)\.outputs\.(\w+) \}\}", value, text)
        assert "${{" not in expanded
        return expanded


def _environment(directory: Path) -> dict[str, str]:
    """This process's, with `chunktune` on the path and nothing of a runner or torchrun that may be around it."""
    foreign = ("GITHUB_", "CHUNKTUNE_", "TORCHELASTIC_")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(foreign) and name != "RANK"}
    return {
        **kept,
        "PATH": f"{directory / 'bin'}{os.pathsep}{kept['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _outputs(text: str) -> dict[str, str]:
    """What the runner reads from $GITHUB_OUTPUT."""
    found = re.findall(r"(\w+)<<(\w+)\n(.*?)\n\2\n", text, re.DOTALL)
    assert "".join(f"{name}<<{mark}\n{value}\n{mark}\n" for name, mark, value in found) == text
    return {name: value for name, _, value in found}


def _job(name: str) -> dict[str, Any]:
    workflow = yaml.safe_load((WORKFLOWS / name).read_text())
    job: dict[str, Any] = next(iter(workflow["jobs"].values()))
    return {**job, "env": workflow["env"]}


def _repository(directory: Path) -> Path:
    """A working directory as the workflow finds it: the spec, the command, no baseline."""
    (directory / "ci").mkdir(parents=True)
    (directory / "ci" / "pipeline.toml").write_text(SPEC)
    (directory / "bin").mkdir()
    command = directory / "bin" / "chunktune"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m chunktune "$@"\n')
    command.chmod(0o755)
    return directory


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """The first run, by hand and with `update`: a real sweep, whose record becomes the baseline."""
    runner = Runner(_repository(tmp_path_factory.mktemp("first")), _job("github.yml"), {"update": True})
    runner.run("Sweep", "Check", "Update the baseline", "Train with it")
    assert {name: (ran.code, ran.err) for name, ran in runner.ran.items() if ran.code} == {}
    return runner


@pytest.fixture
def again(swept: Runner, tmp_path: Path) -> Runner:
    """A later run in a copy of that repository, its sweep done already."""
    shutil.copytree(swept.directory, tmp_path / "later")
    return Runner(tmp_path / "later", swept.job, ran={"Sweep": swept.ran["Sweep"]})


def test_a_sweep_leaves_summary_outputs_and_annotations(swept: Runner) -> None:
    sweep, directory = swept.ran["Sweep"], swept.directory
    assert sweep.summary.startswith("### chunktune sweep\n\n**M = 1 (b = 4, N = 4): ")
    assert sweep.summary.count("\n| ") == 4
    assert sweep.outputs == {
        "chunks": "1",
        "micro_batch": "4",
        "limit": "throughput",
        "confidence": "clear",
        "record": "chunktune-sweep/record.json",
    }
    assert (directory / sweep.outputs["record"]).is_file()
    record = read_record(directory / sweep.outputs["record"])
    commands = [line for line in sweep.err.splitlines() if line.startswith("::")]
    assert len(commands) == len(record.warnings) + len(record.verdict.findings if record.verdict else ())
    assert not any(line.lstrip().startswith("::") for line in sweep.out.splitlines())


def test_started_with_update_the_run_makes_a_baseline_and_checks_nothing(swept: Runner) -> None:
    assert list(swept.ran) == ["Sweep", "Update the baseline", "Train with it"]
    baseline, record = (swept.directory / name for name in ("ci/baseline.json", "chunktune-sweep/record.json"))
    assert read_record(baseline) == read_record(record)


def test_the_next_steps_have_the_answer(swept: Runner) -> None:
    assert swept.ran["Train with it"].out == "train with 1 micro-batches, limit throughput\n"


def test_the_gate_holds_against_its_own_baseline(again: Runner) -> None:
    again.run("Check", "Update the baseline", "Train with it")
    check = again.ran["Check"]
    assert (check.code, [line for line in check.err.splitlines() if line.startswith("::")]) == (0, [])
    assert re.match(r"### chunktune check: passed, \d+ checks", check.summary)
    assert check.outputs["chunks"] == "1"
    assert "Update the baseline" not in again.ran
    assert "Train with it" in again.ran
    assert len(list(ET.parse(again.directory / "junit.xml").iter("testcase"))) >= 11
    entries = json.loads((again.directory / "benchmark.json").read_text())
    assert [entry["unit"] for entry in entries] == ["s", "share", "share"]


def test_a_changed_m_ends_the_run_with_4(again: Runner) -> None:
    baseline = again.directory / "ci" / "baseline.json"
    data = json.loads(baseline.read_text())
    data["verdict"] |= {"chunks": 4, "micro_batch": 1}
    baseline.write_text(json.dumps(data))
    again.run("Check", "Train with it")
    check = again.ran["Check"]
    assert check.code == 4
    assert "FAILED" in check.out.splitlines()[5]
    errors = [line for line in check.err.splitlines() if line.startswith("::error ")]
    assert len(errors) == 1
    assert errors[0].startswith(
        "::error title=chunktune check%3A chunks::M = 1 was chosen, and the baseline's M = 4 is "
    )
    assert "- FAILED: chunks: M = 1 was chosen" in check.summary
    assert "Train with it" not in again.ran
    failures = ET.parse(again.directory / "junit.xml").findall("testsuite/testcase/failure")
    assert len(failures) == 1


def test_without_a_baseline_the_run_says_how_to_make_one(again: Runner) -> None:
    (again.directory / "ci" / "baseline.json").unlink()
    again.run("Check")
    assert again.ran["Check"].code == 2
    assert "--baseline ci/baseline.json --update makes one" in again.ran["Check"].err


# --- the files


def test_every_artefact_is_something_that_a_step_writes(again: Runner) -> None:
    again.run("Check")
    keep = next(step for step in again.job["steps"] if step.get("name") == "Keep the record")
    assert all((again.directory / name).exists() for name in keep["with"]["path"].split())


def test_no_expression_stands_in_a_script() -> None:
    """A value that is pasted into bash could run: values come through `env`."""
    assert all("${{" not in step.get("run", "") for step in _job("github.yml")["steps"])


def test_every_step_is_known_to_these_tests() -> None:
    names = [step["name"] for step in _job("github.yml")["steps"] if "run" in step]
    assert names == [INSTALL, "Sweep", "Check", "Update the baseline", "Train with it"]


def test_gitlab_runs_the_same_commands() -> None:
    job = yaml.safe_load((WORKFLOWS / "gitlab.yml").read_text())["chunks"]
    script = "\n".join(job["script"])
    assert job["artifacts"]["reports"]["junit"] == "junit.xml"
    for step in _job("github.yml")["steps"]:
        command = re.sub(r"\s*\\?\n\s*", " ", step.get("run", "")).strip()
        assert command in script or step.get("name") == "Train with it"


@pytest.mark.parametrize(("update", "code"), [("false", 2), ("true", 0)])
def test_the_gitlab_script_checks_or_updates(update: str, code: int, again: Runner) -> None:
    (again.directory / "ci" / "baseline.json").unlink()
    workflow = yaml.safe_load((WORKFLOWS / "gitlab.yml").read_text())
    lines = [line for line in workflow["chunks"]["script"] if "chunktune check" in line]
    environment = {**_environment(again.directory), **workflow["variables"], "UPDATE": update}
    ended = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", "\n".join(lines)],
        cwd=again.directory,
        env=environment,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == code
    assert (again.directory / "ci" / "baseline.json").exists() is (code == 0)
