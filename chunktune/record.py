"""The journal that a sweep writes while it runs, and the record that is made from it. No torch.

The journal is one JSON object a line, appended, flushed and fsynced. A file of lines and not SQLite, because
one process at a time writes it, a kill at any moment can tear its last line only, network file systems keep
it whole, and people can read it. A line without its newline is torn: readers leave it out, the next writer
cuts it off.

`python -m chunktune.record` rewrites the JSON Schema that is shipped as chunktune/schema/record.schema.json.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from chunktune.errors import ChunktuneError, EnvironmentFailedError, UsageError
from chunktune.results import SCHEMA_VERSION, Record, State, Trial

Event = dict[str, Any]
Status = Literal["complete", "interrupted", "failed"]
LOST_STATES: tuple[State, ...] = ("oom", "killed", "timeout", "error")
SCHEMA_FILE = "record.schema.json"

_REQUIRED: dict[str, tuple[str, ...]] = {
    "start": ("schema_version", "tool", "spec", "sources", "environment", "candidates", "quick", "warnings"),
    "begin": ("task", "values", "elapsed_s"),
    "trial": ("trial", "elapsed_s"),
    "rounds": ("values", "rounds", "elapsed_s"),
    "confirm": ("trial", "elapsed_s"),
    "lost": ("task", "values", "state", "elapsed_s"),
    "warning": ("text",),
    "end": ("status", "elapsed_s"),
}

_Model = TypeVar("_Model", bound=BaseModel)


# --- the journal -------------------------------------------------------------------------------------------


class Journal:
    """OUT/journal.jsonl, open for appending; a context manager.

    A torn last line of an earlier writer is cut off first, and a "warning" event says so where whole lines
    stand before it. Raises EnvironmentFailedError where the file cannot be opened, read or cut.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = _open_for_append(path)
        except OSError as error:
            raise _unwritable(path, "the journal cannot be opened", error) from error
        try:
            torn_bytes = self._cut_torn_line()
        except OSError as error:
            self.close()
            raise _unwritable(path, "its torn last line cannot be cut off", error) from error
        if torn_bytes and os.fstat(self._fd).st_size:
            self.append(_torn_warning(path, torn_bytes))

    def append(self, event: Mapping[str, Any]) -> None:
        """Write one event, with "at" (UTC, ISO 8601, microseconds) added, and wait until it is on the disk.

        Raises EnvironmentFailedError where the disk refuses it (the file then ends with the event before) and
        ValueError for NaN or infinity, before anything is written.
        """
        if self._is_gone():
            raise _gone(self.path)
        at = datetime.now(UTC).isoformat(timespec="microseconds")
        data = (json.dumps({**event, "at": at}, allow_nan=False) + "\n").encode()
        size = os.fstat(self._fd).st_size
        try:
            _write_all(self._fd, data)
            os.fsync(self._fd)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._fd, size)
            raise _unwritable(self.path, f"{len(data)} bytes were not written", error) from error

    def _is_gone(self) -> bool:
        """Whether the file is no longer where it was opened: what is written to it then, nobody finds again."""
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._fd))
        except OSError:
            return True

    def close(self) -> None:
        """Close the file; the journal takes no further event. Raises nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _cut_torn_line(self) -> int:
        whole, torn = _split_torn(self.path.read_bytes())
        if torn:
            os.ftruncate(self._fd, len(whole))
            os.fsync(self._fd)
        return len(torn)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: Path) -> list[Event]:
    """All whole events of a journal, oldest first; a torn last line is reported as a "warning" event.

    Raises EnvironmentFailedError where the file cannot be read, holds a bad line other than a torn last one,
    or was written by a newer chunktune.
    """
    try:
        whole, torn = _split_torn(path.read_bytes())
    except OSError as error:
        raise EnvironmentFailedError(f"{path}: the journal cannot be read ({_why(error)})") from error
    events = [_event(path, number, line) for number, line in enumerate(whole.split(b"\n")[:-1], start=1)]
    return [*events, _torn_warning(path, len(torn))] if torn and events else events


def _open_for_append(path: Path) -> int:
    new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    if new:
        _sync_directory(path.parent)
    return descriptor


def _split_torn(data: bytes) -> tuple[bytes, bytes]:
    end = data.rfind(b"\n") + 1
    return data[:end], data[end:]


def _torn_warning(path: Path, size: int) -> Event:
    return {"event": "warning", "text": f"{path.name}: the last line was torn; its {size} bytes are left out"}


def _event(path: Path, number: int, line: bytes) -> Event:
    try:
        event = strict_loads(line)
    except ValueError as error:
        raise EnvironmentFailedError(f"{path}: line {number} is not an event: {error}") from error
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise EnvironmentFailedError(f'{path}: line {number} is not an event: an object with "event" is expected')
    missing = [key for key in _REQUIRED.get(event["event"], ()) if key not in event]
    if missing:
        kind = event["event"]
        raise EnvironmentFailedError(f'{path}: line {number}: the event "{kind}" lacks {", ".join(missing)}')
    if event["event"] == "start":
        _check_version(str(path), event, EnvironmentFailedError)
    return event


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


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


def start_of(events: Iterable[Event]) -> Event | None:
    """The "start" event, None where there is none."""
    return next((event for event in events if event["event"] == "start"), None)


def end_of(events: Sequence[Event]) -> Event | None:
    """The "end" event; None where there is none, or the sweep went on after it."""
    last = next((event for event in reversed(events) if event["event"] in ("end", "resumed")), None)
    return last if last is not None and last["event"] == "end" else None


def asked(start: Event, events: Iterable[Event]) -> tuple[Event, dict[str, str]]:
    """The spec and its sources as the sweep was asked last: a "resumed" event may bring "sweep" and "sources"."""
    spec, sources = start["spec"], start["sources"]
    for event in events:
        if event["event"] == "resumed":
            spec = {**spec, "sweep": {**spec["sweep"], **event.get("sweep", {})}}
            sources = {**sources, **event.get("sources", {})}
    return spec, sources


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


def last_elapsed_s(events: Iterable[Event]) -> float:
    """The greatest `elapsed_s` (seconds since the start of the sweep) of the events; 0 where none has one."""
    return max((float(event["elapsed_s"]) for event in events if "elapsed_s" in event), default=0.0)


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
        _sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _unwritable(path, f"the record ({len(data)} bytes) was not written", error) from error


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
        raise UsageError(f"{path}: the record cannot be read ({_why(error)})") from error
    return parse_record(text, str(path))


def parse_record(text: bytes, where: str) -> Record:
    """The record in the bytes of its JSON text; `where` names their source in messages. Raises UsageError, one line."""
    try:
        data = strict_loads(text)
    except ValueError as error:
        raise UsageError(f"{where}: not a record: {error}") from error
    if not isinstance(data, dict) or "schema_version" not in data:
        raise UsageError(f'{where}: not a record: it has no "schema_version"')
    _check_version(where, data, UsageError)
    present = data["schema_version"] == SCHEMA_VERSION  # its text need not be written and read once more
    try:
        return _validated(Record, text, where) if present else validated(Record, migrated(data), where)
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


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading what others wrote -----------------------------------------------------------------------------


def strict_loads(data: bytes) -> object:
    """JSON without NaN, infinity or numbers beyond a float.

    Raises ValueError with one line: not UTF-8, not JSON (where), nested too deeply, or a number out of range.
    """
    try:
        return json.loads(data.decode(), parse_constant=_refuse_number, parse_float=_finite_float)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON (line {error.lineno}, column {error.colno}: {error.msg})") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def validated(model: type[_Model], data: object, where: str) -> _Model:
    """`data` (plain JSON values) as a value of `model`; no type is converted but an integer to a float.

    Raises EnvironmentFailedError, one line with the first mistake, its place and the number of the others.
    """
    try:
        text = json.dumps(data, allow_nan=False)
    except RecursionError as error:
        raise EnvironmentFailedError(f"{where}: nested too deeply") from error
    return _validated(model, text, where)


def _validated(model: type[_Model], text: str | bytes, where: str) -> _Model:
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise EnvironmentFailedError(f"{where}: {_first_mistake(error)}") from error


def _first_mistake(error: ValidationError) -> str:
    mistakes = error.errors(include_url=False)
    place = ".".join(str(part) for part in mistakes[0]["loc"]) or "(whole)"
    message = mistakes[0]["msg"].removeprefix("Value error, ")
    others = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
    return f"{place}: {message[:1].lower()}{message[1:]}{others}"


def _check_version(where: str, data: Event, kind: type[ChunktuneError]) -> None:
    version = data.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise kind(f"{where}: schema_version is {version!r:.40}; it must be a whole number, 1 to {SCHEMA_VERSION}")
    if version > SCHEMA_VERSION:
        raise kind(
            f"{where}: schema_version is {version}; this chunktune reads up to {SCHEMA_VERSION}: "
            "read it with the newer chunktune that wrote it"
        )


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number that JSON knows")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is beyond what a float can hold")
    return value


def _why(error: OSError) -> str:
    return error.strerror or type(error).__name__


def _gone(path: Path) -> EnvironmentFailedError:
    return EnvironmentFailedError(
        f"{path}: the journal is gone, or another file stands in its place; every result must reach the disk: "
        "leave the output directory alone while a sweep runs"
    )


def _unwritable(path: Path, fact: str, error: OSError) -> EnvironmentFailedError:
    return EnvironmentFailedError(
        f"{path}: {fact} ({_why(error)}); every result must reach the disk: "
        "free space there or give another --output-dir"
    )


def _write_schema() -> Path:
    path = Path(__file__).parent / "schema" / SCHEMA_FILE
    path.write_text(json.dumps(record_schema(), indent=2) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    print(f"Wrote {_write_schema()}")
