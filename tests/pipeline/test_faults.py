"""What goes wrong in a sweep, for real: gloo, real processes, faults that a model of the user's own brings about."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from running import Finished, despite_noise, sweep

from chunktune.standing import Rules

MINI_BATCH = 16
GIB = 2**30
Fault = Mapping[str, Any]


def fault(kind: str, chunks: int | str, phase: str, rank: int | str = 1, **more: Any) -> Fault:
    return {"kind": kind, "rank": rank, "chunks": chunks, "phase": phase, **more}


def faulty_sweep(
    folder: Path, stages: int, chunks: Iterable[int], faults: Iterable[Fault], *args: str, **arguments: Any
) -> Finished:
    """A sweep of K sleeping layers over these values of M, N = 16, in which these faults happen."""
    shutil.copy(Path(__file__).with_name("faulty_model.py"), folder)
    given = {
        "faults": list(faults),
        "layers": stages,
        "mini_batch": MINI_BATCH,
        "folder": str(folder),
        "seconds": 0.001,
    }
    path = folder / "spec.toml"
    path.write_text(
        f"""
[model]
family = "python"
factory = "faulty_model:build"
arguments = {toml(given | arguments)}
[pipeline]
stages = {stages}
schedule = "gpipe"
[batch]
mini_batch = {MINI_BATCH}
chunks = {list(chunks)}
"""
    )
    return sweep(path, "--output-dir", str(folder / "out"), "--share", *args)


def toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {toml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return str(value) if isinstance(value, float) else json.dumps(value)


def losses(done: Finished) -> list[tuple[int, str, int | None]]:
    """(M, state, rank) of every group that was lost, in order."""
    return [(event["chunks"], event["state"], event["rank"]) for event in done.events if event["event"] == "lost"]


def tried(done: Finished) -> list[int]:
    """The values of M whose trial was finished, in order."""
    trials = [event["trial"] for event in done.events if event["event"] == "trial"]
    return [trial["chunks"] for trial in trials if trial["state"] != "skipped"]


def logs(folder: Path, rank: int) -> str:
    """What a rank of any group wrote to stderr."""
    return "".join(file.read_text() for file in sorted((folder / "out" / "logs").glob(f"**/{rank}/stderr.log")))


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_out_of_memory_on_one_rank_of_the_real_pipeline(tmp_path: Path, stages: int) -> None:
    """Which no rehearsal sees: in warm-up, a timed step, the optimizer step, the first use of a transfer's buffer."""
    faults = [
        fault("shortage", 1, "warm-up", rank=stages - 1, gib=1),
        fault("shortage of the CPU", 2, "timed", rank=0, gib=2, where="backward"),
        fault("shortage", 4, "timed", rank=stages - 1, gib=3, where="optimizer"),
        fault("shortage of NCCL", 8, "warm-up", rank=1, where="send"),
    ]
    done = faulty_sweep(tmp_path, stages, [1, 2, 4, 8, 16], faults, "--quick")
    record = done.chosen()
    assert losses(done) == [(one["chunks"], "oom", one["rank"]) for one in faults], done
    for one in faults:
        trial = done.trial(one["chunks"])
        assert (trial.state, trial.rank) == ("oom", one["rank"]), done
        assert trial.shortage is not None and trial.shortage.rank == one["rank"]
        assert trial.shortage.where == "pipeline"
        assert trial.shortage.asked_bytes == (one["gib"] * GIB if "gib" in one else None), done
        assert trial.reason is not None and trial.reason.startswith(f"rank {one['rank']} ran out"), done
    assert record.group_restarts == len(faults)
    assert tried(done) == [16], "with N fixed the climb goes on past what does not fit"
    verdict = record.verdict
    assert verdict is not None and verdict.floor is not None
    assert (verdict.chunks, verdict.floor.chunks, verdict.floor.limit) == (16, 16, "memory"), done


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_worker_that_dies_once_is_named_and_its_m_is_tried_again(tmp_path: Path, stages: int) -> None:
    """In the rehearsal, warm-up, timed steps of a trial, rounds of a comparison."""
    last = stages - 1
    deaths = {
        f"rank {last} was ended by SIGKILL": fault("signals", 1, "rehearsal", rank=last, signal="SIGKILL", once=True),
        "rank 1 was ended by SIGSEGV": fault("signals", 2, "warm-up", signal="SIGSEGV", once=True),
        "rank 0 ended by itself, with exit status 3": fault("leaves", 4, "timed", rank=0, status=3, once=True),
        f"rank {last} was ended by SIGABRT": fault("signals", 4, "rounds", rank=last, signal="SIGABRT", once=True),
    }
    done = faulty_sweep(tmp_path, stages, [1, 2, 4], deaths.values(), "--quick")
    record = done.chosen()
    lost = [event for event in done.events if event["event"] == "lost"]
    assert losses(done) == [(one["chunks"], "killed", one["rank"]) for one in deaths.values()], done
    for event, words in zip(lost, deaths, strict=True):
        assert event["reason"].startswith(words), done
        assert words in done.stderr, done
    assert tried(done) == [1, 2, 4], "no trial that was journaled ran twice"
    assert all(trial.fits for trial in record.trials), done
    assert record.group_restarts == len(deaths)


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_death_between_trials_loses_none_and_a_second_one_at_the_same_m_is_final(tmp_path: Path, stages: int) -> None:
    """Rank 0 itself dies once the line of M = 2 is on the disk; then M = 4 takes its worker along each time."""
    faults = [
        fault("signals", 2, "any", rank=0, signal="SIGKILL", where="journal", once=True),
        fault("signals", 4, "warm-up", rank=stages - 1, signal="SIGKILL"),
    ]
    done = faulty_sweep(tmp_path, stages, [2, 4], faults, "--quick")
    verdict = done.chosen().verdict
    assert tried(done) == [2], done
    assert "lost between two trials and started again: rank 0 was ended by SIGKILL" in done.stderr, done
    assert losses(done) == [(4, "killed", stages - 1)] * 2, done
    assert sum(event["event"] == "group" for event in done.events) == 4
    trial = done.trial(4)
    assert (trial.state, trial.rank) == ("killed", stages - 1)
    assert trial.reason is not None and trial.reason.startswith(f"rank {stages - 1} was ended by SIGKILL"), done
    assert verdict is not None
    assert (verdict.chunks, verdict.limit, verdict.next_chunks) == (2, "failed", 4), done
    assert "M = 4 did not run" in done.stdout, done


