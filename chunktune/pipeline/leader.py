"""Rank 0 of a group: it keeps the journal, runs the search, and leads the other ranks through its commands."""

from __future__ import annotations

import contextlib
import platform
import sys
import time
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import chunktune
from chunktune.candidates import described
from chunktune.errors import ChunktuneError, EnvironmentFailedError, UsageError
from chunktune.journal import Event, Journal, OnEvent, read_events, start_of
from chunktune.pipeline.counted import LayerBook
from chunktune.pipeline.group import Group
from chunktune.pipeline.leading import Command
from chunktune.pipeline.live import FreshGroupNeededError, LivePipeline
from chunktune.pipeline.measure import Measurer
from chunktune.pipeline.plan import Plan
from chunktune.pipeline.rehearsed import RehearsedPipeline
from chunktune.record import assemble, measured_of, write_record
from chunktune.replay import JournaledRunner, lost_event
from chunktune.request import SweepRequest
from chunktune.results import SCHEMA_VERSION, Record, Trial
from chunktune.resume import (
    as_recorded,
    changed_code,
    hosts_moved,
    note_resumed,
    refuse_other_code,
    refuse_other_machine,
    refuse_other_question,
)
from chunktune.search import search
from chunktune.standing import Rules
from chunktune.verdict import comparisons, decide
from chunktune.whatif.counsel import advised

QUICK_ROUNDS = 4
_CHANGED_CODE = (
    "the file of model.factory changed while the sweep ran: what was measured after the worker group was started again "
    "is of the changed model; measure anew"
)
LOSS_TOLERANCE = {"float32": 2e-3, "bfloat16": 2e-2}
"""How far the first step's loss may differ over M by rounding alone, as a share."""


