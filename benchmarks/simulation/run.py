"""What a simulated step costs: `python benchmarks/simulation/run.py [--quick]`.

The closed forms of GPipe and 1F1B against a fixed loop of additions, against the node-by-node play of the same
step, and the memory of the largest. Prints Markdown tables; needs one process and no network.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reference import circumstances, interval, table

from chunktune.simulate import Durations, simulate
from chunktune.simulate.graph import compiled, hop_seconds, operation_seconds
from chunktune.stats import LogRatio, paired_log_ratio

PAIRS, QUICK_PAIRS = 8, 2
ADDITIONS = 1_000_000
MIB = 2**20
# K, M, and the most seconds that a call may take.
SIZES = [(64, 4096, 0.5), (1024, 65536, 5.0)]
SMALL = [(8, 64), (8, 512), (32, 256)]
MOST_MIB = 2048
COSTS = ("equal", "unequal", "near equal")
SCHEDULES = ("1f1b", "gpipe")
# VmHWM begins anew with a program; ru_maxrss would carry over what this process had when it forked.
_CHILD = """
import json, re, sys
from pathlib import Path
from chunktune.simulate import Durations, simulate
schedule, stages, chunks, costs = json.load(sys.stdin)
simulate(schedule, stages=stages, chunks=chunks, virtual_stages=1, durations=Durations(**costs))
print(1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text()).group(1)))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="What a simulated step costs.")
    parser.add_argument("--quick", action="store_true", help="few pairs: to see that it runs")
    quick = parser.parse_args().quick
    pairs = QUICK_PAIRS if quick else PAIRS
    head = ["schedule", "K", "M", "stages", "seconds", "most seconds", "/ loop", "95 % interval"]
    print(table(head, against_loop(pairs)), end="\n\n")
    head = ["schedule", "K", "M", "nodes", "play / closed", "95 % interval", "from nothing / closed", "95 % interval"]
    print(table(head, against_play(pairs)), end="\n\n")
    head = ["schedule", "K", "M", "Python's own, MiB", "whole process, MiB", "most MiB"]
    print(table(head, memory()), end="\n\n")
    print(circumstances("python benchmarks/simulation/run.py" + " --quick" * quick))


def costs_of(kind: str, stages: int) -> Durations:
    """Equal stages, stages that differ by up to 2, or by up to a hundredth, where the steady state comes late."""
    rng = random.Random(stages)
    spread = {"equal": 0.0, "unequal": 1.0, "near equal": 0.01}[kind]

    def seconds(values: int, least: float) -> tuple[float, ...]:
        return tuple(least * (1 + spread * rng.random()) for _ in range(values))

    each = [seconds(stages, least) for least in (1.0, 2.0, 1.0, 1.0)]
    return Durations(*each, seconds(stages - 1, 0.05), seconds(stages, 0.5), 0.01)


def closed(schedule: str, stages: int, chunks: int, costs: Durations) -> Callable[[], float]:
    """A call of `simulate`, whole: two steps at least."""
    return lambda: simulate(schedule, stages=stages, chunks=chunks, virtual_stages=1, durations=costs).step_s


def loop() -> float:
    """The yardstick: a million additions in plain Python."""
    total = 0.0
    for value in range(ADDITIONS):
        total += value
    return total


def paired(first: Callable[[], float], second: Callable[[], float], pairs: int) -> tuple[LogRatio, float]:
    """Seconds of one over the other, A B B A, and the least seconds of the first."""
    first(), second()
    ours, theirs = [], []
    for turn in range(pairs):
        for take in (0, 1) if turn % 2 == 0 else (1, 0):
            (theirs if take else ours).append(seconds_of(second if take else first))
    return paired_log_ratio(ours, theirs), min(ours)


def seconds_of(call: Callable[[], float]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def against_loop(pairs: int) -> list[list[str]]:
    return [
        _loop_line(schedule, size, kind, pairs)
        for schedule in SCHEDULES
        for size in SIZES
        for kind in COSTS
    ]  # fmt: skip


def _loop_line(schedule: str, size: tuple[int, int, float], kind: str, pairs: int) -> list[str]:
    stages, chunks, most_s = size
    found, least_s = paired(closed(schedule, stages, chunks, costs_of(kind, stages)), loop, pairs)
    cells = [schedule, str(stages), str(chunks), kind, f"{least_s:.4f}", f"{most_s:g}"]
    return _shown([*cells, f"{found.ratio:.3f}", interval(found.interval)])


def against_play(pairs: int) -> list[list[str]]:
    return [_play_line(schedule, stages, chunks, pairs) for schedule in SCHEDULES for stages, chunks in SMALL]


def _play_line(schedule: str, stages: int, chunks: int, pairs: int) -> list[str]:
    """The play of a graph that is there, twice as `simulate` would, and with the making of program and graph."""
    costs = costs_of("unequal", stages)
    hops, operations = hop_seconds(costs), operation_seconds(costs, costs.overhead_s)

    def play(size: int) -> float:
        graph = compiled(schedule, stages, size, 1, "rendezvous")
        first = graph.play(hops, operations, [0.0] * stages)
        return max(graph.play(hops, operations, [first[node] for node in graph.last]))

    fresh = count(chunks + 1)  # programs and graphs are kept: another M each time
    fast = closed(schedule, stages, chunks, costs)
    warm, _ = paired(lambda: play(chunks), fast, pairs)
    cold, _ = paired(lambda: play(next(fresh)), fast, pairs)
    nodes = len(compiled(schedule, stages, chunks, 1, "rendezvous").before)
    ratios = [cell for each in (warm, cold) for cell in (f"{each.ratio:.1f}", interval(each.interval))]
    return _shown([schedule, str(stages), str(chunks), str(nodes), *ratios])


def memory() -> list[list[str]]:
    return [_memory_line(schedule, *SIZES[-1][:2]) for schedule in SCHEDULES]


def _memory_line(schedule: str, stages: int, chunks: int) -> list[str]:
    """The peak that Python and numpy allocate for a call, and the peak of a process that does nothing else."""
    costs = costs_of("unequal", stages)
    tracemalloc.start()
    closed(schedule, stages, chunks, costs)()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    asked = json.dumps([schedule, stages, chunks, asdict(costs)])
    child = subprocess.run([sys.executable, "-c", _CHILD], input=asked, capture_output=True, text=True, check=True)
    cells = [schedule, str(stages), str(chunks), f"{peak_bytes / MIB:.1f}", f"{int(child.stdout) / MIB:.0f}"]
    return _shown([*cells, str(MOST_MIB)])


def _shown(line: list[str]) -> list[str]:
    print("  ".join(line), file=sys.stderr, flush=True)
    return line


if __name__ == "__main__":
    main()
