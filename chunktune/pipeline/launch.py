"""Starting the workers: by torch's own elastic launcher, or not at all under the user's torchrun.

One launch serves every M; a second one confirms the choice in fresh processes. Where a group died, why is journaled
here, and a new launch goes on from the journal. Everything listens on loopback only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from chunktune import errors
from chunktune.device import resolve_kind
from chunktune.errors import ChunktuneError, EnvironmentFailedError, InterruptedSweepError, UsageError
from chunktune.journal import Event, Journal, OnEvent, followed, read_events, start_of
from chunktune.locks import holding, holding_directory
from chunktune.pipeline import worker
from chunktune.pipeline.group import EXIT_LOST, first_note, outcome_of, running_of, under_launcher
from chunktune.pipeline.plan import make_plan
from chunktune.pipeline.rendezvous import BACKEND, LoopbackRendezvous, registered
from chunktune.pipeline.server import START_METHOD, start_server, stop_server
from chunktune.pipeline.signals import handlers_restored, leaving_at_the_second_signal
from chunktune.pipeline.warden import Warden
from chunktune.record import Status, assemble, measured_of, read_record, write_record
from chunktune.replay import lost_event
from chunktune.request import SweepRequest
from chunktune.results import Record
from chunktune.resume import as_recorded, journal_of, note_resumed, refuse_other_code, refuse_other_question
from chunktune.spec import Spec

SPARE_RESTARTS = 16
"""Restarts of a group besides two for each value of M."""
_STILLBORN = 2
"""Groups in a row that may end before they journal a line."""
_CHATTY = ("torch.distributed.elastic", "torch.multiprocessing")


def run(request: SweepRequest, on_event: OnEvent) -> Record | None:
    """Measure, decide, confirm; the record, or None on the ranks other than 0 of the user's own torchrun.

    `on_event` gets every journal event as it is written. Raises the ChunktuneError that ended the sweep; what was
    measured by then stands in the journal and, where one trial was finished, in a partial record.
    """
    if under_launcher():
        return worker.run(request, on_event)
    stages = visible_stages(request.spec)
    check_devices(request.spec, stages, rehearse=request.rehearse)
    plan = make_plan(request.spec, stages, request.spec_dir)
    plan.model.sample_batch(1, torch.Generator())  # a factory's mistake is told before any process starts
    if request.resume:
        spec = as_recorded(request.spec.model_dump(mode="json"), plan.stages, plan.virtual_stages)
        events = journal_of(Path(request.output_dir))
        refuse_other_question(events, request, spec)
        refuse_other_code(events, request.output_dir, getattr(request.spec.model, "factory", ""), plan.code)
    launch = _Launch(request, stages, len(plan.candidates.ladder))
    with holding(_devices(request, stages), request.output_dir):
        return launch.run(on_event)


def visible_stages(spec: Spec) -> int:
    """K: the spec's, else one stage for each visible device (on the CPU: one)."""
    if spec.pipeline.stages is not None:
        return spec.pipeline.stages
    return torch.cuda.device_count() if resolve_kind(spec.device.kind) == "cuda" else 1


def check_devices(spec: Spec, stages: int, *, rehearse: bool) -> None:
    """Raise UsageError where the devices cannot carry the stages, or the capacity leaves nothing to use."""
    if resolve_kind(spec.device.kind) == "cuda" and stages > torch.cuda.device_count() and not rehearse:
        raise UsageError(
            f"pipeline.stages = {stages}, but {torch.cuda.device_count()} GPUs are visible; a stage needs a GPU of "
            f"its own: use --stages {torch.cuda.device_count()}, torchrun over more nodes, or --rehearse"
        )
    memory = spec.device.memory
    if memory != "auto" and int(int(memory) * (1 - spec.device.headroom)) <= spec.device.reserve:
        raise UsageError(
            f"device.memory = {memory} bytes leaves nothing after headroom = {spec.device.headroom} and "
            f"reserve = {spec.device.reserve} bytes; raise device.memory or lower device.reserve"
        )


def _processes(request: SweepRequest, stages: int) -> int:
    """One for each stage; where they rehearse in turn one for each device, on the CPU one."""
    if not request.rehearse:
        return stages
    return min(stages, max(1, torch.cuda.device_count())) if resolve_kind(request.spec.device.kind) == "cuda" else 1


