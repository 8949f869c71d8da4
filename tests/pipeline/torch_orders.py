"""What each rank does in one step, by torch's own classes, and a player that finds out whether it ends.

The only module of these tests that takes torch's private names. GPipe and 1F1B execute hand-written loops and
not their `pipeline_order` (1F1B's is wrong on the last rank), so their loops are run here over a stage that
only writes down; the others execute `pipeline_order_with_comms`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed.pipelining.schedules as torch_schedules
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)

from chunktune.orders import Compute, Post, Step, Transfer, Wait

__all__ = ["FakeTensorMode", "stage_backward_input", "stage_backward_weight"]


class LocalStage(PipelineStage):
    """torch's stage without its greeting to itself, at which torch 2.11 fails over gloo."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


def mock_stages(stages: int, virtual_stages: int, rank: int = 0) -> list[Any]:
    """Stages without a process group: the attributes that torch's constructors read, and nothing else."""
    count = stages * virtual_stages
    return [
        SimpleNamespace(group_rank=rank, group_size=stages, num_stages=count, submod=None)
        for _ in range(virtual_stages)
    ]


def construct(torch_name: str, stages: int, chunks: int, virtual_stages: int, parts: list[Any]) -> Any:
    """torch's schedule over mock stages; ValueError where torch refuses (K, M, V)."""
    schedule_class = get_schedule_class(torch_name)
    if issubclass(schedule_class, PipelineScheduleSingle):
        return schedule_class(parts[0], chunks)
    assert issubclass(schedule_class, PipelineScheduleMulti)
    return schedule_class(parts, chunks)


def torch_parts(stages: int, virtual_stages: int, placement: str) -> dict[int, list[int]]:
    """Parts of every rank by torch's own mapping."""
    return generate_rank_to_stage_mapping(stages, stages * virtual_stages, style=placement)


def _into(kind: str, part: int, chunk: int, rank_of: dict[int, int]) -> Transfer:
    source = part - 1 if kind == "F" else part + 1
    return Transfer(kind, part, chunk, rank_of[source], rank_of[part])


def _moves(rank: int, stages: int) -> Any:
    """(receive, send) of a single-part rank: the transfers of one chunk, none at the ends of the pipeline."""
    rank_of = {part: part for part in range(stages)}

    def receive(kind: str, chunk: int) -> tuple[Transfer, ...]:
        first = rank == 0 if kind == "F" else rank == stages - 1
        return () if first else (_into(kind, rank, chunk, rank_of),)

    def send(kind: str, chunk: int) -> tuple[Transfer, ...]:
        target = rank + 1 if kind == "F" else rank - 1
        return (_into(kind, target, chunk, rank_of),) if 0 <= target < stages else ()

    return receive, send


class _RecordingStage(SimpleNamespace):
    """Stands in for the stage of a single-part schedule and writes down what torch's loop asks of it."""

    def get_fwd_recv_ops(self, chunk: int) -> list[Transfer]:
        return list(self.receive("F", chunk))

    def get_fwd_send_ops(self, chunk: int) -> list[Transfer]:
        return list(self.send("F", chunk))

    def get_bwd_recv_ops(self, chunk: int) -> list[Transfer]:
        return list(self.receive("B", chunk))

    def get_bwd_send_ops(self, chunk: int) -> list[Transfer]:
        return list(self.send("B", chunk))

    def forward_one_chunk(self, chunk: int, *_: Any, **__: Any) -> None:
        self.steps.append(Compute("F", self.stage_index, chunk))

    def backward_one_chunk(self, chunk: int, **_: Any) -> None:
        self.steps.append(Compute("B", self.stage_index, chunk))

    def perform_reduce_grad(self, *_: Any) -> None:
        pass

    def batch(self, transfers: Any, desc: Any = None) -> list[Transfer]:
        # At an end of the pipeline the loop hands over no operations: torch then does nothing, and nothing is noted.
        if transfers:
            self.steps.append(Post(tuple(transfers)))
        return list(transfers)

    def wait(self, transfers: Any) -> None:
        if transfers:
            self.steps.append(Wait(tuple(transfers)))


