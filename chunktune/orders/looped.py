"""The schedules whose parts go round the ranks in a loop: the order of computes of one rank, without communication.

Source: `ScheduleLoopedBFS`, `ScheduleInterleaved1F1B` and `ScheduleInterleavedZeroBubble` with
`_get_1f1b_rank_ops` and `_get_warmup_ops`. The idle slots that torch pads its lists with, those of
`_add_bubbles_to_actions` among them, are left out: `_add_unshard_reshard` drops every one before the lowering.
"""

from __future__ import annotations

from collections.abc import Iterator

from chunktune.orders.steps import Compute, Group, Size


def looped_bfs(size: Size, rank: int) -> Iterator[Group]:
    """Every chunk through the first part, then the next; back with the last part and the last chunk first."""
    parts = range(rank, size.parts, size.stages)
    for part in parts:
        yield from ((Compute("F", part, chunk),) for chunk in range(size.chunks))
    for part in reversed(parts):
        yield from ((Compute("B", part, chunk),) for chunk in reversed(range(size.chunks)))


def interleaved_1f1b(size: Size, rank: int) -> Iterator[Group]:
    """Rounds of micro-batches through the rank's parts in turn, one forward and one backward after the warm-up."""
    ahead = _forwards_ahead(size, rank, a_hop=2)
    for forward, backward in _alternating(size, ahead):
        if forward is not None:
            yield (_forward(size, rank, forward),)
        if backward is not None:
            yield (_backward("B", size, rank, backward),)


def interleaved_zero_bubble(size: Size, rank: int) -> Iterator[Group]:
    """ZB1P: the same with fewer forwards ahead and the backward split; W follows its I by `rank` backwards."""
    ahead = _forwards_ahead(size, rank, a_hop=1)
    for forward, backward in _alternating(size, ahead):
        if forward is not None:
            yield (_forward(size, rank, forward),)
        if backward is not None:
            yield (_backward("I", size, rank, backward),)
            if backward >= rank:
                yield (_backward("W", size, rank, backward - rank),)
    of_rank = size.chunks * size.virtual_stages
    for weight in range(max(0, of_rank - rank), of_rank):
        yield (_backward("W", size, rank, weight),)


def _a_round(size: Size) -> int:
    """Micro-batches that go through a part before the rank turns to its next part."""
    return size.chunks // max(1, size.chunks // size.stages)


def _forwards_ahead(size: Size, rank: int, a_hop: int) -> int:
    """Forwards before the first backward: `_get_warmup_ops`."""
    ahead = (size.virtual_stages - 1) * _a_round(size) + a_hop * (size.stages - 1 - rank)
    return min(ahead, size.chunks * size.virtual_stages)


def _alternating(size: Size, ahead: int) -> Iterator[tuple[int | None, int | None]]:
    """Numbers of the forward and the backward that stand side by side; null where there is none."""
    of_rank = size.chunks * size.virtual_stages
    yield from ((forward, None) for forward in range(ahead))
    for backward in range(of_rank):
        forward = backward + ahead
        yield (forward if forward < of_rank else None), backward


def _turn_and_chunk(size: Size, number: int) -> tuple[int, int]:
    """Which of the rank's V parts has its turn at the number-th forward (or backward), and with which chunk."""
    a_round = _a_round(size)
    turns, within = divmod(number, a_round)
    rounds, turn = divmod(turns, size.virtual_stages)
    return turn, rounds * a_round + within


def _forward(size: Size, rank: int, number: int) -> Compute:
    turn, chunk = _turn_and_chunk(size, number)
    return Compute("F", turn * size.stages + rank, chunk)


def _backward(kind: str, size: Size, rank: int, number: int) -> Compute:
    turn, chunk = _turn_and_chunk(size, number)
    return Compute(kind, (size.virtual_stages - 1 - turn) * size.stages + rank, chunk)