def _devices(request: SweepRequest, stages: int) -> list[str]:
    """What a sweep keeps others from: its GPUs, or this machine's cores; sleeping stages need none."""
    if request.share:
        return []
    if resolve_kind(request.spec.device.kind) == "cuda":
        return [f"GPU {torch.cuda.get_device_properties(i).uuid}" for i in range(_processes(request, stages))]
    return [] if request.spec.model.family == "sleep" else ["the CPU"]


class _Launch:
    """The launches of one sweep on this machine: one to measure, one more for every confirmation and every loss."""

    def __init__(self, request: SweepRequest, stages: int, rungs: int) -> None:
        spec = request.spec.model_copy(update={"pipeline": request.spec.pipeline.model_copy(update={"stages": stages})})
        self._request = replace(request, spec=spec, launch=uuid.uuid4().hex)
        self._processes = _processes(request, stages)
        self._output = Path(request.output_dir)
        self._journal = self._output / "journal.jsonl"
        self._restarts = SPARE_RESTARTS + 2 * rungs
        self._seen: list[Event] = []

    def run(self, on_event: OnEvent) -> Record:
        _or_unwritable(lambda: self._output.mkdir(parents=True, exist_ok=True), self._output)
        with holding_directory(self._output):
            self._prepare_output()
            start_server()
            with handlers_restored(), leaving_at_the_second_signal(self._go_on, stop_server):
                return self._run(on_event)

    def _run(self, on_event: OnEvent) -> Record:
        def see(event: Event) -> None:
            self._seen.append(event)
            on_event(event)

        try:
            with followed(self._journal, see), _quiet_agent():
                outcome = self._until_decided()
            return self._finish(outcome)
        except (SignalException, KeyboardInterrupt) as error:
            self._interrupted(error)

    def _until_decided(self) -> dict[str, str]:
        """Launch group after group, each going on from the journal, until one says how the sweep ended."""
        losses = without_a_line = 0
        while True:
            if self._seen and not self._journal.exists():
                return {"outcome": "failed", "message": f"{self._journal}: the journal is gone"}
            lines = self._journal_bytes()
            outcome = self._launch_once()
            if outcome.get("outcome") not in ("lost", "fresh group needed"):
                return outcome
            losses += outcome.get("outcome") == "lost"
            without_a_line = without_a_line + 1 if self._journal_bytes() == lines else 0
            if losses > self._restarts or without_a_line == _STILLBORN:
                return {"outcome": "failed", "type": "EnvironmentFailedError", "message": _gave_up(losses, outcome)}

    def _journal_bytes(self) -> int:
        return self._journal.stat().st_size if self._journal.exists() else 0

    def _prepare_output(self) -> None:
        if self._request.resume:
            note_resumed(self._journal, self._request)
            return
        for name in ("journal.jsonl", "record.json"):
            (self._output / name).unlink(missing_ok=True)
        shutil.rmtree(self._output / "logs", ignore_errors=True)

    def _launch_once(self) -> dict[str, str]:
        handler = LoopbackRendezvous()
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._processes,
            run_id="chunktune",
            rdzv_backend=BACKEND,
            max_restarts=0,  # the parent journals what ended a group before it starts the next
            monitor_interval=0.1,
            start_method=START_METHOD,
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=str(self._output / "logs"), redirects=Std.ALL),
        )
        with registered(handler), _environment(_worker_environment()), Warden(self._journal, handler) as warden:
            try:
                elastic_launch(config, worker.main)(self._request.to_json())
            except ChildFailedError as error:
                return outcome_of(handler.store) or self._lost(handler, *_last_words(error))
            except SignalException:
                if not warden.alarmed:
                    raise
                return self._lost(handler, None, "a worker ended by itself, with exit status 0")
        return outcome_of(handler.store)

    def _lost(self, handler: LoopbackRendezvous, rank: int | None, words: str) -> dict[str, str]:
        """Journal why the group ended: in a worker's own words, the first by time, else in those of the agent."""
        note = first_note(handler.store, 1, self._processes)
        if note is None:
            note = {**(running_of(handler.store) or {}), "state": "killed", "rank": rank, "reason": words}
        reason = str(note.get("reason") or words)
        if self._journal.exists():
            events = read_events(self._journal)
            end = lost_event(events, note) or _lost_between(events, reason)
            if end is not None:
                with Journal(self._journal) as journal:
                    journal.append(end)
        return {"outcome": "lost", "message": reason}

    def _interrupted(self, error: BaseException) -> NoReturn:
        terminated = isinstance(error, SignalException) and error.sigval == signal.SIGTERM
        kept = self._keep_partial("interrupted")
        word = "terminated" if terminated else "interrupted"
        raise InterruptedSweepError(f"{word}; {kept}{self._go_on()}", 143 if terminated else 130) from None

    def _go_on(self) -> str:
        """The command that goes on with the sweep, where there is anything to go on with."""
        shown = min(str(self._output), os.path.relpath(self._output), key=len)
        return f"; go on with: chunktune sweep --resume {shlex.quote(shown)}" if self._journal.exists() else ""

    def _keep_partial(self, status: Status) -> str:
        """Close the journal of a group that ended too early and write what it amounts to."""
        if not self._journal.exists():
            return "nothing was measured yet"
        events = read_events(self._journal)
        lost = lost_event(events, None)
        if lost is not None and status == "failed":
            with Journal(self._journal) as journal:
                journal.append(lost)
        if start_of(events) is None:
            return "nothing was measured yet"
        path = self._output / "record.json"
        write_record(assemble(read_events(self._journal), status), path)
        return f"what was measured is kept in {path}"

    def _kept_or_shown(self, measured: str) -> str:
        """Keep what was measured; where the disk does not take it, show it on stderr: nothing is lost."""
        why = "the journal is gone"
        if not self._journal.exists():
            measured = measured or measured_of(self._seen)
        if self._journal.exists() or not measured:
            try:
                return self._keep_partial("failed")
            except ChunktuneError as error:
                why = str(error)
        if not measured:
            return f"and nothing was kept: {why}"
        print(measured, file=sys.stderr)
        return f"what was measured stands above, as a record, and not on the disk: {why}"

    def _finish(self, outcome: dict[str, str]) -> Record:
        if outcome.get("outcome") == "decided":
            return read_record(self._output / "record.json")
        kind = getattr(errors, outcome.get("type", ""), EnvironmentFailedError)
        message = outcome.get("message", "the workers ended without a verdict")
        kept = self._kept_or_shown(outcome.get("record", ""))
        raise kind(f"{message}; {kept}; the workers' logs are in {self._output / 'logs'}{self._go_on()}")


