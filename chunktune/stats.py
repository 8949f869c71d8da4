"""Medians, intervals and the paired comparison of two values of M. Pure.

Two values of M are only ever compared inside rounds, so that a drift of the machine's speed cancels. The
interval of a ratio is that of the 20 % trimmed mean of the log ratios, its error from the Winsorized variance
(Tukey and McLaughlin 1963, Sankhya A 25; Yuen 1974, Biometrika 61): one disturbed round in five may be
arbitrarily wrong without widening it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chunktune.results import Comparison, Criterion, Outcome, Round

TRIM = 0.2
FEWEST_TRIMMED = 5  # with fewer pairs nothing would be trimmed

# 0.975 quantiles of Student's t for 1 to 30 degrees of freedom; above, the normal's.
_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL_975 = 1.960
_LARGEST_EXPONENT = 700.0  # math.exp overflows just above; a record never holds infinity


@dataclass(frozen=True)
class LogRatio:
    """Estimate of the log of a ratio; `half_width` of its 95 % interval is null with fewer than two pairs."""

    mean: float
    half_width: float | None
    pairs: int

    @property
    def ratio(self) -> float:
        """The ratio itself."""
        return _exp(self.mean)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % two-sided interval of the ratio."""
        if self.half_width is None:
            return None
        return _exp(self.mean - self.half_width), _exp(self.mean + self.half_width)


def median(samples: Sequence[float]) -> float:
    """Median of at least one sample, in the samples' unit. Raises ValueError when there is none."""
    if not samples:
        raise ValueError("0 samples: a median needs at least 1")
    return float(statistics.median(samples))


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """95 % interval (low, high) of the median by order statistics, in the samples' unit.

    Ranks from the binomial distribution (David and Nagaraja 2003, Order Statistics, 7.1). Fewer than 6
    samples cannot reach 95 %: then it is (min, max). Raises ValueError when there is no sample.
    """
    if not samples:
        raise ValueError("0 samples: an interval of the median needs at least 1")
    ordered = sorted(samples)
    skipped = _skipped_ranks(len(ordered))
    return ordered[skipped], ordered[-1 - skipped]


def _skipped_ranks(count: int) -> int:
    """How many samples may be left out at each end while the interval still covers 95 %."""
    tail, skipped = 0.5**count, 0
    while tail + math.comb(count, skipped + 1) * 0.5**count <= 0.025:
        skipped += 1
        tail += math.comb(count, skipped) * 0.5**count
    return skipped


def paired_log_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> LogRatio:
    """Log of numerator / denominator from samples paired by position; all positive, in one unit.

    Trimmed-mean t interval (see the module); plain t interval with fewer than 5 pairs, none with fewer than
    2. Raises ValueError when the lengths differ or there is no pair.
    """
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(f"{len(numerators)} samples against {len(denominators)}: pairs need equal, positive counts")
    return _estimate([math.log(a) - math.log(b) for a, b in zip(numerators, denominators, strict=True)])


def _estimate(logs: Sequence[float]) -> LogRatio:
    """Trimmed mean of log ratios and the half-width of its interval (Yuen 1974, equation 2.1)."""
    ordered, count = sorted(logs), len(logs)
    trimmed = int(TRIM * count) if count >= FEWEST_TRIMMED else 0
    kept = ordered[trimmed : count - trimmed]
    mean = math.fsum(kept) / len(kept)
    if count < 2:
        return LogRatio(mean, None, count)
    winsorized = [kept[0]] * trimmed + kept + [kept[-1]] * trimmed
    variance = statistics.variance(winsorized) * (count - 1) / (len(kept) * (len(kept) - 1))
    return LogRatio(mean, t_quantile(len(kept) - 1) * math.sqrt(variance), count)


def t_quantile(degrees: int) -> float:
    """0.975 quantile of Student's t; the normal's above 30 degrees of freedom."""
    return _T_975[degrees - 1] if degrees <= len(_T_975) else _NORMAL_975


