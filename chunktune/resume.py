"""Going on with a sweep that ended early: what may join what it measured, and what may not. No torch.

A sweep is the answers that its journal holds. Going on means to replay them and to ask for what is missing, so that
everything which could have changed an answer has to be as it was: the spec, but for how long it may take; the way of
measuring; chunktune and torch; the devices. What differs is named, and nothing is mixed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import chunktune
from chunktune.errors import EnvironmentFailedError, UsageError
from chunktune.journal import Event, Journal, asked, end_of, last_elapsed_s, read_events, start_of
from chunktune.keys import FREE_KEYS
from chunktune.reading import checked
from chunktune.record import assemble, flat
from chunktune.request import SweepRequest
from chunktune.results import Round, Trial
from chunktune.spec import Spec
from chunktune.strict import validated
from chunktune.units import shorten

_SOFTWARE = ("torch", "cuda", "nccl")
_DEVICE = ("kind", "name", "memory_bytes", "cores")
_MOST_NAMED = 12


def journal_of(directory: Path) -> list[Event]:
    """The events of a sweep that may be gone on with, a torn last line left out.

    Raises UsageError where the directory holds no journal, or one that begins with no whole "start" event, and
    where it was written by a newer chunktune, is damaged before its last line, or amounts to no record.
    """
    path = directory / "journal.jsonl"
    if not _is_file(path):
        raise UsageError(f"{directory}: holds no journal.jsonl; --resume takes the output directory of a sweep")
    try:
        events = read_events(path)
        start = start_of(events)
        if start is None:
            raise UsageError(f"{path}: holds no whole start event, so nothing was measured; start anew with --force")
        checked(assemble(events), str(path))
        _check_pipeline(Spec.model_validate(start["spec"]))
        _check_devices(start)
        for event in events:
            _check_answer(event)
    except (EnvironmentFailedError, ValidationError) as error:
        why = f"{path}: the spec in it is damaged" if isinstance(error, ValidationError) else str(error)
        raise UsageError(f"{why}; nothing of it was changed") from error
    return events


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _check_pipeline(spec: Spec) -> None:
    if spec.pipeline.stages is None or spec.pipeline.virtual_stages is None:
        raise EnvironmentFailedError("the journal is damaged: its spec does not say K and V, as a sweep's does")


def _check_devices(start: Event) -> None:
    devices = start["environment"].get("devices") or []
    if not isinstance(devices, list) or not all(isinstance(device, dict) for device in devices):
        raise EnvironmentFailedError("the journal is damaged: its devices are no list of tables")


def _check_answer(event: Event) -> None:
    """Raises EnvironmentFailedError for an answer that the search could not be told."""
    kind, values = event["event"], event.get("values")
    if kind in ("begin", "rounds", "lost") and not (isinstance(values, list) and values and all(map(_is_m, values))):
        raise EnvironmentFailedError(f'the journal is damaged: the values of a "{kind}" event are no values of M')
    if kind in ("trial", "confirm"):
        validated(Trial, event["trial"], "the journal's trial")
    if kind == "rounds":
        rounds = event["rounds"] if isinstance(event["rounds"], list) else [event["rounds"]]
        for data in rounds:
            _check_round(validated(Round, data, "the journal's rounds"), values)


def _check_round(measured: Round, values: Any) -> None:
    blocks = measured.blocks
    sound = all(block.step_s > 0 and block.mini_batch > 0 and max(block.busy_s, default=0) > 0 for block in blocks)
    if not sound or {block.chunks for block in blocks} != set(values):
        raise EnvironmentFailedError("the journal is damaged: its rounds are not of the values that they name")


def _is_m(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_finished(events: Iterable[Event], budget_s: float) -> bool:
    """Whether the sweep came to its end and a budget of `budget_s` seconds would not take it further."""
    kept = list(events)
    end, start = end_of(kept), start_of(kept)
    if end is None or start is None or end.get("status") != "complete":
        return False
    spec, _ = asked(start, kept)
    return budget_s <= float(spec["sweep"]["budget"])


def as_recorded(spec: Mapping[str, Any], stages: int, virtual_stages: int) -> dict[str, Any]:
    """The dumped spec as a journal keeps it: K and V as they were settled."""
    pipeline = {**spec["pipeline"], "stages": stages, "virtual_stages": virtual_stages}
    return {**spec, "pipeline": pipeline}


def refuse_other_question(events: Iterable[Event], request: SweepRequest, spec: Mapping[str, Any]) -> None:
    """Raises UsageError where the journal's sweep was asked something else; `spec` as `as_recorded` gives it."""
    start = start_of(events)
    assert start is not None
    pairs = {
        "chunktune": (start["tool"].get("version"), chunktune.__version__),
        "--quick": (bool(start["quick"]), request.quick),
        "mode": (start.get("mode", "measured"), "rehearsed" if request.rehearse else "measured"),
        **_of_specs(start["spec"], spec),
    }
    _refuse(request.output_dir, pairs)


