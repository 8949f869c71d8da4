"""A sweep that was ended, from outside or by its disk: what is kept, what is said, and how it goes on."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from running import Finished, Running, run, started, wait_for

import chunktune
from chunktune.journal import followed, read_events
from chunktune.locks import holding
from chunktune.record import parse_record
from chunktune.results import Record

SWEEP = (sys.executable, "-m", "chunktune", "sweep")
GOLDEN = Path(__file__).parents[1] / "data" / "journal.jsonl"
FIRST_TRIAL = '"event": "trial"'
SLEEP = """
[model]
family = "sleep"
layers = 2
seconds_per_chunk = 0.01
seconds_per_sample = 0.002
[pipeline]
stages = 2
schedule = "gpipe"
[batch]
mini_batch = 4
chunks = [1, 2]
"""
TRANSFORMER = """
[model]
family = "transformer"
layers = 2
hidden = 16
heads = 2
vocab = 32
sequence = 8
[pipeline]
stages = 2
schedule = "gpipe"
[batch]
mini_batch = 4
chunks = [1, 2]
"""
FACTORY = """
import torch
from chunktune.models.base import ModelDefinition

def build():
    return ModelDefinition(
        layers=(lambda: torch.nn.Linear(4, 4),) * 2,
        sample_batch=lambda samples, generator: (torch.randn(samples, 4, generator=generator), torch.zeros(samples, 4)),
        loss=lambda output, target: ((output - target) ** 2).mean(),
    )
"""
CHANGING_FACTORY = (
    FACTORY.replace("lambda: torch.nn.Linear(4, 4)", "lambda: Layer(4, 4)")
    + """
import os, signal
from pathlib import Path

class Layer(torch.nn.Linear):
    def forward(self, values):
        text = Path(__file__).read_text()
        if type(values) is torch.Tensor and "RANK" in os.environ and not text.endswith("changed"):
            Path(__file__).write_text(text.replace("** 2", "** 4") + "# changed")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(values)
