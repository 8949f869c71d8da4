"""`chunktune sweep SPEC`: measure on this machine's devices and choose M."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from chunktune.cli.outputs import Outputs, deliver, settle_directory, to_stdout, write
from chunktune.errors import (
    ChunktuneError,
    EnvironmentFailedError,
    InconclusiveError,
    InfeasibleError,
    UsageError,
)
from chunktune.request import SweepRequest
from chunktune.results import Record, Trial, Verdict
from chunktune.spec import Resolved, load

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


def _setting(flag: str, metavar: str, text: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=text, rich_help_panel=SETTINGS, show_default=False)


def _output(flag: str, metavar: str | None, text: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=text, rich_help_panel=OUTPUT, show_default=False)


def _running(flag: str, text: str) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=RUNNING)


def sweep(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="The spec, a TOML file.", show_default=False)],
    sets: Annotated[list[str] | None, _setting("--set", "KEY=VALUE", "Any key of the spec; repeatable.")] = None,
    stages: Annotated[str | None, _setting("--stages", "K", "Pipeline ranks, or auto.")] = None,
    schedule: Annotated[str | None, _setting("--schedule", "NAME", "gpipe, 1f1b, interleaved-1f1b, ...")] = None,
    virtual_stages: Annotated[str | None, _setting("--virtual-stages", "V", "Parts a rank, or auto.")] = None,
    recompute: Annotated[str | None, _setting("--recompute", "HOW", "none or full.")] = None,
    partition: Annotated[
        str | None, _setting("--partition", "HOW", "uniform, parameters, time, or counts such as 4,4.")
    ] = None,
    mini_batch: Annotated[str | None, _setting("--mini-batch", "N", "Samples a step, held fixed.")] = None,
    micro_batch: Annotated[str | None, _setting("--micro-batch", "B", "Samples a chunk, held fixed.")] = None,
    chunks: Annotated[str | None, _setting("--chunks", "M", "auto, values such as 1,2,4, or 1:64.")] = None,
    optimizer: Annotated[str | None, _setting("--optimizer", "NAME", "adamw, sgd or none.")] = None,
    precision: Annotated[str | None, _setting("--precision", "TYPE", "float32 or bfloat16.")] = None,
    device: Annotated[str | None, _setting("--device", "KIND", "auto, cuda or cpu.")] = None,
    memory: Annotated[str | None, _setting("--memory", "SIZE", "What a rank may use: auto, 12GiB, ...")] = None,
    headroom: Annotated[str | None, _setting("--headroom", "SHARE", "Share kept free: 5% or 0.05.")] = None,
    criterion: Annotated[str | None, _setting("--criterion", "RULE", "pipeline or stage.")] = None,
    tolerance: Annotated[str | None, _setting("--tolerance", "SHARE", "What counts as slower: 1%.")] = None,
    patience: Annotated[str | None, _setting("--patience", "COUNT", "Values tried past a fall.")] = None,
    budget: Annotated[str | None, _setting("--budget", "TIME", "For all trials: 90s, 10m, 1.5h.")] = None,
    output_dir: Annotated[
        Path | None, _output("--output-dir", "DIR", "For journal and record; runs/<spec>-<time> if not given.")
    ] = None,
    force: Annotated[bool, _output("--force", None, "Overwrite a sweep in the output directory.")] = False,
    json_file: Annotated[str | None, _output("--json", "FILE", "The record as JSON; - for stdout.")] = None,
    csv_file: Annotated[str | None, _output("--csv", "FILE", "The trials as CSV; - for stdout.")] = None,
    markdown_file: Annotated[str | None, _output("--markdown", "FILE", "The trials as Markdown; - for stdout.")] = None,
    printed: Annotated[str | None, _output("--print", "chunks", "Print only the chosen M.")] = None,
    dry_run: Annotated[bool, _running("--dry-run", "Show what would be tried, and touch no device.")] = False,
    quick: Annotated[bool, _running("--quick", "Fewer rounds; marked in the record.")] = False,
    strict: Annotated[bool, _running("--strict", "Exit with 5 where the verdict is unclear.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=RUNNING)] = False,
    debug: Annotated[bool, _running("--debug", "Show tracebacks.")] = False,
) -> int:
    """Measure the pipeline at several chunk counts on this machine's devices, and choose one.

    The answer goes to stdout, progress to stderr, the journal and the record to the output directory.
    """
    if printed not in (None, "chunks"):
        raise UsageError(f"--print {printed} is unknown; it prints one thing, --print chunks")
    files = {"--json": json_file, "--csv": csv_file, "--markdown": markdown_file}
    outputs = Outputs({flag: path for flag, path in files.items() if path is not None}, printed is not None)
    if leads(os.environ):
        outputs.check()
    resolved = load(spec, environ=os.environ, sets=sets or (), flags=overrides(context.params))
    if dry_run:
        return show_plan(resolved, outputs, quiet=quiet)
    directory = _directory(output_dir, resolved.name, force=force)
    record, written = run(_request(resolved, quick=quick, output_dir=directory, force=force), quiet=quiet)
    if record is None:
        return 0
    say = _sayer(quiet)
    deliver(record, outputs, say)
    if (written / "record.json").is_file():
        say(f"Wrote {output_dir or Path(os.path.relpath(written))}/record.json")
    return conclude(record, strict=strict, torchrun=under_torchrun(os.environ))


def overrides(parameters: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Dotted key -> (flag, value) for the settings given as flags; lists may be written without brackets."""
    return {
        key: (f"--{name.replace('_', '-')}", _bracketed(parameters[name]) if name in _LISTS else parameters[name])
        for name, key in OVERRIDES.items()
        if parameters.get(name) is not None
    }


