"""`chunktune sweep` end to end: real processes over gloo, known costs, real limits."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from running import Finished, despite_noise, run, started, sweep, wait_for

from chunktune.journal import read_events
from chunktune.record import read_record, shipped_schema
from chunktune.theory import best_sleep_chunks

A, C = 0.004, 0.001
"""Seconds a chunk and a sample of the throughput test; half of that and the runtime's own cost would show."""
SLEEP = """
[model]
family = "sleep"
layers = {stages}
seconds_per_chunk = {a}
seconds_per_sample = {c}
{more}
[pipeline]
stages = {stages}
schedule = "{schedule}"
[batch]
{batch}
"""


def sleep_spec(
    *, stages: int, batch: str, a: float = 0.008, c: float = 0.002, schedule: str = "gpipe", more: str = ""
) -> str:
    return SLEEP.format(stages=stages, a=a, c=c, schedule=schedule, batch=batch, more=more)


def neighbours_of_best(stages: int, size: int, a: float, c: float) -> set[int]:
    best = best_sleep_chunks(stages, size, a, c)
    divisors = [m for m in range(1, size + 1) if size % m == 0]
    return {max(m for m in divisors if m <= best), min(m for m in divisors if m >= best)}


@despite_noise()
def test_throughput_bound_at_the_known_best_and_json_says_what_the_table_says(tmp_path: Path) -> None:
    done = sweep(sleep_spec(stages=4, a=A, c=C, batch="mini_batch = 16"), "--json", str(tmp_path / "record.json"))
    record = done.chosen()
    verdict = record.verdict
    assert verdict is not None
    assert verdict.chunks in neighbours_of_best(4, 16, A, C), done
    assert (verdict.limit, verdict.limit_side, verdict.floor) == ("throughput", "above", None), done
    assert verdict.confirmed == "fresh processes"
    assert record.group_restarts == 0
    # The sleep family costs 3 (a + c b) a chunk; the runtime adds its own on top, never takes away.
    for trial in (trial for trial in record.trials if trial.fits):
        assert all(stage.forward_s >= A + C * trial.micro_batch for stage in trial.stages)
        assert all(stage.backward_s >= 2 * (A + C * trial.micro_batch) for stage in trial.stages)
        assert trial.bubble is not None and trial.bubble.ideal == pytest.approx(3 / (trial.chunks + 3))
        assert trial.bubble.measured is not None and trial.bubble.measured > 0.8 * trial.bubble.ideal
    losses = [trial.loss for trial in record.trials if trial.fits]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5), "N is fixed, so the loss agrees over M"
    assert not verdict.findings, done

    written = json.loads((tmp_path / "record.json").read_text())
    jsonschema.Draft202012Validator(shipped_schema()).validate(written)
    assert written["verdict"]["chunks"] == verdict.chunks
    assert re.search(rf"chosen\s+M = {verdict.chunks} \(b = {verdict.micro_batch}, N = 16\)", done.stdout), done
    rows = {int(m) for m in re.findall(r"^\|\s+(\d+) \|", done.stdout, re.MULTILINE)}
    assert rows == {trial["chunks"] for trial in written["trials"]}


@despite_noise()
def test_micro_batch_mode_ends_at_exactly_the_last_m_that_fits() -> None:
    batch = "micro_batch = 1\nchunks = [2, 11, 12]"
    spec = sleep_spec(stages=4, a=0.004, c=0.001, batch=batch, more='bytes_per_sample = "4MiB"')
    done = sweep(spec, "--memory", "48MiB", "--tolerance", "5%")
    record = done.chosen()
    verdict = record.verdict
    assert verdict is not None
    # 95 % of 48 MiB hold 11 chunks of 4 MiB and not 12.
    assert (verdict.chunks, verdict.limit, verdict.limit_side, verdict.next_chunks) == (11, "memory", "above", 12), done
    assert verdict.limit_stage is not None
    assert done.trial(12).state == "oom" and done.trial(12).shortage is not None
    assert done.trial(11).predicted is not None
    assert record.group_restarts == 0, "what the rehearsal caught costs no process"
    assert f"rank {verdict.limit_stage} needs at least" in done.stdout


