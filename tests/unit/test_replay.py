from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from sample_record import a_round, batch_of, begin_event, failed_trial, lost_event, ok_trial, shortage, start_event

from chunktune.candidates import Candidates
from chunktune.errors import EnvironmentFailedError
from chunktune.journal import Event
from chunktune.record import assemble
from chunktune.replay import JournaledRunner
from chunktune.replay import lost_event as made_lost_event
from chunktune.results import Round, Trial
from chunktune.search import Found, Rules, TrialLost, search

TASK_S = {"trial": 10.0, "rounds": 5.0, "confirm": 20.0}


class GroupEnded(BaseException):
    """What the death of the worker group looks like to this process: nothing after it runs."""

    def __init__(self, note: Event | None) -> None:
        self.note = note


@dataclass
class World:
    """Machines that answer a question always alike, and kill the group at the questions listed in `deaths`."""

    deaths: list[tuple[str, tuple[int, ...], Event | None]] = field(default_factory=list)
    oom_from: int = 16
    now_s: float = 0.0
    asked: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def work(self, task: str, values: Sequence[int]) -> None:
        question = (task, tuple(values))
        self.asked.append(question)
        self.now_s += TASK_S[task]
        for death in self.deaths:
            if death[:2] == question:
                self.deaths.remove(death)
                raise GroupEnded(death[2])

    def trial(self, chunks: int) -> Trial:
        self.work("trial", [chunks])
        return ok_trial(chunks) if chunks < self.oom_from else failed_trial(chunks, "oom")

    def rounds(self, values: Sequence[int], count: int) -> Sequence[Round]:
        self.work("rounds", values)
        return [a_round(values, 1 + index / 10) for index in range(count)]

    def confirm(self, chunks: int) -> Trial:
        self.work("confirm", [chunks])
        return ok_trial(chunks)

    def freshness(self) -> str:
        return "fresh processes"

    def deadline_s(self, task: str, values: Sequence[int]) -> float:
        return 3 * TASK_S[task]


def scripted_search(runner: JournaledRunner) -> list[object]:
    """A small deterministic search: what it asks depends on every kind of answer, the time left included."""
    told: list[object] = []
    fitting: list[int] = []
    for chunks in (2, 4, 8, 16, 32):
        told.append(runner.remaining_s())
        if runner.remaining_s() <= 0:
            break
        trial = runner.trial(chunks)
        told.append(trial)
        if not trial.fits:
            break
        fitting.append(chunks)
        if len(fitting) > 1:
            try:
                told.append(tuple(runner.rounds(fitting[-2:], 2)))
            except TrialLost as lost:
                told.append(lost.trial)
                fitting.remove(lost.trial.chunks)
    if fitting:
        told.append(runner.confirm(fitting[-1]))
    return told


def live_on(events: list[Event], world: World, budget_s: float) -> list[object]:
    """One life of the group: the search from its beginning over the journal so far."""
    runner = JournaledRunner(list(events), world, events.append, budget_s, lambda: world.now_s, batch_of)
    return scripted_search(runner)


def sweep(events: list[Event], world: World, budget_s: float = 1000.0) -> list[object]:
    """Lives of the group until one comes to the end; each death is journaled by what outlives it."""
    for attempt in itertools.count():
        if events[-1]["event"] == "lost":
            events.append(group_event(attempt, events[-1]["elapsed_s"] + 7.0))
        try:
            return live_on(events, world, budget_s)
        except GroupEnded as end:
            lost = made_lost_event(events, end.note)
            assert lost is not None
            events.append(lost)
    raise AssertionError


def group_event(attempt: int, elapsed_s: float) -> Event:
    return {"event": "group", "generation": attempt, "kind": "processes", "elapsed_s": elapsed_s}


def note(state: str, chunks: int | None, **changes: object) -> Event:
    reason = f"worker said {state}"
    return {"state": state, "reason": reason, "rank": 0, "chunks": chunks, "shortage": None, "time_ns": 0, **changes}


# --- replay ------------------------------------------------------------------------------------------------


def test_a_whole_sweep_journals_begin_and_answer_of_each_question() -> None:
    events = [start_event(), group_event(0, 8.0)]
    world = World()
    sweep(events, world)
    kinds = [(event["event"], event.get("task"), event.get("elapsed_s")) for event in events[2:6]]
    assert kinds == [("begin", "trial", 8.0), ("trial", None, 18.0), ("begin", "trial", 18.0), ("trial", None, 28.0)]
    assert events[2]["values"] == [2] and events[2]["deadline_s"] == 30.0
    assert events[-1]["event"] == "confirm" and events[-1]["fresh"] == "fresh processes"
    assert world.asked[-1] == ("confirm", (8,))