@pytest.mark.parametrize(
    ("stages", "kind"),
    [
        (2, "hangs with the lock"),
        (4, "drops"),
        *(pytest.param(stages, "hangs", marks=pytest.mark.slow) for stages in (2, 4)),
        pytest.param(2, "drops", marks=pytest.mark.slow),
        pytest.param(4, "hangs with the lock", marks=pytest.mark.slow),
    ],
)
def test_a_hang_is_ended_with_the_stack_of_every_rank_in_the_log(tmp_path: Path, stages: int, kind: str) -> None:
    """A sleep inside forward, with and without the interpreter's lock, and a receive that nobody sends anything to."""
    rank, more = (0, {"where": "send"}) if kind == "drops" else (1, {})
    hang = fault(kind, 2, "warm-up", rank=rank, **more)
    done = faulty_sweep(tmp_path, stages, [2, 4], [hang], "--quick", "--set", "sweep.trial_timeout=5")
    done.chosen()
    assert losses(done) == [(2, "timeout", None if kind == "drops" else 1)], done
    reason = done.trial(2).reason
    assert reason is not None and "not done after 5 s" in reason, done
    assert tried(done) == [4], done
    for one in range(stages):
        assert "most recent call first" in logs(tmp_path, one), f"rank {one} left no stack"
    if kind != "drops":
        assert f"in {kind.replace(' ', '_')}" in logs(tmp_path, 1), "the line that hangs"
    if kind == "hangs":
        assert "faulty_model.py:" in reason


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_exception_costs_its_m_and_no_other_and_a_loss_of_nan_none(tmp_path: Path, stages: int) -> None:
    faults = [
        fault("raises", 1, "any", says="too many samples"),
        fault("raises", 2, "any", rank=stages - 1, says="no way back", where="backward"),
        fault("raises", 4, "warm-up", rank=0, says="not with peers"),
    ]
    done = faulty_sweep(tmp_path, stages, [1, 2, 4, 8], faults, "--quick", loss="nan")
    done.chosen()
    check_no_number(done, tmp_path, [8])
    assert losses(done) == [(4, "error", 0)], "what the rehearsal finds costs no process"
    assert tried(done) == [1, 2, 8], done
    for one in faults:
        trial = done.trial(one["chunks"])
        assert (trial.state, trial.rank) == ("error", one["rank"]), done
        assert trial.reason is not None and f"ValueError: {one['says']} (faulty_model.py:" in trial.reason, done
        assert one["says"] in done.stdout and "Traceback" not in done.stdout + done.stderr, done
        log = logs(tmp_path, one["rank"])
        assert "Traceback" in log and f"ValueError: {one['says']}" in log, "the user's own traceback"
        assert "faulty_model.py" in log


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_the_same_error_at_every_m_ends_the_sweep_after_two(tmp_path: Path, stages: int) -> None:
    """And after the largest M: with N fixed a large b may be what is wrong."""
    faults = [fault("raises", "every", "any", says="always so")]
    done = faulty_sweep(tmp_path, stages, [1, 2, 4, 8, 16], faults, "--quick")
    assert done.returncode == 6, done
    assert tried(done) == [1, 2, 16], done
    assert done.record is not None and done.record.status == "failed"
    assert "ValueError: always so" in done.stderr and "Traceback" not in done.stderr, done


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_an_infinite_loss_is_a_finding(tmp_path: Path, stages: int) -> None:
    done = faulty_sweep(tmp_path, stages, [1, 2], [], "--quick", loss="inf")
    done.chosen()
    check_no_number(done, tmp_path, [1, 2])