def test_mini_batch_mode_climbs_past_the_memory_floor() -> None:
    spec = sleep_spec(
        stages=2, a=0.002, c=0.002, batch="mini_batch = 16", schedule="1f1b", more='bytes_per_sample = "4MiB"'
    )
    done = sweep(spec, "--memory", "40MiB", "--quick")
    record = done.chosen()
    verdict = record.verdict
    assert verdict is not None and verdict.chunks is not None
    assert done.trial(2).state == "oom", "two chunks of 8 samples are in flight on rank 0: 64 MiB"
    assert done.trial(4).fits, "two chunks of 4 samples: 32 MiB"
    assert verdict.floor is not None
    assert (verdict.floor.chunks, verdict.floor.limit) == (4, "memory"), done
    assert verdict.chunks >= 4
    assert record.group_restarts == 0


def test_nothing_fits_is_exit_3_with_every_reason() -> None:
    spec = sleep_spec(stages=2, a=0.001, c=0.0001, batch="mini_batch = 4", more='bytes_per_sample = "16MiB"')
    done = sweep(spec, "--memory", "8MiB")
    assert done.returncode == 3, done
    assert done.record is not None and done.record.verdict is not None
    assert (done.record.verdict.chunks, done.record.verdict.limit) == (None, "memory")
    for chunks in (1, 2, 4):
        assert f"M = {chunks}: oom" in done.stderr


TRANSFORMER = """
[model]
family = "transformer"
layers = 5
hidden = 32
heads = 2
vocab = 64
sequence = 16
[pipeline]
stages = 2
schedule = "{schedule}"
recompute = "{recompute}"
partition = "{partition}"
[batch]
mini_batch = 8
chunks = [4, 8]
[training]
precision = "{precision}"
"""


@pytest.mark.parametrize(
    ("schedule", "recompute", "precision", "partition"),
    [
        ("1f1b", "none", "float32", "parameters"),
        ("interleaved-1f1b", "full", "bfloat16", "uniform"),
        ("zbv-zero-bubble", "full", "float32", "time"),
    ],
)
def test_the_rehearsal_foretells_the_peak_of_the_real_pipeline(
    schedule: str, recompute: str, precision: str, partition: str
) -> None:
    spec = TRANSFORMER.format(schedule=schedule, recompute=recompute, precision=precision, partition=partition)
    record = sweep(spec, "--quick").chosen()
    assert len(record.layers_per_part) == (2 if schedule == "1f1b" else 4)
    assert sum(record.layers_per_part) == 8
    for trial in record.trials:
        assert trial.fits and trial.predicted is not None
        measured = [stage.peak_bytes for stage in trial.stages]
        assert list(trial.predicted.peak_bytes) == pytest.approx(measured, rel=0.02)
    assert record.verdict is not None
    assert [finding for finding in record.verdict.findings if "machine's speed" not in finding] == []


FACTORY = """
import time
import traceback
import torch
from torch import nn
from chunktune.models.base import ModelDefinition

class Layer(nn.Module):
    def __init__(self, index, behaviour):
        super().__init__()
        self.linear, self.index, self.behaviour = nn.Linear(8, 8), index, behaviour
        self.norm = nn.BatchNorm1d(8) if behaviour == "batch statistics" else nn.Identity()

    def forward(self, value):
        if self.index == 1 and self.behaviour == "raises":
            raise ValueError("the layer does not like its input")
        if self.index == 1 and self.behaviour == "late shortage" and len(value) == 2 and in_the_real_pipeline(value):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        time.sleep(0.002)
        return self.norm(self.linear(value)).tanh()

def in_the_real_pipeline(value):
    names = {frame.f_code.co_name for frame, _ in traceback.walk_stack(None)}
    return type(value) is torch.Tensor and "_step_microbatches" in names and "rehearse" not in names

def build(behaviour):
    if behaviour == "factory raises":
        raise KeyError("no weights")
    if behaviour == "factory returns nothing":
        return None
    return ModelDefinition(
        layers=tuple((lambda i=i: Layer(i, behaviour)) for i in range(2)),
        sample_batch=lambda samples, generator: (torch.randn(samples, 8, generator=generator), torch.zeros(samples, 8)),
        loss=lambda output, target: ((output - target) ** 2).mean(),
        tokens_per_sample=None,
    )
"""


