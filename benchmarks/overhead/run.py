"""A step inside chunktune against the same step in a bare loop: `python benchmarks/overhead/run.py [--quick]`.

Both run in the same processes and the same process group, over layers of the same weights, in pairs A B B A.
Prints a Markdown table of ratios.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reference import LONGEST_RUN_S, BareLoop, circumstances, interval, launched, reached, table

from chunktune.device import Device, open_device
from chunktune.pipeline.group import Group, Place
from chunktune.pipeline.measure import Effort, Measurer, Timed, step_seconds
from chunktune.pipeline.plan import Plan, make_plan
from chunktune.pipeline.work import RankWork
from chunktune.spec import Spec
from chunktune.stats import LogRatio, paired_log_ratio

TARGET = 1.01
SLEEP_2 = {"family": "sleep", "layers": 2, "seconds_per_chunk": 0.002, "seconds_per_sample": 0.0002}
SLEEP_4 = {"family": "sleep", "layers": 4, "seconds_per_chunk": 0.001, "seconds_per_sample": 0.0002}
TRANSFORMER = {"family": "transformer", "layers": 4, "hidden": 128, "heads": 4, "vocab": 512, "sequence": 64}


@dataclass(frozen=True)
class Row:
    """One line of the table. `pairs`: of blocks of `steps` steps each. `arm`: what the processes do."""

    model: dict[str, object]
    stages: int
    schedule: str
    chunks: int
    mini_batch: int
    pairs: int = 120
    steps: int = 2
    arm: str = "pairs"

    @property
    def micro_batch(self) -> int:
        return self.mini_batch // self.chunks

    @property
    def spec(self) -> Spec:
        pipeline = {"stages": self.stages, "schedule": self.schedule}
        tables = {"model": self.model, "pipeline": pipeline, "batch": {"mini_batch": self.mini_batch}}
        return Spec.model_validate(tables | {"device": {"kind": "cpu"}})


ROWS = [
    *(Row(SLEEP_2, 2, schedule, chunks=4, mini_batch=32) for schedule in ("gpipe", "1f1b")),
    *(Row(SLEEP_4, 4, schedule, chunks=8, mini_batch=32) for schedule in ("gpipe", "1f1b")),
    *(Row(TRANSFORMER, 2, schedule, chunks=4, mini_batch=16) for schedule in ("gpipe", "1f1b")),
]
LAUNCHES, QUICK_LAUNCHES, QUICK_PAIRS = 8, 2, 6
TURNS_A_LAUNCH = 20


# --- the parent


def main() -> None:
    parser = argparse.ArgumentParser(description="A step inside chunktune against a bare loop.")
    parser.add_argument("--quick", action="store_true", help="few pairs: to see that it runs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work([Row(**fields) for fields in json.loads(arguments.worker)])
    rows = [replace(row, pairs=QUICK_PAIRS) for row in ROWS] if arguments.quick else ROWS
    lines = [
        _line(_name(row), row, found, "blocks")
        for stages in sorted({row.stages for row in rows})
        for row, found in paired([row for row in rows if row.stages == stages])
    ]
    launches = QUICK_LAUNCHES if arguments.quick else LAUNCHES
    row = ROWS[-1]
    lines.append(_line(f"{_name(row)}, limits set and lifted", row, after_enforce(row, launches), "launches"))
    print(table(["step", "K", "schedule", "M", "pairs", "ratio", "95 % interval", f"<= {TARGET} reached"], lines))
    print(f"\n{circumstances('python benchmarks/overhead/run.py' + ' --quick' * arguments.quick)}")
    return None


def _name(row: Row) -> str:
    return str(row.model["family"])


def _line(name: str, row: Row, found: LogRatio, unit: str) -> list[str]:
    cells = [name, str(row.stages), row.schedule, str(row.chunks), f"{found.pairs} {unit}"]
    line = [*cells, f"{found.ratio:.4f}", interval(found.interval), reached(found, TARGET, above=False)]
    print("  ".join(line), file=sys.stderr, flush=True)
    return line


def paired(rows: Sequence[Row]) -> Iterator[tuple[Row, LogRatio]]:
    """Inside over bare, for rows of one K, in one set of processes."""
    with launched(__file__, [asdict(row) for row in rows], rows[0].stages) as leader:
        assert leader.stdout is not None
        for row in rows:
            inside, bare = json.loads(leader.stdout.readline())
            yield row, paired_log_ratio(inside, bare)


def after_enforce(row: Row, launches: int) -> LogRatio:
    """Steps after a whole trial, limits set and lifted, over steps of processes that never set one.

    Two sets of processes live at once and take turns. A launch is the unit of the interval, since two processes
    may differ for good in ways that no number of turns averages out.
    """
    means = [_one_launch(row) for _ in range(launches)]
    return paired_log_ratio(means, [1.0] * launches)


def _one_launch(row: Row) -> float:
    limited, plain = ([asdict(replace(row, arm=arm))] for arm in ("after trial", "no trial"))
    with launched(__file__, limited, row.stages) as first, launched(__file__, plain, row.stages) as second:
        for leader in (first, second):
            _turn(leader)  # ready, and warm
        turns = [(_turn(first), _turn(second), _turn(second), _turn(first)) for _ in range(TURNS_A_LAUNCH)]
        for leader in (first, second):
            leader.communicate("stop\n", timeout=LONGEST_RUN_S)
    numerators = [one for a, _, _, d in turns for one in (a, d)]
    return paired_log_ratio(numerators, [one for _, b, c, _ in turns for one in (b, c)]).ratio


def _turn(leader: subprocess.Popen[str]) -> float:
    assert leader.stdin is not None
    assert leader.stdout is not None
    leader.stdin.write("go\n")
    leader.stdin.flush()
    return float(leader.stdout.readline())


# --- a rank


def work(rows: Sequence[Row]) -> None:
    place = Place.from_environment()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.local_ranks))
    gc.freeze()  # as chunktune's worker does
    device = open_device("cpu", place.local_rank, place.local_ranks)
    group = Group(place, device)
    group.open()
    for row in rows:
        run_row(row, group, device)
    group.close()


def run_row(row: Row, group: Group, device: Device) -> None:
    place = group.place
    plan = make_plan(row.spec, place.ranks, str(Path.cwd()))
    assert plan.counts is not None
    rank = RankWork(row.spec, plan.model, plan.counts, rank=place.rank, ranks=place.ranks, device=device)
    measurer = Measurer((rank,), group, Effort())
    if row.arm != "no trial":
        measurer.trial(row.chunks, row.micro_batch)
    if row.arm == "pairs":
        compare(row, measurer, bare_loop(row, rank, plan))
    else:
        serve(row, measurer)


def compare(row: Row, measurer: Measurer, bare: BareLoop) -> None:
    """A B B A ..., then both lists of seconds a step on rank 0's stdout."""
    bare_block(measurer.group, bare, row.steps)  # the first steps of either are not counted
    inside_block(row, measurer)
    inside, outside = [], []
    for turn in range(row.pairs):
        if turn % 2 == 0:
            inside.append(inside_block(row, measurer))
            outside.append(bare_block(measurer.group, bare, row.steps))
        else:
            outside.append(bare_block(measurer.group, bare, row.steps))
            inside.append(inside_block(row, measurer))
    if measurer.group.place.rank == 0:
        print(json.dumps([inside, outside]), flush=True)