def loop_steps(torch_name: str, stages: int, chunks: int, rank: int) -> list[Step]:
    """What torch's hand-written loop does on one rank, by running that very loop."""
    receive, send = _moves(rank, stages)
    stage = _RecordingStage(
        group_rank=rank, group_size=stages, num_stages=stages, submod=None, stage_index=rank, steps=[],
        is_first=rank == 0, is_last=rank == stages - 1, has_backward=True, receive=receive, send=send,
    )  # fmt: skip
    schedule = construct(torch_name, stages, chunks, 1, [stage])
    schedule._check_inputs = lambda *_: ([()] * chunks, [{}] * chunks)
    for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        setattr(schedule, name, lambda *_: None)
    with (
        mock.patch.object(torch_schedules, "_batch_p2p", stage.batch),
        mock.patch.object(torch_schedules, "_sorted_batch_p2p", lambda ops, desc: {0: stage.batch(ops)} if ops else {}),
        mock.patch.object(torch_schedules, "_wait_batch_p2p", stage.wait),
    ):
        schedule._step_microbatches(return_outputs=False)
    steps: list[Step] = stage.steps
    return steps


def runtime_steps(schedule: Any, rank: int) -> list[Step]:
    """The list that torch's generic runtime executes, compute and communication."""
    rank_of = dict(schedule.stage_index_to_group_rank)
    return list(_runtime_steps(schedule.pipeline_order_with_comms[rank], rank_of))


def _runtime_steps(actions: list[Any], rank_of: dict[int, int]) -> Iterator[Step]:
    for action in actions:
        if action.sub_actions:
            yield from _runtime_steps(action.sub_actions, rank_of)
            continue
        kind = _kind(action)
        if kind in ("F", "B", "I", "W"):
            yield Compute(kind, action.stage_index, action.microbatch_index)
        elif kind.startswith(("SEND", "RECV")):
            yield _post_of(kind, action, rank_of)


def _kind(action: Any) -> str:
    """The letter or word between the two numbers of torch's own notation, such as SEND_F in 3SEND_F1."""
    return str(action).strip("0123456789")


def _post_of(kind: str, action: Any, rank_of: dict[int, int]) -> Post:
    direction, part = kind[-1], action.stage_index
    if kind.startswith("SEND"):
        part += 1 if direction == "F" else -1
    return Post((_into(direction, part, action.microbatch_index, rank_of),))


def steps_of_ranks(torch_name: str, stages: int, chunks: int, virtual_stages: int) -> list[list[Step]]:
    """What every rank of a legal (K, M, V) does in one step."""
    if torch_name in ("GPipe", "1F1B"):
        return [loop_steps(torch_name, stages, chunks, rank) for rank in range(stages)]
    schedule = construct(torch_name, stages, chunks, virtual_stages, mock_stages(stages, virtual_stages))
    return [runtime_steps(schedule, rank) for rank in range(stages)]


