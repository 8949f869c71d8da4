"""`chunktune validate`: the predictor against published measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chunktune.cli.outputs import Outputs, deliver_texts, tell
from chunktune.errors import CheckFailedError

if TYPE_CHECKING:
    from chunktune.validate import Validation


def _output(flag: str, text: str) -> Any:
    return typer.Option(flag, metavar="FILE", help=text, rich_help_panel="Output", show_default=False)


def validate(
    json_file: Annotated[str | None, _output("--json", "Everything as JSON; - for stdout.")] = None,
    csv_file: Annotated[str | None, _output("--csv", "One line a comparison; - for stdout.")] = None,
    markdown_file: Annotated[str | None, _output("--markdown", "The tables as Markdown; - for stdout.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> int:
    """Hold the predictor against published measurements: a row each, with its error.

    Exits with 4 where a pass mark does not hold.
    """
    files = {"--json": json_file, "--csv": csv_file, "--markdown": markdown_file}
    outputs = Outputs({flag: path for flag, path in files.items() if path is not None})
    outputs.check()
    from chunktune import validate as validation

    found = validation.validate()
    _deliver(found, outputs)
    return _conclude(found)


def _deliver(found: Validation, outputs: Outputs) -> None:
    """Write every format asked for; without one on stdout, the tables go there."""
    from chunktune.report import validation as report

    renderings: Mapping[str, Callable[[Validation], str]] = {
        "--json": report.to_json,
        "--csv": report.to_csv,
        "--markdown": report.to_markdown,
    }
    deliver_texts(outputs, lambda flag: renderings[flag](found), lambda width: report.to_text(found, width), tell)


def _conclude(found: Validation) -> int:
    """0. Raises CheckFailedError where a pass mark does not hold."""
    if found.failed:
        broken = "\n".join(f"  {mark.name}: {mark.detail}" for mark in found.failed)
        raise CheckFailedError(f"{len(found.failed)} of {len(found.marks)} pass marks do not hold:\n{broken}")
    return 0