def compare(rounds: Sequence[Round], chunks: int, against: int, criterion: Criterion, tolerance: float) -> Comparison:
    """Throughput of `chunks` over that of `against`, from the rounds that hold both.

    "slower" when the interval lies below 1 - tolerance, "not slower" when it lies above, else "undecided".
    Raises ValueError when no round holds both.
    """
    logs = _paired_logs(log_speeds(rounds, criterion), chunks, against)
    if not logs:
        raise ValueError(f"no round holds both M = {chunks} and M = {against}: nothing to compare")
    return as_comparison(_estimate(logs), chunks, against, criterion, tolerance)


def as_comparison(estimate: LogRatio, chunks: int, against: int, criterion: Criterion, tolerance: float) -> Comparison:
    """The comparison that an estimate of chunks / against makes at a tolerance."""
    return Comparison(
        chunks=chunks,
        against=against,
        criterion=criterion,
        rounds=estimate.pairs,
        ratio=estimate.ratio,
        interval=estimate.interval,
        tolerance=tolerance,
        outcome=_outcome(estimate.interval, tolerance),
    )


def shared_rounds(rounds: Sequence[Round], chunks: int, against: int) -> int:
    """How many rounds hold both values of M."""
    return sum({chunks, against} <= {block.chunks for block in entry.blocks} for entry in rounds)


def drift(rounds: Sequence[Round], chunks: int, against: int) -> float:
    """How much the machine's speed moved while two values of M were compared: 1 where it stood still.

    The longest over the shortest step of the same M between the rounds that hold both, the smaller of the two
    values' figures: what moved both is the machine's.
    """
    shared = [entry for entry in rounds if {chunks, against} <= {block.chunks for block in entry.blocks}]
    moved = []
    for value in (chunks, against):
        steps_s = [block.step_s for entry in shared for block in entry.blocks if block.chunks == value]
        moved.append(max(steps_s) / max(min(steps_s), 1e-12) if steps_s else 1.0)
    return min(moved)


def relative(rounds: Sequence[Round], criterion: Criterion, reference: int) -> dict[int, LogRatio]:
    """Throughput of every M over that of `reference`, through the shortest chain of shared rounds.

    A value that met the reference has its paired estimate. Along a chain means add, half-widths add in
    quadrature (independent rounds), and `pairs` is that of the weakest link. Values without a chain are
    absent; `reference` itself is there with ratio 1.
    """
    table = log_speeds(rounds, criterion)
    known = {reference: LogRatio(0.0, 0.0, len(table))}
    queue = deque([reference])
    while queue:
        near = queue.popleft()
        met = {value for speeds in table if near in speeds for value in speeds}
        for value in sorted(met - known.keys()):
            known[value] = _chained(known[near], _estimate(_paired_logs(table, value, near)))
            queue.append(value)
    return known


def log_speeds(rounds: Sequence[Round], criterion: Criterion) -> list[dict[int, float]]:
    """For each round, the log of the samples/s of every M in it (mean where a round visits an M twice)."""
    return [_speeds(entry, criterion) for entry in rounds]


def _speeds(entry: Round, criterion: Criterion) -> dict[int, float]:
    visits: dict[int, list[float]] = {}
    for block in entry.blocks:
        if criterion == "pipeline" or block.busy_s:
            visits.setdefault(block.chunks, []).append(math.log(block.samples_per_s(criterion)))
    return {chunks: math.fsum(logs) / len(logs) for chunks, logs in visits.items()}


def _paired_logs(table: Sequence[Mapping[int, float]], chunks: int, against: int) -> list[float]:
    return [speeds[chunks] - speeds[against] for speeds in table if chunks in speeds and against in speeds]


def _chained(first: LogRatio, second: LogRatio) -> LogRatio:
    widths = (first.half_width, second.half_width)
    width = None if widths[0] is None or widths[1] is None else math.hypot(widths[0], widths[1])
    return LogRatio(first.mean + second.mean, width, min(first.pairs, second.pairs))


def _outcome(interval: tuple[float, float] | None, tolerance: float) -> Outcome:
    if interval is None:
        return "undecided"
    low, high = interval
    if high < 1 - tolerance:
        return "slower"
    return "not slower" if low > 1 - tolerance else "undecided"


def _exp(value: float) -> float:
    return math.exp(max(-_LARGEST_EXPONENT, min(_LARGEST_EXPONENT, value)))
