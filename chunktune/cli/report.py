"""`chunktune report RECORD...`: a record rendered again, or several side by side. No torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from chunktune.cli import ci, options
from chunktune.cli.outputs import Outputs, deliver, deliver_texts, tell, to_stdout
from chunktune.cli.sweep import failure
from chunktune.errors import UsageError
from chunktune.reading import load_records, record_names
from chunktune.report import columns_of
from chunktune.results import Record

EXAMPLES = """
Examples:

chunktune report runs/a-sweep

chunktune report runs/a-sweep --html report.html --trace trace.json

chunktune report runs/monday runs/tuesday --markdown -

chunktune report runs/a-sweep --print chunks
"""
# What has one record for its subject.
_ALONE = ("--html", "--trace")


def report(
    records: Annotated[
        list[Path],
        options.records(
            "RECORD...", "A record.json, a sweep's output directory, or - for stdin; several are laid side by side."
        ),
    ],
    json_file: Annotated[
        str | None, options.output("--json", "FILE", "The record, or of several their summaries, as JSON.")
    ] = None,
    csv_file: Annotated[str | None, options.output("--csv", "FILE", "A row a trial, or of several a record.")] = None,
    markdown_file: Annotated[str | None, options.output("--markdown", "FILE", "The tables as Markdown.")] = None,
    html_file: options.HtmlFile = None,
    trace_file: Annotated[
        str | None, options.output("--trace", "FILE", "One step for Perfetto or chrome://tracing.")
    ] = None,
    chunks: Annotated[
        int | None, options.output("--chunks", "M", "The M of the trace; the chosen one if not given.")
    ] = None,
    printed: options.Printed = None,
    github: options.Github = None,
    debug: options.Debug = False,
) -> int:
    """Render a record: the table and the verdict as `sweep` prints them, and bars of throughput and memory.

    Several records are laid side by side: their answers, and what differs between their settings. The answer goes to
    stdout, notes to stderr; FILE may be - for stdout.
    """
    files = {"--json": json_file, "--csv": csv_file, "--markdown": markdown_file, "--html": html_file}
    files |= {"--trace": trace_file}
    outputs = Outputs({flag: path for flag, path in files.items() if path is not None}, printed is not None)
    _check(records, outputs, printed, chunks)
    found = load_records(records)
    if len(found) > 1:
        _deliver_several(found, record_names(records), outputs)
        return 0
    _deliver_one(found[0], outputs, chunks)
    ci.publish_record(github, found[0], "report", ci.place_of(records[0]), tell)
    return 0


def _check(records: Sequence[Path], outputs: Outputs, printed: str | None, chunks: int | None) -> None:
    """Raises UsageError for what the command line cannot mean, and where an output would overwrite a record."""
    options.check_printed(printed)
    if chunks is not None and "--trace" not in outputs.files:
        raise UsageError(f"--chunks {chunks} is the M of --trace, which is not given; a report shows every M")
    alone = [flag for flag in _ALONE if flag in outputs.files] + (["--print chunks"] if printed else [])
    if len(records) > 1 and alone:
        given = f"{' and '.join(alone)} shows one record, and {len(records)} are given"
        raise UsageError(f"{given}; name one, or use --json, --csv or --markdown")
    outputs.check()
    outputs.spare(records, "the record")


def _deliver_one(record: Record, outputs: Outputs, chunks: int | None) -> None:
    if outputs.print_chunks and (error := failure(record, strict=False)):
        raise error
    ready = {}
    if "--trace" in outputs.files:
        from chunktune.report.trace import to_trace

        ready["--trace"] = to_trace(record, chunks)
    deliver(record, outputs, tell, ready)
    if not outputs.on_stdout:
        _print_bars(record)


def _print_bars(record: Record) -> None:
    from chunktune.report.bars import marks_for, render_bars

    if text := render_bars(record, columns_of(sys.stdout), marks_for(sys.stdout.encoding)):
        to_stdout(f"\n{text}")


def _deliver_several(found: Sequence[Record], names: Sequence[str], outputs: Outputs) -> None:
    """Write every format asked for; without one on stdout, the tables go there."""
    from chunktune.report import side_by_side

    renderings: Mapping[str, Callable[[Sequence[Record], Sequence[str]], str]] = {
        "--json": side_by_side.to_json,
        "--csv": side_by_side.to_csv,
        "--markdown": side_by_side.to_markdown,
    }
    deliver_texts(
        outputs,
        lambda flag: renderings[flag](found, names),
        lambda width: side_by_side.to_text(found, names, width),
        tell,
    )
