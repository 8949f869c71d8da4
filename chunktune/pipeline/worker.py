"""One worker process: the same code under chunktune's own launcher and under the user's torchrun.

Rank 0 keeps the journal, runs the search and leads; the others follow its commands. A worker that cannot go on
says why in the launcher's store and ends: nothing else frees its peers.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from datetime import datetime
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch

from chunktune import partition
from chunktune.device import Device, is_peer_failure, open_device
from chunktune.errors import ChunktuneError, UsageError
from chunktune.journal import OnEvent
from chunktune.pipeline.group import EXIT_LOST, Group, Place, outcome_of
from chunktune.pipeline.leader import Leader
from chunktune.pipeline.leading import FIRST_DEADLINE_S, Command, obey
from chunktune.pipeline.measure import Effort, Measurer, PipelineLostError
from chunktune.pipeline.plan import Plan, counts_for, make_plan
from chunktune.pipeline.rehearsed import RESAMPLES
from chunktune.pipeline.runtime import quiet_logs
from chunktune.pipeline.server import outlive_no_server
from chunktune.pipeline.work import RankWork
from chunktune.request import SweepRequest
from chunktune.results import Record
from chunktune.spec import Spec

_UNFORMED = (
    f"the process group was not formed within {FIRST_DEADLINE_S:.0f} s: do the ranks reach each other over "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME? NCCL_DEBUG=INFO says more"
)
QUICK_EFFORT = Effort(trial_steps=2, trial_s=0.15, block_steps=1, block_s=0.1)


def main(request: str) -> None:
    """Entry of a worker that chunktune's own launcher started; `request` is a SweepRequest as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the agent hands on what it got, and waits for half a minute
    _die_with_launcher()
    run(SweepRequest.from_json(request), on_event=None)


def run(request: SweepRequest, on_event: OnEvent | None) -> Record | None:
    """Take part in a sweep until it is decided; the record on rank 0, None elsewhere.

    `on_event` gets each journal event on rank 0; None means that the launcher reads the journal itself, replaces
    the group when a fresh one is needed, and is told of errors through its store instead of an exception.
    Raises the ChunktuneError that ends the sweep, under the user's own torchrun.
    """
    quiet_logs()
    _die_with_parent()
    place = Place.from_environment()
    stages = _stages(request, place)
    # A rank that rehearses alone gets what it would have beside all the others.
    ranks_here = stages if request.rehearse else place.local_ranks
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
    device = open_device(request.spec.device.kind, place.local_rank, place.local_ranks, ranks_here)
    plan = make_plan(request.spec, stages, request.spec_dir)
    # A trial collects garbage five times, and each would walk the 300000 objects of the imported torch.
    gc.freeze()
    group = Group(place, device)
    own_launcher = on_event is None
    if not own_launcher:
        request = replace(request, output_dir=_settled_directory(request, group))
    if own_launcher and outcome_of(group.store).get("outcome") == "failed":
        return None
    while True:
        with group.deadline(FIRST_DEADLINE_S, {"reason": _UNFORMED}):
            group.open()
        record, reopen = _session(request, plan, group, device, on_event)
        group.close()
        if own_launcher or not reopen:
            return record


def _settled_directory(request: SweepRequest, group: Group) -> str:
    """The output directory that all workers of a torchrun use, restarted ones included."""
    place = group.place
    named = f"{datetime.now():%Y%m%d-%H%M%S}" if place.agent_store else place.run_id
    proposed = request.output_dir or str(Path("runs").absolute() / f"{request.name}-{named}")
    return group.agree_on("output_dir", proposed)


def _stages(request: SweepRequest, place: Place) -> int:
    """K: as many ranks as were started, unless they rehearse in turn."""
    if request.rehearse:
        return request.spec.pipeline.stages or place.ranks
    check_world(request.spec, place.ranks)
    return place.ranks


def check_world(spec: Spec, ranks: int) -> None:
    """Raise UsageError where the launcher started another number of ranks than the spec's stages."""
    asked = spec.pipeline.stages
    if asked is not None and asked != ranks:
        raise UsageError(
            f"pipeline.stages = {asked}, but {ranks} ranks were started; one rank runs one stage: "
            f"start {asked} ranks, say --stages {ranks}, or rehearse them in turn with --rehearse"
        )