"""
)
PYTHON = """
[model]
family = "python"
factory = "factory_beside:build"
[pipeline]
stages = 2
schedule = "gpipe"
[batch]
mini_batch = 4
chunks = [2]
"""


def spec_in(folder: Path, text: str = SLEEP) -> Path:
    path = folder / "spec.toml"
    path.write_text(text)
    return path


def quick(spec: Path, out: Path, *args: str) -> list[str]:
    return [*SWEEP, str(spec), "--output-dir", str(out), "--quick", *args]


def resumed(out: Path, *args: str, env: Mapping[str, str] | None = None) -> Finished:
    return run([*SWEEP, "--resume", str(out), *args], output=out, env=env)


def tried(events: Sequence[Mapping[str, Any]]) -> list[int]:
    return [event["trial"]["chunks"] for event in events if event["event"] == "trial"]


def printed_command(done: Finished) -> list[str]:
    """The command that stderr names, as a shell would take it, run by this Python."""
    found = re.search(r"go on with: chunktune (sweep --resume .+)$", done.stderr, re.MULTILINE)
    assert found, done
    return [*SWEEP[:3], *shlex.split(found[1])]


def workers(out: Path) -> list[int]:
    pids: list[int] = [event for event in read_events(out / "journal.jsonl") if event["event"] == "group"][-1]["pids"]
    return pids


# --- Ctrl-C and SIGTERM ------------------------------------------------------------------------------------


def interrupted(folder: Path, out: Path, number: int, code: int, word: str) -> Finished:
    """A sweep that got this signal after its first trial: what it leaves is checked."""
    done = run(quick(spec_in(folder), out), output=out, interrupt=(out / "journal.jsonl", FIRST_TRIAL, number))
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr and f"error: {word}; what was measured is kept in" in done.stderr, done
    assert done.stdout == "", "there is no answer yet"
    assert done.record is not None and done.record.status == "interrupted" and done.record.verdict is None
    assert 1 in tried(done.events)
    assert all(done.trial(chunks).fits for chunks in tried(done.events))
    return done


def test_a_terminated_sweep_keeps_what_it_measured(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = interrupted(tmp_path, out, signal.SIGTERM, 143, "terminated")
    assert printed_command(done)[4:] == ["--resume", str(out)]


def test_an_interrupted_sweep_keeps_what_it_measured_and_the_command_it_prints_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "a directory of 'mine'"
    done = interrupted(tmp_path, out, signal.SIGINT, 130, "interrupted")
    before = (out / "journal.jsonl").read_bytes()
    kept = {chunks: done.trial(chunks) for chunks in tried(done.events)}

    again = run(printed_command(done), output=out)
    record = again.chosen()
    assert (out / "journal.jsonl").read_bytes().startswith(before)
    assert {chunks: again.trial(chunks) for chunks in kept} == kept
    assert sorted(tried(again.events)) == [1, 2], "each once: what was measured was not measured again"
    assert (record.status, record.quick, record.group_restarts) == ("complete", True, 0), again
    assert [event["event"] for event in again.events].count("resumed") == 1


def test_a_second_signal_does_not_wait_for_a_worker_that_does_not_end(tmp_path: Path) -> None:
    """A stopped worker obeys no signal but SIGKILL, as one does that hangs in a driver; the agent waits for it."""
    out = tmp_path / "out"
    with started(quick(spec_in(tmp_path), out)) as running:
        wait_for(out / "journal.jsonl", FIRST_TRIAL, running.popen, 120)
        os.kill(workers(out)[1], signal.SIGSTOP)
        running.popen.send_signal(signal.SIGINT)
        running.popen.send_signal(signal.SIGTERM)
        assert running.popen.wait(120) in (130, 143), running.texts()  # which of them came second, the kernel decides
        _, stderr = running.texts()
    # `started` fails the test where the stopped worker is left.
    assert "error: told to end a second time, and ended at once; go on with: chunktune sweep --resume" in stderr
    assert "Traceback" not in stderr
    assert 1 in tried(read_events(out / "journal.jsonl"))


# --- the disk ----------------------------------------------------------------------------------------------


def record_on_stderr(stderr: str) -> Record:
    lines = stderr.splitlines()
    text = "\n".join(lines[lines.index("{") : lines.index("}") + 1])
    return parse_record(text.encode(), "stderr")


def check_shown(running: Running, *words: str) -> None:
    """The sweep ended with 6, and what it measured stands on stderr."""
    assert running.popen.wait(120) == 6, running.texts()
    stdout, stderr = running.texts()
    assert stdout == "" and "Traceback" not in stderr, stderr
    for word in words:
        assert word in stderr, stderr
    record = record_on_stderr(stderr)
    assert record.status == "failed" and record.verdict is None
    assert [trial.chunks for trial in record.trials if trial.fits][:1] == [1]


def test_a_full_disk_ends_the_sweep_and_what_was_measured_is_shown(tmp_path: Path) -> None:
    """No process of the sweep may let a file grow, which is what a full disk comes to; a pipe takes what it says."""
    out = tmp_path / "out"
    with started(["bash", "-c", 'exec "$@" 2> >(cat >&2)', "-", *quick(spec_in(tmp_path), out)]) as running:
        wait_for(out / "journal.jsonl", FIRST_TRIAL, running.popen, 120)
        for pid in (running.popen.pid, workers(out)[0]):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (64, 64))
        check_shown(running, "bytes were not written", "every result must reach the disk", "stands above, as a record")
    events = read_events(out / "journal.jsonl")
    assert 1 in tried(events), "the journal is whole as far as it goes"
    assert not (out / "record.json").exists() and list(out.glob(".*")) == [], "nothing half written is left"


def test_an_output_directory_that_vanishes_ends_the_sweep_and_what_was_measured_is_shown(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with started(quick(spec_in(tmp_path), out)) as running:
        wait_for(out / "journal.jsonl", FIRST_TRIAL, running.popen, 120)
        out.rename(tmp_path / "elsewhere")
        check_shown(running, "the journal is gone")
    assert not out.exists(), "it is not made anew"


@pytest.mark.slow
def test_an_output_directory_that_vanishes_while_the_group_is_replaced(tmp_path: Path) -> None:
    """The next group would begin anew: what the parent saw is shown instead."""
    out = tmp_path / "out"
    with started(quick(spec_in(tmp_path), out)) as running:
        wait_for(out / "journal.jsonl", FIRST_TRIAL, running.popen, 120)
        pid = workers(out)[0]
        os.kill(pid, signal.SIGSTOP)  # it writes no more
        out.rename(tmp_path / "elsewhere")
        os.kill(pid, signal.SIGKILL)
        check_shown(running, "the journal is gone")
    assert not (out / "journal.jsonl").exists()


def test_the_journal_is_followed_past_its_end_and_past_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path, seen = tmp_path / "journal.jsonl", list[dict[str, Any]]()
    with followed(path, seen.append), path.open("ab", buffering=0) as file:
        file.write(b'{"event": "one"}\n{"event": "tor')
        wait_until(lambda: len(seen) == 1)
        file.truncate(len(b'{"event": "one"}\n'))
        file.write(b'{"event": "two"}\n')
        wait_until(lambda: len(seen) == 2)
        path.unlink()
        file.write(b'{"event": "three"}\n')
    assert [event["event"] for event in seen] == ["one", "two", "three"]


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


# --- two at once, and a parent that is killed --------------------------------------------------------------


def test_two_sweeps_at_once_and_one_after_the_first_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, first, second = spec_in(tmp_path, TRANSFORMER), tmp_path / "first", tmp_path / "second"
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with started(quick(spec, first), env=env) as holder:
        wait_for(first / "journal.jsonl", FIRST_TRIAL, holder.popen, 120)
        os.kill(workers(first)[0], signal.SIGSTOP)  # so that it is still there after the others

        refused = run(quick(spec, second), output=second, env=env)
        assert refused.returncode == 6, refused
        who = rf"the CPU is in use by another sweep \(pid {holder.popen.pid}, since 20\S+, output directory {first}\)"
        assert re.search(who, refused.stderr), refused
        assert "--share" in refused.stderr and not second.exists(), "nothing is left of it"

        same = run([*SWEEP, "--resume", str(first), "--share"], env=env)
        assert same.returncode == 6 and "another sweep is running there" in same.stderr, same

        before = (first / "journal.jsonl").read_bytes()
        holder.popen.kill()
        assert holder.popen.wait() == -signal.SIGKILL
    # `started` fails the test where a process of the first is left, the stopped one included.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with holding(["the CPU"], "this test"):  # nobody else holds it any more
        done = resumed(first, "--share", env=env)
    assert any("--share" in warning for warning in done.chosen().warnings), done
    assert (first / "journal.jsonl").read_bytes().startswith(before)
    assert Counter(tried(done.events)) == {1: 1, 2: 1}, "what was measured was not measured again"


def test_a_factory_that_changes_under_a_sweep_is_a_warning(tmp_path: Path) -> None:
    """Its worker ends just then, and the next one imports the file as it is now."""
    (tmp_path / "factory_beside.py").write_text(CHANGING_FACTORY)
    out = tmp_path / "out"
    done = run(quick(spec_in(tmp_path, PYTHON), out), output=out)
    assert any("the file of model.factory changed while the sweep ran" in text for text in done.chosen().warnings)


# --- what may be gone on with ------------------------------------------------------------------------------


def test_without_a_spec_with_a_larger_budget_and_once_more_when_all_is_done(tmp_path: Path) -> None:
    (tmp_path / "factory_beside.py").write_text(FACTORY)
    out = tmp_path / "out"
    first = run(quick(spec_in(tmp_path, PYTHON), out, "--budget", "1ms"), output=out)
    assert first.returncode == 6 and "sweep.budget was spent" in first.stderr, first
    assert [event["trial"]["state"] for event in first.events if event["event"] == "trial"] == ["skipped"]

    same = resumed(out)
    assert same.returncode == 6, same
    assert same.events == first.events, "no more time, no more trials: nothing was run"

    (tmp_path / "factory_beside.py").write_text(FACTORY.replace("** 2", "** 4"))
    other = resumed(out, "--budget", "10m")
    assert other.returncode == 2 and other.events == first.events, "nothing of two models is mixed"
    assert "the file of model.factory factory_beside:build has changed since it began" in other.stderr
    (tmp_path / "factory_beside.py").write_text(FACTORY)

    second = resumed(out, "--budget", "10m")
    record = second.chosen()
    assert tried(second.events) == [2, 2] and record.quick, "what the budget cut short is no answer"
    assert (record.spec["sweep"]["budget"], record.sources["sweep.budget"]) == (600.0, "flag --budget")
    assert record.spec["model"]["factory"] == "factory_beside:build"

    journal = (out / "journal.jsonl").read_bytes()
    (out / "record.json").unlink()
    third = resumed(out)
    assert third.chosen() == record and third.stdout == second.stdout, "the same answer"
    assert "this sweep has come to its end; nothing was run" in third.stderr
    assert (out / "journal.jsonl").read_bytes() == journal


def unfinished(out: Path, change: Mapping[str, Any] | None = None) -> bytes:
    """An output directory as a killed sweep leaves it: a real one's of this version, on another machine."""
    events = [json.loads(line) for line in GOLDEN.read_text().splitlines()][:5]
    events[0] |= {"tool": {"name": "chunktune", "version": chunktune.__version__}, **(change or {})}
    out.mkdir()
    data = "".join(json.dumps(event) + "\n" for event in events).encode()
    (out / "journal.jsonl").write_bytes(data)
    return data


