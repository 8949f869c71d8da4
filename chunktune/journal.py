"""The journal that a sweep writes while it runs. No torch.

One JSON object a line, appended, flushed and fsynced. A file of lines and not SQLite, because one process at a
time writes it, a kill at any moment can tear its last line only, network file systems keep it whole, and people
can read it. A line without its newline is torn: readers leave it out, the next writer cuts it off.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from chunktune.errors import EnvironmentFailedError
from chunktune.strict import check_version, strict_loads

Event = dict[str, Any]
OnEvent = Callable[[Event], None]

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
            raise unwritable(path, "the journal cannot be opened", error) from error
        try:
            torn_bytes = self._cut_torn_line()
        except OSError as error:
            self.close()
            raise unwritable(path, "its torn last line cannot be cut off", error) from error
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
            raise unwritable(self.path, f"{len(data)} bytes were not written", error) from error

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
        raise EnvironmentFailedError(f"{path}: the journal cannot be read ({why(error)})") from error
    events = [_event(path, number, line) for number, line in enumerate(whole.split(b"\n")[:-1], start=1)]
    return [*events, _torn_warning(path, len(torn))] if torn and events else events


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


def last_elapsed_s(events: Iterable[Event]) -> float:
    """The greatest `elapsed_s` (seconds since the start of the sweep) of the events; 0 where none has one."""
    return max((float(event["elapsed_s"]) for event in events if "elapsed_s" in event), default=0.0)


def _open_for_append(path: Path) -> int:
    new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    if new:
        sync_directory(path.parent)
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
        check_version(str(path), event, EnvironmentFailedError)
    return event


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


@contextmanager
def followed(journal: Path, on_event: OnEvent) -> Iterator[None]:
    """Inside, hand every whole line that is added to the journal to `on_event`, as it is written."""
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(journal, on_event, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _follow(journal: Path, on_event: OnEvent, stop: threading.Event) -> None:
    """Once open it stays open: what is written before the file vanishes is read all the same."""
    position = 0
    with ExitStack() as opened:
        file = None
        while True:
            last_time = stop.is_set()
            if file is None:
                with suppress(OSError):
                    file = opened.enter_context(journal.open("rb", buffering=0))
            if file is not None:
                file.seek(position)
                data = file.read()
                whole = data[: data.rfind(b"\n") + 1]  # a torn line may be cut off and written anew
                position += len(whole)
                for line in whole.splitlines():
                    on_event(_parsed(line))
            if last_time:
                return
            time.sleep(0.1)


def _parsed(line: bytes) -> Event:
    event: Event = json.loads(line)
    return event


def sync_directory(directory: Path) -> None:
    """Wait until a new or renamed entry of the directory is on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def why(error: OSError) -> str:
    """What the system says of it."""
    return error.strerror or type(error).__name__


def _gone(path: Path) -> EnvironmentFailedError:
    return EnvironmentFailedError(
        f"{path}: the journal is gone, or another file stands in its place; every result must reach the disk: "
        "leave the output directory alone while a sweep runs"
    )


def unwritable(path: Path, fact: str, error: OSError) -> EnvironmentFailedError:
    """What to raise where the disk refuses `path`; `fact` says what of it."""
    return EnvironmentFailedError(
        f"{path}: {fact} ({why(error)}); every result must reach the disk: "
        "free space there or give another --output-dir"
    )
