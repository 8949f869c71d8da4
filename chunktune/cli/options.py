"""The options that `sweep` and `whatif` share: settings over the spec, outputs, and the keys that they override."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from chunktune.cli.completion import Complete, complete_from, complete_record, complete_setting, complete_values
from chunktune.errors import UsageError
from chunktune.units import shorten

SETTINGS = "Settings (over the spec and the environment)"
OUTPUT = "Output"
RUNNING = "Running"

# Parameter of `sweep` -> the key of the spec that it overrides.
OVERRIDES: Mapping[str, str] = {
    "stages": "pipeline.stages",
    "schedule": "pipeline.schedule",
    "virtual_stages": "pipeline.virtual_stages",
    "recompute": "pipeline.recompute",
    "partition": "pipeline.partition",
    "mini_batch": "batch.mini_batch",
    "micro_batch": "batch.micro_batch",
    "chunks": "batch.chunks",
    "optimizer": "training.optimizer",
    "precision": "training.precision",
    "device": "device.kind",
    "memory": "device.memory",
    "headroom": "device.headroom",
    "criterion": "sweep.criterion",
    "tolerance": "sweep.tolerance",
    "patience": "sweep.patience",
    "budget": "sweep.budget",
}
_LISTS = ("chunks", "partition")


def under(panel: str, flag: str, metavar: str | None, text: str, complete: Complete | None = None, **more: Any) -> Any:
    """An option that the help shows under a heading, without its default; `complete` offers values to the shell."""
    return typer.Option(
        flag, metavar=metavar, help=text, rich_help_panel=panel, show_default=False, autocompletion=complete, **more
    )


setting = partial(under, SETTINGS)
"""An option that overrides a key of the spec."""
output = partial(under, OUTPUT)
"""An option that says where the answer goes."""


def choice(flag: str, metavar: str, text: str, key: str) -> Any:
    """`setting`, of a key whose values can be listed."""
    return setting(flag, metavar, text, complete_values(key))


def a_directory(flag: str, text: str) -> Any:
    """An option that names a directory; an empty one is refused, since it would be the present one."""
    return output(flag, "DIR", text, parser=read_path)


def records(metavar: str, text: str) -> Any:
    """An argument that names records."""
    return typer.Argument(metavar=metavar, help=text, show_default=False, autocompletion=complete_record)


def running(flag: str, text: str) -> Any:
    """A switch of how the command runs."""
    return typer.Option(flag, help=text, rich_help_panel=RUNNING)


RecordPath = Annotated[Path, records("RECORD", "A record.json, a sweep's output directory, or - for stdin.")]
Sets = Annotated[list[str] | None, setting("--set", "KEY=VALUE", "Any key of the spec; repeatable.", complete_setting)]
Stages = Annotated[str | None, setting("--stages", "K", "Pipeline ranks, or auto.")]
Schedule = Annotated[
    str | None, choice("--schedule", "NAME", "gpipe, 1f1b, interleaved-1f1b, ...", "pipeline.schedule")
]
VirtualStages = Annotated[str | None, setting("--virtual-stages", "V", "Parts a rank, or auto.")]
Recompute = Annotated[str | None, choice("--recompute", "HOW", "none or full.", "pipeline.recompute")]
Partition = Annotated[
    str | None, choice("--partition", "HOW", "uniform, parameters, time, or counts such as 4,4.", "pipeline.partition")
]
MiniBatch = Annotated[str | None, setting("--mini-batch", "N", "Samples a step, held fixed.")]
MicroBatch = Annotated[str | None, setting("--micro-batch", "B", "Samples a chunk, held fixed.")]
Chunks = Annotated[str | None, setting("--chunks", "M", "auto, values such as 1,2,4, or 1:64.")]
Optimizer = Annotated[str | None, choice("--optimizer", "NAME", "adamw, sgd or none.", "training.optimizer")]
Precision = Annotated[str | None, choice("--precision", "TYPE", "float32 or bfloat16.", "training.precision")]
Memory = Annotated[str | None, setting("--memory", "SIZE", "What a rank may use: auto, 12GiB, ...")]
Headroom = Annotated[str | None, setting("--headroom", "SHARE", "Share kept free: 5% or 0.05.")]
Criterion = Annotated[str | None, choice("--criterion", "RULE", "pipeline or stage.", "sweep.criterion")]
Tolerance = Annotated[str | None, setting("--tolerance", "SHARE", "What counts as slower: 1%.")]
Patience = Annotated[str | None, setting("--patience", "COUNT", "Values tried past a fall.")]

CsvFile = Annotated[str | None, output("--csv", "FILE", "The trials as CSV; - for stdout.")]
MarkdownFile = Annotated[str | None, output("--markdown", "FILE", "The trials as Markdown; - for stdout.")]
JsonFile = Annotated[str | None, output("--json", "FILE", "The record as JSON; - for stdout.")]
HtmlFile = Annotated[str | None, output("--html", "FILE", "The whole report as one HTML file; - for stdout.")]
Printed = Annotated[str | None, output("--print", "chunks", "Print only the chosen M.")]

Shown = Annotated[
    str | None,
    typer.Option(
        "--progress",
        metavar="HOW",
        help="auto (live on a terminal, else plain), live, plain or none.",
        rich_help_panel=RUNNING,
        show_default=False,
        autocompletion=complete_from(("auto", "live", "plain", "none")),
    ),
]
Github = Annotated[
    bool | None,
    typer.Option(
        "--github/--no-github",
        help="Step summary, outputs and annotations for GitHub Actions; on where GITHUB_ACTIONS is true.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes.", rich_help_panel=RUNNING)]
Debug = Annotated[bool, running("--debug", "Show tracebacks.")]


def check_printed(printed: str | None) -> None:
    """Raises UsageError where --print is given anything but what it prints."""
    if printed not in (None, "chunks"):
        raise UsageError(f"--print {shorten(printed) or '(empty)'} is unknown; it prints one thing, --print chunks")


def read_path(text: str) -> Path:
    """What an option names. Raises typer.BadParameter for an empty text, which would be the present directory."""
    if not text:
        raise typer.BadParameter("is empty; it takes a path, . for the present directory")
    return Path(text)


def overrides(parameters: Mapping[str, Any], keys: Mapping[str, str] = OVERRIDES) -> dict[str, tuple[str, Any]]:
    """Dotted key -> (flag, value) for the settings given as flags; lists may be written without brackets."""
    return {
        key: (f"--{name.replace('_', '-')}", _bracketed(parameters[name]) if name in _LISTS else parameters[name])
        for name, key in keys.items()
        if parameters.get(name) is not None
    }


def _bracketed(text: str) -> str:
    """`1,2,4` as the list it means."""
    items = text.split(",")
    digits = all(item.strip().removeprefix("-").isdecimal() for item in items)
    return f"[{text}]" if digits and text.isascii() else text