DEATHS = {
    "none": [],
    "trial killed once": [("trial", (4,), None)],
    "trial killed twice": [("trial", (4,), None), ("trial", (4,), None)],
    "trial timed out": [("trial", (8,), note("timeout", 8))],
    "trial out of memory": [("trial", (8,), note("oom", 8, shortage=shortage().model_dump(mode="json")))],
    "rounds killed once": [("rounds", (2, 4), None)],
    "rounds killed twice": [("rounds", (2, 4), None), ("rounds", (2, 4), note("killed", 4))],
    "rounds raised": [("rounds", (4, 8), note("error", 8))],
    "confirm killed once": [("confirm", (8,), None)],
    "confirm killed twice": [("confirm", (8,), None), ("confirm", (8,), note("killed", 8))],
    "deaths all over": [("trial", (2,), None), ("rounds", (2, 4), None), ("trial", (8,), note("error", 8))],
}


@pytest.mark.parametrize("deaths", DEATHS.values(), ids=DEATHS)
@pytest.mark.parametrize("budget_s", [1000.0, 45.0, 30.0])
def test_every_beginning_of_a_journal_leads_to_the_same_end(
    deaths: list[tuple[str, tuple[int, ...], Event | None]], budget_s: float
) -> None:
    first = [start_event(), group_event(0, 8.0)]
    result = sweep(first, World(list(deaths)), budget_s)
    for size in range(2, len(first) + 1):
        events = list(first[:size])
        left = deaths[sum(event["event"] == "lost" for event in events) :]
        world = World(list(left))
        assert sweep(events, world, budget_s) == result
        assert [e for e in events if e["event"] in ("trial", "rounds", "confirm", "lost")] == [
            e for e in first if e["event"] in ("trial", "rounds", "confirm", "lost")
        ]


def test_a_replayed_answer_costs_no_work() -> None:
    events = [start_event(), group_event(0, 8.0)]
    sweep(events, World())
    world = World()
    size = len(events)
    assert live_on(events, world, 1000.0)
    assert (world.asked, world.now_s, len(events)) == ([], 0.0, size)


@pytest.mark.parametrize("size", range(2, 17))
def test_a_sudden_death_at_any_moment_changes_nothing(size: int) -> None:
    whole = [start_event(), group_event(0, 8.0)]
    result = sweep(whole, World())
    events = whole[:size]
    lost = made_lost_event(events, None)
    if lost is not None:
        events.append(lost)
    assert [told for told in sweep(events, World()) if not isinstance(told, float)] == [
        told for told in result if not isinstance(told, float)
    ]


def answers(deaths: Sequence[tuple[str, tuple[int, ...], Event | None]]) -> tuple[list[object], World, list[Event]]:
    world, events = World(list(deaths)), [start_event()]
    return sweep(events, world), world, events


def test_a_trial_killed_once_is_tried_again() -> None:
    told, world, _ = answers(DEATHS["trial killed once"])
    assert ok_trial(4) in told
    assert world.asked.count(("trial", (4,))) == 2


def test_a_trial_killed_twice_is_killed() -> None:
    told, world, _ = answers(DEATHS["trial killed twice"])
    killed = next(each for each in told if isinstance(each, Trial) and each.chunks == 4)
    assert (killed.state, killed.micro_batch, killed.mini_batch) == ("killed", 8, 32)
    assert "without a word" in str(killed.reason)
    assert world.asked.count(("trial", (4,))) == 2


@pytest.mark.parametrize("state", ["oom", "timeout", "error"])
def test_what_a_worker_could_still_say_decides_at_once(state: str) -> None:
    said = note(state, 4, shortage=shortage().model_dump(mode="json"))
    told, world, _ = answers([("trial", (4,), said)])
    lost = next(each for each in told if isinstance(each, Trial) and each.chunks == 4)
    assert (lost.state, lost.rank, lost.reason, lost.shortage) == (state, 0, f"worker said {state}", shortage())
    assert world.asked.count(("trial", (4,))) == 1


def test_rounds_lose_the_value_that_the_note_names() -> None:
    told, world, _ = answers([("rounds", (2, 4), note("error", 4))])
    lost = next(each for each in told if isinstance(each, Trial) and not each.fits)
    assert (lost.chunks, lost.state) == (4, "error")
    assert world.asked.count(("rounds", (2, 4))) == 1


def test_rounds_without_a_culprit_lose_their_first_value_at_the_second_death() -> None:
    told, world, _ = answers([("rounds", (2, 4), None), ("rounds", (2, 4), None)])
    lost = next(each for each in told if isinstance(each, Trial) and not each.fits)
    assert (lost.chunks, lost.state) == (2, "killed")
    assert world.asked.count(("rounds", (2, 4))) == 2


