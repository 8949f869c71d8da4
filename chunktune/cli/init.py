"""`chunktune init`: a commented spec to start from."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from chunktune.cli import options
from chunktune.cli.completion import complete_setting, complete_values
from chunktune.cli.outputs import STDOUT, Outputs, tell, write
from chunktune.errors import UsageError

CONTENT = "What stands in it"
FILE = "spec.toml"
EXAMPLES = """
Examples:

chunktune init --family transformer --stages 4 --mini-batch 64

chunktune init --family python --schedule interleaved-1f1b --output mine.toml

chunktune init --family sleep --set model.layers=16 --output -
"""
OVERRIDES = {"family": "model.family"} | {
    name: options.OVERRIDES[name] for name in ("stages", "schedule", "mini_batch", "micro_batch")
}


_content = partial(options.under, CONTENT)


def init(
    context: typer.Context,
    family: Annotated[
        str | None,
        _content("--family", "NAME", "transformer, mlp, sleep, costs or python.", complete_values("model.family")),
    ] = None,
    stages: Annotated[str | None, _content("--stages", "K", "Pipeline ranks, or auto; 2 if not given.")] = None,
    schedule: Annotated[
        str | None,
        _content("--schedule", "NAME", "gpipe, 1f1b, interleaved-1f1b, ...", complete_values("pipeline.schedule")),
    ] = None,
    mini_batch: Annotated[str | None, _content("--mini-batch", "N", "Samples a step, held fixed.")] = None,
    micro_batch: Annotated[str | None, _content("--micro-batch", "B", "Samples a chunk, held fixed.")] = None,
    sets: Annotated[
        list[str] | None, _content("--set", "KEY=VALUE", "Any key of the spec; repeatable.", complete_setting)
    ] = None,
    output: Annotated[str, options.output("--output", "FILE", f"Where to; {FILE} if not given, - for stdout.")] = FILE,
    force: Annotated[bool, options.output("--force", None, "Overwrite the file.")] = False,
    debug: options.Debug = False,
) -> int:
    """Write a commented spec that is valid as written: every key with its default, its meaning and what it takes.

    What cannot be swept fails here as it would there.
    """
    Outputs({"--output": output}).check()
    _refuse_overwriting(output, force=force)
    from chunktune.init import start

    flags = options.overrides(context.params, OVERRIDES)
    begun = start(sets or (), flags, Path(FILE if output == STDOUT else output))
    write(output, begun.text, tell)
    if output != STDOUT:
        tell(f"Next: {_next_command(begun.spec.model.family, output)}")
    return 0


def _refuse_overwriting(output: str, *, force: bool) -> None:
    if output != STDOUT and Path(output).exists() and not force:
        raise UsageError(f"{output} already exists; give another --output, or --force to overwrite it")


def _next_command(family: str, output: str) -> str:
    """What can be done with the file as it is."""
    path = shlex.quote(output)
    return f"chunktune whatif {path}" if family == "costs" else f"chunktune sweep {path} --dry-run"
