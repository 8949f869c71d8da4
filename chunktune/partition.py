"""Layers to parts: contiguous, each part one layer or more. Pure.

`weights` are what is balanced, one value a layer: parameters, or seconds. The largest part decides the step, so
its weight is what is minimised, exactly; among the cuts that reach that minimum the most even one is taken.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

from chunktune.errors import UsageError

Choice = str | Sequence[int]
"""uniform, parameters, time, or the layers of every part."""

# Sums of floats taken in another order differ in the last bits; a cut that is worse by less is not worse.
_ROUNDING = 1e-12


_EVENED = 512
"""Up to so many layers the tie between optimal cuts is broken towards even, which costs O(K L^2)."""


def check_parts(layers: int, stages: int, virtual_stages: int = 1) -> None:
    """Raise UsageError where the model has too few layers for K V parts."""
    parts = stages * virtual_stages
    if parts <= layers:
        return
    most = layers // virtual_stages
    advice = [f"use stages <= {most}"] if most else []
    if virtual_stages > 1 and layers >= stages:
        advice.append(f"virtual_stages <= {layers // stages}")
    advice.append(f"a model of {parts} layers")
    raise UsageError(
        f"K x V = {parts} parts but the model has {layers} layers; each part needs one layer; {', or '.join(advice)}"
    )


def counts_for(choice: Choice, *, layers: int, parts: int, weights: Sequence[float] | None = None) -> tuple[int, ...]:
    """Layers of every part, first part first.

    `weights`: one value a layer, needed for "parameters" and "time" and not looked at otherwise. Raises
    UsageError for explicit counts that do not fit the model, or more parts than layers.
    """
    if not isinstance(choice, str):
        return explicit(choice, layers, parts)
    check_parts(layers, parts)
    if choice == "uniform":
        return uniform(layers, parts)
    if weights is None or len(weights) != layers:
        raise ValueError(f"partition {choice!r} needs the weights of {layers} layers")
    return optimal(weights, parts)


def explicit(counts: Sequence[int], layers: int, parts: int) -> tuple[int, ...]:
    """The user's own counts, checked; raises UsageError where they do not fit the model."""
    listed = list(counts)
    if len(listed) != parts:
        raise UsageError(
            f"partition = {listed} has {len(listed)} counts; it needs one for each of the {parts} parts; "
            f"such as {_example(layers, parts)}"
        )
    if sum(listed) != layers or min(listed) < 1:
        raise UsageError(
            f"partition = {listed} places {sum(listed)} layers; the model has {layers} and each part needs one "
            f"or more; such as {_example(layers, parts)}"
        )
    return tuple(listed)


def _example(layers: int, parts: int) -> str:
    return str(list(uniform(layers, parts))) if parts <= layers else f"{layers} parts or fewer"


def uniform(layers: int, parts: int) -> tuple[int, ...]:
    """Equal counts of layers; the remainder goes one each to the first parts."""
    share, rest = divmod(layers, parts)
    return tuple(share + (index < rest) for index in range(parts))


def optimal(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """The counts whose largest part weighs least; of several, those nearest to even (least sum of squares).

    `weights`: finite, 0 or more. Raises UsageError for fewer layers than parts, ValueError for other weights.
    """
    check_parts(len(weights), parts)
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError("weights are finite and 0 or more")
    prefix = [0.0, *accumulate(map(float, weights))]
    limit = smallest_largest(weights, parts) + _ROUNDING * prefix[-1]
    return _most_even(prefix, parts, limit) if len(weights) <= _EVENED else _filled(prefix, parts, limit)


def smallest_largest(weights: Sequence[float], parts: int) -> float:
    """The least that the largest of `parts` contiguous parts can weigh; there are as many layers or more.

    The limit is bisected, and each part filled as far as it goes: a limit that can be kept leads at once to the
    largest part which that makes, so that the answer is exact. O(parts log L) a try.
    """
    prefix = [0.0, *accumulate(map(float, weights))]
    low, high = 0.0, prefix[-1]
    while low < (middle := low + (high - low) / 2) < high:
        largest = _largest_filled(prefix, parts, middle)
        if largest is None:
            low = middle
        else:
            high = largest
    return high


def _largest_filled(prefix: Sequence[float], parts: int, limit: float) -> float | None:
    """The largest of so many parts or fewer, none above `limit` and each as full as it allows; None if they do not do.

    Cutting one of fewer parts in two makes no part larger.
    """
    start, largest = 0, 0.0
    for _ in range(parts):
        weighs = partial(_weight, prefix[start])
        end = bisect_right(prefix, limit, start, key=weighs) - 1
        if end == start:
            return None
        largest = max(largest, weighs(prefix[end]))
        if end == len(prefix) - 1:
            return largest
        start = end
    return None


def _weight(begun: float, reached: float) -> float:
    return reached - begun


def _most_even(prefix: Sequence[float], parts: int, limit: float) -> tuple[int, ...]:
    """The counts with no part above `limit` and the least sum of squares, of weights first and layers second."""
    layers = len(prefix) - 1
    cost: list[tuple[float, int]] = [(0.0, 0)] + [(math.inf, 0)] * layers
    cuts: list[list[int]] = []
    for part in range(1, parts + 1):
        found = [_last_cut(cost, prefix, part, j, limit) for j in range(layers + 1)]
        cost = [total for total, _ in found]
        cuts.append([cut for _, cut in found])
    ends = [layers]
    for row in reversed(cuts):
        ends.append(row[ends[-1]])
    ends.reverse()
    return tuple(after - before for before, after in pairwise(ends))


def _filled(prefix: Sequence[float], parts: int, limit: float) -> tuple[int, ...]:
    """Counts with no part above `limit`, each part as full as that allows: O(L), for long models."""
    layers, starts = len(prefix) - 1, [0]
    for left in range(parts - 1, 0, -1):
        end = starts[-1] + 1
        while end < layers - left and prefix[end + 1] - prefix[starts[-1]] <= limit:
            end += 1
        starts.append(end)
    return tuple(after - before for before, after in pairwise([*starts, layers]))


def _last_cut(
    cost: Sequence[tuple[float, int]], prefix: Sequence[float], part: int, end: int, limit: float
) -> tuple[tuple[float, int], int]:
    """The cheapest way to end a part at layer `end`: its total cost, and where the part begins."""
    best, cut = (math.inf, 0), 0
    for start in range(end - 1, part - 2, -1):
        weight = prefix[end] - prefix[start]
        if weight > limit:
            break
        total = (cost[start][0] + weight * weight, cost[start][1] + (end - start) ** 2)
        if total < best:
            best, cut = total, start
    return best, cut


def layers_of_parts(counts: Sequence[int]) -> tuple[range, ...]:
    """The layer indices of every part."""
    ends = list(accumulate(counts))
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))
