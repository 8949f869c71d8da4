"""Renderings of a record: pure functions from the record to text, and what they share. No torch."""

from __future__ import annotations

import re
import shutil
import textwrap
import unicodedata
from collections.abc import Callable
from typing import TextIO, TypeVar

from chunktune.results import Record, StageFigures, Trial
from chunktune.units import format_bytes, format_share

T = TypeVar("T")

# CSI and OSC sequences, in their 7-bit and 8-bit forms: taken out whole, so that no "[31m" is left behind.
_ESCAPES = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?")


def plain(text: str) -> str:
    """`text` on one line without escape sequences and control, format or surrogate characters."""
    spaced = re.sub(r"\s", " ", _ESCAPES.sub("", text))
    kept = "".join(char for char in spaced if unicodedata.category(char)[0] != "C")
    return re.sub(" +", " ", kept).strip()


def trial_of(record: Record, chunks: int | None) -> Trial | None:
    """The trial of M = `chunks`, None where there is none."""
    return next((trial for trial in record.trials if trial.chunks == chunks), None)


def fullest_stage(trial: Trial) -> StageFigures | None:
    """The rank whose peak is the largest share of its budget; None where no rank's share is known."""
    known = [stage for stage in trial.stages if share_of_budget(stage) is not None]
    return max(known, key=lambda stage: share_of_budget(stage) or 0.0, default=None)


def share_of_budget(stage: StageFigures) -> float | None:
    """A rank's peak as a share of what it may use; None where a prediction knows one of them not."""
    if stage.peak_bytes is None or stage.budget_bytes is None:
        return None
    return stage.peak_bytes / max(1, stage.budget_bytes)


def slowest_stage(trial: Trial) -> StageFigures | None:
    """The rank with the most busy seconds a step; None for a trial without stages."""
    return max(trial.stages, key=lambda stage: stage.busy_s, default=None)


def tokens_per_sample(record: Record) -> int | None:
    """Tokens in one sample where the spec's model has a sequence, else None."""
    model = record.spec.get("model")
    sequence = model.get("sequence") if isinstance(model, dict) else None
    return sequence if isinstance(sequence, int) and 0 < sequence < 2**63 else None


def is_chosen(record: Record, trial: Trial) -> bool:
    """Whether the verdict chose this trial's M."""
    return record.verdict is not None and record.verdict.chunks == trial.chunks


def setting(record: Record, section: str, key: str) -> object:
    """One value of the resolved spec, None where the record's spec lacks it (a record from elsewhere may)."""
    table = record.spec.get(section)
    return table.get(key) if isinstance(table, dict) else None


def format_rate(per_second: float) -> str:
    """A rate with four significant digits, whole and with thousands separators from 10,000 on."""
    return f"{per_second:,.0f}" if per_second >= 9999.5 else f"{per_second:.4g}"


def or_dash(value: T | None, form: Callable[[T], str]) -> str:
    """A value for people; "-" where it is not known."""
    return "-" if value is None else form(value)


def peak_text(peak_bytes: int | None, rank: int | None, budget_bytes: int | None) -> str:
    """The peak of the fullest rank: its share of what the rank may use where that is known, the bytes, the rank."""
    if peak_bytes is None:
        return "-"
    size = f"{format_bytes(peak_bytes)}, rank {rank}"
    return f"{format_share(peak_bytes / budget_bytes)}, {size}" if budget_bytes else size


def columns_of(stream: TextIO) -> int | None:
    """How wide a text for the stream may be; None for one that is no terminal."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def encodable(text: str, stream: TextIO) -> str:
    """`text` with what the stream's encoding lacks written as escapes."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def wrap(text: str, width: int | None, label: str = "") -> list[str]:
    """`text` after `label`, in lines of at most `width` columns (but 30), indented below the text."""
    if width is None:
        return [f"{label}{text}".rstrip()]
    indent = " " * (len(label) or 2)
    return textwrap.wrap(text, max(width, 30), initial_indent=label, subsequent_indent=indent)
