from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunktune import schedules
from chunktune.candidates import Candidates, divisors, enumerate_candidates
from chunktune.errors import UsageError
from chunktune.schedules import SCHEDULES
from chunktune.spec import Spec


def spec(batch: dict[str, object], schedule: str = "gpipe", **pipeline: object) -> Spec:
    return Spec.model_validate(
        {
            "model": {"family": "mlp", "layers": 64, "hidden": 8},
            "pipeline": {"schedule": schedule, **pipeline},
            "batch": batch,
        }
    )


def mini(size: int, stages: int, schedule: str = "gpipe", chunks: object = "auto") -> Candidates:
    return enumerate_candidates(spec({"mini_batch": size, "chunks": chunks}, schedule), stages)


def micro(size: int, stages: int, schedule: str = "gpipe", chunks: object = "auto") -> Candidates:
    return enumerate_candidates(spec({"micro_batch": size, "chunks": chunks}, schedule), stages)


def test_with_n_fixed_the_candidates_are_its_divisors() -> None:
    found = mini(32, 2)
    assert found.legal == found.ladder == (1, 2, 4, 8, 16, 32)
    assert (found.above, found.warnings, found.refused) == ("batch", (), ())
    assert found.batch_of(8) == (4, 32)


def test_divisors_that_the_schedule_refuses_are_kept_with_their_reasons() -> None:
    found = mini(32, 3, "1f1b")
    assert found.legal == (4, 8, 16, 32)
    assert [(c.chunks, c.micro_batch, c.mini_batch, c.legal) for c in found.refused] == [
        (1, 32, 32, False),
        (2, 16, 32, False),
    ]
    assert "at least K = 3" in (found.refused[0].reason or "")
    assert found.below == "schedule"


def test_the_largest_divisor_can_be_the_schedules_limit() -> None:
    found = mini(14, 4, "interleaved-1f1b")
    assert found.legal == (1, 2, 7)
    assert found.above == "schedule"


def test_many_divisors_are_climbed_by_doubling() -> None:
    found = mini(720, 2)
    assert len(found.legal) == 30
    assert found.ladder == (1, 2, 4, 8, 16, 36, 72, 144, 360, 720)


@pytest.mark.parametrize(
    ("schedule", "stages", "cap", "rungs"),
    [
        ("1f1b", 3, 64, (3, 6, 12, 24, 48, 64)),
        ("interleaved-1f1b", 3, 16, (1, 2, 4, 8, 15)),
        ("gpipe", 2, 5, (1, 2, 4, 5)),
        ("dualpipe-v", 2, 16, (4, 8, 16)),
        ("gpipe", 1, 1, (1,)),
    ],
)
def test_the_ladder_with_b_fixed(schedule: str, stages: int, cap: int, rungs: tuple[int, ...]) -> None:
    found = micro(4, stages, schedule, f"1:{cap}")
    assert found.ladder == rungs
    assert found.above == "range"
    assert found.legal[-1] == rungs[-1]


def test_the_automatic_cap_grows_with_the_stages() -> None:
    assert micro(4, 1).legal[-1] == 64
    assert micro(4, 4).legal[-1] == 256
    assert micro(4, 4).batch_of(8) == (4, 32)


def test_the_values_that_the_ladder_passes_over_are_said() -> None:
    assert [c.chunks for c in micro(4, 4, "1f1b").refused] == [1, 2, 3]
    assert 16 in [c.chunks for c in micro(4, 3, "interleaved-1f1b", "1:20").refused]


def test_a_list_is_tried_as_it_stands() -> None:
    found = mini(32, 4, "1f1b", [2, 4, 5, 16])
    assert found.legal == found.ladder == (4, 16)
    assert (found.above, found.below) == ("range", "schedule")
    reasons = {c.chunks: c.reason or "" for c in found.refused}
    assert "does not divide N = 32" in reasons[5] and "nearest: 4 or 8" in reasons[5]
    assert "at least K = 4" in reasons[2]
    assert next(c for c in found.refused if c.chunks == 5).micro_batch is None


def test_a_list_with_b_fixed() -> None:
    found = micro(2, 4, "1f1b", [3, 7, 9])
    assert found.ladder == (7, 9)
    assert (found.above, found.below) == ("range", "range")
    assert [c.chunks for c in found.refused] == [3]


@pytest.mark.parametrize(
    ("chunks", "legal", "above", "below"),
    [
        ("2:16", (2, 4, 8, 16), "range", "range"),
        ("1:64", (1, 2, 4, 8, 16, 32), "batch", "schedule"),
        ("5:100", (8, 16, 32), "batch", "range"),
    ],
)
def test_a_range_restricts(chunks: str, legal: tuple[int, ...], above: str, below: str) -> None:
    found = mini(32, 2, "gpipe", chunks)
    assert (found.legal, found.above, found.below) == (legal, above, below)


