"""One plain line for each journal event that people wait for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chunktune.report import format_rate, plain
from chunktune.report.limit import STATE_WORDS, because, why_not
from chunktune.report.trials import peak_cell, step_cell
from chunktune.results import Round, State, Trial
from chunktune.units import format_share


def progress_line(event: Mapping[str, Any]) -> str | None:
    """One plain line for a journal event that people wait for (see record.py), None for the others.

    Raises pydantic.ValidationError or KeyError for an event that is not as `record.py` says.
    """
    if event["event"] == "rounds" and not event["rounds"]:
        return None  # the budget ended in the first of them
    line = _PROGRESS.get(event["event"])
    return None if line is None else plain(line(event))


def _trial_progress(event: Mapping[str, Any]) -> str:
    trial = Trial.model_validate(event["trial"])
    return f"M = {trial.chunks}: {_progress_figures(trial) if trial.fits else why_not(trial)}"


def _progress_figures(trial: Trial) -> str:
    figures = [f"b = {trial.micro_batch}", f"N = {trial.mini_batch}", f"step {step_cell(trial)}"]
    if trial.throughput_samples_per_s is not None:
        figures.append(f"{format_rate(trial.throughput_samples_per_s)} samples/s")
    if trial.bubble is not None and trial.bubble.measured is not None:
        figures.append(f"bubble {format_share(trial.bubble.measured)}")
    if trial.stages:
        figures.append(f"peak of budget {peak_cell(trial)}")
    return ", ".join(figures)


def _rounds_progress(event: Mapping[str, Any]) -> str:
    rounds = [Round.model_validate(each) for each in event["rounds"]]
    *others, reference = event["values"]
    ratios = [f"M = {chunks} runs at {_ratio(rounds, chunks, reference)}" for chunks in others]
    count = f"{len(rounds)} round{'' if len(rounds) == 1 else 's'}"
    values = ", ".join(str(value) for value in event["values"])
    speeds = f": {', '.join(ratios)} of the speed of M = {reference}" if ratios else ""
    return f"compared M = {values} in {count}{speeds}"


def _ratio(rounds: Sequence[Round], chunks: int, against: int) -> str:
    logs = [
        math.log(upper / lower)
        for each in rounds
        if (upper := _round_rate(each, chunks)) and (lower := _round_rate(each, against))
    ]
    return format_share(math.exp(sum(logs) / len(logs))) if logs else "an unknown share"


def _round_rate(each: Round, chunks: int) -> float | None:
    """Samples/s of M = `chunks` over all its blocks in a round: samples over seconds, no mean of rates."""
    blocks = [block for block in each.blocks if block.chunks == chunks]
    seconds = sum(block.step_s for block in blocks)
    return sum(block.mini_batch for block in blocks) / seconds if seconds > 0 else None


def _confirm_progress(event: Mapping[str, Any]) -> str:
    return f"confirmation in {event.get('fresh', 'a fresh group')}: {_trial_progress(event)}"


def _lost_progress(event: Mapping[str, Any]) -> str:
    values = ", ".join(str(value) for value in event["values"])
    rank = "" if event.get("rank") is None else f" on rank {event['rank']}"
    state: State = event["state"]
    word = STATE_WORDS.get(state, state)
    why = because(event.get("reason"))
    return f"worker group lost during {event['task']} of M = {values}: {word}{rank}{why}"


def _warning_progress(event: Mapping[str, Any]) -> str:
    return f"warning: {event['text']}"


_PROGRESS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "trial": _trial_progress,
    "rounds": _rounds_progress,
    "confirm": _confirm_progress,
    "lost": _lost_progress,
    "warning": _warning_progress,
}
