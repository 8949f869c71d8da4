"""A sweep that outlives its workers: answers of the journal first, the live pipeline after them. Pure.

When a worker dies the whole group is started again and the search, which is deterministic, runs again from
its beginning. `JournaledRunner` hands it the answers that the journal already holds, in their order, so that
it arrives at the very question that was open; from there on it asks the live pipeline and journals what that
answers.

    journal    start  group  begin  trial  begin  trial  begin  lost  group
    replayed                          1             2             3: tried again, or given up with that state
    live                                                                     begin  trial  ...

Nothing but the answers consumed decides what the search is told, the time left included: a clock read between
two events would differ the second time and lead the search elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Literal, Protocol

from chunktune.errors import EnvironmentFailedError
from chunktune.journal import Event, last_elapsed_s
from chunktune.record import LOST_STATES, loss_is_final, lost_chunks, lost_trial
from chunktune.results import Round, Trial
from chunktune.search import TrialLost
from chunktune.standing import Fresh
from chunktune.strict import validated

__all__ = ["Fresh", "JournaledRunner", "LiveRunner", "Task", "lost_event"]

Task = Literal["trial", "rounds", "confirm"]

_ANSWERS = ("trial", "rounds", "confirm", "lost")
_SUDDEN = "the worker group ended without a word (signal or sudden death)"


class LiveRunner(Protocol):
    """Does the real work. What it raises ends the group; what ended it comes back as a "lost" event."""

    def trial(self, chunks: int) -> Trial:
        """Rehearse and run M = `chunks`; every state but a lost group is an answer."""

    def rounds(self, values: Sequence[int], count: int) -> Sequence[Round]:
        """Measure `count` interleaved rounds over these values of M; must not raise TrialLost itself."""

    def confirm(self, chunks: int) -> Trial:
        """Run M = `chunks` once more in a fresh group."""

    def freshness(self) -> Fresh:
        """How the group of the confirmation just done was made; asked after each `confirm`."""

    def deadline_s(self, task: Task, values: Sequence[int]) -> float:
        """Seconds that the task may take before the group counts as hung.

        Asked before the task is journaled as begun: what is raised here ends the group and loses nothing.
        """


class JournaledRunner:
    """Answers the search from `events`, then from `live`, which it journals through `append`.

    `budget_s`: sweep.budget in seconds. `clock`: monotonic seconds. `batch_of(M)` = (b, N) in samples.
    Every method raises EnvironmentFailedError where the journal's next answer is for another question.
    """

    def __init__(
        self,
        events: Sequence[Event],
        live: LiveRunner,
        append: Callable[[Event], None],
        budget_s: float,
        clock: Callable[[], float],
        batch_of: Callable[[int], tuple[int, int]],
    ) -> None:
        self._answers = deque(event for event in events if _is_answer(event))
        self._live = live
        self._append = append
        self._budget_s = budget_s
        self._clock = clock
        self._batch_of = batch_of
        self._base_s = last_elapsed_s(events)
        self._live_since_s = clock()
        self._consumed_s = 0.0

    @property
    def replaying(self) -> bool:
        """Whether the next answer comes from the journal."""
        return bool(self._answers)

    def trial(self, chunks: int) -> Trial:
        """The trial of M = `chunks`; a group lost to it twice, or once but not by sudden death, is one."""
        event = self._answer("trial", (chunks,), lambda: {"trial": _dump(self._live.trial(chunks))})
        return self._trial_of(event, chunks)

    def rounds(self, values: Sequence[int], count: int) -> Sequence[Round]:
        """`count` more rounds over `values`; raises search.TrialLost where one lost the group for good."""
        event = self._answer("rounds", tuple(values), lambda: self._live_rounds(values, count))
        if event["event"] == "lost":
            raise TrialLost(self._trial_of(event, lost_chunks(event)))
        return tuple(validated(Round, data, "the journal's rounds") for data in event["rounds"])

    def confirm(self, chunks: int) -> Trial:
        """The trial of M = `chunks` in a fresh group, or the state in which that group was lost."""
        event = self._answer("confirm", (chunks,), lambda: self._live_confirm(chunks))
        return self._trial_of(event, chunks)

    def remaining_s(self) -> float:
        """Seconds left of the budget at the last answer that was given; below 0 when it is overspent."""
        return self._budget_s - self._consumed_s

    def elapsed_s(self) -> float:
        """Seconds since the start of the sweep, earlier groups included: the stamp of the next event."""
        return self._base_s + self._clock() - self._live_since_s

    def left_s(self) -> float:
        """Seconds left of the budget now: for what is being measured, never for what the search is told."""
        return self._budget_s - self.elapsed_s()

    def _answer(self, task: Task, values: tuple[int, ...], work: Callable[[], Event]) -> Event:
        losses = 0
        while self._answers:
            event = self._consume(task, values)
            losses += event["event"] == "lost"
            if event["event"] != "lost" or loss_is_final(event["state"], losses):
                return event
        return self._ask_live(task, values, work)

    def _consume(self, task: Task, values: tuple[int, ...]) -> Event:
        event = self._answers[0]
        if _question(event) != (task, values):
            raise _mismatch(event, task, values)
        self._consumed_s = float(event["elapsed_s"])
        return self._answers.popleft()

    def _ask_live(self, task: Task, values: tuple[int, ...], work: Callable[[], Event]) -> Event:
        deadline_s = self._live.deadline_s(task, values)
        self._append(
            {
                "event": "begin",
                "task": task,
                "values": list(values),
                "deadline_s": deadline_s,
                "elapsed_s": self.elapsed_s(),
            }
        )
        result = work()
        event = {"event": task, **result, "elapsed_s": self.elapsed_s()}
        self._append(event)
        self._consumed_s = event["elapsed_s"]
        return event

    def _live_rounds(self, values: Sequence[int], count: int) -> Event:
        rounds = self._live.rounds(values, count)
        return {"values": list(values), "rounds": [_dump(each) for each in rounds]}

    def _live_confirm(self, chunks: int) -> Event:
        trial = self._live.confirm(chunks)
        return {"trial": _dump(trial), "fresh": self._live.freshness()}

    def _trial_of(self, event: Event, chunks: int) -> Trial:
        if event["event"] == "lost":
            return lost_trial(event, chunks, self._batch_of(chunks))
        return validated(Trial, event["trial"], "the journal's trial")


def lost_event(events: Sequence[Event], note: Event | None, elapsed_s: float | None = None) -> Event | None:
    """The "lost" event for the task that was open when a group ended; None when none was.

    `note`: the first failure that a worker of that group wrote, {state, reason, rank, chunks, shortage,
    time_ns} (time_ns: wall clock), or None where no worker could. `elapsed_s`: seconds since the start of the
    sweep by the caller's clock; where not given, that of the "begin" event and the time until the note.
    """
    begin = _open_begin(events)
    if begin is None:
        return None
    note = note or {}
    state = note.get("state", "killed")
    values: list[int] = begin["values"]
    chunks = note.get("chunks")
    return {
        "event": "lost",
        "task": begin["task"],
        "values": values,
        "chunks": chunks if chunks in values else values[0],
        "state": state if state in LOST_STATES else "error",
        "reason": note.get("reason") or _SUDDEN,
        "rank": note.get("rank"),
        "shortage": note.get("shortage"),
        "elapsed_s": _noted_elapsed_s(begin, note) if elapsed_s is None else elapsed_s,
    }


def _open_begin(events: Sequence[Event]) -> Event | None:
    """The task without an answer; none after "resumed": what was open then ended with the command, not by itself."""
    ends = ("begin", "end", "resumed", *_ANSWERS)
    last = next((event for event in reversed(events) if event["event"] in ends), None)
    return last if last is not None and last["event"] == "begin" else None


def _noted_elapsed_s(begin: Event, note: Event) -> float:
    elapsed_s = float(begin["elapsed_s"])
    if "at" not in begin or "time_ns" not in note:
        return elapsed_s
    began_s = datetime.fromisoformat(begin["at"]).timestamp()
    return elapsed_s + max(0.0, float(note["time_ns"]) / 1e9 - began_s)


def _is_answer(event: Event) -> bool:
    """Whether an event answers a question of the search for good: what the budget cut short is asked again."""
    if event["event"] in ("trial", "confirm"):
        return bool(event["trial"].get("state") != "skipped")
    return bool(event["event"] in _ANSWERS and event.get("rounds") != [])


def _question(event: Event) -> tuple[str, tuple[int, ...]]:
    kind: str = event["event"]
    if kind == "lost":
        return event["task"], tuple(event["values"])
    if kind == "rounds":
        return kind, tuple(event["values"])
    return kind, (event["trial"]["chunks"],)


def _mismatch(event: Event, task: Task, values: tuple[int, ...]) -> EnvironmentFailedError:
    found, at = _question(event)
    return EnvironmentFailedError(
        f"the journal goes on with {found} of M = {_listed(at)} where the search asks for {task} of "
        f"M = {_listed(values)}; a journal is resumed by the same chunktune with the same spec: "
        "give another --output-dir"
    )


def _listed(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)


def _dump(value: Trial | Round) -> dict[str, Any]:
    return value.model_dump(mode="json")
