"""Plan and costs to a timeline: the program that torch runs, played with given durations. No torch.

A rank does its steps in order. An operation takes its duration and the runtime's overhead before it; it starts
when the rank is free and its input is there. Handing a transfer to the back end takes no time; the transfer comes
through `transfer_s` after both ends have handed it over (or, "asynchronous", after it was sent), and transfers do
not slow each other. After the last operation a rank waits for its sends, updates its weights and begins the
next step, without a barrier.

    values.py     what goes in and comes out
    graph.py      any program as a list of nodes, and its play
    closed.py     gpipe and 1f1b from their structure, equal to the play and much faster
    paths.py      the time line of a step and its longest chain
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chunktune import schedules
from chunktune.simulate.closed import gpipe_ends, one_f_one_b_ends
from chunktune.simulate.graph import compiled, hop_seconds, operation_seconds
from chunktune.simulate.paths import critical_path, spans_of
from chunktune.simulate.values import Critical, Durations, Simulated, Span, Transfers

__all__ = ["Critical", "Durations", "Simulated", "Span", "Transfers", "active_s", "simulate", "timeline"]

_CLOSED = {"gpipe": gpipe_ends, "1f1b": one_f_one_b_ends}
_MOST_STEPS = 16
_SAME = 1e-12

_Play = Callable[[Sequence[float]], list[float]]


def simulate(
    schedule: str,
    *,
    stages: int,
    chunks: int,
    virtual_stages: int,
    durations: Durations,
    transfers: Transfers = "rendezvous",
) -> Simulated:
    """Play a legal (K, M, V) step after step.

    `step_s` is the steady value. A step maps the ranks' starts to their ends, a map that is linear in the
    max-plus sense: once all ranks' ends have grown by the same amount from one step to the next, they do so for
    ever. That is nearly always the second step. Where it does not come within 16 steps, `step_s` is the mean
    growth of the last end over the second half of them.

    Raises ValueError for an illegal (K, M, V) and for durations of another number of parts or ranks.
    """
    _check(schedule, stages, chunks, virtual_stages, durations)
    if schedule in _CLOSED and transfers == "rendezvous":
        play, work_s = _closed(schedule, chunks, durations)
    else:
        play, work_s = _general(schedule, stages, chunks, virtual_stages, durations, transfers)
    makespan_s, step_s = _steps(play, durations.update_s)
    busy_s = tuple(work + update for work, update in zip(work_s, durations.update_s, strict=True))
    idle = 1 - sum(busy_s) / (stages * step_s) if step_s > 0 else 0.0
    return Simulated(step_s=step_s, makespan_s=makespan_s, busy_s=busy_s, bubble=max(0.0, idle))


def timeline(
    schedule: str,
    *,
    stages: int,
    chunks: int,
    virtual_stages: int,
    durations: Durations,
    transfers: Transfers = "rendezvous",
) -> tuple[tuple[Span, ...], Critical]:
    """Every operation of one step alone that starts at 0, by rank and start, and its critical path.

    A span leaves the overhead before it out. Raises ValueError as `simulate` does.
    """
    _check(schedule, stages, chunks, virtual_stages, durations)
    graph = compiled(schedule, stages, chunks, virtual_stages, transfers)
    ends = graph.play(hop_seconds(durations), operation_seconds(durations, durations.overhead_s), [0.0] * stages)
    return spans_of(graph, durations, ends), critical_path(graph, durations, ends)


def active_s(spans: Sequence[Span]) -> tuple[float, ...]:
    """Seconds of each rank from its first operation's start to its last one's end (the update included)."""
    ranks = range(1 + max(span.rank for span in spans))
    of_rank = [[span for span in spans if span.rank == rank] for rank in ranks]
    return tuple(max(s.end_s for s in mine) - min(s.start_s for s in mine) for mine in of_rank)


def _check(schedule: str, stages: int, chunks: int, virtual_stages: int, durations: Durations) -> None:
    refused = schedules.refusal(schedule, stages=stages, chunks=chunks, virtual_stages=virtual_stages)
    if refused is not None:
        raise ValueError(f"M = {chunks}: {refused}")
    parts = stages * virtual_stages
    wanted = dict.fromkeys(("forward_s", "backward_s", "input_s", "weight_s"), parts)
    wanted |= {"transfer_s": parts - 1, "update_s": stages}
    for name, count in wanted.items():
        found = len(getattr(durations, name))
        if found != count:
            raise ValueError(f"{name} has {found} values; K = {stages} and V = {virtual_stages} need {count}")


def _closed(schedule: str, chunks: int, durations: Durations) -> tuple[_Play, list[float]]:
    overhead_s = durations.overhead_s
    forward_s = [seconds + overhead_s for seconds in durations.forward_s]
    backward_s = [seconds + overhead_s for seconds in durations.backward_s]

    def play(starts_s: Sequence[float]) -> list[float]:
        return _CLOSED[schedule](forward_s, backward_s, durations.transfer_s, starts_s, chunks)

    pairs = zip(durations.forward_s, durations.backward_s, strict=True)
    return play, [chunks * (forward + backward) for forward, backward in pairs]


def _general(
    schedule: str, stages: int, chunks: int, virtual_stages: int, durations: Durations, transfers: Transfers
) -> tuple[_Play, list[float]]:
    graph = compiled(schedule, stages, chunks, virtual_stages, transfers)
    hops, operations = hop_seconds(durations), operation_seconds(durations, durations.overhead_s)

    def play(starts_s: Sequence[float]) -> list[float]:
        ends = graph.play(hops, operations, starts_s)
        return [ends[node] for node in graph.last]

    return play, graph.work_s(operation_seconds(durations, 0.0))


def _steps(play: _Play, update_s: Sequence[float]) -> tuple[float, float]:
    """Seconds of the first step alone, and of a step in the steady state."""
    ends = _updated(play([0.0] * len(update_s)), update_s)
    last_s = [max(ends)]
    for _ in range(_MOST_STEPS - 1):
        later = _updated(play(ends), update_s)
        growth = [after - before for before, after in zip(ends, later, strict=True)]
        if max(growth) - min(growth) <= _SAME * max(later):
            return last_s[0], max(growth)
        ends = later
        last_s.append(max(ends))
    half = len(last_s) // 2
    return last_s[0], (last_s[-1] - last_s[half - 1]) / (len(last_s) - half)


def _updated(ends_s: Sequence[float], update_s: Sequence[float]) -> list[float]:
    return [end + update for end, update in zip(ends_s, update_s, strict=True)]
