"""A sweep under way: its journal events folded into a state, and how long it may still take. Pure, without a clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from chunktune.candidates import ALL_DIVISORS, ladder
from chunktune.record import loss_is_final, lost_chunks
from chunktune.report import fullest_stage
from chunktune.results import Criterion, Round, Trial
from chunktune.standing import best_of

SETTLING_VALUES = 1
"""What refining and the joint rounds take, in values of the climb: with it the median of 1,200 estimates is right."""
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """What the workers were asked last: "trial", "rounds" or "confirm" of these M, and when (seconds of the sweep)."""

    kind: str
    values: tuple[int, ...]
    began_s: float


@dataclass(frozen=True)
class Seen:
    """What the events of a sweep say so far.

    `budget_s`: sweep.budget, null where not known. `elapsed_s`: the latest stamp. `pending`: what happens while no
    `task` is in hand. `trials`: the latest of each M, null where the worker group was lost to it. `latest`: the last
    trial that says something of memory. `rungs`: the M that the climb visits, ascending; `climbed`: of those it came
    to, when. `climbing`: no task yet was one of those that follow the climb. `took_s`: seconds of each trial.
    """

    budget_s: float | None = None
    elapsed_s: float = 0.0
    pending: str = "starting the workers"
    task: Task | None = None
    criterion: Criterion = "pipeline"
    confirms: bool = True
    rungs: tuple[int, ...] = ()
    trials: Mapping[int, Trial | None] = field(default_factory=dict)
    rounds: tuple[Round, ...] = ()
    best: Trial | None = None
    latest: Trial | None = None
    climbed: Mapping[int, float] = field(default_factory=dict)
    climbing: bool = True
    took_s: Mapping[int, float] = field(default_factory=dict)
    lost: tuple[tuple[str, tuple[int, ...]], int] | None = None

    def add(self, event: Event) -> Seen:
        """The state after one more event; events that say nothing of progress change nothing.

        Raises pydantic.ValidationError, LookupError, TypeError or ValueError for one that is not as `record.py` says.
        """
        fold = _FOLDS.get(event["event"])
        seen = self if fold is None else fold(self, event)
        return replace(seen, elapsed_s=max(self.elapsed_s, float(event.get("elapsed_s", 0.0))))


# --- folding


def _started(seen: Seen, event: Event) -> Seen:
    spec = event["spec"]
    criterion: Criterion = "stage" if spec["sweep"]["criterion"] == "stage" else "pipeline"
    confirms = not event["quick"] and event.get("mode", "measured") == "measured"
    return replace(seen, criterion=criterion, confirms=confirms, rungs=_rungs(event), pending=_NEXT)


def _rungs(start: Event) -> tuple[int, ...]:
    """The M that the climb visits, as `chunktune.candidates` makes them of the legal ones."""
    legal = tuple(each["chunks"] for each in start["candidates"] if each["legal"])
    batch = start["spec"]["batch"]
    every = batch.get("mini_batch") is None or isinstance(batch.get("chunks"), (list, tuple))
    return legal if every or len(legal) <= ALL_DIVISORS else ladder(legal)


def _begun(seen: Seen, event: Event) -> Seen:
    task = Task(str(event["task"]), tuple(event["values"]), float(event["elapsed_s"]))
    climbing = seen.climbing and _climbs(seen, task)
    climbed = seen.climbed
    if climbing and task.kind == "trial" and task.values[0] == _next_rung(seen):
        climbed = {task.values[0]: task.began_s, **climbed}  # a second try began with the first
    return replace(seen, task=task, climbing=climbing, climbed=climbed)


def _next_rung(seen: Seen) -> int | None:
    return next((chunks for chunks in seen.rungs if chunks not in seen.trials), None)


def _climbs(seen: Seen, task: Task) -> bool:
    """Whether a task is one of the climb: the next rung, the last one ahead of its turn, or a rung's duel."""
    if task.kind == "trial":
        return task.values[0] in (_next_rung(seen), *seen.rungs[-1:])
    return task.kind == "rounds" and len(task.values) == 2 and task.values[0] == max(seen.climbed, default=None)


def _tried(seen: Seen, event: Event) -> Seen:
    trial = Trial.model_validate(event["trial"])
    after = replace(seen, task=None, pending=_NEXT, lost=None)
    if trial.state == "skipped":
        return after
    if seen.task is not None:
        took_s = max(0.0, float(event["elapsed_s"]) - seen.task.began_s)
        after = replace(after, took_s={**seen.took_s, trial.chunks: took_s})
    return _with_trial(after, trial.chunks, trial)


