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


# --- times of one step -------------------------------------------------------------------------------------


def test_the_sleep_forms_are_the_general_ones() -> None:
    assert theory.step_s(4, 8, 64, 3 * 0.008, 3 * 0.002) == pytest.approx(theory.sleep_step_s(4, 8, 64, 0.008, 0.002))
    assert theory.best_chunks(4, 64, 0.024, 0.006) == pytest.approx(theory.best_sleep_chunks(4, 64, 0.008, 0.002))


def test_a_step_by_hand() -> None:
    assert theory.step_s(4, 8, 64, 0.5, 0.25, constant_s=1.0) == pytest.approx(11 * 2.5 + 1)
    assert theory.step_s(1, 8, 64, 0, 0.25) == pytest.approx(16)
    # V = 2: M = 8 chunks through 4 ranks are 2 * 8 + 3 part times of 0.5 + 0.25 * 8 / 2 seconds.
    assert theory.step_s(4, 8, 64, 0.5, 0.25, virtual_stages=2) == pytest.approx(19 * 1.5)


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 4), st.floats(1e-4, 1.0))
def test_without_a_cost_a_chunk_the_step_has_the_interleaved_bubble(k: int, rounds: int, v: int, c: float) -> None:
    chunks, mini_batch = rounds * k, 48
    step_s = theory.step_s(k, chunks, mini_batch, 0, c, virtual_stages=v)
    assert 1 - c * mini_batch / step_s == pytest.approx(theory.interleaved_bubble(k, chunks, v), abs=1e-9)


@given(st.integers(2, 16), st.integers(1, 256), st.floats(1e-4, 1.0), st.floats(1e-5, 1.0), st.integers(1, 4))
def test_best_chunks_is_where_the_step_is_shortest(stages: int, batch: int, a: float, c: float, v: int) -> None:
    best = theory.best_chunks(stages, batch, a, c, v)
    step_s, less_s, more_s = (
        theory.step_s(stages, best * factor, batch, a, c, virtual_stages=v) for factor in (1, 0.99, 1.01)
    )
    assert step_s <= min(less_s, more_s)


# --- activations -------------------------------------------------------------------------------------------


def test_gpipe_keeps_the_boundary_and_one_micro_batch_inside() -> None:
    assert theory.gpipe_activations(32, 24, 4, 8) == 32 + 6 * 4
    assert theory.gpipe_activations(32, 24, 1, 1, rematerialized=False) == 32 * 24
    assert theory.gpipe_activations(32, 24, 4, 8, rematerialized=False) == 32 * 6


# Korthikanti et al. 2022, table 3: heads, hidden; s = 2048, t = 8.
MODELS = {"22B": (64, 6144), "175B": (96, 12288), "530B": (128, 20480), "1T": (160, 25600)}


def layer_bytes(name: str, **options: object) -> float:
    heads, hidden = MODELS[name]
    return theory.transformer_activation_bytes(2048, 1, hidden, heads, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "saved"), [("175B", 0.70), ("530B", 0.65)])
def test_selective_recomputation_saves_what_the_paper_says(name: str, saved: float) -> None:
    """The paper, section 5: 70 % of GPT-3's and 65 % of MT-NLG's activations."""
    assert 1 - layer_bytes(name, recompute="selective") / layer_bytes(name) == pytest.approx(saved, abs=0.005)


@pytest.mark.parametrize("name", MODELS)
def test_both_techniques_together_save_about_five_times(name: str) -> None:
    """The paper's abstract: 5x less than tensor parallelism alone."""
    alone = layer_bytes(name, tensor_parallel=8)
    both = layer_bytes(name, tensor_parallel=8, sequence_parallel=True, recompute="selective")
    assert 4.9 < alone / both < 6.3


def test_one_layer_of_gpt3_by_hand() -> None:
    elements = 2048 * 12288
    assert layer_bytes("175B") == elements * (34 + 80)
    assert layer_bytes("175B", tensor_parallel=8) == elements * (10 + 3 + 10)
    assert layer_bytes("175B", tensor_parallel=8, sequence_parallel=True) == elements * (4.25 + 10)
    assert layer_bytes("175B", tensor_parallel=8, recompute="selective") == elements * 13
    assert layer_bytes("175B", tensor_parallel=8, sequence_parallel=True, recompute="selective") == elements * 4.25
    assert layer_bytes("175B", recompute="selective") == elements * 34
    assert layer_bytes("175B", recompute="full") == elements * 2


def test_without_ranks_to_split_over_sequence_parallelism_changes_nothing() -> None:
    for how in ("none", "selective", "full"):
        assert layer_bytes("22B", recompute=how, sequence_parallel=True) == layer_bytes("22B", recompute=how)


def test_the_first_rank_holds_as_many_micro_batches_as_there_are_ranks() -> None:
    assert theory.first_rank_activation_bytes(10, 96, 8, 64) == 10 * 96
    assert theory.first_rank_activation_bytes(10, 96, 8, 4) == 10 * 12 * 4
    assert theory.first_rank_activation_bytes(10, 96, 8, 64, virtual_stages=3) == pytest.approx(960 * (1 + 7 / 24))
    assert theory.first_rank_activation_bytes(10, 96, 8, 1, virtual_stages=3) == 10 * 12
