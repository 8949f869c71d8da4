"""What goes into a simulation and what comes out of it. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Transfers = Literal["rendezvous", "asynchronous"]
"""When a boundary tensor sets out. "rendezvous", as in torch over gloo and NCCL: once it is sent and its receive
is posted, and whoever waits for its send waits until it is through. "asynchronous", as analyses of schedules
assume: as soon as it is sent, and nobody waits for a send."""


@dataclass(frozen=True)
class Durations:
    """Seconds of everything that happens in a step.

    A part each (K V of them): `forward_s` (loss included), `backward_s` (whole gradient), `input_s`, `weight_s`;
    what the schedule never runs is not read. `transfer_s`: a boundary tensor between part p and p + 1, either
    way (K V - 1 of them), not read where both lie on one rank. `update_s`: the optimizer, a rank each (K of
    them). `overhead_s`: what the runtime adds before each operation, the update excepted.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    update_s: tuple[float, ...]
    overhead_s: float = 0.0


@dataclass(frozen=True)
class Critical:
    """What the longest chain of one step is made of, in seconds: the four sum to the makespan."""

    compute_s: float
    overhead_s: float
    transfer_s: float
    update_s: float


@dataclass(frozen=True)
class Simulated:
    """One step, simulated.

    `step_s`: the time between the ends of two consecutive steps, each rank going on as soon as it is through, as in
    training. `makespan_s`: one step alone, from the first start to the last end. `busy_s`: seconds in operations
    (update included, overhead and waiting not), a rank each. `bubble`: mean over the ranks of 1 - busy_s / step_s,
    0 where nothing takes any time.
    """

    step_s: float
    makespan_s: float
    busy_s: tuple[float, ...]
    bubble: float


@dataclass(frozen=True)
class Span:
    """One operation on the time line of a single step: `kind` is F, B, I, W or U (the update; part and chunk -1)."""

    rank: int
    kind: str
    part: int
    chunk: int
    start_s: float
    end_s: float