class Player:
    """Plays the ranks against each other, with the strictest back end: NCCL's one queue a pair of ranks.

    The head of a rank's queue moves only with the head of its peer's, so a send never completes before its
    receive stands at the head too, and nothing overtakes. What ends here ends with gloo as well. A forward
    needs its input to have arrived, a backward its gradient; W needs its I.
    """

    def __init__(self, ranks: Sequence[Sequence[Step]]) -> None:
        self.ranks = ranks
        self.position = [0] * len(ranks)
        self.queues: dict[tuple[int, int], list[set[Transfer]]] = {}
        self.arrived: dict[Transfer, float] = {}
        self.done: dict[Compute, float] = {}
        self.clock = [0.0] * len(ranks)
        self.rank_of = {s.part: r for r, steps in enumerate(ranks) for s in steps if isinstance(s, Compute)}
        self.last = max(self.rank_of)
        self.post_s: dict[tuple[int, Transfer], float] = {}

    def play(self, seconds: dict[str, float] | None = None) -> list[str]:
        """Run to the end; what is left standing, one line a stuck rank, empty where every rank came through.

        `seconds`: cost of F, B, I and W; afterwards `clock` is each rank's end with free communication.
        """
        self.seconds = seconds or {}
        while any(self._advance(rank) for rank in range(len(self.ranks))):
            pass
        return [
            f"rank {rank} stands at {steps[at]}"
            for rank, (steps, at) in enumerate(zip(self.ranks, self.position, strict=True))
            if at < len(steps)
        ] + [f"queue {pair} holds {queue}" for pair, queue in self.queues.items() if queue]

    def _advance(self, rank: int) -> bool:
        moved = False
        while self.position[rank] < len(self.ranks[rank]):
            step = self.ranks[rank][self.position[rank]]
            if not self._perform(rank, step):
                break
            self.position[rank] += 1
            moved = True
        return moved

    def _perform(self, rank: int, step: Step) -> bool:
        """Whether the rank got past this step."""
        if isinstance(step, Compute):
            return self._compute(rank, step)
        if isinstance(step, Post):
            self._enqueue(rank, step)
            self._match(rank)
            return True
        if any(transfer not in self.arrived for transfer in step.transfers):
            return False
        self.clock[rank] = max([self.clock[rank], *(self.arrived[t] for t in step.transfers)])
        return True

    def _enqueue(self, rank: int, post: Post) -> None:
        by_peer: dict[int, set[Transfer]] = {}
        for transfer in post.transfers:
            peer = transfer.target if transfer.source == rank else transfer.source
            by_peer.setdefault(peer, set()).add(transfer)
            self.post_s[rank, transfer] = self.clock[rank]
        for peer, transfers in by_peer.items():
            self.queues.setdefault((rank, peer), []).append(transfers)

    def _match(self, rank: int) -> None:
        for peer in range(len(self.ranks)):
            mine, theirs = self.queues.get((rank, peer), []), self.queues.get((peer, rank), [])
            while mine and theirs and mine[0] & theirs[0]:
                for transfer in mine[0] & theirs[0]:
                    self.arrived[transfer] = self.post_s[transfer.source, transfer]
                    mine[0].discard(transfer)
                    theirs[0].discard(transfer)
                for queue in (mine, theirs):
                    if queue and not queue[0]:
                        queue.pop(0)

    def _needs(self, step: Compute) -> list[Transfer | Compute]:
        """What must have happened before: an arrival where the neighbour part lies on another rank."""
        if step.kind == "W":
            return [Compute("I", step.part, step.chunk)]
        forward = step.kind == "F"
        neighbour = step.part + (-1 if forward else 1)
        needs: list[Transfer | Compute] = [] if forward else [Compute("F", step.part, step.chunk)]
        if 0 <= neighbour <= self.last:
            if self.rank_of[neighbour] == self.rank_of[step.part]:
                needs.append(self._local(step, neighbour))
            else:
                needs.append(_into("F" if forward else "B", step.part, step.chunk, self.rank_of))
        return needs

    def _local(self, step: Compute, neighbour: int) -> Compute:
        kinds = ("F",) if step.kind == "F" else ("B", "I")
        found = [Compute(kind, neighbour, step.chunk) for kind in kinds]
        return next((compute for compute in found if compute in self.done), found[0])

    def _compute(self, rank: int, step: Compute) -> bool:
        needs = self._needs(step)
        times = [self.arrived.get(n) if isinstance(n, Transfer) else self.done.get(n) for n in needs]
        if any(time is None for time in times):
            return False
        start = max([self.clock[rank], *(time for time in times if time is not None)])
        self.clock[rank] = self.done[step] = start + self.seconds.get(step.kind, 0.0)
        return True
