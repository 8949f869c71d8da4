"""`chunktune whatif SPEC`: predict settings that nobody has run; no device is touched."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chunktune.cli import ci, options
from chunktune.cli.completion import complete_record, complete_values, complete_varied
from chunktune.cli.counting import counted
from chunktune.cli.outputs import Outputs, deliver, deliver_texts, tell, to_stdout
from chunktune.cli.progress import How, decide
from chunktune.cli.sweep import failure
from chunktune.errors import InconclusiveError, InfeasibleError, UsageError
from chunktune.results import Record

if TYPE_CHECKING:
    from chunktune.costs import CostSource
    from chunktune.spec import Resolved, Spec
    from chunktune.whatif import Engine
    from chunktune.whatif.grid import Grid

PREDICTION = "Prediction"
EXAMPLES = """
Examples:

chunktune whatif spec.toml --stages 8

chunktune whatif spec.toml --vary K=4,8,16 --vary schedule=gpipe,1f1b --vary recompute=none,full

chunktune whatif --from runs/a-sweep/record.json --vary K=2,4,8 --json grid.json

chunktune whatif spec.toml --device a100-80gb --mini-batch 512 --print chunks
"""

# Parameter of `whatif` -> the key of the spec that it overrides: no device runs, and nothing takes time.
OVERRIDES: Mapping[str, str] = {
    name: "hardware.name" if name == "device" else key for name, key in options.OVERRIDES.items() if name != "budget"
}


_predicting = partial(options.under, PREDICTION)


def whatif(
    context: typer.Context,
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="SPEC", help="The spec, a TOML file; with --from the record's own if not given."),
    ] = None,
    record_file: Annotated[
        Path | None,
        _predicting(
            "--from",
            "RECORD",
            "Calibrate with what a sweep measured: its record.json.",
            complete_record,
            parser=options.read_path,
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        _predicting(
            "--vary",
            "KEY=V1,V2",
            "Predict every value: a key of the spec, or K, N, b, V, M; repeatable.",
            complete_varied,
        ),
    ] = None,
    device: Annotated[
        str | None,
        _predicting(
            "--device", "NAME", "Estimate for this device: h100-80gb, a100-80gb, ...", complete_values("hardware.name")
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
    memory: options.Memory = None,
    headroom: options.Headroom = None,
    criterion: options.Criterion = None,
    tolerance: options.Tolerance = None,
    patience: options.Patience = None,
    json_file: options.JsonFile = None,
    csv_file: options.CsvFile = None,
    markdown_file: options.MarkdownFile = None,
    html_file: options.HtmlFile = None,
    printed: options.Printed = None,
    github: options.Github = None,
    strict: Annotated[bool, options.running("--strict", "Exit with 5 where the costs are extrapolated.")] = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Predict step time, bubble, memory of every rank and the best M, for settings nobody has run.

    Costs come from the spec (families sleep and costs), from a record (--from), or from a device's datasheet.
    The answer goes to stdout, notes to stderr. Nothing is run and no device is needed.
    """
    files = {"--json": json_file, "--csv": csv_file, "--markdown": markdown_file, "--html": html_file}
    outputs = Outputs({flag: path for flag, path in files.items() if path is not None}, printed is not None)
    _check(spec, record_file, printed, varied=bool(vary), outputs=outputs, github=github)
    question = _question(spec, record_file, sets or (), options.overrides(context.params, OVERRIDES))
    say = _sayer(quiet)
    if vary:
        how, _ = decide(None, quiet=quiet, stream=sys.stderr, environ=os.environ)
        return _answer_grid(question, vary, outputs, say, how, strict=strict)
    return _answer(question, outputs, say, github, strict=strict)


def _check(
    spec: Path | None,
    record: Path | None,
    printed: str | None,
    *,
    varied: bool,
    outputs: Outputs,
    github: bool | None = None,
) -> None:
    """Raises UsageError for what the command line cannot mean."""
    if spec is None and record is None:
        raise UsageError("neither SPEC nor --from RECORD is given; a prediction needs a spec, a record, or both")
    options.check_printed(printed)
    if printed and varied:
        raise UsageError("--print chunks prints one M, and --vary asks for many; use --csv - or --json - for all rows")
    if varied and github:
        raise UsageError("--github publishes one answer, and --vary asks for many; leave one of them out")
    if varied and "--html" in outputs.files:
        raise UsageError("--html shows one record, and --vary asks for many; use --markdown, --csv or --json")
    outputs.check()


@dataclass
class Question:
    """What is asked: the tables of the spec, what stands over them, and the record to calibrate with.

    `engines`: one for each family of model, which is what the source of costs depends on.
    """

    tables: Mapping[str, Any]
    path: Path
    source: str
    sets: Sequence[str]
    flags: Mapping[str, tuple[str, Any]]
    record: Record | None
    engines: dict[str, Engine] = field(default_factory=dict)

    def load(self, varied: Mapping[str, Any] | None = None) -> Resolved:
        """The spec, with some keys varied. Raises SpecError."""
        from chunktune.spec import resolve

        return resolve(
            self.tables,
            self.path,
            source=self.source,
            environ=os.environ,
            sets=self.sets,
            flags=self.flags,
            varied=varied,
        )

    def engine(self, spec: Spec) -> Engine:
        """The engine that predicts this spec."""
        from chunktune.whatif import Engine

        family = spec.model.family
        if family not in self.engines:
            self.engines[family] = Engine(_source(spec, self.record, self.path), self.record)
        return self.engines[family]

    def predict(self, resolved: Resolved) -> Record:
        """The record of one spec. Raises ChunktuneError."""
        return self.engine(resolved.spec).predict(resolved.spec, resolved.sources)


