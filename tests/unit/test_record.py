from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from sample_record import (
    comparison,
    every_record,
    failed_trial,
    full_journal,
    lost_event,
    ok_trial,
    record,
    start_event,
    trial_event,
    verdict,
)

import chunktune.record as record_module
from chunktune.errors import EnvironmentFailedError, UsageError
from chunktune.record import assemble, read_record, record_json, record_schema, shipped_schema, write_record
from chunktune.results import SCHEMA_VERSION, Record

# --- assemble ----------------------------------------------------------------------------------------------


def test_a_whole_journal_becomes_the_record() -> None:
    made = assemble(full_journal())
    assert made.status == "complete"
    assert [(trial.chunks, trial.state) for trial in made.trials] == [(2, "ok"), (4, "ok"), (8, "killed")]
    assert made.trials[2].reason == "signal 6" and made.trials[2].mini_batch == 32
    assert made.confirmation == ok_trial(4)
    assert made.comparisons == (comparison(2, 4, 0.8),)
    assert made.verdict == verdict("failed")
    assert (made.group_restarts, made.elapsed_s) == (2, 56.0)
    assert made.warnings == ("4 stages on 2 cores", "the clock drifts")


def test_every_beginning_of_a_journal_is_a_valid_partial_record() -> None:
    events = full_journal()
    for size in range(1, len(events)):
        made = assemble(events[:size])
        assert (made.status, made.verdict, made.comparisons) == ("interrupted", None, ())
        assert [t.chunks for t in made.trials] == sorted({t.chunks for t in made.trials})
        assert read_back(made) == made
    assert assemble(events[:3], "failed").status == "failed"


def read_back(made: Record) -> Record:
    return Record.model_validate_json(record_json(made), strict=True)


def test_the_latest_trial_of_an_m_wins_and_they_ascend() -> None:
    events = [start_event(), trial_event(ok_trial(8)), trial_event(ok_trial(2)), trial_event(failed_trial(8, "oom"))]
    assert [(t.chunks, t.state) for t in assemble(events).trials] == [(2, "ok"), (8, "oom")]


@pytest.mark.parametrize(
    ("losses", "state"),
    [
        ([("trial", [8], "killed")], "killed"),
        ([("trial", [8], "oom")], "oom"),
        ([("rounds", [4, 8], "killed")], "ok"),
        ([("rounds", [4, 8], "killed"), ("rounds", [4, 8], "killed")], "killed"),
        ([("rounds", [4, 8], "timeout")], "timeout"),
        ([("confirm", [8], "killed")], "ok"),
        ([("confirm", [8], "killed"), ("confirm", [8], "killed")], "killed"),
        ([("confirm", [8], "error")], "error"),
    ],
)
def test_lost_groups_count_as_the_search_was_told(losses, state: str) -> None:
    before = [] if losses[0][0] == "trial" else [trial_event(ok_trial(4)), trial_event(ok_trial(8))]
    lost = [lost_event(task, values, state, 5.0, chunks=8) for task, values, state in losses]
    made = assemble([start_event(), *before, *lost])
    assert made.trials[-1].chunks == 8
    assert made.trials[-1].state == state


def test_a_single_sudden_death_is_forgotten_once_the_second_try_is_in() -> None:
    events = [start_event(), lost_event("trial", [8], "killed", 5.0), trial_event(ok_trial(8))]
    made = assemble(events)
    assert made.trials == (ok_trial(8),)
    assert made.group_restarts == 1


def test_sudden_deaths_of_different_questions_do_not_add_up() -> None:
    died = [lost_event(task, values, "killed", 5.0, chunks=8) for task, values in (("trial", [8]), ("rounds", [4, 8]))]
    rounds = {"event": "rounds", "values": [4, 8], "rounds": [], "elapsed_s": 6.0}
    told = [died[0], trial_event(ok_trial(8)), died[1], rounds, died[1], rounds]
    for size in range(2, len(told) + 1):
        assert assemble([start_event(), *told[:size]]).trials == (ok_trial(8),)
    other = lost_event("rounds", [2, 8], "killed", 5.0, chunks=8)
    assert assemble([start_event(), *told[:2], died[1], other]).trials == (ok_trial(8),)


def test_a_failed_confirmation_takes_its_trial_along() -> None:
    confirm = {"event": "confirm", "trial": failed_trial(4, "oom").model_dump(mode="json"), "elapsed_s": 3.0}
    made = assemble([start_event(), trial_event(ok_trial(4)), confirm])
    assert made.confirmation is None
    assert [(t.chunks, t.state) for t in made.trials] == [(4, "oom")]


def test_skipped_values_come_with_the_end() -> None:
    skipped = failed_trial(16, "skipped").model_dump(mode="json")
    end = {"event": "end", "status": "complete", "elapsed_s": 9.0, "trials": [skipped]}
    made = assemble([start_event(), trial_event(ok_trial(4)), end])
    assert [(t.chunks, t.state) for t in made.trials] == [(4, "ok"), (16, "skipped")]


def test_a_lost_trial_knows_its_batch_in_both_modes() -> None:
    made = [
        assemble([start_event(mode), lost_event("trial", [8], "error", 1.0)]) for mode in ("mini_batch", "micro_batch")
    ]
    assert [(m.trials[0].micro_batch, m.trials[0].mini_batch) for m in made] == [(4, 32), (4, 32)]


