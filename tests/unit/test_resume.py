"""Going on from a journal: `data/journal.jsonl` is that of a real sweep of two sleeping stages.

In it a worker was killed in the rounds, the parent after them; the sweep was resumed with a larger budget and ended.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import chunktune
from chunktune.candidates import enumerate_candidates
from chunktune.errors import UsageError
from chunktune.journal import Event, read_events
from chunktune.record import assemble
from chunktune.replay import JournaledRunner, lost_event
from chunktune.request import SweepRequest
from chunktune.results import Round, Trial, Verdict
from chunktune.resume import (
    as_recorded,
    changed_code,
    hosts_moved,
    is_finished,
    journal_of,
    note_resumed,
    refuse_other_machine,
    refuse_other_question,
)
from chunktune.search import search
from chunktune.spec import Spec
from chunktune.standing import Rules
from chunktune.verdict import decide

DATA = (Path(__file__).parents[1] / "data" / "journal.jsonl").read_bytes()
EVENTS: list[Event] = [json.loads(line) for line in DATA.splitlines()]
START = EVENTS[0]
END = EVENTS[-1]
SPEC = Spec.model_validate(START["spec"])
FIRST_BUDGET_S, LAST_BUDGET_S = 600.0, 1200.0
LINE_ENDS = [index + 1 for index, byte in enumerate(DATA) if byte == ord("\n")]
Question = tuple[str, tuple[int, ...]]


@pytest.fixture(autouse=True)
def same_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunktune, "__version__", START["tool"]["version"])


def request(**changes: Any) -> SweepRequest:
    asked = SweepRequest(SPEC, {"sweep.budget": "--set"}, "small", "/home/me", False, "OUT", resume=True, launch="new")
    return replace(asked, **changes)


def with_sweep(**changes: Any) -> SweepRequest:
    return request(spec=SPEC.model_copy(update={"sweep": SPEC.sweep.model_copy(update=changes)}))


def journal_at(folder: Path, data: bytes = DATA) -> Path:
    path = folder / "journal.jsonl"
    path.write_bytes(data)
    return path


def lines(*events: Event) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


# --- a journal cut anywhere --------------------------------------------------------------------------------


@dataclass
class Oracle:
    """A machine that answers as that of the whole journal did."""

    asked: list[Question] = field(default_factory=list)

    def _answer(self, task: str, values: Sequence[int]) -> Event:
        self.asked.append((task, tuple(values)))
        return next(event for event in EVENTS if question(event) == (task, tuple(values)) and event["event"] == task)

    def trial(self, chunks: int) -> Trial:
        return Trial.model_validate(self._answer("trial", [chunks])["trial"])

    def rounds(self, values: Sequence[int], count: int) -> Sequence[Round]:
        return [Round.model_validate(each) for each in self._answer("rounds", values)["rounds"]]

    def confirm(self, chunks: int) -> Trial:
        return Trial.model_validate(self._answer("confirm", [chunks])["trial"])

    def freshness(self) -> str:
        return "fresh processes"

    def deadline_s(self, task: str, values: Sequence[int]) -> float:
        return 60.0


def question(event: Event) -> Question | None:
    """What an event of the journal answers."""
    if event["event"] in ("trial", "confirm"):
        return event["event"], (event["trial"]["chunks"],)
    return ("rounds", tuple(event["values"])) if event["event"] == "rounds" else None


def gone_on_with(events: list[Event], oracle: Oracle) -> tuple[Verdict, list[Event]]:
    """What the search makes of these events and the oracle: the verdict, and all events."""
    candidates, rules = enumerate_candidates(SPEC, 2), Rules()
    kept = list(events)
    runner = JournaledRunner(events, oracle, kept.append, LAST_BUDGET_S, lambda: 0.0, candidates.batch_of)
    return decide(candidates, search(candidates, runner, rules), rules), kept


WHOLE_VERDICT, _ = gone_on_with(EVENTS, Oracle())


def check_cut(cut: int) -> None:
    with tempfile.TemporaryDirectory(prefix="chunktune-test-") as name:
        folder = Path(name)
        path = journal_at(folder, DATA[:cut])
        if cut < LINE_ENDS[0]:
            with pytest.raises(UsageError) as refused:
                journal_of(folder)
            assert "\n" not in str(refused.value) and "start" in str(refused.value)
            assert path.read_bytes() == DATA[:cut], "what is refused is left alone"
            return
        whole = [event for event, end in zip(EVENTS, LINE_ENDS, strict=True) if end <= cut]
        torn = cut not in LINE_ENDS
        seen = journal_of(folder)
        assert seen[: len(whole)] == whole and len(seen) == len(whole) + torn
        assert path.read_bytes() == DATA[:cut], "reading changes nothing"

        note_resumed(path, request())
        events = read_events(path)
        assert path.read_bytes().startswith(DATA[: LINE_ENDS[len(whole) - 1]]), "no whole line is lost"
        assert [event["event"] for event in events[len(whole) :]] == (["warning"] if torn else []) + ["resumed"]
        before = assemble(events)
        assert before.status == "interrupted" and before.verdict is None
        assert [trial.chunks for trial in before.trials] == sorted(
            event["trial"]["chunks"] for event in whole if event["event"] == "trial"
        )

        oracle = Oracle()
        verdict, after = gone_on_with(events, oracle)
        assert verdict == WHOLE_VERDICT
        known = {question(event) for event in whole}
        assert not known & set(oracle.asked), "what the journal holds is not measured again"
        assert assemble(after).trials == assemble(EVENTS[:-1]).trials


@pytest.mark.parametrize("cut", sorted({end + near for end in [0, *LINE_ENDS] for near in (-1, 0, 1)} - {-1}))
def test_a_journal_cut_beside_a_line_end_is_refused_or_goes_on_to_the_same_verdict(cut: int) -> None:
    check_cut(min(cut, len(DATA)))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(DATA)))
@example(LINE_ENDS[0] // 2)
def test_a_journal_cut_at_any_byte_is_refused_or_goes_on_to_the_same_verdict(cut: int) -> None:
    check_cut(cut)


# --- what cannot be gone on with ---------------------------------------------------------------------------


def without(event: Event, *keys: str) -> Event:
    return {key: value for key, value in event.items() if key not in keys}


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "holds no whole start event"),
    "no start": (lines(*EVENTS[1:]), "holds no whole start event"),
    "binary": (bytes(range(256)) * 4 + b"\n", "line 1 is not an event"),
    "bad line in the middle": (
        DATA[: LINE_ENDS[3]] + b'{"event": "tri\n' + DATA[LINE_ENDS[4] :],
        "line 5 is not an event",
    ),
    "newer": (
        lines({**START, "schema_version": 999}, *EVENTS[1:]),
        "schema_version is 999; this chunktune reads up to",
    ),
    "start without a spec": (lines(without(START, "spec")), 'the event "start" lacks spec'),
    "spec of another shape": (lines({**START, "spec": {"sweep": {"budget": 1.0}}}), "the spec in it is damaged"),
    "tool of another shape": (lines({**START, "tool": 5}), "tool"),
    "trial of another shape": (lines(START, {"event": "trial", "trial": [], "elapsed_s": 1.0}), "damaged"),
    "NaN": (lines(*EVENTS[:2]) + b'{"event": "warning", "text": NaN}\n' + lines(*EVENTS[2:]), "NaN is not a number"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_journal_is_refused_in_one_line_and_left_alone(tmp_path: Path, case: str) -> None:
    data, words = DAMAGED[case]
    path = journal_at(tmp_path, data)
    with pytest.raises(UsageError) as refused:
        journal_of(tmp_path)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert str(path) in str(refused.value) or "the journal" in str(refused.value)
    assert path.read_bytes() == data


def test_a_directory_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no journal\.jsonl; --resume takes the output directory"):
        journal_of(tmp_path)


def settled(asked: SweepRequest) -> dict[str, Any]:
    return as_recorded(asked.spec.model_dump(mode="json"), 2, 1)


def part(name: str, **changes: Any) -> SweepRequest:
    return request(spec=SPEC.model_copy(update={name: getattr(SPEC, name).model_copy(update=changes)}))


OTHERS: dict[str, tuple[SweepRequest, str]] = {
    "model": (part("model", seconds_per_chunk=0.5), "model.seconds_per_chunk was 0.01 and is 0.5"),
    "schedule": (part("pipeline", schedule="1f1b"), "pipeline.schedule was 'gpipe' and is '1f1b'"),
    "batch": (part("batch", mini_batch=8), "batch.mini_batch was 4 and is 8"),
    "chunks": (part("batch", chunks=(1, 4)), "batch.chunks was [1, 2] and is [1, 4]"),
    "memory": (part("device", memory=2**30), "device.memory was 'auto' and is 1073741824"),
    "tolerance": (with_sweep(tolerance=0.02), "sweep.tolerance was 0.01 and is 0.02"),
    "quick": (request(quick=True), "--quick was False and is True"),
    "mode": (request(rehearse=True), "mode was 'measured' and is 'rehearsed'"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_question_is_refused_and_what_differs_is_named(case: str) -> None:
    asked, words = OTHERS[case]
    with pytest.raises(UsageError) as refused:
        refuse_other_question(EVENTS, asked, settled(asked))
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert str(refused.value).count(" and is ") == 1, "nothing else differs"


def test_another_chunktune_is_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunktune, "__version__", "9.9")
    with pytest.raises(UsageError, match=r"chunktune was '.+' and is '9\.9'"):
        refuse_other_question(EVENTS, request(), settled(request()))


def test_another_number_of_stages_is_refused_and_named() -> None:
    with pytest.raises(UsageError, match=r"pipeline\.stages was 2 and is 4"):
        refuse_other_question(EVENTS, request(), as_recorded(SPEC.model_dump(mode="json"), 4, 1))


def test_everything_that_differs_is_named_up_to_a_dozen() -> None:
    other = {**settled(request()), "batch": {f"key_{index}": index for index in range(20)}}
    with pytest.raises(UsageError, match=r"batch\.chunks was .*, and \d+ more; what was measured before would not be"):
        refuse_other_question(EVENTS, request(), other)


@pytest.mark.parametrize(
    "asked", [request(), with_sweep(budget=5.0), with_sweep(budget=9999.0), with_sweep(trial_timeout=7.0)]
)
def test_the_same_question_in_another_time_is_accepted(asked: SweepRequest) -> None:
    refuse_other_question(EVENTS, asked, settled(asked))


@pytest.mark.parametrize(
    ("begun", "now", "changed"), [(None, "ab", False), ("ab", "ab", False), ("ab", "cd", True), ("ab", None, True)]
)
def test_another_factory_file_is_another_question(begun: str | None, now: str | None, changed: bool) -> None:
    assert changed_code([{**EVENTS[0], "code": begun}, *EVENTS[1:]], now) == changed


# --- the machine -------------------------------------------------------------------------------------------


def environment(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(START["environment"]))
    change(copied)
    return copied


MACHINES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "torch": (lambda env: env.update(torch="9.9"), "torch was '2.13.0+cpu' and is '9.9'"),
    "cuda": (lambda env: env.update(cuda="13.0"), "cuda was not set and is '13.0'"),
    "nccl": (lambda env: env.update(nccl="2.27"), "nccl was not set and is '2.27'"),
    "fewer": (lambda env: env["devices"].pop(), "devices was 2 and is 1"),
    "name": (lambda env: env["devices"][1].update(name="H200"), "rank 1: name was 'Intel"),
    "kind": (lambda env: env["devices"][0].update(kind="cuda"), "rank 0: kind was 'cpu' and is 'cuda'"),
    "memory": (lambda env: env["devices"][0].update(memory_bytes=1), "rank 0: memory_bytes was "),
    "cores": (lambda env: env["devices"][1].update(cores=64), "rank 1: cores was 2 and is 64"),
}


@pytest.mark.parametrize("case", MACHINES)
def test_other_devices_or_another_torch_are_refused_and_named(case: str) -> None:
    change, words = MACHINES[case]
    with pytest.raises(UsageError) as refused:
        refuse_other_machine(EVENTS, "OUT", environment(change))
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert str(refused.value).count(" and is ") == 1, "nothing else differs"


def test_the_same_machine_is_accepted_whatever_the_pids() -> None:
    refuse_other_machine(EVENTS, "OUT", environment(lambda env: env["devices"][0].update(pid=1)))
    assert hosts_moved(EVENTS, START["environment"]) is None


def test_other_hosts_with_equal_devices_are_a_warning() -> None:
    moved = environment(lambda env: [device.update(host="there") for device in env["devices"]])
    refuse_other_machine(EVENTS, "OUT", moved)
    assert hosts_moved(EVENTS, moved) == (
        "the sweep began on here and went on on there: devices of equal name may differ"
    )


# --- finished or not ---------------------------------------------------------------------------------------

RESUMED: Event = {"event": "resumed", "launch": "x", "pid": 1, "elapsed_s": 9.0}


@pytest.mark.parametrize(
    ("events", "budget_s", "finished"),
    [
        (EVENTS, LAST_BUDGET_S, True),
        (EVENTS, LAST_BUDGET_S - 1, True),
        (EVENTS, LAST_BUDGET_S + 1, False),
        (EVENTS[:-1], LAST_BUDGET_S, False),
        ([*EVENTS[:-1], {**END, "status": "failed"}], LAST_BUDGET_S, False),
        ([*EVENTS, RESUMED], LAST_BUDGET_S, False),
        ([*EVENTS, RESUMED, END], LAST_BUDGET_S, True),
        ([START, END], FIRST_BUDGET_S, True),
        ([START, END], FIRST_BUDGET_S + 1, False),
    ],
)
def test_finished_is_a_complete_end_that_no_larger_budget_takes_further(
    events: list[Event], budget_s: float, finished: bool
) -> None:
    assert is_finished(events, budget_s) is finished


def test_a_sweep_that_went_on_after_its_end_is_no_longer_complete() -> None:
    record = assemble([*EVENTS, {**RESUMED, "sweep": {"budget": 3600.0}, "sources": {"sweep.budget": "flag --budget"}}])
    assert (record.status, record.verdict, record.comparisons) == ("interrupted", None, ())
    assert record.spec["sweep"]["budget"] == 3600.0
    assert record.sources["sweep.budget"] == "flag --budget"
    assert [trial.chunks for trial in record.trials if trial.fits] == [1, 2], "what was measured stays"


def test_the_record_says_the_budget_that_was_asked_last() -> None:
    assert START["spec"]["sweep"]["budget"] == FIRST_BUDGET_S
    assert assemble(EVENTS).spec["sweep"]["budget"] == LAST_BUDGET_S
    assert assemble(EVENTS).sources["sweep.budget"] == "flag --budget"


# --- noting it ---------------------------------------------------------------------------------------------


def test_going_on_is_noted_once_a_launch(tmp_path: Path) -> None:
    path = journal_at(tmp_path, lines(*EVENTS[:5]))
    for launch in ("a", "a", "b", "a", "b"):
        note_resumed(path, request(launch=launch))
    noted = read_events(path)[5:]
    assert [(event["event"], event["launch"]) for event in noted] == [("resumed", "a"), ("resumed", "b")]
    assert {event["elapsed_s"] for event in noted} == {EVENTS[4]["elapsed_s"]}, "what passed in between is not paid for"


@pytest.mark.parametrize(
    ("asked", "noted"),
    [
        (request(), {"sweep": {}, "sources": {}}),
        (with_sweep(budget=5.0), {"sweep": {"budget": 5.0}, "sources": {"sweep.budget": "--set"}}),
        (
            with_sweep(trial_timeout=7.0),
            {"sweep": {"trial_timeout": 7.0}, "sources": {"sweep.trial_timeout": "default"}},
        ),
    ],
)
def test_what_this_command_asks_for_instead_is_noted(tmp_path: Path, asked: SweepRequest, noted: Event) -> None:
    path = journal_at(tmp_path, lines(*EVENTS[:5]))
    note_resumed(path, asked)
    event = read_events(path)[-1]
    assert {key: event[key] for key in noted} == noted


def test_what_was_open_is_no_loss_after_going_on(tmp_path: Path) -> None:
    """The command was ended; nobody knows of a fault in what it was doing."""
    begun = next(index for index, event in enumerate(EVENTS) if event["event"] == "begin") + 1
    path = journal_at(tmp_path, lines(*EVENTS[:begun]))
    assert lost_event(read_events(path), None) is not None
    for launch in ("a", "b", "c"):
        note_resumed(path, request(launch=launch))
    assert lost_event(read_events(path), None) is None
    oracle = Oracle()
    verdict, _ = gone_on_with(read_events(path), oracle)
    assert verdict == WHOLE_VERDICT and oracle.asked[0] == ("trial", (1,))
