"""`python -m chunktune.doctor.workload SECONDS`: one workload against itself, timed as a sweep times two values of M.

A round visits A and B, which are the same, in turn: A B, B A, ... A visit is a block of about 0.1 s, its time the
median of its units. stdout: {"unit_s": ..., "rounds": [[a, b], ...]}, seconds a unit.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time

UNIT_S = 0.025
UNITS = 4
"""A block: as long as that of a sweep (`pipeline.measure.Effort.block_s`)."""

_DATA = bytes(2**18)
_MOST_HASHES = 2**16


def main(seconds: float) -> None:
    """Time rounds for so long, one at the least, and print them."""
    hashes = calibrated()
    rounds: list[tuple[float, float]] = []
    end_s = time.perf_counter() + seconds
    while not rounds or time.perf_counter() < end_s:
        first, second = block_s(hashes), block_s(hashes)
        rounds.append((first, second) if len(rounds) % 2 == 0 else (second, first))
    unit_s = statistics.median(value for pair in rounds for value in pair)
    print(json.dumps({"unit_s": unit_s, "rounds": rounds}))


def calibrated() -> int:
    """How many hashes make a unit of about UNIT_S."""
    hashes, taken_s = 1, unit_s(1)
    while taken_s < UNIT_S and hashes < _MOST_HASHES:
        hashes *= 2
        taken_s = unit_s(hashes)
    return max(1, round(hashes * min(1.0, UNIT_S / taken_s)))


def block_s(hashes: int) -> float:
    """Seconds a unit in one block."""
    return statistics.median(unit_s(hashes) for _ in range(UNITS))


def unit_s(hashes: int) -> float:
    """Seconds of one unit: arithmetic on one core, of data that its cache holds."""
    start_s = time.perf_counter()
    for _ in range(hashes):
        hashlib.blake2b(_DATA).digest()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main(float(sys.argv[1]))