def python_spec(folder: Path, behaviour: str) -> Path:
    (folder / "factory_under_test.py").write_text(FACTORY)
    path = folder / "spec.toml"
    path.write_text(
        f"""
[model]
family = "python"
factory = "factory_under_test:build"
arguments = {{behaviour = "{behaviour}"}}
[pipeline]
stages = 2
schedule = "gpipe"
[batch]
mini_batch = 8
chunks = [2, 4]
"""
    )
    return path


def check_failed(done: Finished, exit_code: int, *words: str) -> None:
    assert done.returncode == exit_code, done
    assert "Traceback" not in done.stderr, done
    for word in words:
        assert word in done.stderr, done


def test_a_factory_that_raises_is_one_line_and_exit_6(tmp_path: Path) -> None:
    check_failed(sweep(python_spec(tmp_path, "factory raises")), 6, "KeyError", "no weights")


def test_a_factory_that_returns_nothing_is_one_line_and_exit_6(tmp_path: Path) -> None:
    check_failed(sweep(python_spec(tmp_path, "factory returns nothing")), 6, "returned None")


def test_a_layer_that_raises_at_every_m_ends_the_sweep_after_two(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = sweep(python_spec(tmp_path, "raises"), "--output-dir", str(out))
    check_failed(done, 6, "ValueError: the layer does not like its input")
    logs = "".join(file.read_text() for file in out.glob("logs/**/stderr.log"))
    assert "factory_under_test.py" in logs, "the user's own traceback is in the log"


def test_batch_statistics_are_found_because_the_loss_depends_on_m(tmp_path: Path) -> None:
    record = sweep(python_spec(tmp_path, "batch statistics"), "--quick").chosen()
    assert record.verdict is not None
    assert any("M changes this model's training" in finding for finding in record.verdict.findings)


def test_a_shortage_that_only_the_real_pipeline_meets_costs_a_restart_and_no_more(tmp_path: Path) -> None:
    """Rank 1's layer fails at M = 4 in the real pipeline alone; its peers wait in a receive."""
    done = sweep(python_spec(tmp_path, "late shortage"), "--quick")
    record = done.chosen()
    assert record.verdict is not None
    assert (record.verdict.chunks, record.verdict.limit) == (2, "memory"), done
    assert done.trial(4).state == "oom" and done.trial(4).rank == 1
    assert record.group_restarts == 1


def test_a_worker_that_is_killed_is_replaced_and_nothing_measured_is_lost(tmp_path: Path) -> None:
    out = tmp_path / "out"
    spec = tmp_path / "spec.toml"
    spec.write_text(sleep_spec(stages=2, a=0.01, c=0.002, batch="mini_batch = 8\nchunks = [1, 2, 4]"))
    command = [sys.executable, "-m", "chunktune", "sweep", str(spec), "--output-dir", str(out), "--quick"]
    with started(command) as running:
        wait_for(out / "journal.jsonl", '"trial": {"chunks": 1', running.popen, 120)
        os.kill(worker_pids(out)[-1], signal.SIGKILL)
        assert running.popen.wait(200) == 0, running.texts()
    journal = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    assert [event["state"] for event in journal if event["event"] == "lost"] == ["killed"]
    tried = [event["trial"]["chunks"] for event in journal if event["event"] == "trial"]
    assert len(tried) == len(set(tried)), "no trial ran twice"


def test_everything_listens_on_loopback_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    spec = tmp_path / "spec.toml"
    spec.write_text(sleep_spec(stages=2, a=0.01, c=0.002, batch="mini_batch = 4\nchunks = [1, 2]"))
    with started(
        [sys.executable, "-m", "chunktune", "sweep", str(spec), "--output-dir", str(out), "--quick"]
    ) as running:
        wait_for(out / "journal.jsonl", '"event": "trial"', running.popen, 120)
        family = [running.popen.pid, *children_of(running.popen.pid)]
        addresses = {address for pid in family for address in listening(pid)}
        assert running.popen.wait(200) == 0, running.texts()
    assert addresses, "the store and gloo listen somewhere"
    assert addresses <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def worker_pids(out: Path) -> list[int]:
    """The workers of the group that runs now, as the journal names them."""
    events = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    pids: list[int] = [event for event in events if event["event"] == "group"][-1]["pids"]
    return pids


def children_of(pid: int) -> list[int]:
    found = []
    for task in Path("/proc", str(pid), "task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children_of(int(child))]
    return found


def listening(pid: int) -> set[str]:
    """Local addresses, as the kernel writes them, on which a process listens."""
    inodes = set()
    for entry in Path("/proc", str(pid), "fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path("/proc", str(pid), "net", table).read_text().splitlines()[1:]
    ]
    return {row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def torchrun(nodes: int, ranks_here: int, rest: list[str], port: int | None = None) -> list[str]:
    endpoint = f"127.0.0.1:{port or 0}"
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", str(ranks_here)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "test", "--local-addr", "127.0.0.1"),
        *("-m", "chunktune", "sweep", *rest),
    ]


def wait_for_port(port: int, timeout_s: float = 60) -> None:
    """Wait until something listens there."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    pytest.fail(f"nothing listens on port {port}")


@despite_noise()
def test_the_users_own_torchrun_gives_the_same_kind_of_record(tmp_path: Path) -> None:
    out = tmp_path / "out"
    spec = tmp_path / "spec.toml"
    spec.write_text(sleep_spec(stages=2, a=0.004, c=0.001, batch="mini_batch = 8"))
    done = run(torchrun(1, 2, [str(spec), "--output-dir", str(out), "--force"]), output=out)
    record = done.chosen()
    assert record.verdict is not None
    assert record.verdict.confirmed == "re-initialised group"
    assert record.verdict.chunks in neighbours_of_best(2, 8, 0.004, 0.001)
    assert done.stdout.count("chosen") >= 1 and done.stdout.count("limit ") == 1, "one rank answers"


def test_under_torchrun_nothing_fits_is_an_answer_too(tmp_path: Path) -> None:
    out = tmp_path / "out"
    spec = tmp_path / "spec.toml"
    spec.write_text(sleep_spec(stages=2, batch="mini_batch = 4", more='bytes_per_sample = "16MiB"'))
    done = run(torchrun(1, 2, [str(spec), "--output-dir", str(out), "--memory", "8MiB"]), output=out)
    assert done.returncode == 0, done
    assert done.record is not None and done.record.verdict is not None
    assert done.record.verdict.chunks is None
    assert sum(event["event"] == "start" for event in done.events) == 1, "the agent did not repeat the sweep"


def test_two_agents_on_loopback_are_one_sweep(tmp_path: Path) -> None:
    out = tmp_path / "out"
    spec = tmp_path / "spec.toml"
    spec.write_text(sleep_spec(stages=2, a=0.004, c=0.001, batch="mini_batch = 4\nchunks = [1, 2]"))
    port = 20000 + os.getpid() % 20000
    command = torchrun(2, 1, [str(spec), "--output-dir", str(out), "--quick"], port)
    with started(command) as second:
        done = run(command, output=out)
        end = time.monotonic() + 60
        while second.popen.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        assert second.popen.poll() == 0, second.texts()
    assert done.returncode == 0, done
    record = done.record
    assert record is not None and record.verdict is not None and record.verdict.chunks is not None
    assert len(record.environment["devices"]) == 2


@pytest.mark.slow
def test_an_agent_that_dies_and_comes_back_loses_nothing(tmp_path: Path) -> None:
    """Four ranks on two agents; the one that does not hold the store is killed in the middle, and started again."""
    out = tmp_path / "out"
    spec = tmp_path / "spec.toml"
    spec.write_text(sleep_spec(stages=4, a=0.02, c=0.001, batch="mini_batch = 8\nchunks = [1, 2, 4, 8]"))
    port = 20000 + os.getpid() % 20000
    command = torchrun(2, 2, [str(spec), "--output-dir", str(out), "--quick"], port)
    command[3:3] = ["--max-restarts", "4"]
    # An agent that lends its store keeps the address of it to itself, and a new one never hears it (torch 2.13).
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with started(command, env=env) as first:
        wait_for_port(port)
        with started(command, env=env) as second:
            wait_for(out / "journal.jsonl", '"event": "trial"', first.popen, 120)
            second.popen.kill()
        with started(command, env=env) as third:
            first.popen.wait(180)
            third.popen.wait(60)
        stdout, stderr = first.texts()
    events = read_events(out / "journal.jsonl")
    record = read_record(out / "record.json")
    assert first.popen.returncode == third.popen.returncode == 0, stdout + stderr
    assert record.status == "complete" and record.verdict is not None and record.verdict.chunks is not None
    tried = [event["trial"]["chunks"] for event in events if event["event"] == "trial"]
    assert len(tried) == len(set(tried)), "what was measured was not measured again"
    assert record.group_restarts >= 1
    assert all(trial.state == "ok" for trial in record.trials if trial.state != "skipped")


@pytest.mark.slow
def test_a_torchrun_without_restarts_left_leaves_a_record_to_go_on_from(tmp_path: Path) -> None:
    out = tmp_path / "out"
    spec = tmp_path / "spec.toml"
    spec.write_text(sleep_spec(stages=2, a=0.02, c=0.001, batch="mini_batch = 8\nchunks = [1, 2, 4]"))
    command = torchrun(1, 2, [str(spec), "--quick"])
    command[3:3] = ["--max-restarts", "0"]
    with started([*command, "--output-dir", str(out)]) as first:
        wait_for(out / "journal.jsonl", '"event": "trial"', first.popen, 120)
        group = next(event for event in read_events(out / "journal.jsonl") if event["event"] == "group")
        os.kill(group["pids"][1], signal.SIGKILL)
        first.popen.wait(120)
        assert first.popen.returncode != 0
        assert f"--resume {out}" in first.texts()[1]
    partial = read_record(out / "record.json")
    assert partial.status == "interrupted" and any(trial.fits for trial in partial.trials)
    done = run([*command, "--resume", str(out)], output=out)
    assert done.returncode == 0 and done.record is not None and done.record.status == "complete", done
    tried = [event["trial"]["chunks"] for event in done.events if event["event"] == "trial"]
    assert len(tried) == len(set(tried)), "what was measured was not measured again"


def test_another_number_of_ranks_than_stages_is_said(tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(sleep_spec(stages=3, batch="mini_batch = 4"))
    done = run(torchrun(1, 2, [str(spec), "--output-dir", str(tmp_path / "out")]))
    assert done.returncode != 0
    assert "pipeline.stages = 3, but 2 ranks were started" in done.stderr


@despite_noise()
def test_one_stage_is_plain_gradient_accumulation() -> None:
    record = sweep(sleep_spec(stages=1, a=0.01, c=0.0005, batch="mini_batch = 4"), "--quick").chosen()
    assert record.verdict is not None
    assert (record.verdict.chunks, record.verdict.limit, record.verdict.limit_side) == (1, "throughput", "above")
    trial = record.trials[0]
    assert trial.bubble is not None and trial.bubble.ideal == 0.0
