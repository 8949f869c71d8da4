from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chunktune import orders, schedules, theory
from chunktune.orders import Compute, Post, Step, Transfer
from chunktune.schedules import SCHEDULES
from chunktune.simulate import Durations, Simulated, Span, Transfers, active_s, simulate, timeline
from chunktune.simulate.closed import gpipe_ends, one_f_one_b_ends
from chunktune.simulate.graph import Graph, compiled

UNTIMED = settings(deadline=None)
SEMANTICS: tuple[Transfers, ...] = ("rendezvous", "asynchronous")
CLOSED = {"gpipe": gpipe_ends, "1f1b": one_f_one_b_ends}
KIND_SECONDS = {"F": "forward_s", "B": "backward_s", "I": "input_s", "W": "weight_s"}


@dataclass(frozen=True)
class Case:
    """A legal (K, M, V) and its costs."""

    schedule: str
    stages: int
    chunks: int
    virtual: int
    durations: Durations

    @property
    def parts(self) -> int:
        return self.stages * self.virtual

    def simulate(self, transfers: Transfers = "rendezvous") -> Simulated:
        return simulate(
            self.schedule, stages=self.stages, chunks=self.chunks, virtual_stages=self.virtual,
            durations=self.durations, transfers=transfers,
        )  # fmt: skip

    def timeline(self, transfers: Transfers = "rendezvous") -> tuple[tuple[Span, ...], dict[str, float]]:
        spans, critical = timeline(
            self.schedule, stages=self.stages, chunks=self.chunks, virtual_stages=self.virtual,
            durations=self.durations, transfers=transfers,
        )  # fmt: skip
        return spans, vars(critical)

    def graph(self) -> Graph:
        return compiled(self.schedule, self.stages, self.chunks, self.virtual, "rendezvous")


def uniform(
    schedule: str, stages: int, chunks: int, *, virtual: int | None = None,
    forward_s: float = 1.0, backward_s: float = 2.0, transfer_s: float = 0.0, update_s: float = 0.0,
    overhead_s: float = 0.0,
) -> Case:  # fmt: skip
    virtual = virtual or schedules.default_virtual_stages(schedule)
    parts, half = stages * virtual, (backward_s / 2,)
    costs = Durations(
        (forward_s,) * parts, (backward_s,) * parts, half * parts, half * parts,
        (transfer_s,) * (parts - 1), (update_s,) * stages, overhead_s,
    )  # fmt: skip
    return Case(schedule, stages, chunks, virtual, costs)


@st.composite
def cases(draw: st.DrawFn, names: Sequence[str] = tuple(sorted(SCHEDULES))) -> Case:
    name = draw(st.sampled_from(names))
    virtual = draw(st.integers(1, 3)) if SCHEDULES[name].placement == "loop" else SCHEDULES[name].default_virtual_stages
    stages = draw(st.integers(1, 5))
    chunks = draw(st.sampled_from([m for m in range(1, 15) if schedules.admits(name, stages, m, virtual)]))
    parts = stages * virtual

    def seconds(count: int, most: int) -> tuple[float, ...]:
        values = draw(st.lists(st.integers(0, most), min_size=count, max_size=count))
        return tuple(value / 16 for value in values)

    costs = Durations(
        *(seconds(parts, 32) for _ in range(4)),
        transfer_s=seconds(parts - 1, draw(st.sampled_from([0, 2, 64]))),
        update_s=seconds(stages, draw(st.sampled_from([0, 16, 800]))),
        overhead_s=draw(st.integers(0, 4)) / 16,
    )
    return Case(name, stages, chunks, virtual, costs)


# --- an independent player, by the definitions


