from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunktune import partition
from chunktune.errors import UsageError

WEIGHTS = st.lists(st.one_of(st.integers(0, 20), st.floats(0, 1e3)), min_size=1, max_size=9)


def all_cuts(layers: int, parts: int) -> list[tuple[int, ...]]:
    """Every way to cut, by brute force."""
    return [tuple(b - a for a, b in pairwise((0, *cuts, layers))) for cuts in combinations(range(1, layers), parts - 1)]


def weights_of(weights: list[float], counts: tuple[int, ...]) -> list[float]:
    return [sum(weights[i] for i in layers) for layers in partition.layers_of_parts(counts)]


@given(WEIGHTS, st.data())
def test_the_largest_part_is_as_small_as_brute_force_makes_it(weights: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    best = min(max(weights_of(weights, counts)) for counts in all_cuts(len(weights), parts))
    counts = partition.optimal(weights, parts)
    assert len(counts) == parts and sum(counts) == len(weights) and min(counts) >= 1
    assert max(weights_of(weights, counts)) == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert partition.smallest_largest(weights, parts) == pytest.approx(best, rel=1e-9, abs=1e-9)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_ties_are_broken_towards_even(weights: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))

    def key(counts: tuple[int, ...]) -> tuple[int, int, int]:
        sums = [int(w) for w in weights_of(list(weights), counts)]
        return max(sums), sum(w * w for w in sums), sum(c * c for c in counts)

    assert key(partition.optimal(weights, parts)) == min(map(key, all_cuts(len(weights), parts)))


@given(st.integers(1, 60), st.data())
def test_equal_weights_are_cut_as_evenly_as_uniform(layers: int, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, layers))
    even = partition.uniform(layers, parts)
    assert sum(even) == layers and max(even) - min(even) <= 1
    assert sorted(partition.optimal([0.1] * layers, parts)) == sorted(even)
    assert sorted(partition.optimal([0] * layers, parts)) == sorted(even)


def test_a_greedy_guess_is_beaten() -> None:
    assert partition.optimal([4, 4, 4, 4, 12], 3) == (2, 2, 1)
    assert partition.optimal([1, 1, 10, 1, 1], 3) == (2, 1, 2)
    assert partition.optimal([3, 1, 1, 1, 1, 1], 2) == (2, 4)


def test_the_choice_decides() -> None:
    weights = [5.0, 1.0, 1.0, 1.0]
    assert partition.counts_for("uniform", layers=4, parts=2) == (2, 2)
    assert partition.counts_for("parameters", layers=4, parts=2, weights=weights) == (1, 3)
    assert partition.counts_for("time", layers=4, parts=2, weights=weights) == (1, 3)
    assert partition.counts_for((3, 1), layers=4, parts=2) == (3, 1)


@pytest.mark.parametrize(
    ("counts", "parts", "said"),
    [
        ((2, 2), 3, ["[2, 2] has 2 counts", "each of the 3 parts", "[2, 1, 1]"]),
        ((2, 3), 2, ["places 5 layers", "the model has 4", "[2, 2]"]),
        ((4, 0), 2, ["each part needs one or more", "[2, 2]"]),
    ],
)
def test_counts_that_do_not_fit_are_an_error(counts: tuple[int, ...], parts: int, said: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        partition.counts_for(counts, layers=4, parts=parts)
    assert all(words in str(caught.value) for words in said)


@pytest.mark.parametrize(
    ("stages", "virtual", "said"),
    [
        (4, 2, ["K x V = 8 parts", "6 layers", "each part needs one layer", "stages <= 3", "virtual_stages <= 1"]),
        (7, 1, ["K x V = 7 parts", "stages <= 6", "a model of 7 layers"]),
        (1, 7, ["K x V = 7 parts", "virtual_stages <= 6"]),
    ],
)
def test_more_parts_than_layers(stages: int, virtual: int, said: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        partition.check_parts(6, stages, virtual)
    assert all(words in str(caught.value) for words in said)
    partition.check_parts(stages * virtual, stages, virtual)


def test_more_parts_than_layers_in_counts_for() -> None:
    with pytest.raises(UsageError, match="= 3 parts but the model has 2 layers"):
        partition.counts_for("uniform", layers=2, parts=3)


@pytest.mark.parametrize("weights", [[1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_weights_that_are_none(weights: list[float]) -> None:
    with pytest.raises(ValueError):
        partition.optimal(weights, 1)
