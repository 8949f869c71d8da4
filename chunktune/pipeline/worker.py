"""One worker process: the same code under chunktune's own launcher and under the user's torchrun.

Rank 0 keeps the journal, runs the search and leads; the others follow its commands. A worker that cannot go on
says why in the launcher's store and ends: nothing else frees its peers.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import platform
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import chunktune
from chunktune import partition
from chunktune.candidates import Candidates
from chunktune.device import Device, is_peer_failure, open_device
from chunktune.errors import ChunktuneError, EnvironmentFailedError, UsageError
from chunktune.pipeline.group import EXIT_LOST, Group, Place
from chunktune.pipeline.live import Command, FreshGroupNeededError, LivePipeline, known_step_s, obey
from chunktune.pipeline.measure import Effort, Measurer, PipelineLostError
from chunktune.pipeline.plan import Plan, counts_for, make_plan
from chunktune.pipeline.runtime import quiet_logs
from chunktune.pipeline.work import RankWork
from chunktune.record import Event, Journal, assemble, read_events, write_record
from chunktune.replay import JournaledRunner, lost_event
from chunktune.request import SweepRequest
from chunktune.results import SCHEMA_VERSION, Candidate, Record, Trial
from chunktune.search import search
from chunktune.spec import Spec
from chunktune.standing import Rules
from chunktune.verdict import comparisons, decide

OnEvent = Callable[[Event], None]
OUTCOME_KEY = "chunktune/outcome"
QUICK_EFFORT = Effort(trial_steps=2, trial_s=0.15, block_steps=1, block_s=0.1)
MAX_ROUNDS, QUICK_ROUNDS = 12, 4
LOSS_TOLERANCE = {"float32": 2e-3, "bfloat16": 2e-2}
"""How far the first step's loss may differ over M by rounding alone, as a share."""


def main(request_file: str) -> None:
    """Entry of a worker that chunktune's own launcher started."""
    _die_with_parent()
    run(SweepRequest.from_json(Path(request_file).read_text()), on_event=None)


def run(request: SweepRequest, on_event: OnEvent | None) -> Record | None:
    """Take part in a sweep until it is decided; the record on rank 0, None elsewhere.

    `on_event` gets each journal event on rank 0; None means that the launcher reads the journal itself, replaces
    the group when a fresh one is needed, and is told of errors through its store instead of an exception.
    Raises the ChunktuneError that ends the sweep, under the user's own torchrun.
    """
    quiet_logs()
    place = Place.from_environment()
    check_world(request.spec, place.ranks)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.local_ranks))
    device = open_device(request.spec.device.kind, place.local_rank, place.local_ranks)
    plan = make_plan(request.spec, place.ranks, request.spec_dir)
    # A trial collects garbage five times, and each would walk the 300000 objects of the imported torch.
    gc.freeze()
    group = Group(place, device)
    own_launcher = on_event is None
    if not own_launcher:
        request = replace(request, output_dir=_settled_directory(request, group))
    if own_launcher and outcome_of(group.store).get("outcome") == "failed":
        return None
    while True:
        group.open()
        record, reopen = _session(request, plan, group, device, on_event)
        group.close()
        if own_launcher or not reopen:
            return record


def _settled_directory(request: SweepRequest, group: Group) -> str:
    """The output directory that all workers of a torchrun use, restarted ones included."""
    proposed = request.output_dir or str(Path("runs").absolute() / f"{request.name}-{datetime.now():%Y%m%d-%H%M%S}")
    return group.agree_on("output_dir", proposed)


def check_world(spec: Spec, ranks: int) -> None:
    """Raise UsageError where the launcher started another number of ranks than the spec's stages."""
    asked = spec.pipeline.stages
    if asked is not None and asked != ranks:
        raise UsageError(
            f"pipeline.stages = {asked}, but {ranks} ranks were started; one rank runs one stage: "
            f"start {asked} ranks, or say --stages {ranks}"
        )


