"""The record of a sweep: what its journal amounts to, its file, its schema. No torch.

`python -m chunktune.record` rewrites the JSON Schema that is shipped as chunktune/schema/record.schema.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from chunktune.errors import ChunktuneError, EnvironmentFailedError, UsageError
from chunktune.journal import Event, asked, end_of, last_elapsed_s, start_of, sync_directory, unwritable, why
from chunktune.results import SCHEMA_VERSION, Record, State, Trial
from chunktune.strict import check_version, strict_loads, validated, validated_text

Status = Literal["complete", "interrupted", "failed"]
LOST_STATES: tuple[State, ...] = ("oom", "killed", "timeout", "error")
SCHEMA_FILE = "record.schema.json"

# --- from the journal to the record ------------------------------------------------------------------------


def assemble(events: Sequence[Event], status: Status = "interrupted") -> Record:
    """The record that a journal, or any beginning of one that holds the "start" event, amounts to.

    `trials` holds the latest result of each M, ascending; a group lost for good, or a failed confirmation, counts
    as one; `confirmation` is one that succeeded. The status, the comparisons and the verdict are those of the "end"
    event; `status` is for a journal without one, or one that went on after it. An "end" event may bring "trials",
    which stand above the journal's own (the skipped values). A "resumed" event may bring other values of "sweep".
    Raises EnvironmentFailedError without a "start" event or where an event lacks something.
    """
    start = start_of(events)
    if start is None:
        raise EnvironmentFailedError('the journal holds no "start" event: nothing was measured')
    try:
        data = _record_fields(start, events, status)
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        raise EnvironmentFailedError(f"the journal is damaged: {type(error).__name__}: {error}") from error
    return validated(Record, data, "the journal")


def measured_of(events: Sequence[Event]) -> str:
    """The record of a sweep that failed, as JSON, for where the disk does not take it; "" without any trial in it."""
    if any(event["event"] in ("trial", "lost") for event in events):
        with suppress(ChunktuneError):
            return record_json(assemble(events, "failed"))
    return ""


def _record_fields(start: Event, events: Sequence[Event], status: Status) -> Event:
    end = end_of(events) or {}
    results = _Results(start)
    for event in events:
        if event["event"] != "end" or event is end:
            results.add(event)
    spec, sources = asked(start, events)
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": start["tool"],
        "mode": start.get("mode", "measured"),
        "status": end.get("status", status),
        "quick": start["quick"],
        "spec": spec,
        "sources": sources,
        "environment": start["environment"],
        "layers_per_part": start.get("layers_per_part", []),
        "layers": end.get("layers", []),
        "candidates": start["candidates"],
        "trials": [results.trials[chunks] for chunks in sorted(results.trials)],
        "comparisons": end.get("comparisons", []),
        "confirmation": results.confirmation,
        "group_restarts": sum(event["event"] == "lost" for event in events),
        "resumes": sum(event["event"] == "resumed" for event in events),
        "warnings": _warnings(start, events),
        "verdict": end.get("verdict"),
        "started_at": start["started_at"],
        "elapsed_s": last_elapsed_s(events),
    }


class _Results:
    """Folds the events into the latest result of each M and the latest confirmation, all still plain data."""

    def __init__(self, start: Event) -> None:
        self.start = start
        self.trials: dict[int, Event] = {}
        self.confirmation: Event | None = None
        self._lost_task: tuple[str, tuple[int, ...]] | None = None
        self._losses = 0

    def add(self, event: Event) -> None:
        kind = event["event"]
        if kind in ("trial", "rounds", "confirm"):
            self._lost_task, self._losses = None, 0
        if kind == "trial":
            self._keep(event["trial"])
        elif kind == "confirm":
            self._confirm(event["trial"])
        elif kind == "lost":
            self._lose(event)
        elif kind == "end":
            for trial in event.get("trials", []):
                self._keep(trial)

    def _keep(self, trial: Event) -> None:
        self.trials[trial["chunks"]] = trial

    def _confirm(self, trial: Event) -> None:
        fits = trial["state"] == "ok"
        self.confirmation = trial if fits else None
        if not fits and trial["state"] != "skipped":
            self._keep(trial)

    def _lose(self, event: Event) -> None:
        task = (event["task"], tuple(event["values"]))
        self._losses = self._losses + 1 if task == self._lost_task else 1
        self._lost_task = task
        chunks = lost_chunks(event)
        trial = lost_trial(event, chunks, _batch_of(self.start, chunks)).model_dump(mode="json")
        if not loss_is_final(event["state"], self._losses):
            if event["task"] == "trial":
                self.trials.setdefault(chunks, trial)  # until the second try is in
            return
        self._lost_task = None
        if event["task"] == "confirm":
            self._confirm(trial)
        else:
            self._keep(trial)


def loss_is_final(state: str, losses: int) -> bool:
    """Whether a task is given up after `losses` losses, the last with `state`: sudden death has two tries."""
    return state != "killed" or losses >= 2


def lost_chunks(event: Event) -> int:
    """The M that a "lost" event is held against: the culprit where known, else the first of the task."""
    values: list[int] = event["values"]
    chunks: int | None = event.get("chunks")
    return chunks if chunks in values and chunks is not None else values[0]


def lost_trial(event: Event, chunks: int, batch: tuple[int, int]) -> Trial:
    """What a lost group says about M = `chunks`; `batch` = (b, N) in samples there.

    Raises EnvironmentFailedError where the event lacks something.
    """
    data = {key: event.get(key) for key in ("state", "reason", "rank", "shortage")}
    data |= {"chunks": chunks, "micro_batch": batch[0], "mini_batch": batch[1]}
    return validated(Trial, data, 'the journal\'s "lost" event')


def _batch_of(start: Event, chunks: int) -> tuple[int, int]:
    batch = start["spec"]["batch"]
    if batch.get("mini_batch") is not None:
        return batch["mini_batch"] // chunks, batch["mini_batch"]
    return batch["micro_batch"], batch["micro_batch"] * chunks


def _warnings(start: Event, events: Sequence[Event]) -> list[str]:
    texts = [*start["warnings"], *(event["text"] for event in events if event["event"] == "warning")]
    return list(dict.fromkeys(texts))


# --- the record --------------------------------------------------------------------------------------------


def record_json(record: Record) -> str:
    """The record as JSON text, `schema_version` first, two spaces of indentation, a newline at the end.

    NaN or infinity in a free field (spec, environment) becomes null; the others cannot hold one.
    """
    return json.dumps(record.model_dump(mode="json"), indent=2, allow_nan=False) + "\n"


def write_record(record: Record, path: Path) -> None:
    """Write the record so that `path` holds what it held before or the whole record, whatever happens.

    Raises EnvironmentFailedError where the disk refuses it; no temporary file is left behind then.
    """
    data = record_json(record).encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write_and_sync(temporary, data)
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise unwritable(path, f"the record ({len(data)} bytes) was not written", error) from error


def read_record(path: Path) -> Record:
    """The record in a file.

    Raises UsageError, one line, where there is no such file, it is no record, or a newer chunktune wrote it.
    """
    if not path.is_file():
        fact = "is not a file" if path.exists() else "there is no such file"
        raise UsageError(f"{path}: {fact}; a record is the record.json that a sweep wrote")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: the record cannot be read ({why(error)})") from error
    return parse_record(text, str(path))


def parse_record(text: bytes, where: str) -> Record:
    """The record in the bytes of its JSON text; `where` names their source in messages. Raises UsageError, one line."""
    try:
        data = strict_loads(text)
    except ValueError as error:
        raise UsageError(f"{where}: not a record: {error}") from error
    if not isinstance(data, dict) or "schema_version" not in data:
        raise UsageError(f'{where}: not a record: it has no "schema_version"')
    check_version(where, data, UsageError)
    present = data["schema_version"] == SCHEMA_VERSION  # its text need not be written and read once more
    try:
        return validated_text(Record, text, where) if present else validated(Record, migrated(data), where)
    except EnvironmentFailedError as error:
        raise UsageError(str(error)) from error


def migrated(data: Event) -> Event:
    """The fields of a record of any known schema version as those of the present one.

    1 -> 2: what is new (operations of a prediction, layers, alternatives) is empty where nobody recorded it.
    2 -> 3: so is the time line of the confirmation.
    """
    return {**data, "schema_version": SCHEMA_VERSION}


def flat(table: Mapping[str, Any], prefix: str = "", deepest: int = 16) -> Iterator[tuple[str, Any]]:
    """Dotted key -> leaf of a free table of a record: lists, empty tables, and what lies deeper, are leaves."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value and deepest > 0:
            yield from flat(value, f"{prefix}{key}.", deepest - 1)
        else:
            yield f"{prefix}{key}", value


def record_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a record, made from the classes."""
    schema = Record.model_json_schema()
    schema["title"] = "chunktune record"
    schema["properties"]["schema_version"]["const"] = SCHEMA_VERSION
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def shipped_schema() -> dict[str, Any]:
    """The JSON Schema that the installed package ships; equal to `record_schema()`."""
    text = (resources.files("chunktune") / "schema" / SCHEMA_FILE).read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def _write_and_sync(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write_schema() -> Path:
    path = Path(__file__).parent / "schema" / SCHEMA_FILE
    path.write_text(json.dumps(record_schema(), indent=2) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    print(f"Wrote {_write_schema()}")
