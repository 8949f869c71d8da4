"""`chunktune history DIR|RECORD...`: the chosen M, throughput and peak over time. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from chunktune.cli import options
from chunktune.cli.outputs import Outputs, deliver_texts, tell
from chunktune.errors import UsageError
from chunktune.reading import JOURNAL_FILE, RECORD_FILE, STDIN, load_record, record_names
from chunktune.units import shorten

if TYPE_CHECKING:
    from chunktune.report.history import Entry, Row

EXAMPLES = """
Examples:

chunktune history runs

chunktune history runs/monday runs/tuesday baseline.json

chunktune history runs --csv history.csv
"""
_LONGEST_NOTE = 400


def history(
    paths: Annotated[
        list[Path],
        options.records("DIR|RECORD...", "Directories, with every record below them; record.json files; - for stdin."),
    ],
    json_file: Annotated[str | None, options.output("--json", "FILE", "A list of records as JSON.")] = None,
    csv_file: Annotated[str | None, options.output("--csv", "FILE", "A row a record.")] = None,
    markdown_file: Annotated[str | None, options.output("--markdown", "FILE", "The table as Markdown.")] = None,
    debug: options.Debug = False,
) -> int:
    """Show records over time: M, its limit, throughput and peak, and the change since the record before.

    Of a directory, every record.json below it, and the journal of a sweep that has none yet.

    The column "spec" numbers the specs, device and sweep tables left out; changes are within one of them.

    What cannot be read is named on stderr and left out. FILE may be - for stdout.
    """
    files = {"--json": json_file, "--csv": csv_file, "--markdown": markdown_file}
    outputs = Outputs({flag: path for flag, path in files.items() if path is not None})
    outputs.check()
    if sum(str(path) == STDIN for path in paths) > 1:
        raise UsageError("- is given more than once; stdin holds one record")
    found = list(_found(paths))
    outputs.spare(found, "a record")
    entries = _read(found)
    if not entries:
        raise UsageError(f"no record can be read from {', '.join(map(str, paths))}; {_RULE}")
    from chunktune.report.history import history as rows_of

    _deliver(rows_of(entries), outputs)
    return 0


_RULE = f"a record is the {RECORD_FILE} that a sweep wrote, or its output directory"


def _found(paths: Iterable[Path]) -> Iterator[Path]:
    """Every record, named or below a directory, once: a file, or the output directory that holds it."""
    seen: set[Path] = set()
    for path in paths:
        for each in _below(path) if path.is_dir() else [path]:
            file = (each / RECORD_FILE if (each / RECORD_FILE).exists() else each).absolute()
            if file not in seen:
                seen.add(file)
                yield each


def _below(directory: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(directory, onerror=_say_unreadable):
        folders.sort()
        if RECORD_FILE in files or JOURNAL_FILE in files:
            yield Path(folder)


def _say_unreadable(error: OSError) -> None:
    _say(f"left out: {error.filename}: {error.strerror or error}")


def _read(found: Sequence[Path]) -> list[Entry]:
    """What the history keeps of each record that can be read; the others are named on stderr."""
    from chunktune.report.history import entry

    entries = []
    for path, name in zip(found, record_names(found), strict=True):
        try:
            entries.append(entry(load_record(path), name))
        except UsageError as error:
            _say(f"left out: {error}")
    return entries


def _deliver(rows: Sequence[Row], outputs: Outputs) -> None:
    """Write every format asked for; without one on stdout, the table goes there."""
    from chunktune.report import history_table
    from chunktune.report.bars import marks_for

    renderings: Mapping[str, Callable[[Sequence[Row]], str]] = {
        "--json": history_table.to_json,
        "--csv": history_table.to_csv,
        "--markdown": history_table.to_markdown,
    }
    marks = marks_for(sys.stdout.encoding or "utf-8")
    deliver_texts(
        outputs,
        lambda flag: renderings[flag](rows),
        lambda width: history_table.to_text(rows, width, marks),
        _say,
    )


def _say(text: str) -> None:
    tell(shorten(text, _LONGEST_NOTE))
