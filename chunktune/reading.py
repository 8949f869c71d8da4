"""A record from where people keep one: its file, a sweep's output directory, or stdin. No torch.

What is read may come from anywhere. Only regular files are opened, so that no FIFO keeps a command waiting, nothing
above MAX_BYTES is read, and numbers that no sweep can have measured are refused before anything computes with them.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from chunktune.errors import EnvironmentFailedError, UsageError
from chunktune.journal import read_events
from chunktune.record import assemble, parse_record
from chunktune.results import Frozen, Record, Trial
from chunktune.units import format_bytes, shown

STDIN = "-"
RECORD_FILE, JOURNAL_FILE = "record.json", "journal.jsonl"
MAX_BYTES = 256 * 2**20
MOST = 2**63 - 1
"""The largest count, size or duration that a record can hold."""

_RULE = f"a record is the {RECORD_FILE} that a sweep wrote, or its output directory"
_TRIAL = ("chunks", "micro_batch", "mini_batch", "step_median_s", "throughput_samples_per_s", "measured_step_s")
_SHORTAGE = ("needed_bytes", "budget_bytes", "asked_bytes")
_STAGE = (
    *("forward_s", "backward_s", "busy_s", "samples_per_s"),
    *("peak_bytes", "reserved_bytes", "capacity_bytes", "budget_bytes"),
)


def load_record(path: Path) -> Record:
    """The record in a file, in a sweep's output directory, or on stdin ("-").

    A directory stands for its record.json, and where it only has a journal.jsonl for the record that this journal
    amounts to, with status "interrupted" where the sweep has not come to its end. A journal may be named itself.
    Raises UsageError, one line, where there is none, it is larger than MAX_BYTES, it is no record, a newer chunktune
    wrote it, or it holds a number that none can hold.
    """
    if str(path) == STDIN:
        return checked(parse_record(_read_stdin(), "stdin"), "stdin")
    file = _file_of(path)
    data = _read_file(file)
    record = _assembled(file) if file.name == JOURNAL_FILE else parse_record(data, str(file))
    return checked(record, str(file))


def load_records(paths: Sequence[Path]) -> list[Record]:
    """The record of each path. Raises UsageError as `load_record` does, and where stdin is named twice."""
    if sum(str(path) == STDIN for path in paths) > 1:
        raise UsageError("- is given more than once; stdin holds one record")
    return [load_record(path) for path in paths]


def record_names(paths: Sequence[Path]) -> list[str]:
    """What people call each record: its output directory, or its file without ending; the path where two share it."""
    names = [_name(path) for path in paths]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]


def _name(path: Path) -> str:
    if str(path) == STDIN:
        return "stdin"
    if path.name in (RECORD_FILE, JOURNAL_FILE):
        return path.absolute().parent.name or str(path)
    return path.stem if path.suffix == ".json" else path.absolute().name or str(path)


# --- where it lies


def _file_of(path: Path) -> Path:
    try:
        if not path.is_dir():
            return path
        for name in (RECORD_FILE, JOURNAL_FILE):
            if (path / name).exists():
                return path / name
    except OSError as error:
        raise _unreadable(path, error) from error
    raise UsageError(f"{path}: the directory holds no {RECORD_FILE} and no {JOURNAL_FILE}; {_RULE}")


def _read_file(path: Path) -> bytes:
    try:
        # Without O_NONBLOCK a FIFO would wait here for somebody to write.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: there is no such file; {_RULE}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise _unreadable(path, error) from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise UsageError(f"{path}: is not a regular file; {_RULE}; for a pipe give - and redirect stdin")
    with os.fdopen(descriptor, "rb") as file:
        if found.st_size > MAX_BYTES:
            raise _too_large(str(path), format_bytes(found.st_size))
        return _limited(file, str(path))


def _read_stdin() -> bytes:
    stream = sys.stdin
    if stream is None or stream.isatty():
        raise UsageError("- reads the record from stdin, and stdin is a terminal; redirect a record into it")
    return _limited(stream.buffer, "stdin")


def _limited(file: BinaryIO, where: str) -> bytes:
    """All of a stream, but never more than MAX_BYTES: a file in /proc says it holds nothing, stdin says nothing."""
    try:
        data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(where, error) from error
    if len(data) > MAX_BYTES:
        raise _too_large(where, f"more than {format_bytes(MAX_BYTES)}")
    return data


def _assembled(journal: Path) -> Record:
    try:
        return assemble(read_events(journal), "interrupted")
    except EnvironmentFailedError as error:
        text = str(error)
        raise UsageError(text if text.startswith(str(journal)) else f"{journal}: {text}") from error


def _too_large(where: str, size: str) -> UsageError:
    return UsageError(f"{where}: holds {size}; a record has {format_bytes(MAX_BYTES)} at most")


def _unreadable(where: object, error: Exception) -> UsageError:
    return UsageError(f"{where}: the record cannot be read ({getattr(error, 'strerror', None) or error})")


# --- what it holds


def checked(record: Record, where: str) -> Record:
    """The record. Raises UsageError for a negative duration, size, count or rate, or one above MOST."""
    for place, value, names in _parts(record):
        for name in names:
            number = getattr(value, name)
            if number is not None and not 0 <= number <= MOST:
                raise _impossible(where, f"{place}{name}", number)
    for index, trial in enumerate(record.trials):
        for number in (*trial.step_s, *(trial.step_interval_s or ()), *_foretold(trial)):
            if not 0 <= number <= MOST:
                raise _impossible(where, f"trials.{index}", number)
    return record


def _parts(record: Record) -> Iterator[tuple[str, Frozen, Sequence[str]]]:
    """(place, value, names of its numbers) of what the renderings compute with."""
    yield "", record, ("elapsed_s",)
    if record.verdict is not None:
        yield "verdict.", record.verdict, ("chunks", "micro_batch", "mini_batch", "next_chunks")
    for index, candidate in enumerate(record.candidates):
        yield f"candidates.{index}.", candidate, ("chunks",)
    trials = {f"trials.{index}.": trial for index, trial in enumerate(record.trials)}
    if record.confirmation is not None:
        trials["confirmation."] = record.confirmation
    for place, trial in trials.items():
        yield place, trial, _TRIAL
        if trial.shortage is not None:
            yield f"{place}shortage.", trial.shortage, _SHORTAGE
        yield from ((f"{place}stages.{index}.", stage, _STAGE) for index, stage in enumerate(trial.stages))


def _foretold(trial: Trial) -> tuple[float, ...]:
    foretold = trial.predicted
    if foretold is None:
        return ()
    of_parts = [(part.forward_s, part.backward_s, part.input_s, part.weight_s) for part in foretold.parts]
    seconds = [foretold.step_s, foretold.rehearsed_overhead_s, *(each for part in of_parts for each in part)]
    known = [each for each in seconds if each is not None]
    return (*foretold.peak_bytes, *known, *foretold.update_s, *foretold.boundary_bytes)


def _impossible(where: str, place: str, number: float) -> UsageError:
    return UsageError(f"{where}: {place}: is {shown(number)}; durations, sizes, counts and rates are 0 to {MOST}")


def places_of(record: Path) -> tuple[str, ...]:
    """Where a record may lie, links followed: the path itself, and in it as a sweep's output directory."""
    return tuple(os.path.realpath(record / name) for name in ("", RECORD_FILE, JOURNAL_FILE))
