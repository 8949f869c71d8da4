"""What GitHub Actions takes: the step summary, outputs, annotations; every text of a record escaped. Pure.

Rules: "Workflow commands for GitHub Actions" (docs.github.com). In the data of a command %, CR and LF are written
%25, %0D and %0A, in its properties : and , as well. An output of any text stands between two lines with a random
delimiter, so that no value can end it and begin another. A step's summary holds 1 MiB.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Literal

from chunktune.gate import Finding
from chunktune.report import plain
from chunktune.report.tabular import escaped, to_markdown
from chunktune.results import Record

Level = Literal["error", "warning", "notice"]
SUMMARY_BYTES = 2**20
_TITLE = "chunktune"
_CUT = "\n(cut: a step summary holds 1 MiB)\n"


def summary(record: Record, command: str) -> str:
    """The answer of a record as Markdown: a heading, the verdict, the trials, and what is odd about it."""
    odd = "".join(f"- {escaped(text)}\n" for text in oddities(record))
    return f"### chunktune {command}\n\n{to_markdown(record)}" + (f"\n{odd}" if odd else "")


def oddities(record: Record) -> list[str]:
    """The findings of the verdict, why it is unclear, and the warnings of the record, on one line each."""
    verdict = record.verdict
    texts = list(record.warnings)
    if verdict is not None:
        unclear = verdict.confidence == "unclear"
        reasons = "; ".join(verdict.confidence_reasons) or "no reason was recorded"
        texts = [*verdict.findings, *([f"unclear: {reasons}"] if unclear else []), *texts]
    return [plain(text) for text in texts]


def outputs(record: Record, path: str) -> dict[str, str]:
    """The outputs of a step: chunks, micro_batch, limit, confidence, record; empty where there is none."""
    verdict = record.verdict
    values: Mapping[str, object] = {
        "chunks": None if verdict is None else verdict.chunks,
        "micro_batch": None if verdict is None else verdict.micro_batch,
        "limit": None if verdict is None else verdict.limit,
        "confidence": None if verdict is None else verdict.confidence,
        "record": path,
    }
    return {name: "" if value is None else str(value) for name, value in values.items()}


def output_lines(values: Mapping[str, str]) -> str:
    """Lines for $GITHUB_OUTPUT, each value between lines with a delimiter that nobody can foresee."""
    return "".join(_output(name, value) for name, value in values.items())


def _output(name: str, value: str) -> str:
    delimiter = f"chunktune_{secrets.token_hex(16)}"
    return f"{name}<<{delimiter}\n{value}\n{delimiter}\n"


def record_annotations(record: Record) -> list[str]:
    """A warning for everything that is odd about a record."""
    return [annotation("warning", _TITLE, text) for text in oddities(record)]


def finding_annotations(findings: Sequence[Finding]) -> list[str]:
    """An error for every check that failed, a warning for every one that passed with one."""
    levels: Mapping[str, Level] = {"failed": "error", "warning": "warning"}
    return [
        annotation(levels[finding.outcome], f"{_TITLE} check: {finding.check}", finding.words)
        for finding in findings
        if finding.outcome in levels
    ]


def annotation(level: Level, title: str, message: str) -> str:
    """One workflow command; control characters of title and message are left out."""
    return f"::{level} title={escape_property(plain(title))}::{escape_data(plain(message))}"


def escape_data(text: str) -> str:
    """`text` as the data of a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    """`text` as the value of a property of a workflow command."""
    return escape_data(text).replace(":", "%3A").replace(",", "%2C")


def fitting(text: str, used_bytes: int) -> str:
    """`text` for a summary that holds `used_bytes` already: cut after a whole line where it would be too long."""
    room = SUMMARY_BYTES - used_bytes
    data = text.encode(errors="replace")
    if len(data) <= room:
        return text
    kept = data[: max(0, room - len(_CUT))]
    return kept[: kept.rfind(b"\n") + 1].decode() + _CUT if len(_CUT) <= room else ""
