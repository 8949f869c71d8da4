"""Costs between and beyond the micro-batch sizes at which they are known. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from chunktune.costs import Basis

Points = Sequence[tuple[int, float]]
"""(b, cost), b ascending, each once; costs 0 or more."""


def at(points: Points, micro_batch: int) -> float:
    """The cost at b: affine between the two sizes around it, never negative and never falling beyond them.

    Above the largest size the last piece's line goes on, where it rises. Below the smallest the first piece's line
    does, as far as it stays between the smallest size's cost and that in proportion to b: part of a cost is there
    for every micro-batch however small, and no more than all of it. A single size: in proportion to b.
    """
    if len(points) == 1:
        size, cost = points[0]
        return cost * micro_batch / size
    index = min(max(bisect_left(points, (micro_batch, float("-inf"))), 1), len(points) - 1)
    (left, left_cost), (right, right_cost) = points[index - 1], points[index]
    slope = (right_cost - left_cost) / (right - left)
    if micro_batch > right:
        return right_cost + max(0.0, slope) * (micro_batch - right)
    if micro_batch < left:
        return left_cost - min(max(0.0, slope), left_cost / left) * (left - micro_batch)
    return left_cost + slope * (micro_batch - left)


def reach(sizes: Sequence[int], micro_batch: int) -> Basis:
    """How a cost at b is known from costs measured at these sizes, one or more."""
    if micro_batch in sizes:
        return "measured"
    return "interpolated" if min(sizes) < micro_batch < max(sizes) else "extrapolated"
