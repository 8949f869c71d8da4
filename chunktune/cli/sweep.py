"""`chunktune sweep SPEC`: measure on this machine's devices and choose M."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chunktune.cli import ci, interrupts, options
from chunktune.cli.options import overrides
from chunktune.cli.outputs import Outputs, deliver, settle_directory, tell, to_stdout, write
from chunktune.cli.progress import How, Progress, decide
from chunktune.cli.resume import Unfinished, unfinished
from chunktune.errors import (
    ChunktuneError,
    EnvironmentFailedError,
    InconclusiveError,
    InfeasibleError,
    UsageError,
)
from chunktune.report import plain
from chunktune.results import Record, Trial, Verdict
from chunktune.units import printable

if TYPE_CHECKING:
    from chunktune.request import SweepRequest
    from chunktune.spec import Resolved


def sweep(
    context: typer.Context,
    spec: Annotated[
        Path | None,
        typer.Argument(
            metavar="SPEC",
            help="The spec, a TOML file; with --resume the sweep's own if not given.",
            show_default=False,
        ),
    ] = None,
    sets: options.Sets = None,
    stages: options.Stages = None,
    schedule: options.Schedule = None,
    virtual_stages: options.VirtualStages = None,
    recompute: options.Recompute = None,
    partition: options.Partition = None,
    mini_batch: options.MiniBatch = None,
    micro_batch: options.MicroBatch = None,
    chunks: options.Chunks = None,
    optimizer: options.Optimizer = None,
    precision: options.Precision = None,
    device: Annotated[str | None, options.choice("--device", "KIND", "auto, cuda or cpu.", "device.kind")] = None,
    memory: options.Memory = None,
    headroom: options.Headroom = None,
    criterion: options.Criterion = None,
    tolerance: options.Tolerance = None,
    patience: options.Patience = None,
    budget: Annotated[str | None, options.setting("--budget", "TIME", "For all trials: 90s, 10m, 1.5h.")] = None,
    output_dir: Annotated[
        Path | None,
        options.a_directory("--output-dir", "For journal and record; runs/<spec>-<time> if not given."),
    ] = None,
    force: Annotated[bool, options.output("--force", None, "Overwrite a sweep in the output directory.")] = False,
    resume: Annotated[
        Path | None, options.a_directory("--resume", "Go on with the sweep in this output directory.")
    ] = None,
    json_file: options.JsonFile = None,
    csv_file: options.CsvFile = None,
    markdown_file: options.MarkdownFile = None,
    html_file: options.HtmlFile = None,
    printed: options.Printed = None,
    dry_run: Annotated[bool, options.running("--dry-run", "Show what would be tried, and touch no device.")] = False,
    rehearse: Annotated[
        bool,
        options.running("--rehearse", "Run the stages in turn on the devices there are, and simulate the pipeline."),
    ] = False,
    share: Annotated[bool, options.running("--share", "Measure although another sweep holds the devices.")] = False,
    quick: Annotated[bool, options.running("--quick", "Fewer rounds; marked in the record.")] = False,
    strict: Annotated[bool, options.running("--strict", "Exit with 5 where the verdict is unclear.")] = False,
    github: options.Github = None,
    progress: options.Shown = None,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Measure the pipeline at several chunk counts on this machine's devices, and choose one.

    The answer goes to stdout, progress to stderr, the journal and the record to the output directory.
    """
    options.check_printed(printed)
    how = _how(progress, quiet=quiet)
    files = {"--json": json_file, "--csv": csv_file, "--markdown": markdown_file, "--html": html_file}
    outputs = Outputs({flag: path for flag, path in files.items() if path is not None}, printed is not None)
    if leads(os.environ):
        outputs.check()
    given = {"--output-dir": output_dir, "--force": force, "--dry-run": dry_run}
    kept = None if resume is None else unfinished(resume, given)
    resolved = _resolved(spec, kept, sets or (), overrides(context.params))
    _refuse_costs(resolved)
    if dry_run:
        return show_plan(resolved, outputs, quiet=quiet)
    directory = _directory(output_dir, resolved.name, force=force) if kept is None else str(kept.directory)
    request = _request(resolved, quick=quick, output_dir=directory, force=force, rehearse=rehearse)
    request = replace(kept.again(request, spec) if kept else request, share=share)
    say = _sayer(quiet)
    record, written = None if kept is None else kept.finished(request), Path(directory)
    if record is not None:
        say(f"{resume}: this sweep has come to its end; nothing was run")
    else:
        record, written = run(request, how)
    if record is None:
        return 0
    deliver(record, outputs, say)
    place = _record_file(written, output_dir)
    if place:
        say(f"Wrote {place}")
    ci.publish_record(github, record, "sweep", place, say)
    return conclude(record, strict=strict, torchrun=under_torchrun(os.environ))


