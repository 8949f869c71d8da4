from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunktune.results import Block, Round
from chunktune.stats import (
    compare,
    drift,
    median,
    median_interval,
    paired_log_ratio,
    relative,
    shared_rounds,
    t_quantile,
)


def rounds_of(*tables: dict[int, float], busy: dict[int, tuple[float, ...]] | None = None) -> list[Round]:
    """Rounds of samples/s by M, at N = 8."""
    return [
        Round(
            blocks=tuple(
                Block(chunks=m, mini_batch=8, step_s=8 / speed, busy_s=(busy or {}).get(m, (4 / speed,)))
                for m, speed in table.items()
            )
        )
        for table in tables
    ]


def test_median_of_odd_and_even_counts() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
    with pytest.raises(ValueError, match="0 samples"):
        median([])


# Ranks from the binomial tables: of 9 samples the 2nd and the 8th, of 20 the 6th and the 15th.
@pytest.mark.parametrize(("count", "low", "high"), [(1, 1, 1), (3, 1, 3), (5, 1, 5), (8, 1, 8), (9, 2, 8), (20, 6, 15)])
def test_median_interval_ranks(count: int, low: int, high: int) -> None:
    samples = [float(value) for value in range(1, count + 1)]
    random.Random(0).shuffle(samples)
    assert median_interval(samples) == (low, high)


def test_median_interval_covers_the_median_as_often_as_it_says() -> None:
    draw = random.Random(1)
    hits = 0
    for _ in range(2000):
        low, high = median_interval([draw.expovariate(1.0) for _ in range(15)])
        hits += low <= math.log(2) <= high
    assert 0.95 <= hits / 2000 <= 0.985


@pytest.mark.parametrize("degrees", [1, 2, 3, 5, 10, 20, 30])
def test_t_quantiles_leave_a_fortieth_above(degrees: int) -> None:
    """Integrate the density from 0 to the quantile: it must be 0.475."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    steps = 20000
    width = t_quantile(degrees) / steps
    area = width * sum(scale * (1 + ((i + 0.5) * width) ** 2 / degrees) ** (-(degrees + 1) / 2) for i in range(steps))
    assert area == pytest.approx(0.475, abs=2e-4)
    assert t_quantile(31) == pytest.approx(1.96)


def test_plain_t_interval_of_few_pairs() -> None:
    logs = [0.01, 0.02, 0.06]
    estimate = paired_log_ratio([math.exp(x) for x in logs], [1.0] * 3)
    mean = 0.03
    spread = math.sqrt(sum((x - mean) ** 2 for x in logs) / 2)
    assert estimate.mean == pytest.approx(mean)
    assert estimate.half_width == pytest.approx(4.303 * spread / math.sqrt(3))
    assert estimate.pairs == 3


def test_trimmed_interval_by_hand() -> None:
    """Yuen's example recipe: 5 values, one cut from each end, the ends replaced for the variance."""
    logs = [-9.0, 1.0, 2.0, 3.0, 50.0]
    estimate = paired_log_ratio([math.exp(x) for x in logs], [1.0] * 5)
    assert estimate.mean == pytest.approx(2.0)
    # Winsorized: 1 1 2 3 3, variance 1; h = 3: sqrt(1 * 4 / (3 * 2)), t with 2 degrees of freedom.
    assert estimate.half_width == pytest.approx(4.303 * math.sqrt(4 / 6))


def test_one_disturbed_round_in_five_does_not_move_the_estimate() -> None:
    calm = paired_log_ratio([1.1, 1.1, 1.1, 1.1, 1.1], [1.0] * 5)
    hit = paired_log_ratio([1.1, 1.1, 1.1, 1.1, 900.0], [1.0] * 5)
    assert hit.ratio == pytest.approx(calm.ratio) == pytest.approx(1.1)
    assert hit.interval == pytest.approx(calm.interval)


def test_no_interval_from_one_pair_and_no_estimate_from_none() -> None:
    assert paired_log_ratio([2.0], [1.0]).interval is None
    assert paired_log_ratio([2.0], [1.0]).ratio == pytest.approx(2.0)
    with pytest.raises(ValueError, match="equal, positive"):
        paired_log_ratio([], [])
    with pytest.raises(ValueError, match="2 samples against 1"):
        paired_log_ratio([1.0, 2.0], [1.0])


@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=14))
def test_interval_is_finite_ordered_and_antisymmetric(samples: list[float]) -> None:
    ones = [1.0] * len(samples)
    up, down = paired_log_ratio(samples, ones), paired_log_ratio(ones, samples)
    assert up.interval is not None and down.interval is not None
    assert up.interval[0] <= up.ratio <= up.interval[1] < math.inf
    assert up.mean == pytest.approx(-down.mean, abs=1e-9)
    assert up.half_width == pytest.approx(down.half_width, abs=1e-6)


