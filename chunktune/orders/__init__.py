"""What every rank does in one step, operation by operation, under each schedule, as torch executes it. Pure.

Ported from torch.distributed.pipelining.schedules (torch 2.13; equal on 2.11 and 2.14): GPipe and 1F1B execute
hand-written loops (`loops`), the other five a list of operations (`looped`, `vshaped`) into which torch puts the
communication (`lowering`). `tests/pipeline` holds all of it against torch's own classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from chunktune import schedules
from chunktune.orders import looped, loops, lowering, vshaped
from chunktune.orders.steps import Compute, Group, Post, Size, Step, Transfer, Wait

__all__ = ["Compute", "Post", "Step", "Transfer", "Wait", "computes", "program"]

_LOOPS = {"gpipe": loops.gpipe, "1f1b": loops.one_f_one_b}
_ORDERS: dict[str, Callable[[Size, int], Iterable[Group]]] = {
    "interleaved-1f1b": looped.interleaved_1f1b,
    "looped-bfs": looped.looped_bfs,
    "interleaved-zero-bubble": looped.interleaved_zero_bubble,
    "zbv-zero-bubble": vshaped.zbv_zero_bubble,
    "dualpipe-v": vshaped.dualpipe_v,
}


def program(schedule: str, *, stages: int, chunks: int, virtual_stages: int) -> tuple[tuple[Step, ...], ...]:
    """The steps of every rank of a legal (K, M, V), rank 0 first. The last few programs are kept.

    A transfer stands in a Post of both ranks. GPipe and 1F1B wait explicitly, for receives and for sends. Under the
    other schedules a compute waits by itself for the transfer that it consumes, and sends are waited for after the
    last step only, so their programs hold no Wait. Between two parts of one rank there is no transfer.

    Raises KeyError for an unknown schedule, ValueError where torch would refuse this (K, M, V).
    """
    return _program(schedule, Size(stages, chunks, virtual_stages))


def computes(schedule: str, *, stages: int, chunks: int, virtual_stages: int) -> tuple[tuple[Compute, ...], ...]:
    """The computes of `program` alone, rank 0 first; raises as `program` does."""
    ranks = program(schedule, stages=stages, chunks=chunks, virtual_stages=virtual_stages)
    return tuple(tuple(step for step in steps if isinstance(step, Compute)) for steps in ranks)


# Few: at K = 64 and M = 4096 one program is more than a million steps.
@lru_cache(maxsize=8)
def _program(schedule: str, size: Size) -> tuple[tuple[Step, ...], ...]:
    refusal = schedules.refusal(schedule, stages=size.stages, chunks=size.chunks, virtual_stages=size.virtual_stages)
    if refusal is not None:
        raise ValueError(refusal)
    if schedule in _LOOPS:
        moves = loops.moves_of_ranks(size)
        return tuple(tuple(_LOOPS[schedule](size, rank, moves[rank])) for rank in range(size.stages))
    return _lowered(schedule, size)


def _lowered(schedule: str, size: Size) -> tuple[tuple[Step, ...], ...]:
    orders = [list(_ORDERS[schedule](size, rank)) for rank in range(size.stages)]
    rank_of = {
        part: rank
        for rank in range(size.stages)
        for part in schedules.parts_of_rank(schedule, size.stages, size.virtual_stages, rank)
    }
    return lowering.with_transfers(orders, [rank_of[part] for part in range(size.parts)], size.chunks)
