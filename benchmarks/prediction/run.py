"""Predicted against measured steps: `python benchmarks/prediction/run.py [sleep] [transformer] [--quick]`.

sleep        K = 2, 4, 8, all schedules, equal stages and one twice as slow: every M is rehearsed and predicted before
             it is timed, with overheads fitted from the M before it
transformer  K = 2, GPipe and 1F1B, M = 2 to 32: rehearsals and real steps in pairs A B B A, overheads from other M

Prints Markdown tables. What is predicted has not been seen by the prediction.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reference import circumstances, launched, table

from chunktune.device import Device, open_device
from chunktune.pipeline.group import Group, Place
from chunktune.pipeline.live import trial_of
from chunktune.pipeline.measure import Effort, Measurer, step_seconds
from chunktune.pipeline.plan import Plan, make_plan
from chunktune.pipeline.rehearsal import RankReport
from chunktune.pipeline.work import RankWork
from chunktune.predict import Operations, Shape, predict
from chunktune.results import Predicted, Trial
from chunktune.schedules import SCHEDULES
from chunktune.spec import Spec

OPERATION_S = 0.02
CHUNKS = {2: (4, 8), 4: (8, 12), 8: (16, 24)}
TRANSFORMER = {"family": "transformer", "layers": 8, "hidden": 256, "heads": 4, "vocab": 4096, "sequence": 128}
MEAN, WORST, TRANSFORMER_MEAN = 0.02, 0.05, 0.03
PAIRS = 6


@dataclass(frozen=True)
class Row:
    """One pipeline. `pairs`: of rehearsal and real step for every M; 0 for one of each."""

    model: dict[str, Any]
    batch: dict[str, int]
    stages: int
    schedule: str
    chunks: tuple[int, ...]
    title: str
    pairs: int = 0

    @property
    def spec(self) -> Spec:
        pipeline = {"stages": self.stages, "schedule": self.schedule}
        tables = {"model": self.model, "pipeline": pipeline, "batch": {**self.batch, "chunks": list(self.chunks)}}
        return Spec.model_validate(tables | {"device": {"kind": "cpu"}})


@dataclass(frozen=True)
class Found:
    """One M. `noise`: median relative difference of two consecutive measurements; 0 where there is one."""

    chunks: int
    measured_s: float
    predicted_s: float
    error: float
    noise: float
    overhead_s: float


def sleeping(counts: Sequence[int]) -> list[Row]:
    """The grid of the sleep family at these K, one layer a part."""
    rows = []
    for stages, chunks in ((stages, CHUNKS[stages]) for stages in counts):
        for name, schedule in SCHEDULES.items():
            parts = stages * schedule.default_virtual_stages
            for title, slow in (("equal", 1.0), ("one stage 2x slower", 2.0)):
                slowdown = [1.0] * parts
                slowdown[stages // 2] = slow
                model = {
                    "family": "sleep",
                    "layers": parts,
                    "seconds_per_chunk": OPERATION_S,
                    "seconds_per_sample": 0.0,
                    "slowdown": slowdown,
                }
                rows.append(Row(model, {"micro_batch": 1}, stages, name, chunks, title))
    return rows


def transforming(quick: bool) -> list[Row]:
    """The transformer on two ranks, N fixed."""
    chunks = (2, 4, 8, 16, 32)
    row = Row(TRANSFORMER, {"mini_batch": 32}, 2, "gpipe", chunks, "transformer", 2 if quick else PAIRS)
    return [row, replace(row, schedule="1f1b")]


# --- the parent


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against measured steps.")
    parser.add_argument("what", nargs="*", help="default: both")
    parser.add_argument("--stages", nargs="*", type=int, choices=list(CHUNKS), default=list(CHUNKS), help="K of sleep")
    parser.add_argument("--quick", action="store_true", help="little: to see that it runs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work([Row(**{**row, "chunks": tuple(row["chunks"])}) for row in json.loads(arguments.worker)])
    wanted = arguments.what or ["sleep", "transformer"]
    if "sleep" in wanted:
        report_sleep(sleeping([2] if arguments.quick else arguments.stages))
    if "transformer" in wanted:
        report_transformer(transforming(arguments.quick))
    print(
        f"\n{circumstances('python benchmarks/prediction/run.py ' + ' '.join(wanted) + ' --quick' * arguments.quick)}"
    )
    return None


def report_sleep(rows: Sequence[Row]) -> None:
    lines, errors = [], []
    for row, found in measured(rows):
        errors += [abs(one.error) for one in found]
        errors_text = ", ".join(f"{100 * one.error:+.2f} % (M = {one.chunks})" for one in found)
        steps = ", ".join(f"{one.measured_s:.3f}" for one in found)
        lines.append([str(row.stages), row.schedule, row.title, steps, errors_text])
    print(table(["K", "schedule", "stages", "step (s)", "error of the prediction"], lines))
    print(
        f"\nmean error {100 * statistics.fmean(errors):.2f} % (target {100 * MEAN:g} %), worst "
        f"{100 * max(errors):.2f} % (target {100 * WORST:g} %), {len(errors)} predictions\n"
    )


def report_transformer(rows: Sequence[Row]) -> None:
    lines, errors = [], []
    for row, found in measured(rows):
        errors += [abs(one.error) for one in found]
        lines += [
            [
                row.schedule,
                str(one.chunks),
                f"{one.measured_s:.3f}",
                f"{100 * one.error:+.1f} %",
                f"{100 * one.noise:.1f} %",
            ]
            for one in found
        ]
    print(table(["schedule", "M", "step (s)", "error of the prediction", "noise of a repeated step"], lines))
    print(f"\nmean error {100 * statistics.fmean(errors):.2f} % (target {100 * TRANSFORMER_MEAN:g} %)\n")


def measured(rows: Sequence[Row]) -> Iterator[tuple[Row, list[Found]]]:
    """All rows, those of one K in one set of processes."""
    for stages in sorted({row.stages for row in rows}):
        same = [row for row in rows if row.stages == stages]
        with launched(__file__, [asdict(row) for row in same], stages) as leader:
            assert leader.stdout is not None
            for row in same:
                found = [Found(**one) for one in json.loads(leader.stdout.readline())]
                print(f"K = {stages} {row.schedule} {row.title}: {found}", file=sys.stderr, flush=True)
                yield row, found


# --- a rank


def work(rows: Sequence[Row]) -> None:
    place = Place.from_environment()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.local_ranks))
    gc.freeze()  # as chunktune's worker does
    device = open_device("cpu", place.local_rank, place.local_ranks)
    group = Group(place, device)
    group.open()
    # The first pipeline of new processes is slower than any after it: it runs once without being counted.
    Bench.of(rows[0], group, device).trial(rows[0].chunks[0])
    for row in rows:
        bench = Bench.of(row, group, device)
        trials = [bench.trial(chunks) for chunks in row.chunks]
        found = bench.all_pairs(trials) if row.pairs else [_found(trial) for trial in trials]
        if place.rank == 0:
            print(json.dumps([asdict(one) for one in found]), flush=True)
    group.close()


def _found(trial: Trial) -> Found:
    assert trial.step_median_s is not None and trial.predicted is not None and trial.predicted.step_s is not None
    error = trial.predicted.step_s / trial.step_median_s - 1
    overhead_s = trial.predicted.overhead_s or 0.0
    return Found(trial.chunks, trial.step_median_s, trial.predicted.step_s, error, 0.0, overhead_s)


@dataclass
class Bench:
    """One pipeline under test, the same on every rank: what is collective is called by all in the same order."""

    row: Row
    plan: Plan
    measurer: Measurer
    trials: list[Trial]

    @classmethod
    def of(cls, row: Row, group: Group, device: Device) -> Bench:
        place = group.place
        plan = make_plan(row.spec, place.ranks, str(Path.cwd()))
        assert plan.counts is not None
        rank = RankWork(row.spec, plan.model, plan.counts, rank=place.rank, ranks=place.ranks, device=device)
        return cls(row, plan, Measurer((rank,), group, Effort(trial_steps=3)), [])

    def foretold(self, chunks: int, reports: Sequence[RankReport], trials: Sequence[Trial]) -> Predicted:
        seconds = [report.seconds for report in reports if report.seconds is not None]
        micro_batch, _ = self.plan.candidates.batch_of(chunks)
        operations = Operations(
            parts=tuple(sorted((part for rank in seconds for part in rank.parts), key=lambda part: part.part)),
            update_s=tuple(rank.update_s for rank in seconds),
            boundary_bytes=self.measurer.work.boundary_bytes(micro_batch),
        )
        shape = Shape(self.row.schedule, self.plan.stages, self.plan.virtual_stages)
        overhead_s = statistics.median(rank.overhead_s for rank in seconds)
        return predict(shape, chunks, operations, [report.peak_bytes for report in reports], trials, overhead_s)

    def trial(self, chunks: int) -> Trial:
        """Rehearsed, predicted, and only then measured."""
        micro_batch, _ = self.plan.candidates.batch_of(chunks)
        predicted = self.foretold(chunks, self.measurer.rehearsal(chunks, micro_batch), self.trials)
        trial = trial_of(self.plan, chunks, self.measurer.trial(chunks, micro_batch), predicted)
        self.trials.append(trial)
        return trial

    def all_pairs(self, trials: Sequence[Trial]) -> list[Found]:
        """Rehearsals and real steps of every M in turns."""
        return [self._pairs(trial.chunks, [other for other in trials if other is not trial]) for trial in trials]

    def _pairs(self, chunks: int, others: Sequence[Trial]) -> Found:
        predicted, real = [], []
        for turn in range(self.row.pairs):
            for rehearse in (True, False) if turn % 2 == 0 else (False, True):
                if rehearse:
                    predicted.append(self._predicted(chunks, others))
                else:
                    real.append(self._real(chunks))
        errors = [
            one.step_s / step_s - 1 for one, step_s in zip(predicted, real, strict=True) if one.step_s is not None
        ]
        noise = statistics.median(abs(later / earlier - 1) for earlier, later in pairwise(real))
        median_s = statistics.median(one.step_s for one in predicted if one.step_s is not None)
        overhead_s = predicted[0].overhead_s or 0.0
        return Found(chunks, statistics.median(real), median_s, statistics.median(errors), noise, overhead_s)

    def _predicted(self, chunks: int, others: Sequence[Trial]) -> Predicted:
        micro_batch, _ = self.plan.candidates.batch_of(chunks)
        return self.foretold(chunks, self.measurer.rehearsal(chunks, micro_batch), others)

    def _real(self, chunks: int) -> float:
        micro_batch, _ = self.plan.candidates.batch_of(chunks)
        return statistics.median(step_seconds(self.measurer.block(chunks, micro_batch, 1)))


if __name__ == "__main__":
    main()