def refuse_other_code(events: Iterable[Event], directory: str, factory: str, code: str | None) -> None:
    """Raises UsageError where the file of the user's factory is not as the journal's sweep began with it."""
    if changed_code(events, code):
        raise UsageError(
            f"{directory}: the sweep there cannot be gone on with: the file of model.factory {factory} has changed "
            "since it began; what was measured before would be of another model: put it back, or start anew with "
            "another --output-dir"
        )


def changed_code(events: Iterable[Event], code: str | None) -> bool:
    """Whether the journal's sweep began with another factory file than this digest's; journals of old do not say."""
    begun = (start_of(events) or {}).get("code")
    return begun is not None and begun != code


def refuse_other_machine(events: Iterable[Event], directory: str, environment: Mapping[str, Any]) -> None:
    """Raises UsageError where the journal's sweep ran with another torch or on other devices."""
    start = start_of(events)
    assert start is not None
    before: Mapping[str, Any] = start["environment"]
    pairs = {name: (before.get(name), environment.get(name)) for name in _SOFTWARE}
    old, new = before.get("devices") or [], environment.get("devices") or []
    pairs["devices"] = (len(old), len(new))
    for rank, (mine, now) in enumerate(zip(old, new, strict=False)):
        pairs |= {f"rank {rank}: {name}": (mine.get(name), now.get(name)) for name in _DEVICE}
    _refuse(directory, pairs)


def hosts_moved(events: Iterable[Event], environment: Mapping[str, Any]) -> str | None:
    """A warning where the sweep goes on on other hosts than those it began on."""
    start = start_of(events)
    assert start is not None
    old, new = (
        sorted({str(device.get("host")) for device in each.get("devices") or []})
        for each in (start["environment"], environment)
    )
    if old == new:
        return None
    return f"the sweep began on {', '.join(old)} and went on on {', '.join(new)}: devices of equal name may differ"


def note_resumed(journal: Path, request: SweepRequest) -> None:
    """Journal, once a launch, that the sweep goes on: what was open before ended with the command.

    What this command asks for instead, of the keys that may change, goes with it. Raises EnvironmentFailedError
    where the journal cannot be read or written.
    """
    events = read_events(journal)
    if any(event["event"] == "resumed" and event.get("launch") == request.launch for event in events):
        return
    with Journal(journal) as opened:
        mine = {"launch": request.launch, "pid": os.getpid(), "elapsed_s": last_elapsed_s(events)}
        opened.append({"event": "resumed", **mine, **_changed(events, request)})


def _changed(events: Sequence[Event], request: SweepRequest) -> dict[str, Any]:
    """Those of FREE_KEYS that the request sets to another value, and where from, as `record.asked` reads them."""
    start = start_of(events)
    assert start is not None
    before, now = asked(start, events)[0]["sweep"], request.spec.sweep.model_dump(mode="json")
    keys = {key: key.removeprefix("sweep.") for key in FREE_KEYS}
    other = {key: name for key, name in keys.items() if before.get(name) != now[name]}
    sources = {key: request.sources.get(key, "default") for key in other}
    return {"sweep": {name: now[name] for name in other.values()}, "sources": sources}


def _of_specs(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> both values, for every leaf of two dumped specs but FREE_KEYS."""
    before, now = dict(flat(old)), dict(flat(new))
    return {key: (before.get(key), now.get(key)) for key in sorted({*before, *now}) if key not in FREE_KEYS}


def _refuse(directory: str, pairs: Mapping[str, tuple[Any, Any]]) -> None:
    other = [f"{name} was {_shown(old)} and is {_shown(new)}" for name, (old, new) in pairs.items() if old != new]
    if not other:
        return
    more = f", and {len(other) - _MOST_NAMED} more" if len(other) > _MOST_NAMED else ""
    raise UsageError(
        f"{directory}: the sweep there cannot be gone on with: {'; '.join(other[:_MOST_NAMED])}{more}; what was "
        f"measured before would not be comparable (only {' and '.join(FREE_KEYS)} may change): "
        "put it back, or start anew with another --output-dir"
    )


def _shown(value: Any) -> str:
    return "not set" if value is None else shorten(repr(value), 60)