def test_a_huge_range_is_cut_and_says_so() -> None:
    found = micro(1, 2, "gpipe", "1:2000000000")
    assert found.legal[-1] == 65536
    assert "2000000000" in found.warnings[0] and "65536" in found.warnings[0]


def test_one_stage_is_plain_accumulation() -> None:
    assert mini(8, 1, "1f1b").legal == (1, 2, 4, 8)
    assert mini(1, 1).legal == (1,)


@pytest.mark.parametrize(("size", "near", "count"), [(31, 30, 6), (97, 96, 10), (2, 4, 1)])
def test_a_prime_batch_gets_a_warning_that_names_a_better_one(size: int, near: int, count: int) -> None:
    found = mini(size, 2)
    assert found.legal == (1, size)
    assert f"mini_batch = {size}" in found.warnings[0]
    assert f"nearest N with more is {near}, which has {count}" in found.warnings[0]


def test_a_batch_whose_divisors_the_schedule_refuses_gets_the_warning_too() -> None:
    assert "is 8, which has 1" in mini(4, 4, "1f1b").warnings[0]
    assert mini(8, 4, "1f1b").warnings == ()


@pytest.mark.parametrize(
    ("batch", "stages", "schedule", "parts"),
    [
        ({"mini_batch": 2}, 4, "1f1b", ["N = 2", "M must be at least K = 4", "mini_batch = 8", "stages = 2"]),
        ({"mini_batch": 1}, 2, "dualpipe-v", ["at least 2 K = 4", "mini_batch = 8", "schedule gpipe"]),
        ({"mini_batch": 32, "chunks": [3, 5]}, 2, "gpipe", ["chunks = [3, 5]", "3 does not divide"]),
        ({"mini_batch": 32, "chunks": "9:15"}, 2, "gpipe", ["lies in 9:15", "legal M: 1, 2, 4, 8, 16, 32"]),
        ({"micro_batch": 4, "chunks": "1:3"}, 4, "1f1b", ["no M in 1:3", "nearest legal M: 4"]),
        ({"micro_batch": 4, "chunks": [9]}, 4, "interleaved-1f1b", ["nearest legal M: 8 or 10"]),
    ],
)
def test_no_legal_value_is_an_error_that_says_what_to_change(
    batch: dict[str, object], stages: int, schedule: str, parts: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        enumerate_candidates(spec(batch, schedule), stages)
    for part in parts:
        assert part in str(caught.value)


def test_virtual_stages_that_the_schedule_does_not_take_are_an_error() -> None:
    with pytest.raises(UsageError, match="zbv-zero-bubble holds two parts a rank"):
        enumerate_candidates(spec({"mini_batch": 8}, "zbv-zero-bubble", virtual_stages=3), 2)


@given(st.integers(1, 5000))
def test_divisors_are_all_of_them(number: int) -> None:
    assert divisors(number) == tuple(d for d in range(1, number + 1) if number % d == 0)


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 8),
    st.integers(1, 300),
    st.booleans(),
    st.one_of(
        st.just("auto"),
        st.tuples(st.integers(1, 60), st.integers(0, 60)).map(lambda lh: f"{lh[0]}:{lh[0] + lh[1]}"),
        st.lists(st.integers(1, 300), min_size=1, max_size=20),
    ),
)
def test_what_always_holds(schedule: str, stages: int, size: int, fixed_n: bool, chunks: object) -> None:
    try:
        found = (mini if fixed_n else micro)(size, stages, schedule, chunks)
    except UsageError as error:
        assert "legal" in str(error)
        return
    virtual = schedules.default_virtual_stages(schedule)
    assert found.legal and list(found.legal) == sorted(set(found.legal))
    assert all(schedules.admits(schedule, stages, m, virtual) for m in found.legal)
    assert set(found.ladder) <= set(found.legal)
    assert (found.ladder[0], found.ladder[-1]) == (found.legal[0], found.legal[-1])
    assert not set(found.legal) & {c.chunks for c in found.refused}
    assert len(found.refused) <= 64 and all(c.reason for c in found.refused)
    if fixed_n:
        assert all(size % m == 0 for m in found.legal)
    if isinstance(chunks, str):
        between = [m for low, high in pairwise(found.ladder[:-1]) for m in found.legal if low < m < high]
        assert len(found.legal) <= 12 or all(any(m < 2 * r for r in found.ladder if r <= m) for m in between)
