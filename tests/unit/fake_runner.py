"""A runner over a table of speeds and states: what the machine would do is known, so the right answer is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from chunktune.candidates import Candidates
from chunktune.results import (
    Block,
    Bubble,
    FloorLimit,
    Limit,
    Round,
    Shortage,
    StageFigures,
    State,
    Trial,
)
from chunktune.search import TrialLost

MIB = 2**20


def ladder_of(legal: Sequence[int]) -> tuple[int, ...]:
    """The smallest, then each time the smallest at least twice the last; the last legal one ends it."""
    rungs: list[int] = []
    for chunks in legal:
        if not rungs or chunks >= 2 * rungs[-1]:
            rungs.append(chunks)
    return tuple(rungs) if not legal or rungs[-1] == legal[-1] else (*rungs, legal[-1])


def fixed_n(legal: Iterable[int], size: int = 64, above: Limit = "batch", below: FloorLimit = "schedule") -> Candidates:
    values = tuple(legal)
    return Candidates(mode="mini_batch", size=size, legal=values, ladder=ladder_of(values), above=above, below=below)


def fixed_b(legal: Iterable[int], size: int = 4, above: Limit = "range", below: FloorLimit = "schedule") -> Candidates:
    values = tuple(legal)
    return Candidates(mode="micro_batch", size=size, legal=values, ladder=ladder_of(values), above=above, below=below)


@dataclass
class FakeRunner:
    """`speed`: samples/s at M. `states`: of the values that do not run. `noise`: sigma of each block's log speed.

    `lost`: state in which an M dies when it is visited in its n-th batch of rounds. `unconfirmed`: states of
    values that fail in a fresh group. `busy`: busy seconds of each rank a step, from (M, step seconds).
    """

    candidates: Candidates
    speed: Mapping[int, float] | Callable[[int], float]
    states: Mapping[int, State] | Callable[[int], State] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)
    losses: Mapping[int, float] = field(default_factory=dict)
    lost: Mapping[int, tuple[State, int]] = field(default_factory=dict)
    unconfirmed: Mapping[int, State] = field(default_factory=dict)
    busy: Callable[[int, float], tuple[float, ...]] = lambda chunks, step_s: (0.8 * step_s, 0.7 * step_s)
    noise: float = 0.0
    drift: float = 0.5
    seed: int = 0
    budget_s: float = 1e9
    trial_s: float = 1.0
    calls: list[tuple[object, ...]] = field(default_factory=list)
    spent_s: float = 0.0
    visits: dict[int, int] = field(default_factory=dict)
    measured: int = 0

    def trial(self, chunks: int) -> Trial:
        assert chunks in self.candidates.legal
        assert chunks not in self.tried, f"M = {chunks} was tried twice"
        self.calls.append(("trial", chunks))
        self.spent_s += self.trial_s
        return self.trial_of(chunks, self.state_of(chunks))

    def rounds(self, values: Sequence[int], count: int) -> Sequence[Round]:
        assert len(set(values)) == len(values) and count > 0
        self.calls.append(("rounds", tuple(values), count))
        self.spent_s += 0.1 * count * len(values)
        for chunks in values:
            assert self.state_of(chunks) == "ok"
            self.visits[chunks] = self.visits.get(chunks, 0) + 1
            state, batch = self.lost.get(chunks, ("ok", 0))
            if state != "ok" and self.visits[chunks] == batch:
                raise TrialLost(self.trial_of(chunks, state))
        return [self._round(values) for _ in range(count)]

    def confirm(self, chunks: int) -> Trial:
        self.calls.append(("confirm", chunks))
        self.spent_s += self.trial_s
        return self.trial_of(chunks, self.unconfirmed.get(chunks, "ok"))

    def remaining_s(self) -> float:
        return self.budget_s - self.spent_s

    @property
    def tried(self) -> list[int]:
        return [int(str(call[1])) for call in self.calls if call[0] == "trial"]

    @property
    def confirmed(self) -> list[int]:
        return [int(str(call[1])) for call in self.calls if call[0] == "confirm"]

    @property
    def batches(self) -> list[tuple[tuple[int, ...], int]]:
        return [(call[1], call[2]) for call in self.calls if call[0] == "rounds"]  # type: ignore[misc]

    def state_of(self, chunks: int) -> State:
        return self.states(chunks) if callable(self.states) else self.states.get(chunks, "ok")

    def speed_of(self, chunks: int) -> float:
        return self.speed(chunks) if callable(self.speed) else self.speed[chunks]

    def trial_of(self, chunks: int, state: State) -> Trial:
        micro_batch, mini_batch = self.candidates.batch_of(chunks)
        if state != "ok":
            return Trial(
                chunks=chunks,
                micro_batch=micro_batch,
                mini_batch=mini_batch,
                state=state,
                reason=self.reasons.get(chunks, f"{state} at {chunks}"),
                rank=1,
                shortage=self._shortage() if state == "oom" else None,
            )
        step_s = mini_batch / self.speed_of(chunks)
        return Trial(
            chunks=chunks,
            micro_batch=micro_batch,
            mini_batch=mini_batch,
            state="ok",
            step_s=(step_s,),
            throughput_samples_per_s=self.speed_of(chunks),
            loss=self.losses.get(chunks, 4.0),
            bubble=Bubble(measured=0.25, ideal=0.2),
            stages=self._stages(chunks, mini_batch, step_s),
        )

    def _stages(self, chunks: int, mini_batch: int, step_s: float) -> tuple[StageFigures, ...]:
        return tuple(
            StageFigures(
                rank=rank,
                parts=(rank,),
                forward_s=busy_s / 3 / chunks,
                backward_s=2 * busy_s / 3 / chunks,
                busy_s=busy_s,
                idle_share=1 - busy_s / step_s,
                samples_per_s=mini_batch / busy_s,
                peak_bytes=50 * MIB,
                reserved_bytes=None,
                capacity_bytes=100 * MIB,
                budget_bytes=95 * MIB,
            )
            for rank, busy_s in enumerate(self.busy(chunks, step_s))
        )

    def _shortage(self) -> Shortage:
        return Shortage(rank=1, needed_bytes=120 * MIB, budget_bytes=95 * MIB, where="rehearsal")

    def _round(self, values: Sequence[int]) -> Round:
        """One visit of each; the machine's speed drifts from round to round, alike for all in it."""
        self.measured += 1
        shared = random.Random(f"{self.seed}:{self.measured}").uniform(1 - self.drift, 1)
        return Round(blocks=tuple(self._block(chunks, shared) for chunks in values))

    def _block(self, chunks: int, shared: float) -> Block:
        noise = random.Random(f"{self.seed}:{self.measured}:{chunks}").gauss(0, self.noise)
        mini_batch = self.candidates.batch_of(chunks)[1]
        step_s = mini_batch / (self.speed_of(chunks) * shared * 2.718281828**noise)
        return Block(chunks=chunks, mini_batch=mini_batch, step_s=step_s, busy_s=self.busy(chunks, step_s))