def under_torchrun(environ: Mapping[str, str]) -> bool:
    """Whether this process is a worker of the user's own torchrun."""
    return "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ


def leads(environ: Mapping[str, str]) -> bool:
    """Whether this process is the one that answers: all but rank 0 of the user's torchrun keep silent."""
    return not under_torchrun(environ) or environ["RANK"] == "0"


def show_plan(resolved: Resolved, outputs: Outputs, *, quiet: bool) -> int:
    """Print what the sweep would do. Raises UsageError where an output that needs trials is asked for."""
    needless = [flag for flag in outputs.files if flag != "--json"]
    needless += ["--print chunks"] if outputs.print_chunks else []
    if needless:
        raise UsageError(f"--dry-run runs no trials, so there is nothing for {', '.join(needless)}; use --json")
    if not leads(os.environ):
        return 0
    from chunktune.cli.dry_run import plan

    found = plan(_request(resolved, quick=False, output_dir=""))
    for path in outputs.files.values():
        write(path, found.to_json(), _sayer(quiet))
    if not outputs.on_stdout:
        to_stdout(found.to_text())
    return 0


def run(request: SweepRequest, *, quiet: bool) -> tuple[Record | None, Path]:
    """Run the sweep with its progress on stderr: the record and its directory.

    The record is null where another process of the user's torchrun answers.
    """
    if not under_torchrun(os.environ):
        from chunktune.pipeline.server import start_server

        start_server()
    try:
        return _launched(request, quiet=quiet)
    finally:
        _tidy(Path(request.output_dir) if request.output_dir else None)


def _tidy(directory: Path | None) -> None:
    """End the server that workers are forked from, and take away a directory in which nothing was written."""
    from chunktune.pipeline.server import stop_server

    stop_server()
    if directory is not None:
        with suppress(OSError):  # not empty, as it should be
            directory.rmdir()


def _launched(request: SweepRequest, *, quiet: bool) -> tuple[Record | None, Path]:
    from chunktune.pipeline import launch

    progress = Progress(sys.stderr, quiet=quiet)
    try:
        return launch.run(request, progress), progress.output_dir or Path(request.output_dir)
    finally:
        progress.clear()


