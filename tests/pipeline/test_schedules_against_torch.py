"""Legality against torch's own constructors, and every legal step played to its end, over the whole grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from torch_orders import Player, construct, mock_stages, steps_of_ranks, torch_parts

from chunktune import orders, schedules
from chunktune.orders import Compute, Post, Step, Transfer, Wait
from chunktune.schedules import SCHEDULES, Schedule

STAGES = range(1, 5)
CHUNKS = range(1, 17)
VIRTUAL = range(1, 4)
# V above 3: torch reshards parts on the way, which moves the receives.
LARGER = [(8, chunks, 2) for chunks in (8, 16, 24, 32)] + [(2, 4, 5), (3, 6, 4)]
ROWS = pytest.mark.parametrize("row", SCHEDULES.values(), ids=list(SCHEDULES))


def virtual_of(row: Schedule) -> list[int]:
    return [v for v in VIRTUAL if schedules.virtual_stages_refusal(row.name, v) is None]


def legal(row: Schedule) -> Iterator[tuple[int, int, int]]:
    for stages in STAGES:
        for virtual in virtual_of(row):
            for chunks in CHUNKS:
                if not schedules.refusal(row.name, stages=stages, chunks=chunks, virtual_stages=virtual):
                    yield stages, chunks, virtual


def legal_and_larger(row: Schedule) -> Iterator[tuple[int, int, int]]:
    yield from legal(row)
    for stages, chunks, virtual in LARGER:
        v = 1 if row.placement == "single" else virtual
        if not schedules.refusal(row.name, stages=stages, chunks=chunks, virtual_stages=v):
            yield stages, chunks, v


def torch_refuses(row: Schedule, stages: int, chunks: int, virtual: int) -> bool:
    try:
        construct(row.torch_name, stages, chunks, virtual, mock_stages(stages, virtual))
    except ValueError:
        return True
    return False


@ROWS
@pytest.mark.parametrize("stages", STAGES)
def test_legality_is_what_the_constructors_accept(row: Schedule, stages: int) -> None:
    for virtual in [1] if row.placement == "single" else VIRTUAL:
        for chunks in CHUNKS:
            ours = schedules.refusal(row.name, stages=stages, chunks=chunks, virtual_stages=virtual)
            theirs = torch_refuses(row, stages, chunks, virtual)
            assert (ours is not None) == theirs, (stages, chunks, virtual, ours)


@ROWS
def test_the_program_is_what_torch_executes(row: Schedule) -> None:
    for stages, chunks, virtual in legal_and_larger(row):
        theirs = steps_of_ranks(row.torch_name, stages, chunks, virtual)
        ours = orders.program(row.name, stages=stages, chunks=chunks, virtual_stages=virtual)
        for rank, (steps, expected) in enumerate(zip(ours, theirs, strict=True)):
            assert list(steps) == expected, (stages, chunks, virtual, rank)


@ROWS
def test_every_legal_step_runs_to_its_end_and_does_all_the_work(row: Schedule) -> None:
    for stages, chunks, virtual in legal(row):
        ranks = steps_of_ranks(row.torch_name, stages, chunks, virtual)
        assert Player(ranks).play() == [], (stages, chunks, virtual)
        done = Counter(step for rank in ranks for step in rank if isinstance(step, Compute))
        assert set(done.values()) == {1}
        for part in range(stages * virtual):
            for chunk in range(chunks):
                assert Compute("F", part, chunk) in done
                split = Compute("I", part, chunk) in done and Compute("W", part, chunk) in done
                assert split != (Compute("B", part, chunk) in done)


@ROWS
def test_backward_is_split_exactly_where_the_table_says_so(row: Schedule) -> None:
    kinds = {
        step.kind
        for stages, chunks, virtual in legal(row)
        for rank in steps_of_ranks(row.torch_name, stages, chunks, virtual)
        for step in rank
        if isinstance(step, Compute)
    }
    assert ("W" in kinds) == row.splits_backward


@ROWS
@pytest.mark.parametrize("stages", STAGES)
def test_parts_of_a_rank_are_where_torch_places_them(row: Schedule, stages: int) -> None:
    style = "v" if row.placement == "v" else "loop"
    for virtual in virtual_of(row):
        theirs = torch_parts(stages, virtual, style)
        ours = {r: list(schedules.parts_of_rank(row.name, stages, virtual, r)) for r in range(stages)}
        assert ours == theirs


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_the_ideal_bubble_is_what_torchs_order_gives_with_free_communication(name: str) -> None:
    row = SCHEDULES[name]
    for stages, chunks, virtual in legal(row):
        player = Player(steps_of_ranks(row.torch_name, stages, chunks, virtual))
        player.play({"F": 1.0, "B": 2.0})
        idle = 1 - 3.0 * chunks * virtual / max(player.clock)
        ideal = schedules.ideal_bubble(name, stages=stages, chunks=chunks, virtual_stages=virtual)
        assert idle == pytest.approx(ideal), (stages, chunks, virtual)


def test_the_player_sees_a_deadlock() -> None:
    there, back = Transfer("F", 1, 0, 0, 1), Transfer("B", 0, 0, 1, 0)
    ranks: list[list[Step]] = [
        [Compute("F", 0, 0), Post((back,)), Wait((back,)), Post((there,)), Compute("B", 0, 0)],
        [Post((there,)), Wait((there,)), Compute("F", 1, 0), Compute("B", 1, 0), Post((back,))],
    ]
    assert Player(ranks).play() != []


def test_the_player_sees_a_message_that_would_overtake() -> None:
    first, second = Transfer("F", 1, 0, 0, 1), Transfer("F", 1, 1, 0, 1)
    ranks: list[list[Step]] = [
        [Compute("F", 0, 0), Post((first,)), Compute("F", 0, 1), Post((second,))],
        [Post((second,)), Wait((second,)), Compute("F", 1, 1), Post((first,)), Compute("F", 1, 0)],
    ]
    assert Player(ranks).play() != []