def _confirmed(seen: Seen, event: Event) -> Seen:
    trial = Trial.model_validate(event["trial"])
    after = replace(seen, task=None, pending=_NEXT, lost=None)
    if trial.fits:
        return replace(after, latest=trial if _tells_memory(trial) else after.latest)
    return after if trial.state == "skipped" else _with_trial(after, trial.chunks, trial)


def _compared(seen: Seen, event: Event) -> Seen:
    rounds = tuple(Round.model_validate(each) for each in event["rounds"])
    after = replace(seen, task=None, pending=_NEXT, lost=None, rounds=(*seen.rounds, *rounds))
    return replace(after, best=_best(after))


def _lost(seen: Seen, event: Event) -> Seen:
    task = (str(event["task"]), tuple(event["values"]))
    losses = seen.lost[1] + 1 if seen.lost and seen.lost[0] == task else 1
    after = replace(seen, task=None, pending="starting the workers again", lost=(task, losses))
    if not loss_is_final(event["state"], losses):
        return after
    return _with_trial(replace(after, lost=None), lost_chunks(dict(event)), None)


def _with_trial(seen: Seen, chunks: int, trial: Trial | None) -> Seen:
    latest = trial if trial is not None and _tells_memory(trial) else seen.latest
    after = replace(seen, trials={**seen.trials, chunks: trial}, latest=latest)
    return replace(after, best=_best(after))


def _tells_memory(trial: Trial) -> bool:
    short = trial.shortage
    return fullest_stage(trial) is not None or (short is not None and short.needed_bytes is not None)


def _best(seen: Seen) -> Trial | None:
    """The best by the search's own measure; null where nothing fits."""
    fitting = {chunks: trial for chunks, trial in sorted(seen.trials.items()) if trial is not None and trial.fits}
    return fitting[best_of(list(fitting.values()), seen.rounds, seen.criterion)] if fitting else None


def _resumed(seen: Seen, event: Event) -> Seen:
    return replace(seen, task=None, pending="starting the workers", lost=None)


def _ended(seen: Seen, event: Event) -> Seen:
    return replace(seen, task=None, pending="writing the record", climbing=False)


_NEXT = "preparing what comes next"
_FOLDS: Mapping[str, Callable[[Seen, Event], Seen]] = {
    "start": _started,
    "begin": _begun,
    "trial": _tried,
    "rounds": _compared,
    "confirm": _confirmed,
    "lost": _lost,
    "resumed": _resumed,
    "end": _ended,
}


# --- how long it may take


class Left(NamedTuple):
    """Seconds that a sweep may still take: "about" by what its values of M took, "at most" by its budget alone."""

    how: Literal["about", "at most"]
    seconds: float


def remaining(seen: Seen, elapsed_s: float) -> Left | None:
    """How long the sweep may still take, `elapsed_s` seconds after its start; None where nothing is known."""
    within_s = None if seen.budget_s is None else max(0.0, seen.budget_s - elapsed_s)
    likely_s = _estimate_s(seen, elapsed_s)
    if likely_s is not None and (within_s is None or likely_s <= within_s):
        return Left("about", likely_s)
    return None if within_s is None else Left("at most", within_s)


def _estimate_s(seen: Seen, elapsed_s: float) -> float | None:
    """What the rest of a climb may take, and what follows it; None before a value is done with, and after the climb."""
    if seen.task is not None and seen.task.kind == "confirm":
        took_s = seen.took_s.get(seen.task.values[0])
        return None if took_s is None else max(0.0, took_s - (elapsed_s - seen.task.began_s))
    began = sorted(seen.climbed.values())
    if not seen.climbing or len(began) < 2:
        return None
    value_s = (began[-1] - began[0]) / (len(began) - 1)  # its duels and lost groups included
    in_hand_s = max(0.0, value_s - (elapsed_s - began[-1]))
    ahead = sum(chunks > max(seen.climbed) and chunks not in seen.trials for chunks in seen.rungs)
    confirm_s = sum(seen.took_s.values()) / len(seen.took_s) if seen.confirms and seen.took_s else 0.0
    return in_hand_s + (ahead + SETTLING_VALUES) * value_s + confirm_s