def _session(
    request: SweepRequest, plan: Plan, group: Group, device: Device, on_event: OnEvent | None
) -> tuple[Record | None, bool]:
    """One life of a process group: (record on rank 0, whether a fresh group is wanted)."""
    leader = Leader(request, group, plan, on_event) if group.place.rank == 0 else None
    try:
        refusal = leader.open_journal() if leader else None
        if group.broadcast(refusal is not None):
            if leader is not None and refusal is not None:
                leader.give_up(refusal)
            return None, False
        counts = _agreed_counts(plan, group, device, leader)
        facts = group.gather(_facts(device, group.place))
        measurer = _measurer(request, plan, group, device, counts)
        if leader is None:
            return None, _follow(measurer)
        return leader.lead(measurer, counts, facts)
    except PipelineLostError as lost:
        _end_lost(group, lost)
    except ChunktuneError as error:  # found by every rank alike
        if leader is not None:
            leader.give_up(error)
        return None, False
    except Exception as error:
        _end_broken(group, error)


def _measurer(request: SweepRequest, plan: Plan, group: Group, device: Device, counts: tuple[int, ...]) -> Measurer:
    """This process's share: its own rank, or every W-th where W processes rehearse K ranks in turn."""
    place = group.place
    ranks = range(place.rank, plan.stages, place.ranks) if request.rehearse else (place.rank,)
    works = tuple(
        RankWork(request.spec, plan.model, counts, rank=rank, ranks=plan.stages, device=device) for rank in ranks
    )
    effort = QUICK_EFFORT if request.quick else Effort()
    return Measurer(works, group, effort, resamples=RESAMPLES if request.rehearse else 0)


def _follow(measurer: Measurer) -> bool:
    """Obey rank 0 until it has no more commands; whether a fresh group is wanted."""
    while True:
        command: Command = measurer.group.broadcast(None)
        if command.task in ("stop", "reopen"):
            return command.task == "reopen"
        obey(measurer, command)


def _agreed_counts(plan: Plan, group: Group, device: Device, leader: Leader | None) -> tuple[int, ...]:
    """Layers of each part: from the journal where it has them, else by the spec's choice, the same on every rank."""
    known: tuple[int, ...] | None = group.broadcast(leader.known_counts() if leader else None)
    if known is not None:
        return known
    if plan.counts is not None:
        return plan.counts
    uniform = partition.counts_for("uniform", layers=len(plan.model.layers), parts=plan.parts)
    place = group.place
    work = RankWork(plan.spec, plan.model, uniform, rank=place.rank, ranks=plan.stages, device=device)
    legal = plan.candidates.legal
    micro_batch, _ = plan.candidates.batch_of(legal[len(legal) // 2])
    timeout = plan.spec.sweep.trial_timeout
    with group.deadline(FIRST_DEADLINE_S if timeout == "auto" else float(timeout), {}, "timing the layers"):
        layer_s = group.broadcast(Measurer((work,), group, Effort()).layer_seconds(micro_batch))
    return counts_for("time", plan.model, plan.parts, layer_s)


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


def _end_lost(group: Group, lost: PipelineLostError) -> NoReturn:
    """The real pipeline raised here: say why, unless a peer's end is the reason, and end."""
    report = lost.report
    print(report.log or report.reason, file=sys.stderr, flush=True)
    if lost.__cause__ is None or not is_peer_failure(lost.__cause__):
        shortage = report.shortage.model_dump(mode="json") if report.shortage else None
        group.leave_note({"state": report.state, "reason": report.reason, "chunks": lost.chunks, "shortage": shortage})
    else:
        time.sleep(group.place.peer_grace_s)
    os._exit(EXIT_LOST)


def _end_broken(group: Group, error: Exception) -> NoReturn:
    """Anything else: the control channel broke because a peer ended, or a bug here."""
    traceback.print_exception(error)
    sys.stderr.flush()
    if not is_peer_failure(error):
        message = f"rank {group.place.rank}: {type(error).__name__}: {error}"
        with contextlib.suppress(Exception):
            group.tell("failed", type="ChunktuneError", message=message)
    else:
        time.sleep(group.place.peer_grace_s)
    os._exit(EXIT_LOST)


def _die_with_launcher() -> None:
    """End this process when the launcher dies, however it dies.

    The kernel's signal comes when the server ends that forked us; until then, and where that fails, a thread watches.
    """
    outlive_no_server()
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        threading.Thread(target=_end_after, args=(launcher,), daemon=True).start()


def _die_with_parent() -> None:
    """End this process when its parent does: the server that forked it, or the agent of the user's torchrun."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _end_after(launcher: BaseProcess) -> None:
    launcher.join()
    os._exit(EXIT_LOST)