class Progress:
    """Journal events as lines on a stream; on a terminal also what is running now, in a line that goes away."""

    def __init__(self, stream: TextIO, *, quiet: bool) -> None:
        self._stream, self._quiet, self._live = stream, quiet, stream.isatty()
        self._pending = False
        self.output_dir: Path | None = None

    def __call__(self, event: dict[str, Any]) -> None:
        """Show one event."""
        if "output_dir" in event:
            self.output_dir = Path(event["output_dir"])
        if self._quiet:
            return
        from chunktune.report.terminal import progress_line

        self.clear()
        line = progress_line(event)
        if line is not None:
            print(line, file=self._stream, flush=True)
        if self._live and event.get("event") == "begin":
            self._show(f"{event.get('task')}: M = {', '.join(map(str, event.get('values', ())))} ...")

    def clear(self) -> None:
        """Take the passing line away."""
        if self._pending:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._pending = False

    def _show(self, text: str) -> None:
        self._stream.write(text[:78])
        self._stream.flush()
        self._pending = True


def conclude(record: Record, *, strict: bool, torchrun: bool) -> int:
    """The exit code of a sweep that ended.

    Raises the error that the record stands for. Under the user's torchrun it is only printed: a worker that
    exits with anything but 0 makes the agent repeat the sweep.
    """
    error = failure(record, strict=strict)
    if error is None:
        return 0
    if not torchrun:
        raise error
    print(f"error: {error}", file=sys.stderr)
    return 0


def failure(record: Record, *, strict: bool) -> ChunktuneError | None:
    """What a record without a clear answer amounts to; null where an M was chosen."""
    verdict = record.verdict
    if verdict is None:
        return EnvironmentFailedError(f"the sweep ended without a verdict, status {record.status}")
    if verdict.chunks is None:
        return _nothing_chosen(record, verdict)
    if strict and verdict.confidence == "unclear":
        reasons = "; ".join(verdict.confidence_reasons) or "no reason was recorded"
        return InconclusiveError(f"M = {verdict.chunks} is unclear under --strict: {reasons}")
    return None


def _nothing_chosen(record: Record, verdict: Verdict) -> ChunktuneError:
    tried = [trial for trial in record.trials if trial.state not in ("skipped", "illegal")]
    why = [_why(trial) for trial in tried] or [verdict.limit_detail.reason or f"limit {verdict.limit}"]
    message = "\n".join([f"no M can be chosen of {len(record.candidates)} candidates:", *(f"  {w}" for w in why)])
    broken = bool(tried) and all(trial.state in ("error", "killed", "timeout") for trial in tried)
    if broken or verdict.limit == "budget" or record.status == "failed":
        return EnvironmentFailedError(message)
    return InfeasibleError(message)


def _why(trial: Trial) -> str:
    return f"M = {trial.chunks}: {trial.state}" + (f": {trial.reason}" if trial.reason else "")


def _directory(option: Path | None, name: str, *, force: bool) -> str:
    """The absolute output directory; under the user's torchrun the launcher settles it for all nodes."""
    if under_torchrun(os.environ):
        return str(option.absolute()) if option is not None else ""
    return str(settle_directory(option, name, force=force, now=datetime.now()).absolute())


def _request(resolved: Resolved, *, quick: bool, output_dir: str, force: bool = False) -> SweepRequest:
    spec_dir = str(resolved.path.absolute().parent)
    return SweepRequest(resolved.spec, resolved.sources, resolved.name, spec_dir, quick, output_dir, force)


def _sayer(quiet: bool) -> Callable[[str], None]:
    return (lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr))


def _bracketed(text: str) -> str:
    """`1,2,4` as the list it means."""
    items = text.split(",")
    digits = all(item.strip().removeprefix("-").isdecimal() for item in items)
    return f"[{text}]" if digits and text.isascii() else text
