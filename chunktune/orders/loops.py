"""GPipe and 1F1B, which torch runs as hand-written loops: `ScheduleGPipe` and `Schedule1F1B._step_microbatches`.

One part a rank: part and rank are the same number. Nothing is posted at the two ends of the pipeline, since
torch's `_batch_p2p` and `_wait_batch_p2p` do nothing for no operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chunktune.orders.steps import Compute, Post, Size, Step, Transfer, Wait

Transfers = tuple[Transfer, ...]


@dataclass(frozen=True)
class Moves:
    """What enters and leaves one rank, a chunk each: one transfer, or none at an end of the pipeline."""

    forward_in: Sequence[Transfers]
    forward_out: Sequence[Transfers]
    backward_in: Sequence[Transfers]
    backward_out: Sequence[Transfers]


def moves_of_ranks(size: Size) -> list[Moves]:
    """The moves of every rank, rank 0 first; neighbours share their transfers."""
    last, chunks = size.stages - 1, range(size.chunks)
    none: list[Transfers] = [()] * size.chunks
    into_f = [none] + [[(Transfer("F", p, c, p - 1, p),) for c in chunks] for p in range(1, last + 1)] + [none]
    into_b = [[(Transfer("B", p, c, p + 1, p),) for c in chunks] for p in range(last)] + [none]
    return [Moves(into_f[r], into_f[r + 1], into_b[r], into_b[r - 1] if r else none) for r in range(size.stages)]


def _post(transfers: Transfers) -> Iterator[Step]:
    if transfers:
        yield Post(transfers)


def _wait(transfers: Transfers) -> Iterator[Step]:
    if transfers:
        yield Wait(transfers)


def _exchange(transfers: Transfers) -> Iterator[Step]:
    """Posted together and waited for at once."""
    if transfers:
        yield Post(transfers)
        yield Wait(transfers)


def gpipe(size: Size, rank: int, moves: Moves) -> Iterator[Step]:
    """All forwards, then all backwards; each half ends by waiting for its sends."""
    yield from _fill("F", size, rank, moves.forward_in, moves.forward_out)
    yield from _fill("B", size, rank, moves.backward_in, moves.backward_out)


def _fill(
    kind: str, size: Size, rank: int, arriving: Sequence[Transfers], leaving: Sequence[Transfers]
) -> Iterator[Step]:
    for chunk in range(size.chunks):
        yield from _exchange(arriving[chunk])
        yield Compute(kind, rank, chunk)
        yield from _post(leaving[chunk])
    for transfers in leaving:
        yield from _wait(transfers)


def one_f_one_b(size: Size, rank: int, moves: Moves) -> Iterator[Step]:
    """As many forwards ahead as there are ranks from here to the end, then one backward, one forward in turn."""
    ahead = min(size.chunks, size.stages - rank)
    yield from _warm_up(ahead, rank, moves)
    yield from _alternate(size.chunks, ahead, rank, moves)
    yield from _cool_down(size.chunks, ahead, rank, moves)


def _warm_up(ahead: int, rank: int, moves: Moves) -> Iterator[Step]:
    """The first forwards. The last one's send is left for the exchange before the first backward."""
    for chunk in range(ahead):
        yield from _exchange(moves.forward_in[chunk])
        yield Compute("F", rank, chunk)
        if chunk > 0:
            yield from _wait(moves.forward_out[chunk - 1])
        if chunk < ahead - 1:
            yield from _post(moves.forward_out[chunk])


def _alternate(chunks: int, ahead: int, rank: int, moves: Moves) -> Iterator[Step]:
    """One backward, one forward; ends with the backward that follows the last forward."""
    for chunk in range(chunks - ahead + 1):
        forward = chunk + ahead
        yield from _exchange(moves.forward_out[forward - 1] + moves.backward_in[chunk])
        yield Compute("B", rank, chunk)
        if forward < chunks:
            yield from _exchange(moves.backward_out[chunk] + moves.forward_in[forward])
            yield Compute("F", rank, forward)


def _cool_down(chunks: int, ahead: int, rank: int, moves: Moves) -> Iterator[Step]:
    """The last backwards, each send waited for after the next backward."""
    yield from _post(moves.backward_out[chunks - ahead])
    for chunk in range(chunks - ahead + 1, chunks):
        yield from _exchange(moves.backward_in[chunk])
        yield Compute("B", rank, chunk)
        yield from _wait(moves.backward_out[chunk - 1])
        yield from _post(moves.backward_out[chunk])
    yield from _wait(moves.backward_out[chunks - 1])
