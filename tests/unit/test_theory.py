from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunktune import theory


def test_the_bubble_of_the_papers_example() -> None:
    assert theory.bubble(4, 1) == pytest.approx(3 / 4)
    assert theory.bubble(4, 13) == pytest.approx(3 / 16)
    assert theory.bubble(1, 5) == 0


def test_interleaving_divides_the_bubble_time_by_v() -> None:
    assert theory.interleaved_bubble(4, 8, 2) == pytest.approx(3 / 19)
    assert theory.interleaved_bubble(4, 8, 1) == theory.bubble(4, 8)


def test_fewer_chunks_than_ranks_wait_in_every_turn() -> None:
    assert theory.interleaved_bubble(4, 1, 2) == pytest.approx(6 / 8)
    assert theory.interleaved_bubble(4, 3, 1) == pytest.approx(theory.bubble(4, 3))


@given(st.integers(2, 16), st.integers(1, 256), st.floats(1e-4, 1.0), st.floats(1e-5, 1.0))
def test_m_star_is_where_the_step_is_shortest(stages: int, batch: int, a: float, c: float) -> None:
    best = theory.best_sleep_chunks(stages, batch, a, c)

    def step(chunks: float) -> float:
        return 3 * (chunks + stages - 1) * (a + c * batch / chunks)

    assert step(best) <= min(step(best * 0.99), step(best * 1.01))


def test_m_star_of_the_founding_example() -> None:
    assert theory.best_sleep_chunks(4, 64, 0.008, 0.002) == pytest.approx(math.sqrt(48))
    assert theory.sleep_step_s(4, 8, 64, 0.008, 0.002) == pytest.approx(3 * 11 * 0.024)


def test_m_star_at_the_ends() -> None:
    assert theory.best_sleep_chunks(1, 64, 0.008, 0.002) == 0
    assert theory.best_sleep_chunks(4, 64, 0, 0.002) == math.inf