def _record_file(written: Path, output_dir: Path | None) -> str:
    """Where the record lies, as people say it; "" where it could not be written."""
    there = (written / "record.json").is_file()
    return f"{output_dir or Path(os.path.relpath(written))}/record.json" if there else ""


def _resolved(
    spec: Path | None, kept: Unfinished | None, sets: Sequence[str], flags: Mapping[str, tuple[str, Any]]
) -> Resolved:
    """The spec: the file's, or that of the sweep to go on with. Raises SpecError, and UsageError without either."""
    if spec is not None:
        from chunktune.spec import load

        return load(spec, environ=os.environ, sets=sets, flags=flags)
    if kept is None:
        raise UsageError("neither SPEC nor --resume DIR is given; a sweep needs a spec, or a sweep to go on with")
    return kept.resolved(sets, flags)


def _refuse_costs(resolved: Resolved) -> None:
    if resolved.spec.model.family == "costs":
        raise UsageError(
            'model.family is "costs", which names times and no layers: there is nothing to measure; '
            f"use chunktune whatif {resolved.path}, which predicts from them"
        )


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
        to_stdout(printable(found.to_text()))
    return 0


def run(request: SweepRequest, how: How) -> tuple[Record | None, Path]:
    """Run the sweep with its progress on stderr: the record and its directory.

    The record is null where another process of the user's torchrun answers.
    """
    if not under_torchrun(os.environ):
        from chunktune.pipeline.server import start_server

        start_server()
    try:
        return _launched(request, how)
    finally:
        _tidy(Path(request.output_dir) if request.output_dir else None)


def _tidy(directory: Path | None) -> None:
    """End the server that workers are forked from, and take away a directory in which nothing was written."""
    from chunktune.pipeline.server import stop_server

    stop_server()
    if directory is not None:
        with suppress(OSError):  # not empty, as it should be
            directory.rmdir()


def _launched(request: SweepRequest, how: How) -> tuple[Record | None, Path]:
    with Progress(sys.stderr, how, request.spec.sweep.budget) as progress:
        from chunktune.pipeline import launch

        interrupts.check()
        return launch.run(request, progress), progress.output_dir or Path(request.output_dir)


def _how(asked: str | None, *, quiet: bool) -> How:
    """How progress is shown; says on stderr where that is not as asked. Raises UsageError."""
    alone = not under_torchrun(os.environ)
    how, note = decide(asked, quiet=quiet, stream=sys.stderr, environ=os.environ, alone=alone)
    if note and leads(os.environ):
        tell(f"note: {note}")
    return how


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
    tell(f"error: {error}")
    return 0


def failure(record: Record, *, strict: bool) -> ChunktuneError | None:
    """What a record without a clear answer amounts to; null where an M was chosen."""
    verdict = record.verdict
    if verdict is None:
        return EnvironmentFailedError(f"the sweep ended without a verdict, status {record.status}")
    if verdict.chunks is None:
        return _nothing_chosen(record, verdict)
    if strict and verdict.confidence == "unclear":
        reasons = plain("; ".join(verdict.confidence_reasons)) or "no reason was recorded"
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
    return plain(f"M = {trial.chunks}: {trial.state}" + (f": {trial.reason}" if trial.reason else ""))


def _directory(option: Path | None, name: str, *, force: bool) -> str:
    """The absolute output directory; under the user's torchrun the launcher settles it for all nodes."""
    if under_torchrun(os.environ):
        return str(option.absolute()) if option is not None else ""
    return str(settle_directory(option, name, force=force, now=datetime.now()).absolute())


def _request(
    resolved: Resolved, *, quick: bool, output_dir: str, force: bool = False, rehearse: bool = False
) -> SweepRequest:
    spec_dir = str(resolved.path.absolute().parent)
    from chunktune.request import SweepRequest

    return SweepRequest(resolved.spec, resolved.sources, resolved.name, spec_dir, quick, output_dir, force, rehearse)


def _sayer(quiet: bool) -> Callable[[str], None]:
    return (lambda text: None) if quiet else tell