class Leader:
    """Rank 0: journal, search, verdict and record."""

    def __init__(self, request: SweepRequest, group: Group, plan: Plan, on_event: OnEvent | None) -> None:
        self._request = request
        self._group = group
        self._plan = plan
        self._on_event = on_event
        self._output = Path(request.output_dir)
        place = group.place
        own_name = uuid.uuid4().hex if place.agent_store else f"torchrun {place.run_id}"
        self._launch = request.launch or group.agree_on("launch", own_name)
        self._journal: Journal | None = None
        self._events: list[Event] = []

    def open_journal(self) -> ChunktuneError | None:
        """Open the journal of this launch, or say why it cannot be used."""
        try:
            self._output.mkdir(parents=True, exist_ok=True)
            path = self._output / "journal.jsonl"
            if path.exists():
                self._events = self._own_events(path)
                if not self._events:
                    path.unlink()
            self._journal = Journal(path)
            if self._on_event is not None:
                print(f"should this be cut off, the same command with --resume {self._output} goes on", file=sys.stderr)
        except ChunktuneError as error:
            return error
        except OSError as error:
            return EnvironmentFailedError(f"{self._output} cannot be written: {error.strerror or error}")
        return None

    def _own_events(self, path: Path) -> list[Event]:
        """The events of this launch, or of the one to go on with; none where they may be overwritten.

        Raises UsageError for those of another sweep.
        """
        events = read_events(path)
        start = start_of(events)
        if start is None:
            return events
        if start.get("launch") == self._launch:
            refuse_other_question(events, self._request, self._spec())
            return events
        if self._request.resume:
            refuse_other_question(events, self._request, self._spec())
            factory = getattr(self._plan.spec.model, "factory", "")
            refuse_other_code(events, str(self._output), factory, self._plan.code)
            note_resumed(path, replace(self._request, launch=self._launch))
            return read_events(path)
        if self._request.force:
            return []
        raise UsageError(
            f"{self._output} already holds a sweep; a sweep needs a directory of its own: "
            "give another --output-dir, --force to overwrite, or --resume to go on with it"
        )

    def _spec(self) -> dict[str, Any]:
        dumped = self._plan.spec.model_dump(mode="json")
        return as_recorded(dumped, self._plan.stages, self._plan.virtual_stages)

    def known_counts(self) -> tuple[int, ...] | None:
        """Layers of each part as an earlier group of this sweep settled them."""
        start = self._started()
        return tuple(start["layers_per_part"]) if start else None

    def _started(self) -> Event | None:
        return start_of(self._events)

    def lead(
        self, measurer: Measurer, counts: tuple[int, ...], facts: list[dict[str, Any]]
    ) -> tuple[Record | None, bool]:
        """Search to the end, or until a fresh group is needed: (record, whether one is)."""
        try:
            if self._started() is None:
                self._append(self._start_event(counts, facts))
            elif self._request.resume:
                self._check_machine(facts)
            self._account_for_previous_group([fact["pid"] for fact in facts])
            book = LayerBook(self._plan, counts, measurer.work.device.kind)
            kind = RehearsedPipeline if self._request.rehearse else LivePipeline
            return self._search(kind(measurer, self._plan, self._send, self._append, book, self._ran())), False
        except FreshGroupNeededError:
            self._group.tell("fresh group needed")
            self._send(Command("reopen"))
            return None, True
        except ChunktuneError as error:
            self._send(Command("stop"))
            self.give_up(error)
            return None, False

    def _check_machine(self, facts: list[dict[str, Any]]) -> None:
        """Raises UsageError where the sweep began on another machine, unless only the host's name is another."""
        environment = _environment(facts)
        refuse_other_machine(self._events, str(self._output), environment)
        moved = hosts_moved(self._events, environment)
        for text in [*([moved] if moved is not None else []), *_shared(self._request)]:
            if not self._said(text):
                self._append({"event": "warning", "text": text})

    def _send(self, command: Command) -> Command:
        self._group.broadcast(command)
        return command

    def _search(self, live: LivePipeline | RehearsedPipeline) -> Record:
        spec, candidates = self._plan.spec, self._plan.candidates
        runner = JournaledRunner(
            self._events, live, self._append, spec.sweep.budget, time.monotonic, candidates.batch_of
        )
        live.left_s = runner.left_s
        rules = Rules(
            criterion=spec.sweep.criterion,
            tolerance=spec.sweep.tolerance,
            patience=spec.sweep.patience,
            confirm=not (self._request.quick or self._request.rehearse),
        )
        if self._request.quick:
            rules = replace(rules, max_rounds=QUICK_ROUNDS, drifting_rounds=QUICK_ROUNDS)
        found = search(candidates, runner, rules)
        verdict = decide(
            candidates,
            found,
            rules,
            recompute=spec.pipeline.recompute != "none",
            loss_tolerance=LOSS_TOLERANCE[spec.training.precision],
            fresh=live.freshness(),
        )
        end = {
            "event": "end",
            "status": "failed" if found.aborted else "complete",
            "verdict": verdict.model_dump(mode="json"),
            "comparisons": [one.model_dump(mode="json") for one in comparisons(candidates, found, rules)],
            "trials": [trial.model_dump(mode="json") for trial in found.trials],
            "layers": [layer.model_dump(mode="json") for layer in live.book.layers()],
            "elapsed_s": runner.elapsed_s(),
        }
        verdict = advised(assemble([*self._events, end], "complete"), verdict)
        self._append({**end, "verdict": verdict.model_dump(mode="json"), "elapsed_s": runner.elapsed_s()})
        record = assemble(self._events, "complete")
        write_record(record, self._output / "record.json")
        self._group.tell("decided")
        self._send(Command("stop"))
        return record

    def _account_for_previous_group(self, pids: list[int]) -> None:
        elapsed_s = self._since_start_s()
        lost = lost_event(self._events, self._group.note_of_previous(), elapsed_s)
        if lost is not None:
            self._append(lost)
        kind = "re-initialised" if self._group.reopened else "processes"
        if changed_code(self._events, self._plan.code) and not self._said(_CHANGED_CODE):
            self._append({"event": "warning", "text": _CHANGED_CODE})
        number = self._group.generation
        self._append({"event": "group", "generation": number, "kind": kind, "pids": pids, "elapsed_s": elapsed_s})

    def _said(self, text: str) -> bool:
        return any(event.get("text") == text for event in self._events)

    def _since_start_s(self) -> float:
        """Seconds of the sweep until now, restarts of the group included: they are paid for by the budget too.

        What passed between an end of the command and its resumption is not.
        """
        began = next((event for event in reversed(self._events) if event["event"] in ("start", "resumed")), None)
        if began is None or "at" not in began:
            return 0.0
        since = datetime.now(UTC) - datetime.fromisoformat(began["at"])
        return float(began["elapsed_s"]) + max(0.0, since.total_seconds())

    def _ran(self) -> dict[int, Trial]:
        trials = [Trial.model_validate(event["trial"]) for event in self._events if event["event"] == "trial"]
        return {trial.chunks: trial for trial in trials if trial.fits}

    def _append(self, event: Event) -> None:
        assert self._journal is not None
        self._events.append(event)  # first: what the disk refuses is handed over all the same
        self._journal.append(event)
        if self._on_event is not None:
            self._on_event(event)
            if event["event"] in ("trial", "lost"):
                self._keep_partial()

    def _keep_partial(self) -> None:
        """Under the user's torchrun nobody is left to write a partial record when the agent gives up."""
        write_record(assemble(self._events, "interrupted"), self._output / "record.json")

    def _start_event(self, counts: tuple[int, ...], facts: list[dict[str, Any]]) -> Event:
        candidates = self._plan.candidates
        return {
            "event": "start",
            "schema_version": SCHEMA_VERSION,
            "tool": {"name": "chunktune", "version": chunktune.__version__},
            "name": self._request.name,
            "launch": self._launch,
            "output_dir": str(self._output),
            "spec_dir": self._request.spec_dir,
            "spec": self._spec(),
            "sources": self._request.sources,
            "environment": _environment(facts),
            "candidates": [one.model_dump(mode="json") for one in described(candidates)],
            "mode": "rehearsed" if self._request.rehearse else "measured",
            "quick": self._request.quick,
            "warnings": [*candidates.warnings, *_warnings(self._plan, facts), *_shared(self._request)],
            "layers_per_part": list(counts),
            "code": self._plan.code,
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "elapsed_s": 0.0,
        }

    def give_up(self, error: ChunktuneError) -> None:
        """End the sweep with an error: raised here under torchrun, told to the launcher otherwise.

        What was measured goes with it, for the case that the disk did not take it.
        """
        measured = measured_of(self._events)
        self._group.tell("failed", type=type(error).__name__, message=str(error), record=measured)
        if self._on_event is not None:
            if measured and not (self._output / "journal.jsonl").is_file():
                print(measured, file=sys.stderr)
            raise error


def _environment(facts: list[dict[str, Any]]) -> dict[str, Any]:
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "driver": _driver(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "devices": facts,
    }


def _driver() -> str | None:
    """Version of NVIDIA's kernel driver as it says itself; null where there is none."""
    with contextlib.suppress(OSError):
        words = Path("/proc/driver/nvidia/version").read_text().split()
        return next((word for word in words if word[:1].isdigit() and "." in word), None)
    return None


def _shared(request: SweepRequest) -> list[str]:
    return ["--share: another sweep may have used these devices at the same time"] if request.share else []


def _warnings(plan: Plan, facts: list[dict[str, Any]]) -> list[str]:
    here = facts[0]
    crowded = here["kind"] == "cpu" and here["ranks_here"] > here["cores"] and plan.spec.model.family != "sleep"
    if not crowded:
        return []
    return [
        f"{here['ranks_here']} CPU stages share {here['cores']} cores: stages wait for cores, not for each other; "
        f"use stages <= {here['cores']} for figures that mean something"
    ]
