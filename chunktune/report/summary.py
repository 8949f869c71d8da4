"""The answer of a record in one row, and what differs between the settings of several records. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from chunktune.record import flat
from chunktune.report import fullest_stage, plain, trial_of
from chunktune.report.limit import STATE_WORDS
from chunktune.results import Bubble, Confidence, Finite, Frozen, Limit, Record, StageFigures, Trial
from chunktune.units import shorten

LONGEST_CELL = 60
# Of a device: what is another at every start, or in every place of the list.
_PASSING = ("pid", "rank", "overhead_bytes")
_OF_VERDICT = ("chunks", "micro_batch", "mini_batch", "limit", "limit_side", "confidence")


class Summary(Frozen):
    """One record in a row: the answer, and the figures of the chosen M; null where not known.

    `record`: its name. `peak_rank`, `peak_bytes`, `budget_bytes`: of the fullest rank, or where no budget is known of
    the rank with the highest peak. `bubble`: measured, or predicted in a prediction. `differs`: the settings that are
    not the same in all of the records, see `settings_of`.
    """

    record: str
    mode: str
    status: str
    quick: bool
    chunks: int | None
    micro_batch: int | None
    mini_batch: int | None
    limit: Limit | None
    limit_side: str | None
    confidence: Confidence | None
    throughput_samples_per_s: Finite | None
    step_median_s: Finite | None
    step_low_s: Finite | None
    step_high_s: Finite | None
    bubble: Finite | None
    bubble_ideal: Finite | None
    peak_rank: int | None
    peak_bytes: int | None
    budget_bytes: int | None
    started_at: str
    elapsed_s: Finite
    differs: dict[str, Any]


CSV_COLUMNS = tuple(name for name in Summary.model_fields if name != "differs")
"""One row a record, in seconds, bytes and samples/s, empty where not known."""


def summaries(records: Sequence[Record], names: Sequence[str]) -> list[Summary]:
    """One summary a record, in the given order; `names` as many as records."""
    differing = differences([settings_of(record) for record in records])
    return [
        summary(record, name, {key: values[index] for key, values in differing.items()})
        for index, (record, name) in enumerate(zip(records, names, strict=True))
    ]


def summary(record: Record, name: str, differs: Mapping[str, Any] | None = None) -> Summary:
    """The answer of one record; `differs` as in `Summary`."""
    verdict = record.verdict
    trial = trial_of(record, record.chosen)
    return Summary(
        record=plain(name),
        mode=record.mode,
        status=record.status,
        quick=record.quick,
        started_at=record.started_at,
        elapsed_s=record.elapsed_s,
        differs=dict(differs or {}),
        **{key: None if verdict is None else getattr(verdict, key) for key in _OF_VERDICT},
        **_figures(trial),
    )


def _figures(trial: Trial | None) -> dict[str, Any]:
    stage = None if trial is None else fullest_known(trial)
    low_s, high_s = (None if trial is None else trial.step_interval_s) or (None, None)
    bubble = (None if trial is None else trial.bubble) or Bubble(measured=None, ideal=None)
    return {
        "throughput_samples_per_s": None if trial is None else trial.throughput_samples_per_s,
        "step_median_s": None if trial is None else trial.step_median_s,
        "step_low_s": low_s,
        "step_high_s": high_s,
        "bubble": bubble.measured,
        "bubble_ideal": bubble.ideal,
        "peak_rank": None if stage is None else stage.rank,
        "peak_bytes": None if stage is None else stage.peak_bytes,
        "budget_bytes": None if stage is None else stage.budget_bytes,
    }


def fullest_known(trial: Trial) -> StageFigures | None:
    """The fullest rank, or where no budget is known the one with the highest peak; None where no peak is known."""
    known = [stage for stage in trial.stages if stage.peak_bytes is not None]
    return fullest_stage(trial) or max(known, key=lambda stage: stage.peak_bytes or 0, default=None)


def state_word(trial: Trial) -> str:
    """What became of a trial that has nothing to draw, in a word or two."""
    if trial.fits:
        return "not known"
    tight = trial.shortage is not None and trial.shortage.within_capacity
    return "TIGHT" if tight else STATE_WORDS[trial.state]


# --- what differs


def settings_of(record: Record) -> dict[str, Any]:
    """Dotted key -> value of what a record was made with: mode, quick, tool, the spec, the environment.

    Of the devices only what describes them: each field once, as a list of "count x value" in the order of the ranks.
    """
    environment = {key: value for key, value in record.environment.items() if key != "devices"}
    return {
        "mode": record.mode,
        "status": record.status,
        "quick": record.quick,
        **dict(flat(record.tool, "tool.")),
        **dict(flat(record.spec, "spec.")),
        **dict(flat(environment, "environment.")),
        **_device_settings(record.environment.get("devices")),
    }


def differences(settings: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Dotted key -> its value in each, of the keys that are not the same in all; an absent key is a null."""
    keys = dict.fromkeys(key for each in settings for key in each)
    values = {key: tuple(each.get(key) for each in settings) for key in keys}
    return {key: each for key, each in values.items() if any(value != each[0] for value in each)}


def _device_settings(devices: object) -> dict[str, Any]:
    if not isinstance(devices, list):
        return {} if devices is None else {"environment.devices": devices}
    tables = [device for device in devices if isinstance(device, dict)]
    keys = dict.fromkeys(key for table in tables for key in table if key not in _PASSING)
    found: dict[str, Any] = {"environment.devices": len(devices)}
    for key in keys:
        counts = Counter(shown_setting(table.get(key)) for table in tables)
        found[f"environment.devices.{key}"] = ", ".join(f"{count} x {value}" for value, count in counts.items())
    return found


def shown_setting(value: object) -> str:
    """A setting on one line of at most LONGEST_CELL characters: a text bare, anything else as JSON; "-" for null."""
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shorten(plain(text), LONGEST_CELL)
