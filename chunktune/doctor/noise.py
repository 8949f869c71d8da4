"""How small a difference in throughput this machine can show: the sweep's own comparison, of a workload with itself."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence

from chunktune.doctor.child import Ended, module_command, module_environment, run_several
from chunktune.results import Finite, Frozen
from chunktune.standing import Rules
from chunktune.stats import LogRatio, paired_log_ratio

ROUNDS = Rules.max_rounds
MODULE = "chunktune.doctor.workload"
MOST_PROCESSES = 64
_START_S = 30.0
"""What processes may take to start, and to find the size of their workload, on a machine that is overloaded."""

Rounds = Sequence[tuple[float, float]]
"""Seconds a unit of A and of B, a round each; A and B are the same."""


class Noise(Frozen):
    """The same workload timed against itself in interleaved rounds.

    `processes`: how many ran it at once; a round's time is then that of the slowest, as a step's is. `ratio`,
    `interval`: throughput of B over that of A, which is 1 in truth. `resolution`: the smallest share of throughput
    that `window` rounds tell from none, by half of the 95 % interval of a window, the median over all windows; null
    with fewer than two rounds. `drift`: the slowest block over the fastest. `unit_s`: seconds of the workload.
    """

    processes: int
    rounds: int
    window: int
    unit_s: Finite
    ratio: Finite
    interval: tuple[Finite, Finite] | None
    resolution: Finite | None
    drift: Finite

    @property
    def where(self) -> str:
        """Where it was measured, in words."""
        return "one process alone" if self.processes == 1 else f"{self.processes} processes at once"


def measure(seconds: float, processes: int) -> Noise | str:
    """Run the workload for so many seconds in so many processes; the text says why there is no result."""
    commands = [module_command(MODULE, f"{seconds:g}")] * min(processes, MOST_PROCESSES)
    return of_children(run_several(commands, 3 * seconds + _START_S, module_environment(os.environ)))


def of_children(ended: Sequence[Ended]) -> Noise | str:
    """The noise that the processes found together, or why there is none."""
    trouble = next((one.trouble for one in ended if one.trouble is not None), None)
    if trouble is not None:
        return f"the workload did not finish: {trouble}"
    try:
        said = [json.loads(one.stdout) for one in ended]
        unit_s = statistics.median(float(one["unit_s"]) for one in said)
        return analyse([one["rounds"] for one in said], unit_s)
    except (ValueError, KeyError, TypeError) as error:
        return f"the workload said nothing that makes sense ({type(error).__name__})"


def analyse(of_processes: Sequence[Rounds], unit_s: float) -> Noise:
    """The noise in the rounds of one or more processes. Raises ValueError where there is no round."""
    rounds = slowest(of_processes)
    whole = _speed_of_b(rounds)
    window = min(len(rounds), ROUNDS)
    widths = [_half_width(rounds[first : first + window]) for first in range(0, len(rounds) - window + 1, window)]
    known = [width for width in widths if width is not None]
    blocks = [value for pair in rounds for value in pair]
    return Noise(
        processes=len(of_processes),
        rounds=len(rounds),
        window=window,
        unit_s=unit_s,
        ratio=whole.ratio,
        interval=whole.interval,
        resolution=1 - math.exp(-statistics.median(known)) if known else None,
        drift=max(blocks) / min(blocks),
    )


def slowest(of_processes: Sequence[Rounds]) -> list[tuple[float, float]]:
    """Of every round the slowest process, as far as all of them came. Raises ValueError where there is none."""
    rounds = list(zip(*of_processes, strict=False))
    if not rounds:
        raise ValueError("0 rounds: nothing to compare")
    return [(max(float(a) for a, _ in pairs), max(float(b) for _, b in pairs)) for pairs in rounds]


def _speed_of_b(rounds: Rounds) -> LogRatio:
    """Throughput of B over that of A: their seconds the other way round."""
    return paired_log_ratio([a for a, _ in rounds], [b for _, b in rounds])


def _half_width(rounds: Rounds) -> float | None:
    return _speed_of_b(rounds).half_width
