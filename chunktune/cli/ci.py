"""What a command leaves behind for GitHub Actions: summary and outputs of the step, annotations on stderr.

The runner reads workflow commands from stderr as well, and stdout belongs to the answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from chunktune.cli.outputs import tell
from chunktune.reading import RECORD_FILE, STDIN
from chunktune.results import Record

if TYPE_CHECKING:
    from chunktune.gate import Gate

_SUMMARY, _OUTPUT = "GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT"
Say = Callable[[str], None]


def on_github(wanted: bool | None) -> bool:
    """Whether to write for GitHub Actions: as asked by --github or --no-github, else where it runs this command."""
    return os.environ.get("GITHUB_ACTIONS") == "true" if wanted is None else wanted


def place_of(record: Path) -> str:
    """Where a record that was read lies, as an output of the step; "" for stdin."""
    if str(record) == STDIN:
        return ""
    return str(record / RECORD_FILE if record.is_dir() else record)


def publish_record(wanted: bool | None, record: Record, command: str, path: str, say: Say) -> None:
    """Write the answer of a record where `on_github`; `path`: where the record lies, "" for nowhere.

    Notes on stderr what cannot be written, and raises nothing: the answer itself is delivered elsewhere.
    """
    if on_github(wanted):
        from chunktune.report import github

        _publish(github.summary(record, command), github.outputs(record, path), github.record_annotations(record), say)


def publish_gate(wanted: bool | None, gate: Gate, record: Record, path: str, say: Say, *, holds: bool = True) -> None:
    """The same of a gate. `holds`: its conditions apply, and what fails is an error; not where a baseline is renewed.

    Notes on stderr what cannot be written, and raises nothing.
    """
    if on_github(wanted):
        from chunktune.report import github
        from chunktune.report.gate import to_markdown

        annotations = github.finding_annotations(gate.findings) if holds else []
        _publish(to_markdown(gate), github.outputs(record, path), annotations, say)


def _publish(summary: str, outputs: Mapping[str, str], annotations: Iterable[str], say: Say) -> None:
    from chunktune.report.github import fitting, output_lines

    _append(_SUMMARY, lambda used_bytes: fitting(f"\n{summary}" if used_bytes else summary, used_bytes), say)
    _append(_OUTPUT, lambda used_bytes: output_lines(outputs), say)
    for line in annotations:
        tell(line)


def _append(variable: str, text: Callable[[int], str], say: Say) -> None:
    """Append to the file that a variable names; `text` is made from the bytes that it holds already."""
    name = os.environ.get(variable)
    if not name:
        return say(f"note: {variable} is not set; nothing is written there")
    try:
        with Path(name).open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text(os.fstat(file.fileno()).st_size))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        say(f"note: {variable} cannot be written: {getattr(error, 'strerror', None) or error}")
    return None
