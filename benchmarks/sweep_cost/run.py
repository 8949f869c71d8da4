"""A whole sweep against relaunching torchrun for every M: `python benchmarks/sweep_cost/run.py [--quick]`.

The launches take exactly the steps of the real pipeline that the sweep just took at each M, in a bare loop.
Prints a Markdown table of ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reference import LONGEST_RUN_S, LOOPBACK, BareLoop, circumstances, free_port, interval, reached, table

STAGES, MINI_BATCH, WIDTH = 2, 64, 256
VALUES = (1, 2, 4, 8, 16, 32, 64)
SECONDS_PER_CHUNK, SECONDS_PER_SAMPLE = 0.0, 0.0002
SPEC = f"""\
[model]
family = "sleep"
layers = {STAGES}
seconds_per_chunk = {SECONDS_PER_CHUNK}
seconds_per_sample = {SECONDS_PER_SAMPLE}
width = {WIDTH}

[pipeline]
stages = {STAGES}
schedule = "gpipe"

[batch]
mini_batch = {MINI_BATCH}

[device]
kind = "cpu"

[sweep]
patience = {len(VALUES) - 1}  # no value is left out
"""
RUNS, QUICK_RUNS = 4, 1
FASTER, DEARER = 2.5, 1.3


# --- the parent


@dataclass(frozen=True)
class Sweep:
    """One sweep, from its journal. `steps`: of the real pipeline, by M. The seconds add up to the whole.

    `first_s`: until the first "begin". `second_s`: from the last answer of the first group to the confirmation's
    "begin". `after_s`: from the journal's end to the process's. `apart_s`: the rest, which is measuring.
    """

    steps: dict[int, int]
    first_s: float
    second_s: float
    after_s: float
    apart_s: float

    @property
    def whole_s(self) -> float:
        return self.first_s + self.second_s + self.after_s + self.apart_s


@dataclass(frozen=True)
class Relaunches:
    """A launch for each M: `whole_s` for all of it, `loop_s` for the steps alone."""

    whole_s: float
    loop_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description="A whole sweep against relaunching torchrun for every M.")
    parser.add_argument("--quick", action="store_true", help="once: to see that it runs")
    parser.add_argument("--worker", nargs=2, type=int, metavar=("M", "STEPS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(*arguments.worker)
    runs = [one_run() for _ in range(QUICK_RUNS if arguments.quick else RUNS)]
    print(report(runs))
    print(f"\n{circumstances('python benchmarks/sweep_cost/run.py' + ' --quick' * arguments.quick)}")
    return None


def one_run() -> tuple[Sweep, Relaunches]:
    """A sweep, then the launches with its steps."""
    swept = sweep()
    relaunched = relaunch(swept.steps)
    print(f"steps by M: {swept.steps}; {swept}; {relaunched}", file=sys.stderr, flush=True)
    return swept, relaunched


def sweep() -> Sweep:
    """`chunktune sweep SPEC` as a user runs it."""
    with tempfile.TemporaryDirectory() as folder:
        spec, output = Path(folder) / "spec.toml", Path(folder) / "out"
        spec.write_text(SPEC)
        start = time.time()
        finish([sys.executable, "-m", "chunktune", "sweep", str(spec), "--output-dir", str(output)])
        end = time.time()
        events = [json.loads(line) for line in (output / "journal.jsonl").read_text().splitlines()]
    return accounted(events, start, end)


def relaunch(steps: dict[int, int]) -> Relaunches:
    """The usual way: torchrun once for each M.

    What it takes the worker to import chunktune's layers is taken off: a script of one's own has its layers.
    """
    whole_s = loop_s = 0.0
    for chunks in VALUES:
        start = time.perf_counter()
        answer = json.loads(finish(torchrun(chunks, steps[chunks])).splitlines()[-1])
        whole_s += time.perf_counter() - start - answer["import_s"]
        loop_s += answer["loop_s"]
    return Relaunches(whole_s, loop_s)


def torchrun(chunks: int, steps: int) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={STAGES}"]
    address = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [*launcher, *address, __file__, "--worker", str(chunks), str(steps)]


def finish(command: Sequence[str]) -> str:
    """Run to the end; its stdout. Raises CalledProcessError with its stderr where it failed."""
    process = subprocess.Popen(
        command, env=os.environ | LOOPBACK, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        stdout, stderr = process.communicate(timeout=LONGEST_RUN_S)
    finally:
        if process.poll() is None:
            process.terminate()  # both launchers end their workers
            process.wait()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{stderr}")
    return stdout


# --- what a sweep did


def accounted(events: list[dict[str, Any]], start: float, end: float) -> Sweep:
    """Steps and times of a sweep from its journal and the process's start and end, in seconds since the epoch.

    Ends the benchmark where the sweep was not a plain one.
    """
    if any(event["event"] == "lost" for event in events):
        raise SystemExit("a worker group was lost during the sweep: its steps cannot be counted; run again")
    steps = steps_spent(events)
    if set(steps) != set(VALUES):
        raise SystemExit(f"the sweep tried M = {sorted(steps)}, not {list(VALUES)}")
    began = next(_at(event) for event in events if event["event"] == "begin")
    confirmation = next(index for index, event in enumerate(events) if event.get("task") == "confirm")
    measured = [event for event in events[:confirmation] if event["event"] in ("trial", "rounds")]
    second_s = _at(events[confirmation]) - _at(measured[-1])
    ended = _at(events[-1])
    return Sweep(steps, began - start, second_s, end - ended, ended - began - second_s)


def _at(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["at"]).timestamp()


def steps_spent(events: list[dict[str, Any]]) -> dict[int, int]:
    """Steps of the real pipeline by M: two counted ones before a trial's timed steps; the timed ones of every block
    of a round, and one before them where the block before was at another M. Rehearsals are not among them.
    """
    from chunktune.pipeline.measure import Effort, visiting_order

    steps: dict[int, int] = {}
    step_s: dict[int, float] = {}
    visits: dict[tuple[int, ...], int] = {}
    running = 0
    for event in events:
        if event["event"] in ("trial", "confirm"):
            trial = event["trial"]
            running = trial["chunks"]
            step_s[running] = trial["step_median_s"]
            steps[running] = steps.get(running, 0) + 2 + len(trial["step_s"])
        elif event["event"] == "rounds":
            values = tuple(event["values"])
            for _ in event["rounds"]:
                for chunks in visiting_order(values, visits.get(values, 0)):
                    steps[chunks] += Effort().block_count(step_s[chunks]) + (chunks != running)
                    running = chunks
                visits[values] = visits.get(values, 0) + 1
    return steps


# --- the table


def report(runs: Sequence[tuple[Sweep, Relaunches]]) -> str:
    from chunktune.stats import paired_log_ratio

    sweeps, launches = zip(*runs, strict=True)
    faster = paired_log_ratio([one.whole_s for one in launches], [one.whole_s for one in sweeps])
    dearer = paired_log_ratio([one.apart_s for one in sweeps], [one.loop_s for one in launches])
    rows = [
        ("relaunching / sweep, whole", f">= {FASTER}", faster, reached(faster, FASTER, above=True)),
        ("sweep without start-ups / bare steps", f"<= {DEARER}", dearer, reached(dearer, DEARER, above=False)),
    ]
    cells = [
        [name, target, f"{found.ratio:.2f}", interval(found.interval), str(found.pairs), met]
        for name, target, found, met in rows
    ]
    counts = "; ".join(", ".join(f"{m}: {one.steps[m]}" for m in VALUES) for one in sweeps)
    return (
        f"{table(['what', 'target', 'ratio', '95 % interval', 'runs', 'reached'], cells)}\n\n{_shares(sweeps)}\n\n"
        f"Steps of the real pipeline by M, run by run: {counts}."
    )


def _shares(sweeps: Sequence[Sweep]) -> str:
    whole_s = sum(one.whole_s for one in sweeps)
    first, second, after, apart = (
        f"{100 * sum(getattr(one, name) for one in sweeps) / whole_s:.0f} %"
        for name in ("first_s", "second_s", "after_s", "apart_s")
    )
    return (
        f"Of the sweep's time the first start-up took {first}, the second {second}, the time after the verdict "
        f"{after}, measuring {apart}."
    )


# --- a rank of the usual way


def work(chunks: int, steps: int) -> None:
    """`steps` bare steps at M; rank 0 prints their seconds, the first counted as one of the others.

    The first step connects the ranks, which is start-up.
    """
    start = time.perf_counter()
    from chunktune.models.sleep import SleepLayer

    import_s = time.perf_counter() - start
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    loop = bare_loop(rank, chunks, SleepLayer(WIDTH, SECONDS_PER_CHUNK, SECONDS_PER_SAMPLE, 0))
    loop.step()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps - 1):
        loop.step()
    loop_s = time.perf_counter() - start
    if rank == 0:
        print(json.dumps({"import_s": import_s, "loop_s": loop_s * steps / (steps - 1)}))
    dist.destroy_process_group()


def bare_loop(rank: int, chunks: int, layer: torch.nn.Module) -> BareLoop:
    rows = torch.empty(MINI_BATCH // chunks, WIDTH, device="meta")
    inputs, targets = torch.randn(MINI_BATCH, WIDTH), torch.randn(MINI_BATCH, WIDTH)
    return BareLoop(
        [layer],
        rank=rank,
        ranks=STAGES,
        schedule="gpipe",
        chunks=chunks,
        inputs=rows.clone().requires_grad_(rank > 0),
        outputs=rows.clone().requires_grad_(),
        batch=(inputs, targets),
        loss=torch.nn.functional.mse_loss,
    )


if __name__ == "__main__":
    main()
