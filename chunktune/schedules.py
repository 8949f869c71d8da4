"""The table of schedules: torch's name, where the parts go, and which (K, M, V) it can run. Pure.

K counts ranks (`stages`). A rank holds V parts (`virtual_stages`), so the model is cut into K V parts:

    single   V = 1        rank r holds part r                        gpipe, 1f1b
    loop     V >= 1       rank r holds r, r + K, r + 2 K, ...        the interleaved ones, looped-bfs
    v        V = 2        rank r holds r and 2 K - 1 - r             zbv-zero-bubble, dualpipe-v

The rules are those of torch's constructors. Every (K, M, V) that they admit with K to 4, M to 16 and V to 3
also ran to its end over gloo with the right gradients (torch 2.13; a coarser grid to K = 3 on 2.11 and 2.14).
`tests/pipeline` holds the rules against the constructors and plays every rank's operations over that grid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from chunktune import theory

Placement = Literal["single", "loop", "v"]


@dataclass(frozen=True)
class Rule:
    """Which M a schedule admits: `admits(K, M, V)`, and the same in words for a given (K, M, V)."""

    admits: Callable[[int, int, int], bool]
    words: Callable[[int, int, int], str]


@dataclass(frozen=True)
class Schedule:
    """One row of the table.

    `torch_name`: for `torch.distributed.pipelining.schedules.get_schedule_class`. `splits_backward`: whether
    the gradients of the inputs and of the weights are separate operations.
    """

    name: str
    torch_name: str
    placement: Placement
    rule: Rule
    splits_backward: bool = False

    @property
    def default_virtual_stages(self) -> int:
        """V where the spec names none."""
        return 1 if self.placement == "single" else 2


def _rounds(stages: int, chunks: int) -> int:
    return max(1, chunks // stages)


_ANY = Rule(lambda k, m, v: True, lambda k, m, v: "M must be at least 1")
_ONE_A_STAGE = Rule(lambda k, m, v: m >= k, lambda k, m, v: f"M must be at least K = {k}")
_WHOLE_ROUNDS = Rule(
    lambda k, m, v: m % _rounds(k, m) == 0,
    lambda k, m, v: f"M must be a multiple of its max(1, M // K) = {_rounds(k, m)} rounds",
)
_ONE_A_PART = Rule(lambda k, m, v: m >= 2 * k, lambda k, m, v: f"M must be at least 2 K = {2 * k}")

SCHEDULES: dict[str, Schedule] = {
    row.name: row
    for row in (
        Schedule("gpipe", "GPipe", "single", _ANY),
        Schedule("1f1b", "1F1B", "single", _ONE_A_STAGE),
        Schedule("interleaved-1f1b", "Interleaved1F1B", "loop", _WHOLE_ROUNDS),
        Schedule("looped-bfs", "LoopedBFS", "loop", _ANY),
        Schedule("interleaved-zero-bubble", "InterleavedZeroBubble", "loop", _WHOLE_ROUNDS, True),
        Schedule("zbv-zero-bubble", "ZBVZeroBubble", "v", _ANY, True),
        Schedule("dualpipe-v", "DualPipeV", "v", _ONE_A_PART, True),
    )
}


def default_virtual_stages(name: str) -> int:
    """V where the spec names none: 1 for gpipe and 1f1b, else 2. Raises KeyError for an unknown schedule."""
    return SCHEDULES[name].default_virtual_stages


def virtual_stages_refusal(name: str, virtual_stages: int) -> str | None:
    """Why the schedule cannot run with this V, with the nearest that it can; null where it can."""
    placement = SCHEDULES[name].placement
    if placement == "single" and virtual_stages != 1:
        return f"virtual_stages = {virtual_stages}, but {name} holds one part a rank; use virtual_stages = 1"
    if placement == "v" and virtual_stages != 2:
        return f"virtual_stages = {virtual_stages}, but {name} holds two parts a rank; use virtual_stages = 2"
    if virtual_stages < 1:
        return f"virtual_stages = {virtual_stages}, but a rank holds at least one part; use virtual_stages = 1"
    return None


def admits(name: str, stages: int, chunks: int, virtual_stages: int) -> bool:
    """Whether the schedule can run this M; `virtual_stages` is taken to be one that it can."""
    return chunks >= 1 and SCHEDULES[name].rule.admits(stages, chunks, virtual_stages)


def next_legal(name: str, stages: int, virtual_stages: int, at_least: int, cap: int) -> int | None:
    """The smallest M in [at_least, cap] that the schedule admits; null where there is none."""
    values = range(max(1, at_least), cap + 1)
    return next((m for m in values if admits(name, stages, m, virtual_stages)), None)


def _nearest_legal(name: str, stages: int, chunks: int, virtual_stages: int) -> list[int]:
    """The legal neighbours of an illegal M, below and above."""
    below = (m for m in range(chunks - 1, 0, -1) if admits(name, stages, m, virtual_stages))
    # No rule leaves a gap of more than 2 K.
    above = next_legal(name, stages, virtual_stages, chunks + 1, max(chunks, 0) + 2 * stages)
    return [m for m in (next(below, None), above) if m is not None]


def refusal(name: str, *, stages: int, chunks: int, virtual_stages: int) -> str | None:
    """Why the schedule cannot run this M, with the rule and the nearest legal M; null where it can.

    Raises KeyError for an unknown schedule. `virtual_stages` is checked as well.
    """
    of_parts = virtual_stages_refusal(name, virtual_stages)
    if of_parts is not None:
        return of_parts
    if admits(name, stages, chunks, virtual_stages):
        return None
    rule = SCHEDULES[name].rule if chunks >= 1 else _ANY
    nearest = " or ".join(map(str, _nearest_legal(name, stages, chunks, virtual_stages)))
    words = rule.words(stages, chunks, virtual_stages)
    return f"under {name} at K = {stages} {words}; nearest legal M: {nearest}"


def parts_of_rank(name: str, stages: int, virtual_stages: int, rank: int) -> tuple[int, ...]:
    """Global indices of the parts that a rank holds, in the order torch's schedule takes them.

    Raises ValueError where the schedule cannot run with this V.
    """
    of_parts = virtual_stages_refusal(name, virtual_stages)
    if of_parts is not None:
        raise ValueError(of_parts)
    if SCHEDULES[name].placement == "v":
        return (rank, 2 * stages - 1 - rank)
    return tuple(range(rank, stages * virtual_stages, stages))


def ideal_bubble(name: str, *, stages: int, chunks: int, virtual_stages: int) -> float | None:
    """Idle share of a step for equal stages and free communication; null without a closed form."""
    if name in ("gpipe", "1f1b"):
        return theory.bubble(stages, chunks)
    if name == "interleaved-1f1b":
        return theory.interleaved_bubble(stages, chunks, virtual_stages)
    return None
