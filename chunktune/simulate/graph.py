"""The program of a schedule as one list of nodes in an order in which they can be evaluated. Pure.

Compiled once for a (schedule, K, M, V), played with any costs. What a rank waits for and what it does is a node:

    end = max(end of the rank's node before, max(end of `sent`, end of `posted`) + hop) + operation

`sent` and `posted` are the sender's and the receiver's last nodes before each handed its side of the transfer
to the back end; handing over takes no time. A node that needs no transfer names the node before in all three.
What a rank needs of its own (the F before a B, the I before a W, the neighbour part on the same rank) its own
order guarantees.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from chunktune.orders import Compute, Post, Step, Transfer, program
from chunktune.schedules import parts_of_rank
from chunktune.simulate.values import Durations, Transfers

KINDS = "FBIW"
_NOT_YET = -1


@dataclass(frozen=True)
class Graph:
    """One step of every rank. Nodes 0 to K - 1 are the starts of the ranks, the columns describe those after.

    `operation` indexes `operation_seconds`, `hop` indexes `hop_seconds`; `chunk` is -1 for a wait. `last`: each
    rank's last node. `rank_of`: the rank of each part.
    """

    rank_of: tuple[int, ...]
    last: tuple[int, ...]
    before: array[int]
    sent: array[int]
    posted: array[int]
    hop: array[int]
    operation: array[int]
    chunk: array[int]

    def play(self, hop_s: Sequence[float], operation_s: Sequence[float], starts_s: Sequence[float]) -> list[float]:
        """The end of every node in seconds, the K starts first."""
        ends = list(starts_s)
        append = ends.append
        columns = zip(self.before, self.sent, self.posted, self.hop, self.operation, strict=True)
        for before, sent, posted, hop, operation in columns:
            arrival = ends[sent]
            other = ends[posted]
            if other > arrival:
                arrival = other
            arrival += hop_s[hop]
            free = ends[before]
            append((arrival if arrival > free else free) + operation_s[operation])
        return ends

    def work_s(self, operation_s: Sequence[float]) -> list[float]:
        """Seconds of each rank in its operations, summed."""
        work_s = [0.0] * len(self.last)
        for operation, count in Counter(self.operation).items():
            part = operation % len(self.rank_of)
            work_s[self.rank_of[part]] += count * operation_s[operation]
        return work_s


def operation_seconds(durations: Durations, overhead_s: float) -> list[float]:
    """Seconds of F of every part, then of B, I and W, each with the overhead; 0 at the end, for a wait."""
    tables = (durations.forward_s, durations.backward_s, durations.input_s, durations.weight_s)
    return [seconds + overhead_s for table in tables for seconds in table] + [0.0]


def hop_seconds(durations: Durations) -> list[float]:
    """Seconds across every boundary, between part p and p + 1; 0 at the end, for no transfer."""
    return [*durations.transfer_s, 0.0]


@lru_cache(maxsize=16)  # a ladder of M, so that a grid whose durations vary compiles it once
def compiled(schedule: str, stages: int, chunks: int, virtual_stages: int, transfers: Transfers) -> Graph:
    """The graph of a legal (K, M, V). Raises ValueError where the program cannot come to its end."""
    steps = program(schedule, stages=stages, chunks=chunks, virtual_stages=virtual_stages)
    rank_of = [0] * (stages * virtual_stages)
    for rank in range(stages):
        for part in parts_of_rank(schedule, stages, virtual_stages, rank):
            rank_of[part] = rank
    waits_at_end = schedule not in ("gpipe", "1f1b")
    return _Compiler(steps, rank_of, chunks, transfers == "rendezvous").compile(waits_at_end)


class _Compiler:
    """Runs the ranks against each other, without times, and writes down a node for each thing they do.

    A transfer is known by one number, its `key`; `sent[key]` and `posted[key]` are its two ends' nodes.
    """

    def __init__(self, steps: Sequence[Sequence[Step]], rank_of: Sequence[int], chunks: int, rendezvous: bool) -> None:
        self.steps, self.rank_of, self.chunks, self.rendezvous = steps, rank_of, chunks, rendezvous
        self.parts = len(rank_of)
        self.at = [0] * len(steps)
        self.last = list(range(len(steps)))
        self.count = len(steps)
        self.columns = tuple(array("l") for _ in range(6))
        transfers = 2 * self.parts * chunks
        self.sent, self.posted = [_NOT_YET] * transfers, [_NOT_YET] * transfers
        self.asleep: dict[int, int] = {}
        self.awake = list(reversed(range(len(steps))))

    def compile(self, waits_at_end: bool) -> Graph:
        while self.awake:
            self._advance(self.awake.pop())
        self._check_ended()
        if waits_at_end and self.rendezvous:
            for rank, steps in enumerate(self.steps):
                self._wait_for_sends(rank, steps)
        return Graph(tuple(self.rank_of), tuple(self.last), *self.columns)

    def _advance(self, rank: int) -> None:
        """Go on with this rank until it is through or needs a transfer that the other end has not posted."""
        steps = self.steps[rank]
        while self.at[rank] < len(steps):
            step = steps[self.at[rank]]
            missing = self._take(rank, step)
            if missing != _NOT_YET:
                self.asleep[missing] = rank
                return
            self.at[rank] += 1

    def _take(self, rank: int, step: Step) -> int:
        """Do the step; the key of a transfer that it lacks, if any, and then nothing is done."""
        if isinstance(step, Compute):
            return self._compute(rank, step)
        if isinstance(step, Post):
            for transfer in step.transfers:
                self._post(rank, transfer)
            return _NOT_YET
        keys = [self._key(t.kind, t.part, t.chunk) for t in step.transfers if self.rendezvous or t.target == rank]
        missing = next((key for key in keys if not self._is_underway(key)), _NOT_YET)
        if missing == _NOT_YET:
            for key in keys:
                self._wait(rank, key)
        return missing

    def _key(self, kind: str, part: int, chunk: int) -> int:
        return ((kind != "F") * self.parts + part) * self.chunks + chunk

    def _is_underway(self, key: int) -> bool:
        return self.sent[key] >= 0 and (self.posted[key] >= 0 or not self.rendezvous)

    def _post(self, rank: int, transfer: Transfer) -> None:
        key = self._key(transfer.kind, transfer.part, transfer.chunk)
        end = self.sent if transfer.source == rank else self.posted
        end[key] = self.last[rank]
        if key in self.asleep and self._is_underway(key):
            self.awake.append(self.asleep.pop(key))

    def _compute(self, rank: int, step: Compute) -> int:
        forward = step.kind == "F"
        source = step.part - 1 if forward else step.part + 1
        operation = KINDS.index(step.kind) * self.parts + step.part
        if step.kind == "W" or not 0 <= source < self.parts or self.rank_of[source] == rank:
            self._append(rank, operation, step.chunk)
            return _NOT_YET
        key = self._key(step.kind, step.part, step.chunk)
        if not self._is_underway(key):
            return key
        self._append(rank, operation, step.chunk, key)
        return _NOT_YET

    def _wait(self, rank: int, key: int) -> None:
        self._append(rank, len(KINDS) * self.parts, -1, key)

    def _append(self, rank: int, operation: int, chunk: int, key: int = _NOT_YET) -> None:
        before = self.last[rank]
        sent, posted, hop = before, before, self.parts - 1
        if key != _NOT_YET:
            sent, hop = self.sent[key], self._hop(key)
            posted = self.posted[key] if self.rendezvous else sent
        for column, value in zip(self.columns, (before, sent, posted, hop, operation, chunk), strict=True):
            column.append(value)
        self.last[rank] = self.count
        self.count += 1

    def _hop(self, key: int) -> int:
        """The boundary that a transfer crosses, by the lower of its two parts."""
        backward, part = divmod(key // self.chunks, self.parts)
        return part if backward else part - 1

    def _wait_for_sends(self, rank: int, steps: Sequence[Step]) -> None:
        """Wait for all sends, those left out that a later one of the same boundary outlasts for certain.

        `_PipelineScheduleRuntime._step_microbatches` of torch.distributed.pipelining.schedules waits for them
        in the order of sending; the last to come through decides.
        """
        latest: dict[int, int] = {}
        for key in reversed(list(self._sends(rank, steps))):
            way, posted = key // self.chunks, self.posted[key]
            if posted > latest.get(way, _NOT_YET):
                latest[way] = posted
                self._wait(rank, key)

    def _sends(self, rank: int, steps: Sequence[Step]) -> Iterator[int]:
        for step in steps:
            if isinstance(step, Post):
                for transfer in step.transfers:
                    if transfer.source == rank:
                        yield self._key(transfer.kind, transfer.part, transfer.chunk)

    def _check_ended(self) -> None:
        for rank, (at, steps) in enumerate(zip(self.at, self.steps, strict=True)):
            if at < len(steps):
                raise ValueError(
                    f"rank {rank} stops before step {at} of {len(steps)}, {steps[at]}: every wait needs its transfer "
                    "posted by both ranks"
                )