def outcome_of(store: dist.Store) -> dict[str, str]:
    """How the workers of this launch ended, in their own words; empty where they said nothing."""
    if not store.check([OUTCOME_KEY]):
        return {}
    words: dict[str, str] = json.loads(store.get(OUTCOME_KEY))
    return words


def _session(
    request: SweepRequest, plan: Plan, group: Group, device: Device, on_event: OnEvent | None
) -> tuple[Record | None, bool]:
    """One life of a process group: (record on rank 0, whether a fresh group is wanted)."""
    try:
        leader = _Leader(request, group, plan, on_event) if group.place.rank == 0 else None
        refusal = leader.open_journal() if leader else None
        if group.broadcast(refusal is not None):
            if leader is not None and refusal is not None:
                leader.give_up(refusal)
            return None, False
        counts = _agreed_counts(plan, group, device, leader)
        work = RankWork(request.spec, plan.model, counts, rank=group.place.rank, ranks=group.place.ranks, device=device)
        facts = group.gather(_facts(device, group.place))
        measurer = Measurer(work, group, QUICK_EFFORT if request.quick else Effort())
        if leader is None:
            return None, _follow(measurer)
        return leader.lead(measurer, counts, facts)
    except PipelineLostError as lost:
        _end_lost(group, lost)
    except ChunktuneError:
        raise
    except Exception as error:
        _end_broken(group, error)


def _follow(measurer: Measurer) -> bool:
    """Obey rank 0 until it has no more commands; whether a fresh group is wanted."""
    while True:
        command: Command = measurer.group.broadcast(None)
        if command.task in ("stop", "reopen"):
            return command.task == "reopen"
        obey(measurer, command)


