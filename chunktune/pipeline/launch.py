"""Starting the workers: by torch's own elastic launcher, or not at all under the user's torchrun.

One launch serves every M; a second one confirms the choice in fresh processes. The agent restarts a group that
died, and the new rank 0 goes on from the journal. Everything listens on loopback only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from chunktune import errors
from chunktune.device import resolve_kind
from chunktune.errors import EnvironmentFailedError, InterruptedSweepError, UsageError
from chunktune.pipeline import worker
from chunktune.pipeline.group import loopback_store, outcome_of, running_of, under_launcher
from chunktune.pipeline.plan import make_plan
from chunktune.pipeline.server import START_METHOD, start_server
from chunktune.record import Event, Journal, Status, assemble, read_events, read_record, write_record
from chunktune.replay import lost_event
from chunktune.request import SweepRequest
from chunktune.results import Record
from chunktune.spec import Spec

SPARE_RESTARTS = 16
"""Restarts of a group besides two for each value of M."""
_CHATTY = ("torch.distributed.elastic", "torch.multiprocessing")
_BACKEND = "chunktune-loopback"
OnEvent = Callable[[Event], None]


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
    return _Launch(request, stages, len(plan.candidates.ladder)).run(on_event)


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


class _Launch:
    """The launches of one sweep on this machine: one to measure, one more for every confirmation."""

    def __init__(self, request: SweepRequest, stages: int, rungs: int) -> None:
        spec = request.spec.model_copy(update={"pipeline": request.spec.pipeline.model_copy(update={"stages": stages})})
        self._request = replace(request, spec=spec)
        self._processes = _processes(request, stages)
        self._output = Path(request.output_dir)
        self._journal = self._output / "journal.jsonl"
        self._restarts = SPARE_RESTARTS + 2 * rungs

    def run(self, on_event: OnEvent) -> Record:
        self._prepare_output()
        start_server()
        with followed(self._journal, on_event), _quiet_agent():
            outcome: dict[str, str] = {"outcome": "fresh group needed"}
            while outcome.get("outcome") == "fresh group needed":
                outcome = self._launch_once()
        return self._finish(outcome)

    def _prepare_output(self) -> None:
        _or_unwritable(lambda: self._output.mkdir(parents=True, exist_ok=True), self._output)
        for name in ("journal.jsonl", "record.json"):
            (self._output / name).unlink(missing_ok=True)
        shutil.rmtree(self._output / "logs", ignore_errors=True)

    def _launch_once(self) -> dict[str, str]:
        handler = _LoopbackRendezvous()
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._processes,
            run_id="chunktune",
            rdzv_backend=_BACKEND,
            max_restarts=self._restarts,
            monitor_interval=0.1,
            start_method=START_METHOD,
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=str(self._output / "logs"), redirects=Std.ALL),
        )
        with _registered(handler), _environment(_worker_environment()), _Warden(self._journal, handler) as warden:
            try:
                elastic_launch(config, worker.main)(self._request.to_json())
            except ChildFailedError as error:
                return outcome_of(handler.store) or self._group_failed(error)
            except (SignalException, KeyboardInterrupt) as error:
                if not warden.alarmed:
                    self._interrupted(error)
                self._account_for_silence(handler)
                return {"outcome": "fresh group needed"}
        return outcome_of(handler.store)

    def _account_for_silence(self, handler: _LoopbackRendezvous) -> None:
        """A worker left without a word and with exit status 0: torch's agent would wait for it for ever."""
        note = {**(running_of(handler.store) or {}), "reason": "a worker ended by itself, with exit status 0"}
        lost = lost_event(read_events(self._journal), note)
        if lost is not None:
            with Journal(self._journal) as journal:
                journal.append(lost)

    def _group_failed(self, error: ChildFailedError) -> dict[str, str]:
        rank, failure = error.get_first_failure()
        self._keep_partial("failed")
        last_words = str(failure.message).splitlines()[0]
        message = f"the worker group died {self._restarts + 1} times, last rank {rank} ({last_words})"
        return {"outcome": "failed", "type": "EnvironmentFailedError", "message": message}

    def _interrupted(self, error: BaseException) -> None:
        terminated = isinstance(error, SignalException) and error.sigval == signal.SIGTERM
        kept = self._keep_partial("interrupted")
        word = "terminated" if terminated else "interrupted"
        raise InterruptedSweepError(f"{word}; {kept}", 143 if terminated else 130) from None

    def _keep_partial(self, status: Status) -> str:
        """Close the journal of a group that ended too early and write what it amounts to."""
        if not self._journal.exists():
            return "nothing was measured yet"
        events = read_events(self._journal)
        lost = lost_event(events, None)
        if lost is not None and status == "failed":
            with Journal(self._journal) as journal:
                journal.append(lost)
        if not any(event["event"] == "start" for event in events):
            return "nothing was measured yet"
        path = self._output / "record.json"
        write_record(assemble(read_events(self._journal), status), path)
        return f"what was measured is kept in {path}"

    def _finish(self, outcome: dict[str, str]) -> Record:
        if outcome.get("outcome") == "decided":
            return read_record(self._output / "record.json")
        kind = getattr(errors, outcome.get("type", ""), EnvironmentFailedError)
        message = outcome.get("message", "the workers ended without a verdict")
        kept = self._keep_partial("failed")
        raise kind(f"{message}; {kept}; the workers' logs are in {self._output / 'logs'}")