def serve(row: Row, measurer: Measurer) -> None:
    """A block for each line of rank 0's stdin, until one says stop."""
    first = measurer.group.place.rank == 0
    while measurer.group.broadcast(sys.stdin.readline().strip() if first else None) == "go":
        step_s = inside_block(row, measurer)
        if first:
            print(step_s, flush=True)


def inside_block(row: Row, measurer: Measurer) -> float:
    """Median seconds of a step of a block of chunktune's."""
    return statistics.median(step_seconds(measurer.block(row.chunks, row.micro_batch, row.steps)))


def bare_block(group: Group, bare: BareLoop, steps: int) -> float:
    """Median seconds of a step of the bare loop, by the same clock as chunktune's."""
    group.barrier()
    ends = tuple(_ends(bare, steps, time.perf_counter()))
    ranks = group.gather(Timed(ends_s=ends, busy_s=(), forward_s=0.0, backward_s=0.0))
    return statistics.median(step_seconds(ranks))


def _ends(bare: BareLoop, steps: int, start: float) -> Iterator[float]:
    for _ in range(steps):
        bare.step()
        yield time.perf_counter() - start


def bare_loop(row: Row, rank: RankWork, plan: Plan) -> BareLoop:
    """The same layers with the same weights, in a loop of their own."""
    assert plan.counts is not None
    start = sum(plan.counts[: rank.rank])
    boundary = rank.boundaries(row.micro_batch)[rank.rank]
    return BareLoop(
        [rank.build_layer(layer) for layer in range(start, start + plan.counts[rank.rank])],
        rank=rank.rank,
        ranks=plan.stages,
        schedule=row.schedule,
        chunks=row.chunks,
        inputs=boundary.inputs,
        outputs=boundary.outputs,
        batch=rank.batch(row.mini_batch),
        loss=plan.model.loss,
    )


if __name__ == "__main__":
    main()
