"""A sweep that is killed again and again, and gone on with each time, ends as one that nobody disturbs.

Three kills are part of the ordinary suite. The kill suite proper, thirty of them at moments of a new seed:

    python -m pytest -m slow -s tests/pipeline/test_kills.py

It prints its seed; KILL_SEED=<seed> before the command repeats its choices. The last result is in docs/kill-suite.md.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from running import Finished, run, started

Event = dict[str, Any]
SWEEP = (sys.executable, "-m", "chunktune", "sweep")
CHOICE = (4, "throughput")
SPEC = """
[model]
family = "sleep"
layers = 2
seconds_per_chunk = 0.002
seconds_per_sample = 0.002
[pipeline]
stages = 2
schedule = "gpipe"
[batch]
mini_batch = 16
chunks = [1, 4, 16]
[sweep]
budget = "2h"
"""
"""A step takes 3 (M + 1) (2 ms + 2 ms * 16 / M) and what the runtime adds a chunk: 204, 150 and 204 ms at M = 1, 4, 16.
No noise that leaves a machine usable makes up a third of the best."""
MOST_LINES, MOST_PAUSE_S, HANG_S = 9, 0.6, 300.0


@dataclass(frozen=True)
class Moment:
    """When to kill whom: so many lines of the journal after the last kill, and a while later."""

    lines: int
    pause_s: float
    victim: str
    rank: int

    @classmethod
    def drawn(cls, draw: random.Random) -> Moment:
        return cls(
            draw.randrange(MOST_LINES),
            draw.uniform(0, MOST_PAUSE_S),
            draw.choice(["parent", "worker"]),
            draw.randrange(2),
        )


@dataclass
class Killed:
    """A sweep that was killed, and went on until it was done."""

    out: Path
    kills: list[str] = field(default_factory=list)
    seen: list[bytes] = field(default_factory=list)
    done: Finished | None = None

    @property
    def journal(self) -> bytes:
        path = self.out / "journal.jsonl"
        return path.read_bytes() if path.exists() else b""

    def whole(self) -> list[Event]:
        return events_in(self.journal)


def events_in(data: bytes) -> list[Event]:
    """The events of the whole lines."""
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def kill_until_done(folder: Path, draw: random.Random, most: int) -> Killed:
    """A whole sweep, with up to `most` kills in it, fewer where it is done before."""
    spec = folder / "spec.toml"
    spec.write_text(SPEC)
    sweep = Killed(folder / "out")
    while True:
        # A sweep that was killed before its first line has nothing to go on with, and says so.
        begun = any(event["event"] == "start" for event in sweep.whole())
        anew = [str(spec), "--output-dir", str(sweep.out), "--force"]
        command = [*SWEEP, *(["--resume", str(sweep.out)] if begun else anew), "--quick"]
        with started(command) as running:
            while len(sweep.kills) < most and strike(sweep, running.popen, Moment.drawn(draw)):
                pass
            code = running.popen.wait(HANG_S)
            stdout, stderr = running.texts()
        # `started` fails the test where any process is left: all of them ended, and none writes any more.
        sweep.seen.append(sweep.journal)
        if code == 0:
            sweep.done = run([*SWEEP, "--resume", str(sweep.out), "--quick"], output=sweep.out)
            return sweep
        assert code == -signal.SIGKILL, f"exit code {code}\n{stdout}\n{stderr}"


def strike(sweep: Killed, parent: subprocess.Popen[bytes], moment: Moment) -> bool:
    """Kill at that moment; whether the sweep goes on by itself."""
    end, lines = time.monotonic() + HANG_S, len(sweep.whole()) + moment.lines
    while len(sweep.whole()) < lines and parent.poll() is None:
        assert time.monotonic() < end, f"the sweep hangs; its journal ends with {sweep.whole()[-1:]}"
        time.sleep(0.01)
    with suppress(subprocess.TimeoutExpired):
        parent.wait(moment.pause_s)
    if parent.poll() is not None:
        return False
    sweep.seen.append(sweep.journal)
    events = sweep.whole()
    worker = living_worker(events, moment.rank) if moment.victim == "worker" and not one_loss_is_open(events) else None
    os.kill(worker or parent.pid, signal.SIGKILL)
    sweep.kills.append(f"{'worker' if worker else 'parent'} after {events[-1]['event'] if events else 'nothing'}")
    if worker is None:
        parent.wait(HANG_S)
    return worker is not None


def living_worker(events: Sequence[Event], rank: int) -> int | None:
    """The pid of this rank in the group that runs now, None where none does."""
    since = next((event for event in reversed(events) if event["event"] in ("group", "resumed", "lost")), None)
    pid = since["pids"][rank] if since is not None and since["event"] == "group" else None
    return pid if pid is not None and Path("/proc", str(pid)).exists() else None


def one_loss_is_open(events: Sequence[Event]) -> bool:
    """Whether what is asked now has cost a group: a second one would be an answer, M does not run."""
    last = next(
        (event["event"] for event in reversed(events) if event["event"] in ("trial", "rounds", "confirm", "lost")), ""
    )
    return last == "lost"


def check_nothing_was_lost(sweep: Killed) -> None:
    assert sweep.done is not None
    record = sweep.done.chosen()
    verdict = record.verdict
    assert verdict is not None
    assert (verdict.chunks, verdict.limit) == CHOICE, sweep.done
    final = sweep.journal
    for data in sweep.seen:
        whole = data[: data.rfind(b"\n") + 1]
        assert not events_in(whole) or final.startswith(whole), "a line that was flushed stays"
    kept = {trial.chunks: trial.model_dump(mode="json") for trial in record.trials}
    trials = [event["trial"] for event in events_in(final) if event["event"] == "trial"]
    assert sorted(trial["chunks"] for trial in trials) == [1, 4, 16], "none was run twice"
    for trial in trials:
        assert kept[trial["chunks"]] == trial, "the record holds it as it was flushed"
    lost = [event["state"] for event in events_in(final) if event["event"] == "lost"]
    assert set(lost) <= {"killed"} and record.group_restarts == len(lost)
    assert record.status == "complete"


def kill(folder: Path, seed: int, count: int) -> list[Killed]:
    """Sweeps, one after the other, until `count` kills are done, each checked."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    sweeps: list[Killed] = []
    while (left := count - sum(len(one.kills) for one in sweeps)) > 0:
        own = folder / str(len(sweeps))
        own.mkdir()
        one = kill_until_done(own, draw, left)
        print(f"sweep {len(sweeps)}: {len(one.kills)} kills: {'; '.join(one.kills)}")
        check_nothing_was_lost(one)
        sweeps.append(one)
    return sweeps


def test_a_sweep_that_is_killed_three_times_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    kill(tmp_path, seed=186, count=3)


@pytest.mark.slow
def test_thirty_kills_at_random_moments(tmp_path: Path) -> None:
    seed = int(os.environ.get("KILL_SEED") or random.SystemRandom().randrange(10**6))
    undisturbed = Killed(tmp_path / "undisturbed")
    undisturbed.out.mkdir()
    (tmp_path / "spec.toml").write_text(SPEC)
    command = [*SWEEP, str(tmp_path / "spec.toml"), "--output-dir", str(undisturbed.out), "--quick"]
    undisturbed.done = run(command, output=undisturbed.out)
    check_nothing_was_lost(undisturbed)
    sweeps = kill(tmp_path, seed, 30)
    assert sum(len(one.kills) for one in sweeps) == 30
    victims = {name.partition(" ")[0] for one in sweeps for name in one.kills}
    print(f"{len(sweeps)} sweeps, killed: {', '.join(sorted(victims))}; each ended with M, limit = {CHOICE}")