REFUSED: dict[str, tuple[Mapping[str, Any], Sequence[str], Sequence[str]]] = {
    "another batch": ({}, ["--mini-batch", "8"], ["batch.mini_batch was 4 and is 8"]),
    "two at once": ({}, ["--set", "training.seed=1", "--quick"], ["training.seed was 0 and is 1", "--quick was False"]),
    "another chunktune": ({"tool": {"name": "chunktune", "version": "0.0.1"}}, [], ["chunktune was '0.0.1' and is"]),
    "a newer journal": ({"schema_version": 999}, [], ["schema_version is 999", "read it with the newer chunktune"]),
    "--force": ({}, ["--force"], ["--resume and --force exclude each other"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_question_is_refused_and_nothing_is_written(tmp_path: Path, case: str) -> None:
    change, args, words = REFUSED[case]
    out = tmp_path / "out"
    data = unfinished(out, change)
    done = run([*SWEEP, "--resume", str(out), *args])
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr, done
    for word in words:
        assert word in done.stderr, done
    assert [path.name for path in out.iterdir()] == ["journal.jsonl"]
    assert (out / "journal.jsonl").read_bytes() == data


def test_a_damaged_journal_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    data = unfinished(out).replace(b'"event": "group"', b'"event": group"')
    (out / "journal.jsonl").write_bytes(data)
    done = run([*SWEEP, "--resume", str(out)])
    assert done.returncode == 2 and "line 2 is not an event" in done.stderr, done
    assert (out / "journal.jsonl").read_bytes() == data
    assert [path.name for path in out.iterdir()] == ["journal.jsonl"]


@pytest.mark.slow
def test_another_torch_and_other_devices_are_refused_and_no_line_is_lost(tmp_path: Path) -> None:
    """Found by the workers, so that the journal says that the sweep was gone on with; nothing is measured."""
    out = tmp_path / "out"
    data = unfinished(out)
    environment = json.loads(data.splitlines()[0])["environment"]
    environment["torch"], environment["devices"][1]["name"] = "0.0", "a better one"
    shutil.rmtree(out)
    data = unfinished(out, {"environment": environment})
    done = resumed(out)
    assert done.returncode == 2, done
    assert "torch was '0.0' and is" in done.stderr and "rank 1: name was 'a better one' and is" in done.stderr
    assert (out / "journal.jsonl").read_bytes().startswith(data)
    assert tried(done.events) == [1]
