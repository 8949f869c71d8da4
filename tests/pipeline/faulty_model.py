"""A model of small sleeping layers that breaks on demand: copied beside a spec, which says what goes wrong and where.

A fault is a table of the spec's [model.arguments]: `kind`, `rank`, `chunks` and `phase` say what happens on which rank
at which M; `where` is forward (default), backward, optimizer, send or journal; `once` happens once in the whole sweep.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_pre_hook

from chunktune.journal import Journal
from chunktune.models.base import ModelDefinition

FEATURES = 8
GIB = 2**30
PHASES = {"rehearse": "rehearsal", "_warm_up": "warm-up", "block": "rounds", "_real_trial": "timed"}
"""Functions of chunktune, the innermost on the stack: what a rank does while they run."""

Fault = Mapping[str, Any]


class NothingToWaitFor:
    def wait(self, *_: object) -> bool:
        return True


class Faults:
    """The faults of this process's rank, and what they depend on."""

    def __init__(self, faults: Sequence[Fault], mini_batch: int, folder: Path) -> None:
        rank = int(os.environ.get("RANK", "-1"))
        self._faults = [(number, fault) for number, fault in enumerate(faults) if fault["rank"] in (rank, "every")]
        self._mini_batch = mini_batch
        self._folder = folder
        self._chunks = 0
        self._block: object = None
        self._blocks = 0

    def see(self, samples: int) -> None:
        self._chunks = self._mini_batch // samples

    def strike(self, where: str) -> bool:
        """Do what the spec wants done here; whether the thing itself is to be left out."""
        waiting = [(number, fault) for number, fault in self._faults if fault.get("where", "forward") == where]
        if not waiting:
            return False
        phase = self._phase()
        return any(self._happens(number, fault) for number, fault in waiting if self._is_due(number, fault, phase))

    def before_the_optimizer(self, *_: object) -> None:
        self.strike("optimizer")

    def _is_due(self, number: int, fault: Fault, phase: str) -> bool:
        here = fault["chunks"] in (self._chunks, "every") and fault["phase"] in (phase, "any")
        return here and not (fault.get("once") and self._mark(number).exists())

    def _mark(self, number: int) -> Path:
        return self._folder / f"fault-{number}"

    def _happens(self, number: int, fault: Fault) -> bool:
        self._mark(number).touch()
        return bool(KINDS[fault["kind"]](self, fault))

    def _phase(self) -> str:
        for frame, _ in traceback.walk_stack(None):
            phase = PHASES.get(frame.f_code.co_name)
            if phase is None:
                continue
            if phase == "rounds" and frame is not self._block:
                self._block, self._blocks = frame, self._blocks + 1
            return "confirmation" if self._task() == "confirm" else phase
        return "between"

    def _task(self) -> str:
        lines = (self._folder / "out" / "journal.jsonl").read_text().splitlines()
        return next((event["task"] for event in map(json.loads, reversed(lines)) if event["event"] == "begin"), "")

    def shortage(self, fault: Fault) -> None:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {fault['gib']}.00 GiB.")

    def shortage_of_the_cpu(self, fault: Fault) -> None:
        size = fault["gib"] * GIB
        raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size} bytes.")

    def shortage_of_nccl(self, _: Fault) -> None:
        raise dist.DistBackendError("NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'")

    def signals(self, fault: Fault) -> None:
        os.kill(os.getpid(), getattr(signal, fault["signal"]))

    def leaves(self, fault: Fault) -> None:
        os._exit(fault["status"])

    def hangs(self, _: Fault) -> None:
        time.sleep(3600)

    def hangs_with_the_lock(self, _: Fault) -> None:
        """As an extension module may: the interpreter's lock is not given up."""
        ctypes.PyDLL(None).sleep(3600)

    def drops(self, _: Fault) -> bool:
        return True

    def raises(self, fault: Fault) -> None:
        raise ValueError(fault["says"])

    def slow(self, fault: Fault) -> None:
        time.sleep(fault["seconds"])

    def disturbed(self, fault: Fault) -> None:
        """Slow in the first and third of every four visits: in A B B A now the one is held up, now the other."""
        if self._blocks % 4 in (1, 3):
            layer_s = fault["seconds"] + fault["seconds_per_sample"] * self._mini_batch / self._chunks
            time.sleep(fault["share"] * layer_s)


KINDS: Mapping[str, Callable[[Faults, Fault], bool | None]] = {
    "shortage": Faults.shortage,
    "shortage of the CPU": Faults.shortage_of_the_cpu,
    "shortage of NCCL": Faults.shortage_of_nccl,
    "signals": Faults.signals,
    "leaves": Faults.leaves,
    "hangs": Faults.hangs,
    "hangs with the lock": Faults.hangs_with_the_lock,
    "drops": Faults.drops,
    "raises": Faults.raises,
    "slow": Faults.slow,
    "disturbed": Faults.disturbed,
}


class Layer(nn.Module):
    def __init__(self, faults: Faults, seconds: float, seconds_per_sample: float) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self._faults = faults
        self._seconds, self._seconds_per_sample = seconds, seconds_per_sample

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.linear(value).tanh()
        if isinstance(value, FakeTensor):
            return result
        self._faults.see(len(value))
        time.sleep(self._seconds + self._seconds_per_sample * len(value))
        self._faults.strike("forward")
        if result.requires_grad:
            result.register_hook(self._backward)
        return result

    def _backward(self, _: Tensor) -> None:
        self._faults.strike("backward")


def _watch_sends(faults: Faults) -> None:
    send = dist.isend

    @functools.wraps(send)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return NothingToWaitFor() if faults.strike("send") else send(*args, **kwargs)

    dist.isend = distributed_c10d.isend = watched


def _watch_the_journal(faults: Faults) -> None:
    append = Journal.append

    def watched(journal: Journal, event: Mapping[str, Any]) -> None:
        append(journal, event)
        if event["event"] == "trial":
            faults.strike("journal")

    Journal.append = watched  # type: ignore[method-assign]


def build(
    *,
    faults: list[Fault],
    layers: int,
    mini_batch: int,
    folder: str,
    seconds: float,
    seconds_per_sample: float = 0.0,
    loss: str = "1",
) -> ModelDefinition:
    """`seconds`: of a layer's forward. `loss`: what the loss is multiplied by. `folder`: holds "out"."""
    active = Faults(faults, mini_batch, Path(folder))
    if "RANK" in os.environ:
        _watch_sends(active)
        _watch_the_journal(active)
        register_optimizer_step_pre_hook(active.before_the_optimizer)
    return ModelDefinition(
        layers=(lambda: Layer(active, seconds, seconds_per_sample),) * layers,
        sample_batch=lambda samples, generator: (
            torch.randn(samples, FEATURES, generator=generator),
            torch.zeros(samples, FEATURES),
        ),
        loss=lambda output, target: ((output - target) ** 2).mean() * float(loss),
    )
