"""`chunktune check RECORD`: the gate for CI. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from chunktune.cli import ci, options
from chunktune.cli.baseline import accepted, replaced
from chunktune.cli.completion import complete_from, complete_record
from chunktune.cli.conditions import conditions
from chunktune.cli.outputs import Outputs, tell, to_stdout, write
from chunktune.errors import CheckFailedError, UsageError
from chunktune.reading import STDIN, load_record, places_of
from chunktune.record import write_record
from chunktune.report import columns_of
from chunktune.results import Record

if TYPE_CHECKING:
    from chunktune.gate import Conditions, Gate

BASELINE = "Baseline"
CONDITIONS = "Conditions"
EXAMPLES = """
Examples:

chunktune check runs/a-sweep --baseline ci/baseline.json --max-slowdown 5%

chunktune check runs/a-sweep --baseline ci/baseline.json --update

chunktune check runs/a-sweep --expect-chunks 8 --max-peak 70GiB --junit junit.xml

chunktune check runs/a-sweep --baseline ci/baseline.json --allow-different torch --allow-different sweep
"""
_NEEDS_BASELINE = ("--max-slowdown", "--allow-different", "--update")


_baseline = partial(options.under, BASELINE)
_condition = partial(options.under, CONDITIONS)


def _allowable() -> tuple[str, ...]:
    from chunktune.gate.differences import allowable_keys

    return allowable_keys()


def check(
    record: options.RecordPath,
    baseline: Annotated[
        Path | None,
        _baseline(
            "--baseline",
            "BASE",
            "The record to hold it against.",
            complete=complete_record,
            parser=options.read_path,
        ),
    ] = None,
    max_slowdown: Annotated[
        str | None,
        _baseline("--max-slowdown", "SHARE", "How much slower than the baseline it may be: 5% if not given."),
    ] = None,
    allow_different: Annotated[
        list[str] | None,
        _baseline(
            "--allow-different",
            "KEY",
            "What may be another than the baseline's: torch, device, driver, cuda, nccl, spec, "
            "or a key or table of the spec such as pipeline.stages; repeatable.",
            complete=complete_from(_allowable),
        ),
    ] = None,
    update: Annotated[
        bool, _baseline("--update", None, "Make the record the baseline; what differs is on stderr.")
    ] = False,
    expect_chunks: Annotated[
        int | None,
        _condition("--expect-chunks", "M", "The M to choose, or one that the record finds as good.", min=1),
    ] = None,
    min_headroom: Annotated[
        str | None,
        _condition(
            "--min-headroom",
            "SHARE",
            "Of its capacity the fullest rank keeps free; with a baseline that of its spec if not given.",
        ),
    ] = None,
    max_peak: Annotated[str | None, _condition("--max-peak", "SIZE", "The highest peak of any rank: 70GiB.")] = None,
    allow_unclear: Annotated[
        bool, _condition("--allow-unclear", None, "Let a choice pass whose confidence is unclear.")
    ] = False,
    json_file: Annotated[str | None, options.output("--json", "FILE", "Every check as JSON; - for stdout.")] = None,
    markdown_file: Annotated[str | None, options.output("--markdown", "FILE", "The table as Markdown.")] = None,
    junit_file: Annotated[str | None, options.output("--junit", "FILE", "JUnit XML, a test case a check.")] = None,
    benchmark_file: Annotated[
        str | None,
        options.output("--benchmark-json", "FILE", "customSmallerIsBetter of github-action-benchmark, for dashboards."),
    ] = None,
    github: options.Github = None,
    debug: options.Debug = False,
) -> int:
    """Hold a record to conditions and to a baseline, for CI: exits with 4 where a check fails, and says by how much.

    With a baseline: the same M, or one that the record itself finds as good; throughput, with the noise of both;
    headroom; the same device, versions and spec. Always: an M was chosen, the sweep is complete, its confidence clear.
    """
    files = {"--json": json_file, "--markdown": markdown_file, "--junit": junit_file}
    files |= {"--benchmark-json": benchmark_file}
    outputs = Outputs({flag: path for flag, path in files.items() if path is not None})
    given = {"--max-slowdown": max_slowdown, "--allow-different": allow_different, "--update": update}
    _check_usage(record, baseline, outputs, given)
    asked = conditions(max_slowdown, min_headroom, expect_chunks, max_peak, allow_unclear, allow_different or ())
    found = load_record(record)
    if update and baseline is not None:
        return _update(found, record, baseline, asked, outputs, github)
    gate = _gate(found, record, asked, None if baseline is None else (accepted(baseline, record), baseline))
    _deliver(gate, found, outputs)
    ci.publish_gate(github, gate, found, ci.place_of(record), tell)
    return _conclude(gate)


# --- what the command line means


def _check_usage(record: Path, baseline: Path | None, outputs: Outputs, given: Mapping[str, Any]) -> None:
    """Raises UsageError for what the command line cannot mean, and where an output would overwrite a record."""
    idle = [flag for flag in _NEEDS_BASELINE if given[flag]]
    if baseline is None and idle:
        raise UsageError(f"{' and '.join(idle)} is about a baseline, and none is given; give --baseline BASE")
    if str(record) == STDIN and str(baseline) == STDIN:
        raise UsageError("- is given for RECORD and for --baseline; stdin holds one record")
    written = dict(outputs.files)
    if given["--update"]:
        _check_update(record, baseline)
        written["--baseline"] = str(baseline)
    Outputs(written).check()
    outputs.spare([path for path in (record, baseline) if path is not None], "a record")


def _check_update(record: Path, baseline: Path | None) -> None:
    """Raises UsageError where --update has no file of its own to write."""
    if str(baseline) == STDIN:
        raise UsageError("--update writes the baseline, and --baseline - is stdin; give a file")
    if baseline is not None and os.path.realpath(baseline) in places_of(record):
        raise UsageError(f"--baseline {baseline} is the record itself; --update writes a file of its own")


# --- the answer


def _update(
    found: Record, record: Path, baseline: Path, conditions: Conditions, outputs: Outputs, github: bool | None
) -> int:
    """Write the record as the baseline, with the difference to the one before on stderr.

    Raises UsageError where the record may be no baseline, or what lies there is no record.
    """
    from chunktune.report.gate import to_text

    before = replaced(found, record, baseline, tell, allow_unclear=conditions.allow_unclear)
    gate = _gate(found, record, conditions, None if before is None else (before, baseline))
    tell(to_text(gate, columns_of(sys.stderr)).rstrip("\n"))
    _write_files(gate, found, outputs)
    ci.publish_gate(github, gate, found, ci.place_of(record), tell, holds=False)
    write_record(found, baseline)
    tell(f"Wrote {baseline}")
    return 0


def _gate(found: Record, record: Path, conditions: Conditions, base: tuple[Record, Path] | None) -> Gate:
    from chunktune.gate import Gate
    from chunktune.gate import check as run_checks

    if base is None:
        return Gate(_name(record), None, run_checks(found, conditions))
    return Gate(_name(record), _name(base[1]), run_checks(found, conditions, base[0]))


def _deliver(gate: Gate, found: Record, outputs: Outputs) -> None:
    """Write every format asked for; without one on stdout, the table goes there."""
    from chunktune.report.gate import headline, to_text

    _write_files(gate, found, outputs)
    if outputs.on_stdout:
        tell(headline(gate))
    else:
        to_stdout(to_text(gate, columns_of(sys.stdout)))


def _write_files(gate: Gate, found: Record, outputs: Outputs) -> None:
    for flag, path in outputs.files.items():
        write(path, _rendered(flag, gate, found), tell)


def _rendered(flag: str, gate: Gate, found: Record) -> str:
    if flag == "--benchmark-json":
        from chunktune.report.dashboard import to_benchmark

        return to_benchmark(found)
    if flag == "--junit":
        from chunktune.report.junit import to_junit

        return to_junit(gate)
    from chunktune.report import gate as report

    return report.to_json(gate) if flag == "--json" else report.to_markdown(gate)


def _conclude(gate: Gate) -> int:
    """0. Raises CheckFailedError where a check failed."""
    if not gate.failed:
        return 0
    from chunktune.report import plain

    broken = "\n".join(f"  {plain(f'{finding.check}: {finding.words}')}" for finding in gate.failed)
    checks = gate.count("failed", "warning", "passed")
    raise CheckFailedError(f"{len(gate.failed)} of {checks} checks failed:\n{broken}")


def _name(record: Path) -> str:
    return "stdin" if str(record) == STDIN else str(record)
