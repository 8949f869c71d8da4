from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunktune import schedules
from chunktune.schedules import SCHEDULES

NAMES = st.sampled_from(sorted(SCHEDULES))


def why_not(name: str, stages: int, chunks: int) -> str:
    virtual = schedules.default_virtual_stages(name)
    return schedules.refusal(name, stages=stages, chunks=chunks, virtual_stages=virtual) or ""


def test_the_table_has_torchs_seven_and_their_defaults() -> None:
    assert {name: schedules.default_virtual_stages(name) for name in SCHEDULES} == {
        "gpipe": 1,
        "1f1b": 1,
        "interleaved-1f1b": 2,
        "looped-bfs": 2,
        "interleaved-zero-bubble": 2,
        "zbv-zero-bubble": 2,
        "dualpipe-v": 2,
    }


@pytest.mark.parametrize(
    ("name", "stages", "chunks", "parts"),
    [
        ("1f1b", 4, 3, ["1f1b", "at least K = 4", "nearest legal M: 4"]),
        ("dualpipe-v", 4, 7, ["at least 2 K = 8", "nearest legal M: 8"]),
        ("interleaved-1f1b", 4, 9, ["max(1, M // K) = 2 rounds", "nearest legal M: 8 or 10"]),
        ("interleaved-zero-bubble", 3, 16, ["5 rounds", "nearest legal M: 15 or 18"]),
        ("gpipe", 2, 0, ["at least 1", "nearest legal M: 1"]),
    ],
)
def test_a_refusal_says_the_rule_and_the_nearest_legal_m(name: str, stages: int, chunks: int, parts: list[str]) -> None:
    for part in parts:
        assert part in why_not(name, stages, chunks)


@pytest.mark.parametrize("name", ["gpipe", "looped-bfs", "zbv-zero-bubble"])
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 97])
def test_these_take_any_m(name: str, chunks: int) -> None:
    assert why_not(name, 4, chunks) == ""


@pytest.mark.parametrize(
    ("name", "virtual", "advice"),
    [
        ("gpipe", 2, "virtual_stages = 1"),
        ("zbv-zero-bubble", 1, "virtual_stages = 2"),
        ("dualpipe-v", 3, "virtual_stages = 2"),
        ("looped-bfs", 0, "virtual_stages = 1"),
    ],
)
def test_virtual_stages_that_the_schedule_does_not_take(name: str, virtual: int, advice: str) -> None:
    reason = schedules.virtual_stages_refusal(name, virtual)
    assert reason is not None and advice in reason
    assert schedules.refusal(name, stages=2, chunks=8, virtual_stages=virtual) == reason
    with pytest.raises(ValueError, match="virtual_stages"):
        schedules.parts_of_rank(name, 2, virtual, 0)


def test_loops_go_round_and_v_comes_back() -> None:
    assert schedules.parts_of_rank("interleaved-1f1b", 3, 2, 1) == (1, 4)
    assert schedules.parts_of_rank("zbv-zero-bubble", 3, 2, 1) == (1, 4)
    assert schedules.parts_of_rank("dualpipe-v", 3, 2, 0) == (0, 5)
    assert schedules.parts_of_rank("1f1b", 3, 1, 2) == (2,)


@given(NAMES, st.integers(1, 8), st.data())
def test_the_parts_of_all_ranks_are_the_whole_model_once(name: str, stages: int, data: st.DataObject) -> None:
    placement = SCHEDULES[name].placement
    virtual = {"single": 1, "v": 2}.get(placement) or data.draw(st.integers(1, 4))
    held = [p for rank in range(stages) for p in schedules.parts_of_rank(name, stages, virtual, rank)]
    assert sorted(held) == list(range(stages * virtual))


@given(NAMES, st.integers(1, 9), st.integers(1, 80), st.integers(1, 200))
def test_next_legal_is_the_first_that_is_not_refused(name: str, stages: int, low: int, cap: int) -> None:
    found = schedules.next_legal(name, stages, schedules.default_virtual_stages(name), low, cap)
    expected = [m for m in range(low, cap + 1) if not why_not(name, stages, m)]
    assert found == (expected[0] if expected else None)


@given(NAMES, st.integers(1, 9), st.integers(-2, 200))
def test_what_a_refusal_proposes_is_legal(name: str, stages: int, chunks: int) -> None:
    reason = why_not(name, stages, chunks)
    if reason:
        proposed = [int(m) for m in reason.rsplit(": ", 1)[1].split(" or ")]
        assert proposed and all(not why_not(name, stages, m) for m in proposed)


def test_the_ideal_bubble_is_null_without_a_closed_form() -> None:
    known = {n for n in SCHEDULES if schedules.ideal_bubble(n, stages=4, chunks=8, virtual_stages=2) is not None}
    assert known == {"gpipe", "1f1b", "interleaved-1f1b"}
    assert schedules.ideal_bubble("1f1b", stages=4, chunks=8, virtual_stages=1) == pytest.approx(3 / 11)
