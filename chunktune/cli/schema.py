"""`chunktune schema spec|record`: the JSON Schemas, for editors and other programs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from chunktune.cli import options
from chunktune.cli.completion import complete_from
from chunktune.cli.outputs import STDOUT, Outputs, tell, write
from chunktune.errors import UsageError

KINDS = ("spec", "record")
EXAMPLES = """
Examples:

chunktune schema record

chunktune schema spec --output spec.schema.json
"""


def schema(
    kind: Annotated[
        str,
        typer.Argument(metavar="spec|record", help="What it is of.", autocompletion=complete_from(KINDS)),
    ],
    output: Annotated[str, options.output("--output", "FILE", "Where to; stdout if not given.")] = STDOUT,
    debug: options.Debug = False,
) -> int:
    """Print the JSON Schema (draft 2020-12) of a spec or of a record.

    A spec whose first line is "#:schema FILE" is checked by editors that know taplo.
    """
    if kind not in KINDS:
        raise UsageError(f"schema {kind} is unknown; it is one of {', '.join(KINDS)}")
    Outputs({"--output": output}).check()
    from chunktune.spec_schema import schema_json

    write(output, schema_json(_shipped(kind)), tell)
    return 0


def _shipped(kind: str) -> dict[str, Any]:
    if kind == "record":
        from chunktune.record import shipped_schema

        return shipped_schema()
    from chunktune.spec_schema import shipped_spec_schema

    return shipped_spec_schema()