@dataclass
class Reference:
    """Plays one step of every rank from `starts_s`, by looking at each step again and again until it can be done."""

    case: Case
    starts_s: Sequence[float]
    transfers: Transfers
    clock: list[float] = field(init=False)
    posted: dict[tuple[int, Transfer], float] = field(default_factory=dict)
    done: dict[Compute, tuple[float, float]] = field(default_factory=dict)
    rank_of: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        case = self.case
        self.clock = list(self.starts_s)
        self.program = orders.program(
            case.schedule, stages=case.stages, chunks=case.chunks, virtual_stages=case.virtual
        )
        self.rank_of = {
            s.part: rank for rank, steps in enumerate(self.program) for s in steps if isinstance(s, Compute)
        }
        self.left = [list(steps) for steps in self.program]

    def ends_s(self) -> list[float]:
        while any(self._advance(rank) for rank in range(self.case.stages)):
            pass
        assert not any(self.left)
        if self.case.schedule not in CLOSED and self.transfers == "rendezvous":
            for rank, steps in enumerate(self.program):
                sends = [t for s in steps if isinstance(s, Post) for t in s.transfers if t.source == rank]
                self.clock[rank] = max([self.clock[rank], *(self._arrival(t) for t in sends)])
        return [end + update for end, update in zip(self.clock, self.case.durations.update_s, strict=True)]

    def _advance(self, rank: int) -> bool:
        moved = False
        while self.left[rank]:
            needs = list(self._needs(rank, self.left[rank][0]))
            if math.inf in needs:
                break
            self.clock[rank] = max([self.clock[rank], *needs])
            self._do(rank, self.left[rank].pop(0))
            moved = True
        return moved

    def _do(self, rank: int, step: Step) -> None:
        if isinstance(step, Post):
            self.posted |= {(rank, transfer): self.clock[rank] for transfer in step.transfers}
        if isinstance(step, Compute):
            costs = self.case.durations
            start_s = self.clock[rank] + costs.overhead_s
            self.clock[rank] = start_s + getattr(costs, KIND_SECONDS[step.kind])[step.part]
            self.done[step] = start_s, self.clock[rank]

    def _needs(self, rank: int, step: Step) -> Iterator[float]:
        """When each thing that the step waits for is there; inf for what is not there yet."""
        if isinstance(step, Compute):
            yield from self._inputs(rank, step)
        elif not isinstance(step, Post):
            for transfer in step.transfers:
                if self.transfers == "rendezvous" or transfer.target == rank:
                    yield self._arrival(transfer)

    def _inputs(self, rank: int, step: Compute) -> Iterator[float]:
        if step.kind == "W":
            yield self._done("I", step.part, step.chunk)
            return
        forward = step.kind == "F"
        if not forward:
            yield self._done("F", step.part, step.chunk)
        source = step.part + (-1 if forward else 1)
        if not 0 <= source < self.case.parts:
            return
        if self.rank_of[source] == rank:
            yield min(self._done(kind, source, step.chunk) for kind in ("F" if forward else "BI"))
        else:
            kind = "F" if forward else "B"
            yield self._arrival(Transfer(kind, step.part, step.chunk, self.rank_of[source], rank))

    def _done(self, kind: str, part: int, chunk: int) -> float:
        return self.done.get(Compute(kind, part, chunk), (0.0, math.inf))[1]

    def _arrival(self, transfer: Transfer) -> float:
        sent_s = self.posted.get((transfer.source, transfer), math.inf)
        posted_s = self.posted.get((transfer.target, transfer), math.inf)
        boundary = transfer.part - (transfer.kind == "F")
        both_s = max(sent_s, posted_s) if self.transfers == "rendezvous" else sent_s
        return both_s + self.case.durations.transfer_s[boundary]


def reference_steps(case: Case, transfers: Transfers, steps: int) -> list[list[float]]:
    """Ends of the ranks of consecutive steps, from 0."""
    ends = [[0.0] * case.stages]
    for _ in range(steps):
        ends.append(Reference(case, ends[-1], transfers).ends_s())
    return ends[1:]


# --- against it


