"""What a gate found: a table for people, in text and in Markdown, and JSON for programs. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rich.cells import cell_len

from chunktune import __version__
from chunktune.gate import Finding, Gate, Outcome
from chunktune.report import format_rate, plain, wrap
from chunktune.report.summary import LONGEST_CELL, shown_setting
from chunktune.report.tabular import escaped, markdown_table
from chunktune.report.trials import draw
from chunktune.units import counted, format_bytes, format_share, shorten

HEADINGS = ("check", "result", "expected", "found", "by")
RESULTS: Mapping[Outcome, str] = {"failed": "FAILED", "warning": "warning", "passed": "passed", "noted": "noted"}


def to_text(gate: Gate, width: int | None = None) -> str:
    """The outcome in a line, every check in a table, then a sentence for each that is more than passed.

    At most `width` columns wide (None: unlimited); where the table has no room, a sentence stands for every check.
    """
    table = draw(HEADINGS, _rows(gate), left="check")
    if width is None or max(map(cell_len, table.split("\n"))) <= width:
        body, told = [table, ""], [finding for finding in gate.findings if finding.outcome != "passed"]
    else:
        body, told = [], list(gate.findings)
    sentences = [line for finding in told for line in wrap(_sentence(finding), width)]
    return "\n".join([*wrap(headline(gate), width), "", *body, *sentences]).rstrip("\n") + "\n"


def to_markdown(gate: Gate) -> str:
    """The same as GitHub Markdown."""
    told = [finding for finding in gate.findings if finding.outcome != "passed"]
    sentences = "".join(f"- {escaped(_sentence(finding))}\n" for finding in told)
    table = markdown_table(HEADINGS, _rows(gate))
    return f"### {escaped(headline(gate))}\n\n{table}\n" + (f"\n{sentences}" if sentences else "")


def to_json(gate: Gate) -> str:
    """All findings with the fields of `Finding`: seconds, bytes, shares as fractions, null where not known."""
    answer = {
        "tool": {"name": "chunktune", "version": __version__},
        "record": gate.record,
        "baseline": gate.baseline,
        "passed": not gate.failed,
        "findings": [finding.model_dump(mode="json") for finding in gate.findings],
    }
    return json.dumps(answer, indent=2, allow_nan=False) + "\n"


def headline(gate: Gate) -> str:
    """Whether the gate holds, of how many checks, and what was held against what."""
    checks, warnings = gate.count("failed", "warning", "passed"), gate.count("warning")
    failed = f"FAILED, {len(gate.failed)} of {checks} checks" if gate.failed else f"passed, {counted(checks, 'check')}"
    warned = f", {counted(warnings, 'warning')}" if warnings else ""
    against = "" if gate.baseline is None else f" against {gate.baseline}"
    return plain(f"chunktune check: {failed}{warned} ({gate.record}{against})")


def differing_lines(gate: Gate) -> list[str]:
    """A sentence for every finding that is more than passed, without control characters."""
    return [_sentence(finding) for finding in gate.findings if finding.outcome != "passed"]


def _sentence(finding: Finding) -> str:
    return plain(f"{RESULTS[finding.outcome]}: {finding.check}: {finding.words}")


def _rows(gate: Gate) -> list[tuple[str, ...]]:
    return [
        (
            shorten(plain(finding.check), LONGEST_CELL),
            RESULTS[finding.outcome],
            _expected(finding),
            _value(finding.found, finding),
            _by(finding),
        )
        for finding in gate.findings
    ]


def _expected(finding: Finding) -> str:
    value = _value(finding.expected, finding)
    return value if finding.relation == "equal" or finding.expected is None else f"{finding.relation} {value}"


def _value(value: object, finding: Finding) -> str:
    """A value of a finding for people; "-" where there is none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        if finding.unit == "bytes":
            return format_bytes(value)
        if finding.unit == "share":
            return format_share(value)
        if finding.unit == "samples/s":
            return f"{format_rate(value)} samples/s"
        if finding.unit == "chunks":
            return f"M = {value}"
    return shown_setting(value)


def _by(finding: Finding) -> str:
    """By how much: the throughput as a change against the baseline's, else what was found less what is expected."""
    if finding.ratio is not None:
        ends = ", ".join(f"{_percent(end)}" for end in finding.ratio_interval or ())
        return shorten(f"{_percent(finding.ratio)}{f' [{ends}]' if ends else ''}", LONGEST_CELL)
    if finding.by is None:
        return "-"
    sign, size = "-" if finding.by < 0 else "+", abs(finding.by)
    if size == 0:
        return "0"
    if finding.unit == "bytes":
        return f"{sign}{format_bytes(size)}"
    return f"{sign}{format_share(size)}" if finding.unit == "share" else f"{sign}{size:.4g}"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+z.1f}%"
