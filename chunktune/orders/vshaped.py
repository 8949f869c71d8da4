"""The schedules whose parts go down the ranks and up again: the order of computes of one rank, without communication.

Source: `ScheduleZBVZeroBubble` and `ScheduleDualPipeV._calculate_single_rank_operations`. The orders are written as
operations such as "F0": a kind and which of the rank's two parts, 0 on the way down and 1 on the way up. The chunk
is not written, since every kind takes a part's chunks in turn. torch's idle slots are left out: they are dropped
before the lowering.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from chunktune.orders.steps import Compute, Group, Size

Operations = tuple[str, ...]
Taken = Counter[tuple[str, str]]


def _each(times: int, *operations: str) -> Iterator[Operations]:
    """The operations one after another, the whole `times` over."""
    return ((operation,) for _ in range(times) for operation in operations)


def _numbered(size: Size, rank: int, groups: Iterable[Operations]) -> Iterator[Group]:
    """The operations as computes, with their parts and chunks."""
    parts = {"0": rank, "1": size.parts - 1 - rank}
    taken: Taken = Counter()
    for operations in groups:
        yield tuple(_next(operation, parts, taken) for operation in operations)


def _next(operation: str, parts: dict[str, int], taken: Taken) -> Compute:
    kind, way = operation[0], operation[1]
    # A whole backward is the input gradient and the weight gradient of its chunk.
    counted = "IW" if kind == "B" else kind
    chunk = taken[counted[0], way]
    for letter in counted:
        taken[letter, way] += 1
    return Compute(kind, parts[way], chunk)


def zbv_zero_bubble(size: Size, rank: int) -> Iterator[Group]:
    """ZBV: planned for at least 2 K - 1 micro-batches; those beyond M are dropped, as torch does."""
    planned = max(2 * size.stages - 1, size.chunks)
    groups = _numbered(size, rank, _zbv(size.stages, rank, planned))
    return ((compute,) for (compute,) in groups if compute.chunk < size.chunks)


def _zbv(stages: int, rank: int, chunks: int) -> Iterator[Operations]:
    to_end = stages - rank
    yield from _each(2 * to_end - 1, "F0")
    yield from _each(rank, "F1", "F0")
    yield from _each(to_end, "F1", "I1", "W1")
    # So far 2 K - 1 - rank chunks have gone down and K up; the steady phase takes up the rest.
    yield from _each(chunks - (2 * stages - 1 - rank), "F0", "I0", "W0", "F1", "I1", "W1")
    yield from _each(to_end - 1, "I0", "W0", "F1", "I1", "W1")
    yield from _each(rank, "I0", "I1")
    yield from _each(to_end, "I0", "W0")
    yield from _each(rank, "W1")
    yield from _each(rank, "W0")


def dualpipe_v(size: Size, rank: int) -> Iterator[Group]:
    """DualPipeV: a forward of one way and a backward of the other stand together where torch overlaps them."""
    return _numbered(size, rank, _dualpipe(size.stages, rank, size.chunks))


def _dualpipe(stages: int, rank: int, chunks: int) -> Iterator[Operations]:
    hops = stages - 1 - rank
    yield from _each(2 * hops, "F0")
    yield from _each(rank + 1, "F0", "F1")
    yield from _each(hops, "I1", "W1", "F1")
    yield from _overlapped(chunks - 2 * stages + rank + 1, last=hops == 0)
    for _ in range(hops):
        yield ("B1",)
        yield ("F1", "B0")
    yield from _dualpipe_end(rank, hops)


def _overlapped(times: int, last: bool) -> Iterator[Operations]:
    """Down with up, up with down; the last rank starts without the first overlap, to shorten the bubble."""
    for i in range(times):
        yield from (("F0",), ("B1",)) if last and i == 0 else (("F0", "B1"),)
        yield ("F1", "B0")


def _dualpipe_end(rank: int, hops: int) -> Iterator[Operations]:
    """Backwards by turns, the second half of them split; then each pending W in the order of the I."""
    ways = ["1", "0"] * (rank + 1)
    whole, split = ways[: rank + 1], ways[rank + 1 :]
    yield from ((f"B{way}",) for way in whole)
    yield from ((f"I{way}",) for way in split)
    pending = split + ["0"] * hops
    for way in pending[:hops]:
        yield (f"W{way}",)
        yield ("I0",)
    yield from ((f"W{way}",) for way in pending[hops:])
