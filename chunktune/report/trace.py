"""One step as a trace for Perfetto and chrome://tracing, in the JSON object form of the Trace Event Format. Pure.

A process a rank, a thread a lane: compute, optimizer, and idle (waiting for a neighbour, or the runtime's own work).
The format: Duca and Sinclair, "Trace Event Format", 2016,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from chunktune.report import plain, setting, trial_of
from chunktune.results import Record
from chunktune.simulate import Span
from chunktune.timelines import Shown, timeline

Event = dict[str, Any]

LANES = ("compute", "optimizer", "idle")
_COMPUTE, _OPTIMIZER, _IDLE = range(len(LANES))
TICKS_PER_US = 8
"""Times are whole eighths of a microsecond: exact in binary, so that `ts` + `dur` never lies behind the next `ts`."""
_TICKS_PER_S = TICKS_PER_US * 10**6

_WORDS: Mapping[str, str] = {
    "F": "forward",
    "L": "loss",
    "B": "backward",
    "I": "backward of the input",
    "W": "backward of the weights",
    "U": "optimizer",
}
# Names of chrome://tracing's own palette; Perfetto has its own colours.
_COLOURS: Mapping[str, str] = {
    "F": "rail_response",
    "L": "rail_animation",
    "B": "thread_state_running",
    "I": "good",
    "W": "olive",
    "U": "yellow",
}


def to_trace(record: Record, chunks: int | None = None) -> str:
    """The step at M = `chunks` (None: the chosen one) as JSON text: `traceEvents`, and in `otherData` what it shows.

    `ts` and `dur` in microseconds from the start of the step. Metadata events come first, the others by `ts`; in a
    thread none begins before the last one has ended. Raises UsageError as `timelines.timeline` does.
    """
    shown = timeline(record, chunks)
    ranks = {rank: list(spans) for rank, spans in groupby(shown.spans, lambda span: span.rank)}
    end = _ticks(shown.step_s)
    names = [event for rank, spans in ranks.items() for event in _names(rank, spans, shown)]
    work = [event for rank, spans in ranks.items() for event in _complete(rank, spans, end)]
    events = [*names, *sorted(work, key=lambda event: event["ts"])]
    encode = json.JSONEncoder(allow_nan=False).encode
    lines, other = ",\n".join(map(encode, events)), encode(_other_data(record, shown))
    return f'{{"displayTimeUnit": "ms", "otherData": {other}, "traceEvents": [\n{lines}\n]}}\n'


def _other_data(record: Record, shown: Shown) -> dict[str, Any]:
    trial = trial_of(record, shown.chunks) or record.confirmation
    model = setting(record, "model", "family")
    schedule = setting(record, "pipeline", "schedule")
    return {
        "tool": plain(f"chunktune {record.tool.get('version', '')}"),
        "source": shown.source,
        "mode": record.mode,
        "model": plain(model) if isinstance(model, str) else None,
        "schedule": plain(schedule) if isinstance(schedule, str) else None,
        "stages": 1 + max((span.rank for span in shown.spans), default=-1),
        "chunks": shown.chunks,
        "micro_batch": None if trial is None else trial.micro_batch,
        "mini_batch": None if trial is None else trial.mini_batch,
        "step_s": shown.step_s,
        "step_median_s": None if trial is None else trial.step_median_s,
        "started_at": plain(record.started_at),
    }


# --- names of the tracks


def _names(rank: int, spans: Iterable[Span], shown: Shown) -> Iterator[Event]:
    parts = sorted({span.part for span in spans if span.part >= 0})
    held = f"{'part' if len(parts) == 1 else 'parts'} {', '.join(map(str, parts))}"
    yield _metadata("process_name", rank, _COMPUTE, {"name": f"rank {rank} ({held})"})
    yield _metadata("process_labels", rank, _COMPUTE, {"labels": shown.source})
    yield _metadata("process_sort_index", rank, _COMPUTE, {"sort_index": rank})
    for lane, name in enumerate(LANES):
        yield _metadata("thread_name", rank, lane, {"name": name})
        yield _metadata("thread_sort_index", rank, lane, {"sort_index": lane})


def _metadata(name: str, rank: int, lane: int, args: dict[str, Any]) -> Event:
    return {"name": name, "ph": "M", **_place(rank, lane), "args": args}


def _place(rank: int, lane: int) -> dict[str, int]:
    # Perfetto takes 0 for the idle process, the thread named as its process for the main one, and ids for unique.
    pid = 10 * (rank + 1)
    return {"pid": pid, "tid": pid + lane}


# --- spans


def _ticks(seconds: float) -> int:
    return round(seconds * _TICKS_PER_S)


def _complete(rank: int, spans: Iterable[Span], end: int) -> Iterator[Event]:
    """A rank's operations, and between them, from 0 to `end` ticks, what it stands idle."""
    free = 0
    for span in spans:
        start = max(free, _ticks(span.start_s))
        yield from _idle(rank, free, start)
        free = max(start, _ticks(span.end_s))
        yield _operation(span, start, free)
    yield from _idle(rank, free, end)


def _operation(span: Span, start: int, end: int) -> Event:
    update = span.kind == "U"
    lane, name = (_OPTIMIZER, "optimizer") if update else (_COMPUTE, f"{span.kind} {span.chunk}")
    args = {} if update else {"part": span.part, "chunk": span.chunk}
    event = _event(name, _WORDS[span.kind], start, end, _place(span.rank, lane))
    return {**event, "cname": _COLOURS[span.kind], "args": args}


def _idle(rank: int, start: int, end: int) -> Iterator[Event]:
    if end > start:
        yield {**_event("idle", "idle", start, end, _place(rank, _IDLE)), "cname": "grey", "args": {}}


def _event(name: str, category: str, start: int, end: int, place: Mapping[str, int]) -> Event:
    times = {"ts": start / TICKS_PER_US, "dur": (end - start) / TICKS_PER_US}
    return {"name": name, "cat": category, "ph": "X", **times, **place}