def _agreed_counts(plan: Plan, group: Group, device: Device, leader: _Leader | None) -> tuple[int, ...]:
    """Layers of each part: from the journal where it has them, else by the spec's choice, the same on every rank."""
    known: tuple[int, ...] | None = group.broadcast(leader.known_counts() if leader else None)
    if known is not None:
        return known
    if plan.counts is not None:
        return plan.counts
    uniform = partition.counts_for("uniform", layers=len(plan.model.layers), parts=plan.parts)
    place = group.place
    work = RankWork(plan.spec, plan.model, uniform, rank=place.rank, ranks=place.ranks, device=device)
    legal = plan.candidates.legal
    micro_batch, _ = plan.candidates.batch_of(legal[len(legal) // 2])
    layer_s = group.broadcast(Measurer(work, group, Effort()).layer_seconds(micro_batch))
    return counts_for("time", plan.model, plan.parts, layer_s)


class _Leader:
    """Rank 0: journal, search, verdict and record."""

    def __init__(self, request: SweepRequest, group: Group, plan: Plan, on_event: OnEvent | None) -> None:
        self._request = request
        self._group = group
        self._plan = plan
        self._on_event = on_event
        self._output = Path(request.output_dir)
        self._launch = group.agree_on("launch", uuid.uuid4().hex) if on_event is not None else "own"
        self._journal: Journal | None = None
        self._events: list[Event] = []

    def open_journal(self) -> ChunktuneError | None:
        """Open the journal of this launch, or say why it cannot be used."""
        try:
            self._output.mkdir(parents=True, exist_ok=True)
            path = self._output / "journal.jsonl"
            if path.exists():
                self._events = self._own_events(read_events(path))
                if not self._events:
                    path.unlink()
            self._journal = Journal(path)
        except ChunktuneError as error:
            return error
        except OSError as error:
            return EnvironmentFailedError(f"{self._output} cannot be written: {error.strerror or error}")
        return None

    def _own_events(self, events: list[Event]) -> list[Event]:
        """The events of this launch; none where they may be overwritten. Raises UsageError where they may not."""
        start = next((event for event in events if event["event"] == "start"), None)
        if start is None or start.get("launch") == self._launch:
            return events
        if self._request.force:
            return []
        raise UsageError(
            f"{self._output} already holds a sweep; a sweep needs a directory of its own: "
            "give another --output-dir, or --force to overwrite"
        )

    def known_counts(self) -> tuple[int, ...] | None:
        """Layers of each part as an earlier group of this sweep settled them."""
        start = self._started()
        return tuple(start["layers_per_part"]) if start else None

    def _started(self) -> Event | None:
        return next((event for event in self._events if event["event"] == "start"), None)

    def lead(
        self, measurer: Measurer, counts: tuple[int, ...], facts: list[dict[str, Any]]
    ) -> tuple[Record | None, bool]:
        """Search to the end, or until a fresh group is needed: (record, whether one is)."""
        try:
            if self._started() is None:
                self._append(self._start_event(counts, facts))
            self._account_for_previous_group([fact["pid"] for fact in facts])
            live = LivePipeline(measurer, self._plan, self._send, known_step_s(self._trials()))
            return self._search(live), False
        except FreshGroupNeededError:
            self._tell("fresh group needed")
            self._send(Command("reopen"))
            return None, True
        except ChunktuneError as error:
            self._send(Command("stop"))
            self.give_up(error)
            return None, False

    def _send(self, command: Command) -> Command:
        self._group.broadcast(command)
        return command

    def _search(self, live: LivePipeline) -> Record:
        spec, candidates = self._plan.spec, self._plan.candidates
        runner = JournaledRunner(
            self._events, live, self._append, spec.sweep.budget, time.monotonic, candidates.batch_of
        )
        rules = Rules(
            criterion=spec.sweep.criterion,
            tolerance=spec.sweep.tolerance,
            patience=spec.sweep.patience,
            max_rounds=QUICK_ROUNDS if self._request.quick else MAX_ROUNDS,
            confirm=not self._request.quick,
        )
        found = search(candidates, runner, rules)
        verdict = decide(
            candidates,
            found,
            rules,
            recompute=spec.pipeline.recompute != "none",
            loss_tolerance=LOSS_TOLERANCE[spec.training.precision],
            fresh=live.freshness(),
        )
        self._append(
            {
                "event": "end",
                "status": "failed" if found.aborted else "complete",
                "verdict": verdict.model_dump(mode="json"),
                "comparisons": [one.model_dump(mode="json") for one in comparisons(candidates, found, rules)],
                "trials": [trial.model_dump(mode="json") for trial in found.trials],
                "elapsed_s": runner.elapsed_s(),
            }
        )
        record = assemble(self._events, "complete")
        write_record(record, self._output / "record.json")
        self._tell("decided")
        self._send(Command("stop"))
        return record

    def _account_for_previous_group(self, pids: list[int]) -> None:
        elapsed_s = self._since_start_s()
        lost = lost_event(self._events, self._group.note_of_previous(), elapsed_s)
        if lost is not None:
            self._append(lost)
        kind = "re-initialised" if self._group.reopened else "processes"
        attempt = self._group.place.attempt
        self._append({"event": "group", "attempt": attempt, "kind": kind, "pids": pids, "elapsed_s": elapsed_s})

    def _since_start_s(self) -> float:
        """Seconds of the sweep until now, restarts of the group included: they are paid for by the budget too."""
        start = self._started()
        began = datetime.fromisoformat(start["at"]) if start and "at" in start else datetime.now(UTC)
        return max(0.0, (datetime.now(UTC) - began).total_seconds())

    def _trials(self) -> Mapping[int, Trial]:
        trials = [Trial.model_validate(event["trial"]) for event in self._events if event["event"] == "trial"]
        return {trial.chunks: trial for trial in trials}

    def _append(self, event: Event) -> None:
        assert self._journal is not None
        self._journal.append(event)
        self._events.append(event)
        if self._on_event is not None:
            self._on_event(event)

    def _start_event(self, counts: tuple[int, ...], facts: list[dict[str, Any]]) -> Event:
        candidates = self._plan.candidates
        spec = self._plan.spec.model_dump(mode="json")
        spec["pipeline"] |= {"stages": self._plan.stages, "virtual_stages": self._plan.virtual_stages}
        return {
            "event": "start",
            "schema_version": SCHEMA_VERSION,
            "tool": {"name": "chunktune", "version": chunktune.__version__},
            "name": self._request.name,
            "launch": self._launch,
            "output_dir": str(self._output),
            "spec": spec,
            "sources": self._request.sources,
            "environment": _environment(facts),
            "candidates": [one.model_dump(mode="json") for one in _described(candidates)],
            "quick": self._request.quick,
            "warnings": [*candidates.warnings, *_warnings(self._plan, facts)],
            "layers_per_part": list(counts),
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "elapsed_s": 0.0,
        }

    def give_up(self, error: ChunktuneError) -> None:
        """End the sweep with an error: raised here under torchrun, told to the launcher otherwise."""
        self._tell("failed", type=type(error).__name__, message=str(error))
        if self._on_event is not None:
            raise error

    def _tell(self, outcome: str, **more: str) -> None:
        self._group.store.set(OUTCOME_KEY, json.dumps({"outcome": outcome, **more}))


def _described(candidates: Candidates) -> list[Candidate]:
    """The values of M for the record, ascending; of many legal ones the rungs of the ladder."""
    legal = [
        Candidate(chunks=chunks, micro_batch=b, mini_batch=n, legal=True)
        for chunks in (candidates.legal if candidates.mode == "mini_batch" else candidates.ladder)
        for b, n in [candidates.batch_of(chunks)]
    ]
    return sorted([*legal, *candidates.refused], key=lambda one: one.chunks)


def _facts(device: Device, place: Place) -> dict[str, Any]:
    return {
        "rank": place.rank,
        "host": platform.node(),
        "pid": os.getpid(),
        "kind": device.kind,
        "name": device.describe(),
        "memory_bytes": device.capacity_bytes(),
        "overhead_bytes": device.overhead_bytes(),
        "cores": os.cpu_count() or 1,
        "ranks_here": place.local_ranks,
    }


def _environment(facts: list[dict[str, Any]]) -> dict[str, Any]:
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "devices": facts,
    }


def _warnings(plan: Plan, facts: list[dict[str, Any]]) -> list[str]:
    here = facts[0]
    crowded = here["kind"] == "cpu" and here["ranks_here"] > here["cores"] and plan.spec.model.family != "sleep"
    if not crowded:
        return []
    return [
        f"{here['ranks_here']} CPU stages share {here['cores']} cores: stages wait for cores, not for each other; "
        f"use stages <= {here['cores']} for figures that mean something"
    ]


def _end_lost(group: Group, lost: PipelineLostError) -> NoReturn:
    """The real pipeline raised here: say why, unless a peer's end is the reason, and end."""
    report = lost.report
    print(report.log or report.reason, file=sys.stderr, flush=True)
    if lost.__cause__ is None or not is_peer_failure(lost.__cause__):
        shortage = report.shortage.model_dump(mode="json") if report.shortage else None
        group.leave_note({"state": report.state, "reason": report.reason, "chunks": lost.chunks, "shortage": shortage})
    os._exit(EXIT_LOST)


def _end_broken(group: Group, error: Exception) -> NoReturn:
    """Anything else: the control channel broke because a peer ended, or a bug here."""
    traceback.print_exception(error)
    sys.stderr.flush()
    if not is_peer_failure(error):
        message = f"rank {group.place.rank}: {type(error).__name__}: {error}"
        words = {"outcome": "failed", "type": "ChunktuneError", "message": message}
        with contextlib.suppress(Exception):
            group.store.set(OUTCOME_KEY, json.dumps(words))
    os._exit(EXIT_LOST)


def _die_with_parent() -> None:
    """Let the kernel end this process when the launcher dies, however it dies."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
