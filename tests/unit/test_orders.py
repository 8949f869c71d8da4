from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunktune import orders, schedules
from chunktune.orders import Compute, Post, Step, Transfer, Wait
from chunktune.schedules import SCHEDULES

UNTIMED = settings(deadline=None)
NAMES = pytest.mark.parametrize("name", SCHEDULES)
Program = tuple[tuple[Step, ...], ...]
Case = tuple[str, int, int, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A schedule and a legal (K, M, V)."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    virtual = draw(st.integers(1, 5)) if SCHEDULES[name].placement == "loop" else SCHEDULES[name].default_virtual_stages
    stages = draw(st.integers(1, 9))
    legal = [m for m in range(1, 41) if schedules.admits(name, stages, m, virtual)]
    return name, stages, draw(st.sampled_from(legal)), virtual


def program(case: Case) -> Program:
    name, stages, chunks, virtual = case
    return orders.program(name, stages=stages, chunks=chunks, virtual_stages=virtual)


def places(steps: tuple[Step, ...]) -> tuple[dict[Compute, int], dict[Transfer, int], dict[Transfer, int]]:
    """Where in a rank's steps each compute stands, each transfer is posted, and each is waited for."""
    done: dict[Compute, int] = {}
    posted: dict[Transfer, int] = {}
    waited: dict[Transfer, int] = {}
    for place, step in enumerate(steps):
        if isinstance(step, Compute):
            done[step] = place
        else:
            (posted if isinstance(step, Post) else waited).update(dict.fromkeys(step.transfers, place))
    return done, posted, waited


@UNTIMED
@given(cases())
def test_every_compute_of_every_chunk_stands_once_on_the_rank_of_its_part(case: Case) -> None:
    name, stages, chunks, virtual = case
    kinds: Counter[tuple[str, int, int]] = Counter()
    for rank, steps in enumerate(program(case)):
        mine = [step for step in steps if isinstance(step, Compute)]
        assert len(mine) == len(set(mine))
        assert {step.part for step in mine} == set(schedules.parts_of_rank(name, stages, virtual, rank))
        kinds.update((step.kind, step.part, step.chunk) for step in mine)
    for part in range(stages * virtual):
        for chunk in range(chunks):
            f, b, i, w = (kinds.pop((kind, part, chunk), 0) for kind in "FBIW")
            assert (f, b + i, w) == (1, 1, i)
    assert not kinds


@UNTIMED
@given(cases())
def test_no_rank_runs_a_backward_before_its_forward_or_a_weight_gradient_before_its_input_gradient(case: Case) -> None:
    for steps in program(case):
        done, _, _ = places(steps)
        for step, place in done.items():
            before = {"B": "F", "I": "F", "W": "I"}.get(step.kind)
            assert before is None or done[Compute(before, step.part, step.chunk)] < place


@UNTIMED
@given(cases())
def test_every_transfer_is_posted_once_at_each_end_and_joins_two_ranks(case: Case) -> None:
    name, stages, chunks, virtual = case
    ends = Counter(
        (rank, transfer)
        for rank, steps in enumerate(program(case))
        for step in steps
        if isinstance(step, Post)
        for transfer in step.transfers
    )
    rank_of = {p: r for r in range(stages) for p in schedules.parts_of_rank(name, stages, virtual, r)}
    crossings = [(p, p + 1) for p in range(stages * virtual - 1) if rank_of[p] != rank_of[p + 1]]
    expected = {Transfer("F", q, c, rank_of[p], rank_of[q]) for p, q in crossings for c in range(chunks)}
    expected |= {Transfer("B", p, c, rank_of[q], rank_of[p]) for p, q in crossings for c in range(chunks)}
    assert ends == Counter({(rank, t): 1 for t in expected for rank in (t.source, t.target)})


@UNTIMED
@given(cases())
def test_what_a_compute_takes_is_posted_before_and_what_it_gives_after(case: Case) -> None:
    for rank, steps in enumerate(program(case)):
        done, posted, _ = places(steps)
        for transfer, place in posted.items():
            if transfer.target == rank:
                assert place < done[by_result(done, transfer.kind, transfer.part, transfer.chunk)]
            else:
                from_part = transfer.part + (-1 if transfer.kind == "F" else 1)
                assert place > done[by_result(done, transfer.kind, from_part, transfer.chunk)]


def by_result(done: dict[Compute, int], kind: str, part: int, chunk: int) -> Compute:
    """The compute that takes or gives this activation or gradient: a gradient is B's or I's."""
    return next(c for k in ("F" if kind == "F" else "BI") if (c := Compute(k, part, chunk)) in done)


@UNTIMED
@given(cases())
def test_both_ends_of_a_pair_of_ranks_post_in_the_same_order(case: Case) -> None:
    by_pair: dict[tuple[int, int], list[frozenset[Transfer]]] = {}
    for rank, steps in enumerate(program(case)):
        for step in steps:
            if isinstance(step, Post):
                (peer,) = {t.source + t.target - rank for t in step.transfers}
                by_pair.setdefault((rank, peer), []).append(frozenset(step.transfers))
    for (rank, peer), posts in by_pair.items():
        assert flat(posts) == flat(by_pair[peer, rank])


def flat(posts: list[frozenset[Transfer]]) -> list[Transfer]:
    """Transfers in order; those of one post, which go side by side, in a fixed one."""
    return [t for post in posts for t in sorted(post, key=lambda t: (t.kind, t.part, t.chunk))]


@UNTIMED
@given(cases())
def test_the_hand_written_loops_wait_for_every_transfer_and_the_others_leave_that_to_the_compute(case: Case) -> None:
    for rank, steps in enumerate(program(case)):
        done, posted, waited = places(steps)
        if case[0] not in ("gpipe", "1f1b"):
            assert not waited
            continue
        assert set(waited) == set(posted)
        assert sum(len(step.transfers) for step in steps if isinstance(step, Wait)) == len(waited)
        for transfer, place in waited.items():
            assert place > posted[transfer]
            if transfer.target == rank:
                assert place < done[by_result(done, transfer.kind, transfer.part, transfer.chunk)]


@UNTIMED
@given(cases())
def test_computes_are_the_programs_and_every_post_and_wait_holds_something(case: Case) -> None:
    name, stages, chunks, virtual = case
    alone = orders.computes(name, stages=stages, chunks=chunks, virtual_stages=virtual)
    assert alone == tuple(tuple(s for s in steps if isinstance(s, Compute)) for steps in program(case))
    assert all(isinstance(s, Compute) or s.transfers for steps in program(case) for s in steps)


@UNTIMED
@given(stages=st.integers(1, 9), more=st.integers(0, 30))
def test_1f1b_holds_at_most_k_minus_rank_chunks(stages: int, more: int) -> None:
    ranks = orders.computes("1f1b", stages=stages, chunks=stages + more, virtual_stages=1)
    assert [most_held(steps) for steps in ranks] == [stages - rank for rank in range(stages)]


def most_held(steps: tuple[Compute, ...]) -> int:
    """The most forwards that are ahead of their backward."""
    return max(running(+1 if step.kind == "F" else -1 for step in steps))


def running(changes: Iterator[int]) -> Iterator[int]:
    level = 0
    for change in changes:
        level += change
        yield level


def test_gpipe_in_full() -> None:
    there, back = Transfer("F", 1, 0, 0, 1), Transfer("B", 0, 0, 1, 0)
    assert orders.program("gpipe", stages=2, chunks=1, virtual_stages=1) == (
        (Compute("F", 0, 0), Post((there,)), Wait((there,)), Post((back,)), Wait((back,)), Compute("B", 0, 0)),
        (Post((there,)), Wait((there,)), Compute("F", 1, 0), Compute("B", 1, 0), Post((back,)), Wait((back,))),
    )


def test_zbv_drops_the_chunks_beyond_m() -> None:
    assert orders.computes("zbv-zero-bubble", stages=2, chunks=1, virtual_stages=2)[1] == tuple(
        Compute(kind, part, 0) for kind, part in [("F", 1), ("F", 2), ("I", 2), ("W", 2), ("I", 1), ("W", 1)]
    )


def test_a_program_is_kept() -> None:
    assert program(("dualpipe-v", 2, 4, 2)) is program(("dualpipe-v", 2, 4, 2))


@NAMES
def test_one_rank_moves_nothing(name: str) -> None:
    virtual = schedules.default_virtual_stages(name)
    (steps,) = orders.program(name, stages=1, chunks=4, virtual_stages=virtual)
    assert all(isinstance(step, Compute) for step in steps)


def test_an_illegal_m_is_refused_with_the_rule() -> None:
    with pytest.raises(ValueError, match="M must be at least K = 4; nearest legal M: 4"):
        orders.program("1f1b", stages=4, chunks=3, virtual_stages=1)