def check_no_number(done: Finished, folder: Path, chunks: list[int]) -> None:
    """A loss that is NaN or infinite at these values of M: said, nowhere written as such, and the times stand."""
    assert done.record is not None and done.record.verdict is not None
    named = f"NaN or infinite at M = {', '.join(map(str, chunks))}: times and memory stand"
    assert any(named in finding for finding in done.record.verdict.findings), done
    for trial in (done.trial(value) for value in chunks):
        assert (trial.fits, trial.loss, trial.loss_is_finite) == (True, None, False), done
        assert trial.step_median_s is not None and trial.step_median_s > 0
    for name in ("record.json", "journal.jsonl"):
        text = (folder / "out" / name).read_text()
        assert not re.search(r"[\[:,] *-?(NaN|Infinity)\b", text), name


@pytest.mark.parametrize(
    ("stages", "seconds", "seconds_per_sample"),
    [(2, 0.017, 0.0021), pytest.param(4, 0.015, 0.0006, marks=pytest.mark.slow)],
)
def test_a_slow_neighbour_is_named_and_makes_for_more_rounds(
    tmp_path: Path, stages: int, seconds: float, seconds_per_sample: float
) -> None:
    """Two values of M of about the same speed; all takes half as long again now at the one, now at the other."""
    pace = {"seconds": seconds, "seconds_per_sample": seconds_per_sample}
    disturbed = fault("disturbed", "every", "rounds", rank="every", share=0.5, **pace)
    done = faulty_sweep(tmp_path, stages, [1, 2], [disturbed], **pace)
    record = done.chosen()
    comparison, verdict = record.comparisons[0], record.verdict
    assert verdict is not None
    assert (comparison.outcome, comparison.rounds) == ("undecided", Rules().drifting_rounds), done
    assert verdict.confidence == "unclear"
    moved = [finding for finding in verdict.findings if "the machine's speed moved by" in finding]
    assert len(moved) == 1 and f"{Rules().drifting_rounds} rounds" in moved[0], done


@dataclass(frozen=True)
class Spent:
    """A sweep whose budget ends in this task at the last of the values of M, where it sleeps so long a step."""

    task: str
    budget_s: float
    chunks: list[int]
    step_s: float
    where: tuple[int | str, str]

    def slow(self, stages: int) -> Fault:
        """A step sleeps in the forwards of all chunks on one rank after the other."""
        return fault("slow", *self.where, rank="every", seconds=self.step_s / (self.chunks[-1] + stages - 1))


IN_A_TRIAL = Spent("trial", 3.0, [1, 2], 0.6, (2, "any"))
IN_ROUNDS = Spent("rounds", 5.0, [1, 2], 0.2, ("every", "any"))
IN_THE_CONFIRMATION = Spent("confirm", 4.0, [1], 0.8, (1, "confirmation"))


@pytest.mark.parametrize(
    ("stages", "spent"),
    [
        (4, IN_A_TRIAL),
        pytest.param(2, IN_A_TRIAL, marks=pytest.mark.slow),
        *(pytest.param(stages, IN_ROUNDS, marks=pytest.mark.slow) for stages in (2, 4)),
        *(pytest.param(stages, IN_THE_CONFIRMATION, marks=pytest.mark.slow) for stages in (2, 4)),
    ],
)
@despite_noise()
def test_the_budget_ends_a_sweep_wherever_it_is(tmp_path: Path, stages: int, spent: Spent) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    done = faulty_sweep(folder, stages, spent.chunks, [spent.slow(stages)], "--budget", f"{spent.budget_s}s")
    record = done.chosen()
    verdict = record.verdict
    assert verdict is not None
    begun = [(event["task"], set(event["values"])) for event in done.events if event["event"] == "begin"]
    task, values = begun[-1]
    assert task == spent.task and spent.chunks[-1] in values, done
    allowed_s = max(0.1 * spent.budget_s, spent.step_s)
    assert record.elapsed_s - spent.budget_s <= allowed_s, done
    assert verdict.confirmed == "no"
    if spent is IN_A_TRIAL:
        assert (verdict.chunks, verdict.limit, verdict.next_chunks, tried(done)) == (1, "budget", 2, [1]), done
    else:
        assert verdict.chunks in spent.chunks
        assert any("sweep.budget is spent" in finding for finding in verdict.findings), done
