"""A record for a dashboard: the `customSmallerIsBetter` JSON of github-action-benchmark. Pure.

An array of {name, unit, value, range, extra}; `range` is a text "± <number>", which the action reads back
(github-action-benchmark, src/extractRangeInfo.ts). Names stay the same while M changes, so that each is one curve.
"""

from __future__ import annotations

import json
from typing import Any

from chunktune.report import fullest_stage, plain, setting, share_of_budget, trial_of
from chunktune.report.limit import schedule_name
from chunktune.results import Record, Trial

Entry = dict[str, Any]


def to_benchmark(record: Record) -> str:
    """Step time in seconds, peak of the fullest rank as a share of its budget, and bubble as a share of the step.

    All at the chosen M; what is not known is left out, so that a record without a choice gives an empty array.
    """
    trial = trial_of(record, record.chosen)
    entries = [] if trial is None else [_step(trial), _peak(trial), _bubble(trial)]
    named = [_named(entry, record, trial) for entry in entries if entry is not None and trial is not None]
    return json.dumps(named, indent=2, allow_nan=False) + "\n"


def _named(entry: Entry, record: Record, trial: Trial) -> Entry:
    """The entry under a name that tells settings apart, with the rest of the answer in `extra`."""
    extra = [f"M = {trial.chunks}, b = {trial.micro_batch}, N = {trial.mini_batch}", record.mode]
    if record.verdict is not None:
        extra.append(f"limit {record.verdict.limit}, confidence {record.verdict.confidence}")
    extra += entry.pop("more", [])
    name = f"{entry['name']} ({schedule_name(record)}, K = {_ranks(record, trial)})"
    return {**entry, "name": plain(name), "extra": "\n".join(extra)}


def _ranks(record: Record, trial: Trial) -> object:
    return len(trial.stages) or setting(record, "pipeline", "stages")


def _step(trial: Trial) -> Entry | None:
    if trial.step_median_s is None:
        return None
    entry: Entry = {"name": "step time", "unit": "s", "value": trial.step_median_s}
    if trial.step_interval_s is not None:
        half_s = max(abs(end - trial.step_median_s) for end in trial.step_interval_s)
        entry["range"] = f"± {half_s:.9f}"
    return entry


def _peak(trial: Trial) -> Entry | None:
    stage = fullest_stage(trial)
    if stage is None:
        return None
    entry: Entry = {"name": "peak of budget", "unit": "share", "value": share_of_budget(stage)}
    return {**entry, "more": [f"rank {stage.rank}, {stage.peak_bytes} of {stage.budget_bytes} bytes"]}


def _bubble(trial: Trial) -> Entry | None:
    if trial.bubble is None or trial.bubble.measured is None:
        return None
    ideal = [] if trial.bubble.ideal is None else [f"ideal {trial.bubble.ideal:.6g}"]
    return {"name": "bubble", "unit": "share", "value": trial.bubble.measured, "more": ideal}
