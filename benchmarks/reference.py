"""What both benchmarks share: the step as people write it by hand, launched ranks, and the table.

`BareLoop` holds nothing of chunktune: torch's own stage, schedule class and optimizer, with static shapes.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

if TYPE_CHECKING:
    from chunktune.stats import LogRatio

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
LONGEST_RUN_S = 900.0


class BareLoop:
    """Forward, backward, AdamW and zero_grad of one stage, by hand.

    `inputs`, `outputs`: meta tensors of one micro-batch at this stage's ends. `batch`: the N rows of the first
    and of the last stage. The loss is divided by M and gradients are not scaled, the cheaper of torch's two ways.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        rank: int,
        ranks: int,
        schedule: str,
        chunks: int,
        inputs: torch.Tensor,
        outputs: torch.Tensor,
        batch: tuple[torch.Tensor | None, torch.Tensor | None],
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        module = nn.Sequential(*layers)
        place = torch.device("cpu")
        stage = PipelineStage(module, rank, ranks, place, input_args=inputs, output_args=outputs)
        self._schedule = SCHEDULES[schedule](
            stage, n_microbatches=chunks, loss_fn=lambda y, t: loss(y, t) / chunks, scale_grads=False
        )
        self._optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        self._inputs, self._targets = batch
        self._first, self._last = rank == 0, rank == ranks - 1

    def step(self) -> None:
        """One training step."""
        if self._first:
            self._schedule.step(self._inputs, return_outputs=False)
        elif self._last:
            self._schedule.step(target=self._targets, losses=[], return_outputs=False)
        else:
            self._schedule.step(return_outputs=False)
        self._optimizer.step()
        self._optimizer.zero_grad()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def launched(script: str, argument: object, ranks: int) -> Iterator[subprocess.Popen[str]]:
    """Rank 0 of `ranks` processes of `script --worker ARGUMENT`, with pipes; none is left when the block ends."""
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, script, "--worker", json.dumps(argument)]
    processes = []
    try:
        for rank in range(ranks):
            env = os.environ | LOOPBACK | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            processes.append(subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True))
        yield processes[0]
        for process in processes:
            process.wait(LONGEST_RUN_S)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def reached(found: LogRatio, target: float, *, above: bool) -> str:
    """Whether a ratio is at or beyond a target, as far as its interval says."""
    low, high = found.interval or (0.0, float("inf"))
    inside, outside = (low >= target, high < target) if above else (high <= target, low > target)
    return "yes" if inside else "no" if outside else "undecided"


def interval(bounds: tuple[float, float] | None) -> str:
    """An interval of a ratio as a cell."""
    return "-" if bounds is None else f"{bounds[0]:.3f} to {bounds[1]:.3f}"


def circumstances(command: str) -> str:
    """When, where and how the table was made, in one line."""
    load = " ".join(f"{one:.1f}" for one in os.getloadavg())
    return (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, `{command}`; {_processor()}, {os.cpu_count()} cores, "
        f"load average {load} at the end; torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()}"
    )


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        if found:
            return found.group(1).strip()
    return platform.machine()