class _LoopbackRendezvous(RendezvousHandler):
    """A meeting of one agent with itself: a store on 127.0.0.1 that outlives the workers.

    torch's own backends let their store listen on every interface.
    """

    def __init__(self) -> None:
        self.store = loopback_store()
        self._closed = False

    @property
    def use_agent_store(self) -> bool:
        """The workers use this store too."""
        return True

    def get_backend(self) -> str:
        """Name of the backend."""
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """This node, alone, as rank 0 of 1."""
        place = RendezvousStoreInfo("127.0.0.1", self.store.port)
        return RendezvousInfo(self.store, 0, 1, place)

    def is_closed(self) -> bool:
        """Whether the launch is over."""
        return self._closed

    def set_closed(self) -> None:
        """End the launch."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Nobody else joins."""
        return 0

    def get_run_id(self) -> str:
        """Name of the launch."""
        return "chunktune"

    def shutdown(self) -> bool:
        """Nothing to close: the store lives as long as this object."""
        return True


class _Warden:
    """Watches for a worker that is gone while the sweep goes on, and ends the launch: the agent does not notice.

    torch's agent waits for the result of every worker; one that left with exit status 0 never brings it.
    """

    _GRACE_S, _RESTART_S = 15.0, 90.0  # one gone of several; all gone, as when the agent starts them again

    def __init__(self, journal: Path, handler: _LoopbackRendezvous) -> None:
        self.alarmed = False
        self._journal = journal
        self._handler = handler
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Warden:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        pids: list[int] = []
        with followed(self._journal, lambda event: pids.__setitem__(slice(None), event.get("pids", pids))):
            missing_s = 0.0
            while not self._stop.wait(1.0):
                alive = sum(Path("/proc", str(pid)).exists() for pid in pids)
                missing_s = missing_s + 1.0 if alive < len(pids) and not outcome_of(self._handler.store) else 0.0
                if missing_s > (self._GRACE_S if alive else self._RESTART_S):
                    self.alarmed = True
                    os.kill(os.getpid(), signal.SIGTERM)
                    return


@contextlib.contextmanager
def _registered(handler: _LoopbackRendezvous) -> Iterator[None]:
    """Let torch's launcher find the handler by name; its registry keeps the first maker of a name."""
    _current.append(handler)
    if not _registered_once:
        rendezvous_handler_registry.register(_BACKEND, _current_handler)
        _registered_once.append(True)
    try:
        yield
    finally:
        _current.clear()


_current: list[_LoopbackRendezvous] = []
_registered_once: list[bool] = []


def _current_handler(_: RendezvousParameters) -> RendezvousHandler:
    return _current[-1]


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


@contextlib.contextmanager
def followed(journal: Path, on_event: OnEvent) -> Iterator[None]:
    """Inside, hand every whole line that is added to the journal to `on_event`, as it is written."""
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(journal, on_event, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _follow(journal: Path, on_event: OnEvent, stop: threading.Event) -> None:
    rest = b""
    position = 0
    while True:
        last_time = stop.is_set()
        with contextlib.suppress(OSError), journal.open("rb") as file:
            file.seek(position)
            rest += file.read()
            position = file.tell()
        *lines, rest = rest.split(b"\n")
        for line in lines:
            on_event(_parsed(line))
        if last_time:
            return
        time.sleep(0.1)


def _parsed(line: bytes) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(line)
    return event


def _or_unwritable(act: Callable[[], object], path: Path) -> None:
    try:
        act()
    except OSError as error:
        raise EnvironmentFailedError(f"{path} cannot be written: {error.strerror or error}") from error