@UNTIMED
@given(cases(), st.sampled_from(SEMANTICS))
@example(uniform("1f1b", 1, 1), "rendezvous")
@example(uniform("gpipe", 3, 1, transfer_s=0.5), "rendezvous")
def test_first_and_later_steps_are_those_of_a_player_by_the_definitions(case: Case, transfers: Transfers) -> None:
    found = case.simulate(transfers)
    ends = [max(step) for step in reference_steps(case, transfers, 8)]
    assert found.makespan_s == pytest.approx(ends[0], rel=1e-9)
    assert found.step_s == pytest.approx(ends[-1] - ends[-2], rel=1e-9, abs=1e-9 * ends[-1])


@UNTIMED
@given(cases(), st.sampled_from(SEMANTICS))
def test_every_span_is_where_that_player_has_it(case: Case, transfers: Transfers) -> None:
    reference = Reference(case, [0.0] * case.stages, transfers)
    ends_s = reference.ends_s()
    spans, _ = case.timeline(transfers)
    found = {Compute(s.kind, s.part, s.chunk): (s.start_s, s.end_s) for s in spans if s.kind != "U"}
    assert found.keys() == reference.done.keys()
    for compute, times_s in reference.done.items():
        assert found[compute] == pytest.approx(times_s, rel=1e-9)
    updates = {s.rank: s.end_s for s in spans if s.kind == "U"}
    assert updates == pytest.approx(dict(enumerate(ends_s)), rel=1e-9)


def random_costs(seed: int, stages: int) -> Durations:
    """Rounded, equal, zero, huge: what a closed form may trip over."""
    rng = random.Random(seed)
    kinds = (lambda most: rng.random() * most, lambda most: most, lambda most: 0.0)
    mix = rng.choice([(1, 0, 0), (0, 1, 0), (3, 1, 1)])

    def seconds(count: int, most: float) -> tuple[float, ...]:
        return tuple(kind(most) for kind in rng.choices(kinds, mix, k=count))

    hop_s, update_s = rng.choice([0.0, 0.05, 3.0]), rng.choice([0.0, 1.0, 40.0])
    return Durations(
        seconds(stages, 1.0), seconds(stages, 2.0), (0.0,) * stages, (0.0,) * stages,
        seconds(stages - 1, hop_s), seconds(stages, update_s), rng.choice([0.0, 0.03]),
    )  # fmt: skip


@pytest.mark.parametrize("schedule", CLOSED)
@pytest.mark.parametrize(("stages", "chunks"), [(1, 9), (2, 2), (3, 400), (4, 4), (5, 131), (8, 64), (13, 200)])
def test_closed_forms_end_where_the_graph_ends_from_any_starts(schedule: str, stages: int, chunks: int) -> None:
    for seed in range(12):
        costs = random_costs(seed, stages)
        starts_s = [random.Random(seed + rank).random() * (seed % 3) * 10 for rank in range(stages)]
        case = Case(schedule, stages, chunks, 1, costs)
        forward_s, backward_s = ([s + costs.overhead_s for s in each] for each in (costs.forward_s, costs.backward_s))
        ends = case.graph().play(
            [*costs.transfer_s, 0.0], [*forward_s, *backward_s, *[0.0] * (2 * stages + 1)], starts_s
        )
        found = CLOSED[schedule](forward_s, backward_s, costs.transfer_s, starts_s, chunks)
        assert found == pytest.approx([ends[node] for node in case.graph().last], rel=1e-9, abs=1e-12)


# --- what is known beforehand