def test_a_confirmation_killed_twice_says_so() -> None:
    told, world, _ = answers(DEATHS["confirm killed twice"])
    assert isinstance(told[-1], Trial) and (told[-1].chunks, told[-1].state) == (8, "killed")
    assert world.asked.count(("confirm", (8,))) == 2


@pytest.mark.parametrize("deaths", DEATHS.values(), ids=DEATHS)
def test_the_record_of_the_journal_says_what_the_search_was_told(deaths) -> None:
    told, _, events = answers(deaths)
    latest = {each.chunks: each for each in told if isinstance(each, Trial)}
    assert {trial.chunks: trial for trial in assemble(events).trials} == latest


CANDIDATES = Candidates("mini_batch", 32, (2, 4, 8, 16, 32), (2, 4, 8, 16, 32), "batch", "schedule")


def real_sweep(events: list[Event], world: World) -> Found:
    for attempt in itertools.count():
        if events[-1]["event"] == "lost":
            events.append(group_event(attempt, events[-1]["elapsed_s"] + 7.0))
        runner = JournaledRunner(list(events), world, events.append, 1000.0, lambda: world.now_s, batch_of)
        try:
            return search(CANDIDATES, runner, Rules("pipeline", 0.01, 1))
        except GroupEnded as end:
            lost = made_lost_event(events, end.note)
            assert lost is not None
            events.append(lost)
    raise AssertionError


@pytest.mark.parametrize("deaths", DEATHS.values(), ids=DEATHS)
def test_the_real_search_finds_the_same_from_every_beginning_of_its_journal(deaths) -> None:
    first = [start_event(), group_event(0, 8.0)]
    found = real_sweep(first, World(list(deaths), oom_from=32))
    assert {trial.chunks for trial in found.trials} >= {2, 4, 8}
    for size in range(2, len(first) + 1):
        events = list(first[:size])
        left = deaths[sum(event["event"] == "lost" for event in events) :]
        assert real_sweep(events, World(list(left), oom_from=32)) == found


# --- time --------------------------------------------------------------------------------------------------


def test_the_time_left_is_that_of_the_last_answer_and_of_no_clock() -> None:
    world, events = World(), [start_event(), group_event(0, 8.0)]
    runner = JournaledRunner(events, world, events.append, 100.0, lambda: world.now_s, batch_of)
    assert runner.remaining_s() == 100.0
    runner.trial(2)
    world.now_s += 500
    assert runner.remaining_s() == 100.0 - 18.0
    assert runner.elapsed_s() == 518.0


def test_a_restart_that_ate_the_budget_does_not_rewrite_the_past() -> None:
    events = [start_event(), group_event(0, 8.0), begin_event("trial", [2], 8.0)]
    events += [{"event": "trial", "trial": ok_trial(2).model_dump(mode="json"), "elapsed_s": 18.0}]
    events += [begin_event("trial", [4], 18.0), lost_event("trial", [4], "timeout", 90.0), group_event(1, 200.0)]
    runner = JournaledRunner(events, World(), events.append, 100.0, lambda: 0.0, batch_of)
    runner.trial(2)
    assert runner.remaining_s() == 82.0
    assert runner.trial(4).state == "timeout"
    assert runner.remaining_s() == 10.0
    assert not runner.replaying
    runner.trial(8)
    assert events[-1]["elapsed_s"] == 200.0
    assert runner.remaining_s() == -100.0


def test_a_group_given_up_before_a_task_begins_has_lost_nothing() -> None:
    class WantsAFreshGroup(World):
        def deadline_s(self, task: str, values: Sequence[int]) -> float:
            if task == "confirm":
                raise GroupEnded(None)
            return 1.0

    events = [start_event(), group_event(0, 8.0)]
    with pytest.raises(GroupEnded):
        live_on(events, WantsAFreshGroup(), 1000.0)
    assert made_lost_event(events, None) is None
    assert live_on(events, World(), 1000.0)[-1] == ok_trial(8)


# --- another journal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        {"event": "trial", "trial": ok_trial(4).model_dump(mode="json"), "elapsed_s": 1.0},
        {"event": "confirm", "trial": ok_trial(2).model_dump(mode="json"), "elapsed_s": 1.0},
        {"event": "rounds", "values": [2], "rounds": [{"blocks": []}], "elapsed_s": 1.0},
        lost_event("rounds", [2], "killed", 1.0),
        lost_event("trial", [4], "killed", 1.0),
    ],
)
def test_an_answer_to_another_question_is_an_error(event: Event) -> None:
    runner = JournaledRunner([start_event(), event], World(), print, 100.0, lambda: 0.0, batch_of)
    with pytest.raises(EnvironmentFailedError, match="the search asks for trial of M = 2; a journal is resumed by"):
        runner.trial(2)