def _gave_up(losses: int, outcome: dict[str, str]) -> str:
    return f"the worker group died {losses} times; the last time {outcome.get('message', 'without a word')}"


def _lost_between(events: Sequence[Event], reason: str) -> Event | None:
    """What to journal of a group that ended while nothing was asked of it; None where it had not begun at all."""
    if not events or events[-1]["event"] in ("lost", "warning", "resumed", "end"):
        return None
    return {"event": "warning", "text": f"the worker group was lost between two trials and started again: {reason}"}


def _last_words(error: ChildFailedError) -> tuple[int, str]:
    """The rank that the agent found dead first, and how it ended."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = failure.signal_name()
        killer = ", as the kernel's out-of-memory killer does" if name == "SIGKILL" else ""
        return rank, f"rank {rank} was ended by {name}{killer}"
    if failure.exitcode == EXIT_LOST:
        return rank, f"rank {rank} lost its peers, and none of them said why"
    return rank, f"rank {rank} ended by itself, with exit status {failure.exitcode}"


def _worker_environment() -> dict[str, str]:
    return {name: value for name, value in {"GLOO_SOCKET_IFNAME": "lo"}.items() if name not in os.environ}


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent logs a traceback for every restart; the journal says the same in one line."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(_CHATTY)]
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def _or_unwritable(act: Callable[[], object], path: Path) -> None:
    try:
        act()
    except OSError as error:
        raise EnvironmentFailedError(f"{path} cannot be written: {error.strerror or error}") from error