@pytest.mark.parametrize("schedule", CLOSED)
@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (1, 7), (2, 2), (4, 4), (4, 32), (8, 9), (64, 4096)])
def test_equal_stages_and_free_transfers_give_the_textbook_step(schedule: str, stages: int, chunks: int) -> None:
    found = uniform(schedule, stages, chunks, overhead_s=0.25).simulate()
    work_s = (chunks + stages - 1) * (3 + 2 * 0.25)
    assert found.step_s == pytest.approx(work_s)
    assert found.makespan_s == pytest.approx(work_s)
    without = uniform(schedule, stages, chunks).simulate()
    assert without.bubble == pytest.approx(theory.bubble(stages, chunks), abs=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_rank_is_busy_throughout(schedule: str) -> None:
    chunks = 4
    found = uniform(schedule, 1, chunks, transfer_s=9.0, update_s=5.0).simulate()
    parts = schedules.default_virtual_stages(schedule)
    assert found.step_s == pytest.approx(chunks * parts * 3 + 5)
    assert found.busy_s == pytest.approx((found.step_s,))
    assert found.bubble == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize(("stages", "rounds"), [(2, 1), (2, 5), (4, 3), (8, 2)])
def test_interleaved_bubble_is_the_closed_form(stages: int, rounds: int, virtual: int) -> None:
    found = uniform("interleaved-1f1b", stages, stages * rounds, virtual=virtual).simulate()
    assert found.bubble == pytest.approx(theory.interleaved_bubble(stages, stages * rounds, virtual), abs=1e-12)


@pytest.mark.parametrize("schedule", CLOSED)
def test_one_more_chunk_costs_what_the_slowest_rank_and_its_transfers_take(schedule: str) -> None:
    costs = random_costs(3, 6)
    forward_s, backward_s, hop_s = costs.forward_s, costs.backward_s, (0.0, *costs.transfer_s, 0.0)
    if schedule == "1f1b":  # forward and backward take turns, and each exchange is waited for
        gains = [forward_s[r] + backward_s[r] + hop_s[r] + hop_s[r + 1] + 2 * costs.overhead_s for r in range(6)]
        slowest_s = max(gains)
    else:
        slowest_s = max(forward_s[r] + hop_s[r] for r in range(6)) + costs.overhead_s
        slowest_s += max(backward_s[r] + hop_s[r + 1] for r in range(6)) + costs.overhead_s
    few, many = (Case(schedule, 6, chunks, 1, costs).simulate().makespan_s for chunks in (20_000, 60_000))
    assert (many - few) / 40_000 == pytest.approx(slowest_s)


@UNTIMED
@given(cases(), st.sampled_from(SEMANTICS))
def test_a_step_is_never_shorter_than_any_ranks_work_or_one_chunks_way(case: Case, transfers: Transfers) -> None:
    found = case.simulate(transfers)
    spans, _ = case.timeline(transfers)
    costs = case.durations
    computes = [s for s in spans if s.kind != "U"]
    for rank, busy_s in enumerate(found.busy_s):
        mine = [s for s in computes if s.rank == rank]
        work_s = sum(getattr(costs, KIND_SECONDS[s.kind])[s.part] for s in mine)
        assert busy_s == pytest.approx(work_s + costs.update_s[rank])
        floor_s = busy_s + costs.overhead_s * len(mine)
        assert found.step_s >= floor_s - 1e-9
        assert found.makespan_s >= floor_s - 1e-9
    way_s = sum(
        getattr(costs, KIND_SECONDS[s.kind])[s.part] + costs.overhead_s
        for s in computes
        if s.chunk == 0 and s.kind != "W"
    )
    rank_of = {s.part: s.rank for s in computes}
    way_s += 2 * sum(hop for part, hop in enumerate(costs.transfer_s) if rank_of[part] != rank_of[part + 1])
    assert found.step_s >= way_s - 1e-9
    assert found.makespan_s >= found.step_s - 1e-9


@UNTIMED
@given(cases(), st.sampled_from(SEMANTICS))
def test_spans_of_a_rank_do_not_overlap_and_the_critical_path_is_the_makespan(case: Case, transfers: Transfers) -> None:
    spans, critical = case.timeline(transfers)
    assert list(spans) == sorted(spans, key=lambda s: (s.rank, s.start_s))
    for first, second in pairwise(spans):
        assert first.rank != second.rank or first.end_s <= second.start_s + 1e-9
    assert sum(critical.values()) == pytest.approx(case.simulate(transfers).makespan_s)
    assert all(seconds >= 0 for seconds in critical.values())


@UNTIMED
@given(cases())
def test_asynchronous_transfers_are_never_slower(case: Case) -> None:
    waited, asynchronous = case.simulate("rendezvous"), case.simulate("asynchronous")
    assert asynchronous.makespan_s <= waited.makespan_s + 1e-9
    assert asynchronous.step_s <= waited.step_s + 1e-9


@UNTIMED
@given(cases())
def test_free_transfers_are_never_slower(case: Case) -> None:
    zero = replace(case.durations, transfer_s=(0.0,) * (case.parts - 1))
    free = replace(case, durations=zero)
    assert free.simulate().makespan_s <= case.simulate().makespan_s + 1e-9


# --- published figures

# Zero Bubble Pipeline Parallelism, arXiv 2401.10241: times in ms of table 9 (F, B, W, communication) and the
# bubble rate of 1F1B that table 5 calculates from them, at K = 8.
ZERO_BUBBLE = [
    (24, (18.522, 18.086, 9.337, 0.601), 0.2431),
    (32, (18.513, 18.086, 9.331, 0.626), 0.1985),
    (64, (18.546, 18.097, 9.321, 0.762), 0.1240),
    (24, (29.718, 29.444, 19.927, 0.527), 0.2347),
    (32, (29.802, 29.428, 19.53, 0.577), 0.1898),
    (64, (29.935, 29.621, 19.388, 0.535), 0.1091),
]


def bubble_rate(chunks: int, times_ms: tuple[float, float, float, float], transfers: Transfers) -> float:
    """(cost - M (F + B + W)) / cost; cost is the largest execution time over the ranks."""
    forward_s, input_s, weight_s, transfer_s = (one / 1000 for one in times_ms)
    case = uniform("1f1b", 8, chunks, forward_s=forward_s, backward_s=input_s + weight_s, transfer_s=transfer_s)
    without_updates = [span for span in case.timeline(transfers)[0] if span.kind != "U"]
    cost_s = max(active_s(without_updates))
    return (cost_s - chunks * (forward_s + input_s + weight_s)) / cost_s


@pytest.mark.parametrize(("chunks", "times_ms", "published"), ZERO_BUBBLE)
def test_asynchronous_transfers_give_the_published_bubble_rates(
    chunks: int, times_ms: tuple[float, float, float, float], published: float
) -> None:
    assert bubble_rate(chunks, times_ms, "asynchronous") == pytest.approx(published, abs=1e-4)
    # torch's exchanges wait for both ends, which costs a transfer more in many a turn than that analysis has.
    assert bubble_rate(chunks, times_ms, "rendezvous") > published + 5e-4


def test_transfers_on_the_critical_path_are_those_of_the_published_analysis() -> None:
    for chunks in (24, 32, 64):
        case = uniform("1f1b", 8, chunks, transfer_s=0.01)
        _, critical = case.timeline("asynchronous")
        # Down and up once, 2 (K - 1), and then as much for every K chunks: 1.75 a chunk, in whole hops.
        assert critical["transfer_s"] / 0.01 == pytest.approx(14 + 1.75 * (chunks - 1), abs=0.5)


# --- misuse


def test_an_illegal_setting_is_refused_with_the_nearest_legal_one() -> None:
    with pytest.raises(ValueError, match=r"M = 3: under 1f1b at K = 4 M must be at least K = 4; nearest legal M: 4"):
        uniform("1f1b", 4, 3).simulate()
    with pytest.raises(ValueError, match="use virtual_stages = 2"):
        uniform("dualpipe-v", 2, 8, virtual=3).timeline()


@pytest.mark.parametrize("name", ["forward_s", "backward_s", "input_s", "weight_s", "transfer_s", "update_s"])
def test_durations_of_another_number_of_parts_are_refused(name: str) -> None:
    case = uniform("1f1b", 3, 4)
    wrong = replace(case.durations, **{name: (1.0,) * 9})
    with pytest.raises(ValueError, match=rf"{name} has 9 values; K = 3 and V = 1 need {2 if name[0] == 't' else 3}"):
        replace(case, durations=wrong).simulate()


def test_nothing_takes_no_time() -> None:
    found = uniform("1f1b", 2, 4, forward_s=0.0, backward_s=0.0).simulate()
    assert (found.step_s, found.makespan_s, found.bubble) == (0.0, 0.0, 0.0)