def _question(
    spec: Path | None, record_file: Path | None, sets: Sequence[str], flags: Mapping[str, tuple[str, Any]]
) -> Question:
    from chunktune.settings import read_file

    record = None if record_file is None else _read(record_file)
    if spec is not None:
        return Question(read_file(spec), spec, "file", sets, flags, record)
    assert record is not None and record_file is not None
    from chunktune.spec import tables_of_record

    return Question(tables_of_record(record), record_file, "record", sets, flags, record)


def _read(path: Path) -> Record:
    """The record, or the one in an output directory. Raises UsageError where nothing can be predicted from it."""
    from chunktune.reading import load_record
    from chunktune.sources.recorded import RecordedCosts

    record = load_record(path)
    if record.mode == "predicted":
        raise UsageError(f"{path}: is itself predicted; --from takes the record of a sweep, which measured something")
    RecordedCosts(record)  # what it cannot serve for is said once, and not in every row
    return record


def _source(spec: Spec, record: Record | None, path: Path) -> CostSource:
    from chunktune.whatif.sources import source_of

    return source_of(spec, record=record, spec_dir=str(path.absolute().parent))


# --- one setting


def _answer(
    question: Question, outputs: Outputs, say: Callable[[str], None], github: bool | None, *, strict: bool
) -> int:
    resolved = question.load()
    record = _with_alternatives(question, resolved.spec, question.predict(resolved))
    if question.record is not None:
        _show_calibration(question.record, outputs, say)
    say(f"Predicted from {question.engine(resolved.spec).source.label}; {_what_ran(question, resolved.spec)}")
    deliver(record, outputs, say)
    ci.publish_record(github, record, "whatif", outputs.file("--json"), say)
    error = failure(record, strict=strict)
    if error is not None:
        raise error
    return 0


def _what_ran(question: Question, spec: Spec | None = None) -> str:
    """An estimate of a model of the user's own needs its layers; a record says all of them itself."""
    family = _family(question) if spec is None else spec.model.family
    if family == "python" and question.record is None:
        return "no step was run; the model's own code ran, on tensors without values"
    return "nothing was run"


def _with_alternatives(question: Question, spec: Spec, record: Record) -> Record:
    """The record with what other settings would give."""
    from chunktune.alternatives import changed, with_alternatives

    settled = changed(spec, {"pipeline.stages": record.spec["pipeline"]["stages"]})
    if record.verdict is None or settled is None:
        return record
    engine = question.engine(spec)
    return record.model_copy(update={"verdict": with_alternatives(settled, record.verdict, engine.predict)})


def _show_calibration(record: Record, outputs: Outputs, say: Callable[[str], None]) -> None:
    """How far predictions are from each measured trial: above the table, on stderr where that is not on stdout."""
    from chunktune.report.whatif import calibration_lines
    from chunktune.whatif.calibration import foretold

    lines = calibration_lines(foretold(record))
    if lines and not outputs.on_stdout:
        to_stdout("\n".join(lines) + "\n\n")
    elif lines:
        say("\n".join(lines))


# --- many


def _answer_grid(
    question: Question, texts: Sequence[str], outputs: Outputs, say: Callable[[str], None], how: How, *, strict: bool
) -> int:
    from chunktune.whatif.grid import parse_vary, predict_grid

    given = {key: flag for key, (flag, _) in question.flags.items()}
    varied = parse_vary(texts, given, _family(question))
    total = prod(len(values) for values in varied.values())
    with counted(question.load, total, "combinations", sys.stderr, how) as load:
        grid = predict_grid(varied, load, question.predict)
    if question.record is not None:
        _show_calibration(question.record, outputs, say)
    say(f"Predicted {len(grid.rows)} combinations from {grid.costs}; {_what_ran(question)}")
    _deliver_grid(grid, outputs, say)
    return _conclude(grid, strict=strict)


def _family(question: Question) -> str | None:
    model = question.tables.get("model")
    family = model.get("family") if isinstance(model, Mapping) else None
    return family if isinstance(family, str) else None


def _deliver_grid(grid: Grid, outputs: Outputs, say: Callable[[str], None]) -> None:
    """Write every format asked for; without one on stdout, the table goes there."""
    from chunktune.report import whatif as report

    renderings: Mapping[str, Callable[[Grid], str]] = {
        "--json": report.grid_json,
        "--csv": report.grid_csv,
        "--markdown": report.grid_markdown,
    }
    deliver_texts(outputs, lambda flag: renderings[flag](grid), lambda width: report.grid_text(grid, width), say)


def _conclude(grid: Grid, *, strict: bool) -> int:
    """0. Raises InfeasibleError where no combination has an M, InconclusiveError under --strict."""
    best = grid.best
    if best is None:
        raise InfeasibleError(f"no M can be chosen in any of {len(grid.rows)} combinations: {grid.rows[0].reason}")
    if strict and best.basis == "extrapolated":
        raise InconclusiveError(
            f"the costs of the best combination (M = {best.chunks}) are extrapolated, under --strict"
        )
    return 0


def _sayer(quiet: bool) -> Callable[[str], None]:
    return (lambda text: None) if quiet else tell
