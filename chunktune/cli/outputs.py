"""Where the answer goes: files, stdout and the output directory, all checked before anything starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from chunktune.errors import EnvironmentFailedError, UsageError
from chunktune.reading import places_of
from chunktune.report import columns_of, encodable
from chunktune.results import Record
from chunktune.units import printable, shorten

STDOUT = "-"
_LONGEST_NAME = 200
OUTPUT_FILES = ("journal.jsonl", "record.json")


@dataclass(frozen=True)
class Outputs:
    """What the user asked to have written: format flag -> path or "-", and whether to print M alone."""

    files: Mapping[str, str]
    print_chunks: bool = False

    @property
    def on_stdout(self) -> tuple[str, ...]:
        """The flags that claim stdout; the table is printed only where there is none."""
        claims = [f"{flag} -" for flag, path in self.files.items() if path == STDOUT]
        return (*claims, *(["--print chunks"] if self.print_chunks else []))

    def file(self, flag: str) -> str:
        """The file that a format goes to; "" where it is not asked for, or goes to stdout."""
        path = self.files.get(flag, "")
        return "" if path == STDOUT else path

    def spare(self, read: Iterable[Path], what: str) -> None:
        """Raises UsageError where an output would overwrite `what` is read: records, or directories that hold one."""
        kept = {place for path in read for place in places_of(path)}
        for flag, path in self.files.items():
            if path != STDOUT and os.path.realpath(path) in kept:
                raise UsageError(f"{flag} {path} would overwrite {what} that is read; give another file")

    def check(self) -> None:
        """Raises UsageError where two outputs share a place, or a file could not be written."""
        if len(self.on_stdout) > 1:
            raise UsageError(f"{' and '.join(self.on_stdout)} would share stdout; at most one output may take it")
        paths: dict[Path, str] = {}
        for flag, path in self.files.items():
            if path != STDOUT:
                _check_file(flag, path)
                if other := paths.get(Path(path).absolute()):
                    raise UsageError(f"{other} and {flag} both write to {path}; each needs a file of its own")
                paths[Path(path).absolute()] = flag


def tell(text: str) -> None:
    """Say something on stderr; what names and paths hold of control characters does not reach a terminal."""
    print(printable(text), file=sys.stderr, flush=True)


def deliver(
    record: Record, outputs: Outputs, say: Callable[[str], None], ready: Mapping[str, str] | None = None
) -> None:
    """Write the record in every format asked for; without one on stdout, the table goes there.

    `ready`: format flag -> text, of formats that the command has rendered itself.

    Raises EnvironmentFailedError where a file or stdout cannot be written.
    """
    for flag, path in outputs.files.items():
        text = ready[flag] if ready and flag in ready else _render(flag, record)
        write(path, text, say)
    if outputs.print_chunks and record.verdict and record.verdict.chunks is not None:
        to_stdout(f"{record.verdict.chunks}\n")
    if not outputs.on_stdout:
        _print_table(record)
    elif record.verdict is not None:
        _say_verdict(record, say)


def _say_verdict(record: Record, say: Callable[[str], None]) -> None:
    """The verdict in a line, and what is odd about it: a machine format on stdout hides both."""
    from chunktune.report import plain
    from chunktune.report.terminal import verdict_line

    say(verdict_line(record))
    for finding in record.verdict.findings if record.verdict else ():
        say(f"finding: {plain(finding)}")


def write(path: str, text: str, say: Callable[[str], None]) -> None:
    """Write `text` to a file, or to stdout for "-". Raises EnvironmentFailedError where that fails."""
    ended = text if text.endswith("\n") else text + "\n"
    if path == STDOUT:
        return to_stdout(ended)
    try:
        Path(path).write_text(ended, encoding="utf-8")
    except OSError as error:
        raise EnvironmentFailedError(f"{path} cannot be written: {error.strerror or error}") from error
    return say(f"Wrote {path}")


def deliver_texts(
    outputs: Outputs, render: Callable[[str], str], table: Callable[[int | None], str], say: Callable[[str], None]
) -> None:
    """Write every format asked for, `render(flag)`; without one on stdout, the `table` of a width goes there."""
    for flag, path in outputs.files.items():
        write(path, render(flag), say)
    if not outputs.on_stdout:
        to_stdout(table(columns_of(sys.stdout)))


def to_stdout(text: str) -> None:
    """Write to stdout, at once; characters that its encoding lacks are written as escapes.

    Raises EnvironmentFailedError where nobody reads it or the disk is full.
    """
    try:
        sys.stdout.write(encodable(text, sys.stdout))
        sys.stdout.flush()
    except OSError as error:
        raise _lost_stdout(error) from error


def settle_directory(option: Path | None, name: str, *, force: bool, now: datetime) -> Path:
    """The output directory, made if need be: the option, or runs/<name>-<time>.

    What it holds is left alone: the launcher clears it when nothing else can go wrong. Raises UsageError where
    it holds a sweep and `force` is not given, EnvironmentFailedError where it cannot be written.
    """
    try:
        directory = option if option is not None else _fresh(Path("runs") / f"{name}-{now:%Y%m%d-%H%M%S}")
        held = [file for file in OUTPUT_FILES if (directory / file).exists()]
        if held and not force:
            rule = "a sweep needs a directory of its own; give another --output-dir, or --force to overwrite"
            raise UsageError(f"{directory} already holds {' and '.join(held)}; {rule}")
        if directory.exists() and not directory.is_dir():
            raise UsageError(f"{directory} is no directory; --output-dir takes a directory, made where missing")
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = shorten(str(option or "runs"), _LONGEST_NAME)
        fact = f"{where} cannot be used for output: {error.strerror or error}"
        raise EnvironmentFailedError(f"{fact}; give a writable --output-dir") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise EnvironmentFailedError(f"{directory} is not writable; give a writable --output-dir")
    return directory


def _fresh(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that does not exist: two sweeps may start in one second."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _check_file(flag: str, text: str) -> None:
    if not text:
        raise UsageError(f"{flag} is empty; it takes a file, or - for stdout")
    path, name = Path(text), shorten(text, _LONGEST_NAME)
    try:
        if path.is_dir():
            raise UsageError(f"{flag} {name} is a directory; it takes a file, or - for stdout")
        if not path.parent.is_dir():
            folder = shorten(str(path.parent), _LONGEST_NAME)
            raise UsageError(f"{flag} {name} cannot be written: there is no directory {folder}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"{flag} {name} cannot be written: permission denied")
    except OSError as error:
        raise UsageError(f"{flag} {name} cannot be written: {error.strerror or error}; give another file") from error


def _render(flag: str, record: Record) -> str:
    if flag == "--json":
        from chunktune.record import record_json

        return record_json(record)
    if flag == "--html":
        from chunktune.report.html import to_html

        return to_html(record)
    from chunktune.report import tabular

    return tabular.to_csv(record) if flag == "--csv" else tabular.to_markdown(record)


def _print_table(record: Record) -> None:
    from chunktune.report.terminal import print_record

    try:
        print_record(record, sys.stdout)
        sys.stdout.flush()
    except OSError as error:
        raise _lost_stdout(error) from error


def _lost_stdout(error: OSError) -> EnvironmentFailedError:
    # What is still buffered would raise once more, and noisily, when the interpreter shuts down.
    sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    return EnvironmentFailedError(f"stdout cannot be written: {error.strerror or error}")
