"""Records over time: a row each, oldest first, told apart by what they ran and compared with the one before. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from chunktune.report import plain, setting
from chunktune.report.summary import Summary, summary
from chunktune.results import Confidence, Finite, Frozen, Limit, Record
from chunktune.spec import Spec
from chunktune.units import shorten

LONGEST_TEXT = 60
# Where and how long it was measured, not what.
_NOT_COMPARED = ("device", "sweep")
_LAST = datetime.max.replace(tzinfo=UTC)


class Row(Frozen):
    """One record: when, what it chose, and how that compares with the record before. Null where not known.

    `record`: its name. `spec`: numbers the settings, by first appearance, see `spec_key`. `peak_share`: of the fullest
    rank's budget. `device`: kind and name of the ranks' devices, each with their number. `against`: the record that
    `throughput_change` (a share, 0.02 is 2 % faster) and `chunks_change` (the difference of M) are counted from: the
    last one before with the same spec and mode that chose an M.
    """

    started_at: str
    record: str
    spec: int
    mode: str
    quick: bool
    status: str
    stages: int | None
    schedule: str | None
    chunks: int | None
    micro_batch: int | None
    mini_batch: int | None
    limit: Limit | None
    limit_side: str | None
    throughput_samples_per_s: Finite | None
    peak_bytes: int | None
    budget_bytes: int | None
    peak_share: Finite | None
    confidence: Confidence | None
    torch: str | None
    device: str | None
    against: str | None = None
    throughput_change: Finite | None = None
    chunks_change: int | None = None


@dataclass(frozen=True)
class Entry:
    """What the history keeps of one record: its answer, where it ran, and what its specs are told apart by."""

    answer: Summary
    key: str
    stages: int | None
    schedule: str | None
    torch: str | None
    device: str | None


def entry(record: Record, name: str) -> Entry:
    """What the history keeps of a record; the record itself may be dropped."""
    stages = setting(record, "pipeline", "stages")
    return Entry(
        answer=summary(record, name),
        key=spec_key(record),
        stages=stages if isinstance(stages, int) and not isinstance(stages, bool) else None,
        schedule=_text(setting(record, "pipeline", "schedule")),
        torch=_text(record.environment.get("torch")),
        device=_devices(record.environment.get("devices")),
    )


def spec_key(record: Record) -> str:
    """The same text for records whose specs are the same but for [device], [sweep] and, of a sweep, [hardware].

    A key that a spec did not have yet counts as its default.
    """
    left_out = _NOT_COMPARED if record.mode == "predicted" else (*_NOT_COMPARED, "hardware")
    tables = _settled(record.spec)
    return json.dumps({name: table for name, table in tables.items() if name not in left_out}, sort_keys=True)


def _settled(spec: dict[str, Any]) -> dict[str, Any]:
    """The tables of a spec with every key of this version; as they are where they are none of a spec."""
    tables = {name: table for name, table in spec.items() if isinstance(table, dict)}
    given = {name: {key: value for key, value in table.items() if value is not None} for name, table in tables.items()}
    try:
        return Spec.model_validate(given).model_dump(mode="json")
    except ValueError:  # pydantic's own is one
        return spec


def history(entries: Iterable[Entry]) -> list[Row]:
    """One row an entry, by the time at which it started; where that cannot be read, at the end."""
    rows: list[Row] = []
    numbers: dict[str, int] = {}
    before: dict[tuple[int, str], Row] = {}
    for each in sorted(entries, key=_when):
        row = _row(each, numbers.setdefault(each.key, len(numbers) + 1))
        row = _compared(row, before.get((row.spec, row.mode)))
        if row.chunks is not None:
            before[row.spec, row.mode] = row
        rows.append(row)
    return rows


def moment(started_at: str) -> datetime | None:
    """A record's time in UTC, None where it is none; a time without a zone is taken for UTC."""
    try:
        found = datetime.fromisoformat(started_at)
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _when(each: Entry) -> tuple[datetime, str, str]:
    return moment(each.answer.started_at) or _LAST, each.answer.started_at, each.answer.record


def _row(each: Entry, number: int) -> Row:
    answer = each.answer
    known = answer.peak_bytes is not None and answer.budget_bytes
    return Row(
        started_at=plain(answer.started_at),
        record=answer.record,
        spec=number,
        mode=answer.mode,
        quick=answer.quick,
        status=answer.status,
        stages=each.stages,
        schedule=each.schedule,
        chunks=answer.chunks,
        micro_batch=answer.micro_batch,
        mini_batch=answer.mini_batch,
        limit=answer.limit,
        limit_side=answer.limit_side,
        throughput_samples_per_s=answer.throughput_samples_per_s,
        peak_bytes=answer.peak_bytes,
        budget_bytes=answer.budget_bytes,
        peak_share=(answer.peak_bytes or 0) / (answer.budget_bytes or 1) if known else None,
        confidence=answer.confidence,
        torch=each.torch,
        device=each.device,
    )


def _compared(row: Row, before: Row | None) -> Row:
    if before is None or row.chunks is None or before.chunks is None:
        return row
    change = _growth(row.throughput_samples_per_s, before.throughput_samples_per_s)
    counted = {"throughput_change": change, "chunks_change": row.chunks - before.chunks}
    return row.model_copy(update={"against": before.record, **counted})


def _growth(rate: float | None, before: float | None) -> float | None:
    """By what share a rate has grown; None where a float cannot hold it."""
    share = rate / before - 1 if rate and before else math.nan
    return share if math.isfinite(share) else None


def _devices(devices: object) -> str | None:
    """Such as "2 x cpu Intel(R) Xeon(R)": each kind and name with its number of ranks."""
    if not isinstance(devices, list):
        return None
    counts = Counter(_device(each) for each in devices)
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or None


def _device(device: object) -> str:
    table = device if isinstance(device, dict) else {}
    words: Sequence[str | None] = [_text(table.get("kind")), _text(table.get("name"))]
    return " ".join(word for word in words if word) or "unknown"


def _text(value: object) -> str | None:
    return shorten(plain(value), LONGEST_TEXT) if isinstance(value, str) else None