@pytest.mark.parametrize(
    ("speeds", "outcome"),
    [
        ([0.95, 0.951, 0.949], "slower"),
        ([0.999, 1.0, 1.001], "not slower"),
        ([0.95, 1.0, 1.05], "undecided"),
        ([0.95], "undecided"),
    ],
)
def test_outcome_against_the_tolerance(speeds: list[float], outcome: str) -> None:
    comparison = compare(rounds_of(*({4: 1.0, 8: s} for s in speeds)), 8, 4, "pipeline", 0.01)
    assert comparison.outcome == outcome
    assert comparison.decided == (outcome != "undecided")
    assert (comparison.interval is None) == (len(speeds) < 2)


def test_tolerance_moves_the_line() -> None:
    rounds = rounds_of(*({4: 1.0, 8: s} for s in (0.97, 0.971, 0.969)))
    assert compare(rounds, 8, 4, "pipeline", 0.01).outcome == "slower"
    assert compare(rounds, 8, 4, "pipeline", 0.05).outcome == "not slower"


def test_drift_between_rounds_cancels() -> None:
    rounds = rounds_of(*({4: drift, 8: 0.9 * drift} for drift in (1.0, 0.5, 3.0, 0.1)))
    assert compare(rounds, 8, 4, "pipeline", 0.01).ratio == pytest.approx(0.9)
    assert compare(rounds, 8, 4, "pipeline", 0.01).outcome == "slower"


def test_only_rounds_with_both_values_count() -> None:
    rounds = rounds_of({4: 1.0, 8: 2.0}, {4: 9.0}, {8: 9.0, 2: 1.0}, {4: 1.0, 8: 2.0})
    comparison = compare(rounds, 8, 4, "pipeline", 0.01)
    assert (comparison.rounds, comparison.ratio) == (2, pytest.approx(2.0))
    assert shared_rounds(rounds, 8, 4) == 2
    with pytest.raises(ValueError, match="no round holds both M = 2 and M = 4"):
        compare(rounds, 2, 4, "pipeline", 0.01)


def test_stage_criterion_takes_the_slowest_rank() -> None:
    busy = {4: (2.0, 4.0), 8: (8.0, 1.0)}
    rounds = rounds_of({4: 1.0, 8: 3.0}, {4: 1.0, 8: 3.0}, busy=busy)
    assert compare(rounds, 8, 4, "stage", 0.01).ratio == pytest.approx(0.5)
    assert compare(rounds, 8, 4, "pipeline", 0.01).ratio == pytest.approx(3.0)


def test_relative_goes_through_a_chain() -> None:
    rounds = rounds_of(
        *({1: 1.0, 2: s} for s in (1.9, 2.0, 2.1)), *({2: 1.0, 4: s} for s in (1.4, 1.5, 1.6)), {16: 1.0, 32: 1.0}
    )
    known = relative(rounds, "pipeline", 4)
    assert sorted(known) == [1, 2, 4]
    assert known[4].ratio == 1.0
    assert known[1].ratio == pytest.approx(1 / 3, rel=0.01)
    near, far = compare(rounds, 2, 4, "pipeline", 0.01), compare(rounds, 1, 2, "pipeline", 0.01)
    assert near.interval and far.interval and known[1].half_width is not None
    widths = [math.log(c.interval[1] / c.interval[0]) / 2 for c in (near, far) if c.interval]
    assert known[1].half_width == pytest.approx(math.hypot(*widths))
    assert known[1].pairs == 3


def test_relative_prefers_the_direct_meeting() -> None:
    rounds = rounds_of({1: 1.0, 2: 2.0}, {2: 1.0, 4: 2.0}, {1: 1.0, 4: 5.0})
    assert relative(rounds, "pipeline", 1)[4].ratio == pytest.approx(5.0)


def test_two_visits_in_a_round_are_averaged() -> None:
    entry = rounds_of({4: 1.0, 8: 1.0})[0].blocks + rounds_of({8: 4.0, 4: 1.0})[0].blocks
    comparison = compare([Round(blocks=entry)], 8, 4, "pipeline", 0.01)
    assert (comparison.ratio, comparison.rounds) == (pytest.approx(2.0), 1)


def test_relative_takes_the_shortest_chain() -> None:
    """From 1 to 5: through 2 in two links (6x), or through 3 and 4 in three (which here say 200x)."""
    rounds = rounds_of({1: 1.0, 3: 2.0}, {3: 1.0, 4: 10.0}, {4: 1.0, 5: 10.0}, {1: 1.0, 2: 2.0}, {2: 1.0, 5: 3.0})
    assert relative(rounds, "pipeline", 1)[5].ratio == pytest.approx(6.0)


def test_drift_is_what_moved_both_values_between_their_rounds() -> None:
    steady = rounds_of({1: 10, 2: 20}, {1: 10, 2: 20})
    assert drift(steady, 1, 2) == 1
    both = rounds_of({1: 10, 2: 20}, {1: 5, 2: 8})
    assert drift(both, 1, 2) == pytest.approx(2)
    one = rounds_of({1: 10, 2: 20}, {1: 10, 2: 4})
    assert drift(one, 1, 2) == 1, "noise of one value is not the machine's speed"
    assert drift(rounds_of({1: 10}, {2: 5}), 1, 2) == 1, "no round holds both"
