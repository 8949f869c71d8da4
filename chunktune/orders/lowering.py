"""Communication put into orders of computes: `_PipelineScheduleRuntime._prepare_schedule_with_comms`.

torch adds its own bookkeeping first (`_add_unshard_reshard`, `_add_reduce_grad`) and then lets the ranks take turns,
one slot a turn (`_add_send_recv`). The bookkeeping does nothing here, but each takes a slot, and so decides how
the receives fall between the computes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from chunktune.orders.steps import Compute, Group, Post, Step, Transfer

_UNSHARDED_AT_MOST = 3
"""Parts that torch keeps unsharded at a time: `max_active_stages` of `_add_unshard_reshard`."""


def with_transfers(
    orders: Sequence[Sequence[Group]], rank_of: Sequence[int], chunks: int
) -> tuple[tuple[Step, ...], ...]:
    """The steps of every rank. `orders`: groups of each rank; `rank_of`: the rank of each part.

    Raises RuntimeError where every rank waits for another.
    """
    turns = _Turns([_with_bookkeeping(order, chunks) for order in orders], rank_of)
    turns.take_all()
    return tuple(map(tuple, turns.steps))


def _with_bookkeeping(order: Sequence[Group], chunks: int) -> Iterator[Group]:
    """The order with an empty group wherever torch unshards or reshards a part or reduces its gradients.

    The reshards after the last group hold nothing back and are left out.
    """
    unsharded: set[int] = set()
    backwards: Counter[int] = Counter()
    for group, ahead in zip(order, _parts_ahead(order), strict=True):
        wanted = set(ahead[:_UNSHARDED_AT_MOST])
        yield from [()] * len(wanted ^ unsharded)
        unsharded = wanted
        yield group
        yield from [()] * _parts_done(group, backwards, chunks)


def _parts_ahead(order: Sequence[Group]) -> Iterable[tuple[int, ...]]:
    """For each group the parts that are still to come, itself included, the soonest first."""
    ahead: tuple[int, ...] = ()
    backwards: list[tuple[int, ...]] = []
    for group in reversed(order):
        parts = tuple(compute.part for compute in group)
        ahead = parts + tuple(part for part in ahead if part not in parts)
        backwards.append(ahead)
    return reversed(backwards)


def _parts_done(group: Group, backwards: Counter[int], chunks: int) -> int:
    """How many parts have all their weight gradients with this group; `backwards` counts them."""
    done = 0
    for compute in group:
        if compute.kind in "BW":
            backwards[compute.part] += 1
            done += backwards[compute.part] == chunks
    return done


class _Turns:
    """`_add_send_recv`: rank after rank takes its next slot, or stands back until its input is on the way.

    The sender places the receive as well, at the end of what the receiver has so far: so both ends of a pair
    post in one order.
    """

    def __init__(self, slots: Sequence[Iterable[Group]], rank_of: Sequence[int]) -> None:
        self.slots = [deque(of_rank) for of_rank in slots]
        self.rank_of = rank_of
        self.steps: list[list[Step]] = [[] for _ in slots]
        self.ready: set[tuple[str, int, int]] = set()

    def take_all(self) -> None:
        """Go round until nothing is left."""
        while any(self.slots):
            moved = [self._take(rank) for rank, slots in enumerate(self.slots) if slots]
            if not any(moved):
                raise RuntimeError(f"every rank waits for another; next: {[list(slots)[:1] for slots in self.slots]}")

    def _take(self, rank: int) -> bool:
        """Whether the rank could take its next slot."""
        group = self.slots[rank][0]
        if not all(map(self._has_input, group)):
            return False
        self.slots[rank].popleft()
        self.steps[rank].extend(group)
        for compute in group:
            self._hand_on(rank, compute)
        return True

    def _has_input(self, compute: Compute) -> bool:
        if compute.kind == "W":
            return True
        if compute.kind == "F":
            return compute.part == 0 or ("F", compute.part, compute.chunk) in self.ready
        return compute.part == len(self.rank_of) - 1 or ("B", compute.part, compute.chunk) in self.ready

    def _hand_on(self, rank: int, compute: Compute) -> None:
        """Make the result the neighbour part's input: by a transfer where another rank holds that part."""
        direction = "F" if compute.kind == "F" else "B"
        part = compute.part + (1 if direction == "F" else -1)
        if compute.kind == "W" or not 0 <= part < len(self.rank_of):
            return
        self.ready.add((direction, part, compute.chunk))
        target = self.rank_of[part]
        if target != rank:
            post = Post((Transfer(direction, part, compute.chunk, rank, target),))
            self.steps[rank].append(post)
            self.steps[target].append(post)
