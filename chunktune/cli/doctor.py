"""`chunktune doctor`: devices, versions, limits and noise of this machine."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from chunktune.cli import options
from chunktune.cli.outputs import Outputs, deliver_texts
from chunktune.errors import UsageError

if TYPE_CHECKING:
    pass

EXAMPLES = """
Examples:

chunktune doctor

chunktune doctor --no-noise --json - | jq .facts.torch
"""


def doctor(
    json_file: Annotated[str | None, options.output("--json", "FILE", "Everything as JSON; - for stdout.")] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, max=600, metavar="S", help="Measure noise for so long.")
    ] = 10.0,
    noise: Annotated[bool, typer.Option("--noise/--no-noise", help="Measure noise at all.")] = True,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Say what this machine is, what stands in the way of a sweep, and how well it tells two speeds apart.

    A fact that cannot be had reads "not available". Exits with 0 whatever it finds.
    """
    if not math.isfinite(seconds):
        raise UsageError(f"--seconds is {seconds}; it must be a number from 1 to 600")
    outputs = Outputs({} if json_file is None else {"--json": json_file})
    outputs.check()
    from chunktune.doctor.examination import examine

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    found = examine(seconds if noise else None, say)
    from chunktune.report.doctor import to_json, to_text

    deliver_texts(outputs, lambda _: to_json(found), lambda width: to_text(found, width), say)
    return 0