def test_a_damaged_journal_is_an_error_and_not_a_crash() -> None:
    with pytest.raises(EnvironmentFailedError, match='no "start"'):
        assemble([{"event": "group"}])
    for event in ({"event": "trial", "trial": {}}, {"event": "trial", "trial": None}):
        with pytest.raises(EnvironmentFailedError, match="the journal is damaged"):
            assemble([start_event(), event])
    with pytest.raises(
        EnvironmentFailedError, match=r"the journal: trials\.0\.micro_batch: field required \(and 2 more"
    ):
        assemble([start_event(), {"event": "trial", "trial": {"chunks": 4}}])


# --- the record file ---------------------------------------------------------------------------------------


def test_every_record_survives_the_file(tmp_path: Path) -> None:
    for made in every_record():
        write_record(made, tmp_path / "record.json")
        assert read_record(tmp_path / "record.json") == made
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_schema_version_comes_first() -> None:
    assert next(iter(json.loads(record_json(record())))) == "schema_version"
    assert record_json(record()).startswith(f'{{\n  "schema_version": {SCHEMA_VERSION},')


def test_nan_never_reaches_a_record() -> None:
    text = record_json(record(environment={"load": float("nan"), "most": float("-inf")}))
    assert json.loads(text)["environment"] == {"load": None, "most": None}
    with pytest.raises(ValueError, match="finite"):
        record(elapsed_s=float("inf"))


@pytest.mark.parametrize("call", ["fsync", "write"])
def test_a_failed_write_keeps_the_old_record_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "record.json"
    write_record(record(), path)

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((record_module.os, "fsync") if call == "fsync" else (Path, "replace")), fails)
    with pytest.raises(EnvironmentFailedError, match="No space left on device"):
        write_record(record(quick=True), path)
    monkeypatch.undo()
    assert read_record(path) == record()
    assert [each.name for each in tmp_path.iterdir()] == ["record.json"]


def test_a_record_cannot_replace_a_directory(tmp_path: Path) -> None:
    (tmp_path / "record.json").mkdir()
    with pytest.raises(EnvironmentFailedError, match="was not written"):
        write_record(record(), tmp_path / "record.json")
    with pytest.raises(EnvironmentFailedError, match="was not written"):
        write_record(record(), tmp_path / "missing" / "record.json")


def changed(**changes: object) -> bytes:
    return json.dumps({**json.loads(record_json(record())), **changes}).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a record: not JSON"),
        (b"\x89PNG\xff", "not a record: not UTF-8"),
        (b"[]", 'has no "schema_version"'),
        (b"{}", 'has no "schema_version"'),
        (b'{"schema_version": 1}', "tool: field required"),
        (b'{"schema_version": 99}', f"schema_version is 99; this chunktune reads up to {SCHEMA_VERSION}"),
        (b'{"schema_version": true}', "must be a whole number"),
        (b'{"schema_version": "1"}', "must be a whole number"),
        (b'{"schema_version": 0}', "must be a whole number"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"schema_version": 1, "elapsed_s": Infinity}', "Infinity is not a number"),
        (b"1" * 5000, "not a record"),
        (changed(elapsed_s="61.5"), "elapsed_s: input should be a valid number"),
        (changed(trials=[{"chunks": 1.5}]), r"trials\.0\.chunks: input should be a valid integer"),
        (changed(surprise=1), "surprise: extra inputs are not permitted"),
        (changed(status="fine"), "status: input should be 'complete', 'interrupted' or 'failed'"),
        (changed(quick=1), "quick: input should be a valid boolean"),
        (changed(verdict={}), r"verdict\.chunks: field required \(and \d+ more\)"),
    ],
)
def test_bad_records_are_one_clear_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_record(path)
    assert "\n" not in str(caught.value)
    assert "http" not in str(caught.value)


def test_a_record_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(UsageError, match="is not a file"):
            read_record(path)
    with pytest.raises(UsageError, match="there is no such file"):
        read_record(tmp_path / "nothing.json")


# --- the schema --------------------------------------------------------------------------------------------


def test_the_shipped_schema_is_the_generated_one() -> None:
    assert shipped_schema() == record_schema(), "run python -m chunktune.record"


def test_every_record_validates_against_the_shipped_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(shipped_schema())
    validator = jsonschema.Draft202012Validator(shipped_schema())
    for made in every_record():
        validator.validate(json.loads(record_json(made)))


@pytest.mark.parametrize("change", [{"schema_version": 99}, {"trials": {}}, {"extra": 1}, {"verdict": {"chunks": 4}}])
def test_the_schema_refuses_what_is_no_record(change: dict[str, object]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(changed(**change)), shipped_schema(), jsonschema.Draft202012Validator)


def test_reading_a_record_imports_neither_torch_nor_pandas() -> None:
    code = (
        "import sys, chunktune.record, chunktune.replay, chunktune.report.terminal, chunktune.report.tabular\n"
        "print(sorted({'torch', 'pandas', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_record_of_schema_version_2_is_read() -> None:
    old = read_record(Path(__file__).parents[1] / "data" / "record_v2.json")
    assert old.schema_version == SCHEMA_VERSION
    assert old.verdict is not None and old.verdict.chunks is not None
    assert old.confirmation is not None and old.confirmation.timeline is None
    assert all(trial.predicted is None or trial.predicted.transfer_s == () for trial in old.trials)


def test_a_record_of_schema_version_1_is_read(tmp_path: Path) -> None:
    old = read_record(Path(__file__).parents[1] / "data" / "record_v1.json")
    assert old.schema_version == SCHEMA_VERSION
    assert old.verdict is not None and old.verdict.chunks == 2
    assert old.layers == ()
    predicted = [trial.predicted for trial in old.trials]
    assert all(one is not None and one.step_s is None and one.parts == () for one in predicted)
