"""`chunktune export RECORD`: the chosen M as settings of a training framework. No torch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from chunktune.cli import options
from chunktune.cli.completion import complete_from
from chunktune.cli.outputs import STDOUT, Outputs, tell, write
from chunktune.cli.sweep import failure
from chunktune.errors import InconclusiveError, UsageError
from chunktune.reading import load_record, record_names
from chunktune.results import Record, Verdict

if TYPE_CHECKING:
    from chunktune.export import Framework, Translation, Version

EXAMPLES = """
Examples:

chunktune export runs/a-sweep --to torch

chunktune export runs/a-sweep --to torchtitan --framework-version 0.2 --replicas 8 --output pipeline.toml

chunktune export runs/a-sweep --to megatron-lm --strict

chunktune export runs/a-sweep --to deepspeed --output ds_config.json
"""
TARGET = "Framework"
MAX_REPLICAS = 2**31 - 1


def _names() -> list[str]:
    from chunktune.export import FRAMEWORKS

    return list(FRAMEWORKS)


_target = partial(options.under, TARGET)


def export(
    path: options.RecordPath,
    to: Annotated[
        str,
        _target(
            "--to", "NAME", "torch, torchtitan, megatron-lm, deepspeed, nemo or accelerate.", complete_from(_names)
        ),
    ],
    framework_version: Annotated[
        str | None, _target("--framework-version", "V", "A release or commit; the newest known if not given.")
    ] = None,
    replicas: Annotated[int, _target("--replicas", "D", "Pipelines side by side: the global batch is D N.")] = 1,
    form: Annotated[
        str | None, _target("--format", "NAME", "Where a framework has several: accelerate has yaml and flags.")
    ] = None,
    output: Annotated[str, options.output("--output", "FILE", "Where to write; stdout if not given.")] = STDOUT,
    strict: Annotated[
        bool, options.running("--strict", "Exit with 5 where the choice is unclear or a setting has no counterpart.")
    ] = False,
    debug: options.Debug = False,
) -> int:
    """Write the chosen M, and the setting it was found under, as a training framework names them.

    The file says where it comes from. What the framework has no counterpart for, and what the file cannot say, is in
    its head comment and on stderr.
    """
    from chunktune.export import form_named, framework_named, version_named

    framework = framework_named(to)
    version = version_named(framework, framework_version)
    written = form_named(framework, version, form)
    _check(path, replicas, output)
    record = load_record(path)
    verdict = _verdict(record, strict=strict)
    translation, head = _translate(record, verdict, framework, version, replicas, record_names([path])[0])
    if strict and translation.untranslated:
        raise _inconclusive(framework, version, translation)
    write(output, written(translation, head), tell)
    return 0


def _check(path: Path, replicas: int, output: str) -> None:
    """Raises UsageError for what the command line cannot mean, and where the output would overwrite the record."""
    if not 1 <= replicas <= MAX_REPLICAS:
        nearest = min(max(replicas, 1), MAX_REPLICAS)
        raise UsageError(f"--replicas {replicas}: must be 1 to {MAX_REPLICAS} (did you mean {nearest}?)")
    outputs = Outputs({"--output": output})
    outputs.check()
    outputs.spare([path], "the record")


def _verdict(record: Record, *, strict: bool) -> Verdict:
    """The verdict. Raises what `chunktune sweep` would have ended with where it chose no M."""
    error = failure(record, strict=strict)
    if error is not None:
        raise error
    assert record.verdict is not None  # else `failure` has said so
    return record.verdict


def _translate(
    record: Record, verdict: Verdict, framework: Framework, version: Version, replicas: int, name: str
) -> tuple[Translation, tuple[str, ...]]:
    """The settings, and the lines of the head comment; what has to be said is on stderr."""
    from chunktune.export import values_of
    from chunktune.export.provenance import caveats, head_lines, noted

    values = values_of(record, verdict, replicas)
    translation = version.translate(values)
    notes = noted(caveats(record, verdict), translation)
    for note in notes:
        tell(note)
    return translation, (*head_lines(name, record, verdict, values, framework, version), *notes)


def _inconclusive(framework: Framework, version: Version, translation: Translation) -> InconclusiveError:
    count = len(translation.untranslated)
    what = "1 setting has" if count == 1 else f"{count} settings have"
    return InconclusiveError(f"{what} no counterpart in {framework.title} {version.name}, under --strict; see above")