def test_rounds_over_other_values_are_another_question() -> None:
    event = {"event": "rounds", "values": [2, 4], "rounds": [{"blocks": []}], "elapsed_s": 1.0}
    runner = JournaledRunner([event], World(), print, 100.0, lambda: 0.0, batch_of)
    with pytest.raises(
        EnvironmentFailedError, match=r"rounds of M = 2, 4 where the search asks for rounds of M = 4, 2"
    ):
        runner.rounds([4, 2], 1)


def test_what_the_budget_cut_short_is_asked_again() -> None:
    """A sweep that goes on with a larger budget finds no answer in a trial, or in rounds, that had no time."""
    cut = ok_trial(2).model_copy(update={"state": "skipped"}).model_dump(mode="json")
    events = [
        {"event": "trial", "trial": cut, "elapsed_s": 5.0},
        {"event": "rounds", "values": [2], "rounds": [], "elapsed_s": 5.0},
    ]
    runner = JournaledRunner([start_event(), *events], World(), lambda _: None, 100.0, lambda: 0.0, batch_of)
    assert not runner.replaying
    assert runner.trial(2).fits


def test_what_was_open_when_the_command_ended_is_held_against_nobody() -> None:
    begin = {"event": "begin", "task": "trial", "values": [4], "elapsed_s": 1.0}
    assert made_lost_event([start_event(), begin], None) is not None
    assert made_lost_event([start_event(), begin, {"event": "resumed", "elapsed_s": 1.0}], None) is None


# --- lost events -------------------------------------------------------------------------------------------


def test_nothing_is_lost_where_nothing_was_open() -> None:
    done = {"event": "trial", "trial": ok_trial(2).model_dump(mode="json"), "elapsed_s": 1.0}
    assert made_lost_event([], None) is None
    assert made_lost_event([start_event()], note("error", 2)) is None
    assert made_lost_event([start_event(), begin_event("trial", [2], 0.0), done], note("error", 2)) is None
    open_twice = [begin_event("trial", [2], 0.0), lost_event("trial", [2], "killed", 1.0)]
    assert made_lost_event(open_twice, None) is None
    assert made_lost_event([begin_event("trial", [2], 0.0), {"event": "end", "elapsed_s": 1.0}], None) is None


def test_a_group_that_ended_without_a_word_was_killed() -> None:
    events = [start_event(), begin_event("rounds", [4, 8], 12.0), {"event": "warning", "text": "torn"}]
    lost = made_lost_event(events, None)
    assert lost is not None
    assert (lost["task"], lost["values"], lost["chunks"], lost["state"]) == ("rounds", [4, 8], 4, "killed")
    assert "without a word" in lost["reason"]
    assert (lost["rank"], lost["shortage"], lost["elapsed_s"]) == (None, None, 12.0)


def test_the_note_names_state_reason_rank_and_value() -> None:
    said = note("oom", 8, rank=3, shortage=shortage().model_dump(mode="json"))
    lost = made_lost_event([begin_event("rounds", [4, 8], 12.0)], said)
    assert lost is not None
    assert (lost["chunks"], lost["state"], lost["rank"]) == (8, "oom", 3)
    assert lost["shortage"]["needed_bytes"] == shortage().needed_bytes


@pytest.mark.parametrize("chunks", [None, 16])
def test_a_value_that_was_not_in_the_task_is_not_blamed(chunks: int | None) -> None:
    lost = made_lost_event([begin_event("rounds", [4, 8], 12.0)], note("error", chunks))
    assert lost is not None and lost["chunks"] == 4


def test_an_unknown_state_counts_as_an_error() -> None:
    lost = made_lost_event([begin_event("trial", [4], 12.0)], note("melted", 4))
    assert lost is not None and lost["state"] == "error"


def test_the_time_of_the_note_counts_toward_the_budget() -> None:
    begin = {**begin_event("trial", [4], 12.0), "at": "2026-01-02T03:04:05.000000+00:00"}
    at_ns = 1767323045 * 10**9
    for time_ns, elapsed_s in ((at_ns + 30 * 10**9, 42.0), (at_ns - 10**9, 12.0)):
        lost = made_lost_event([begin], note("timeout", 4, time_ns=time_ns))
        assert lost is not None and lost["elapsed_s"] == elapsed_s
    lost = made_lost_event([begin], note("timeout", 4), elapsed_s=99.0)
    assert lost is not None and lost["elapsed_s"] == 99.0
