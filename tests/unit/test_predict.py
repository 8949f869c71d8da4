"""Steps foretold from operations and overheads: what is fitted, from what, and how little noise may do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chunktune import theory
from chunktune.predict import (
    Operations,
    Overhead,
    Shape,
    backward_s,
    durations,
    fit_overhead,
    ideal_bubble,
    play,
    played,
    predict,
    simulated,
)
from chunktune.results import PartSeconds, Predicted, Trial
from chunktune.schedules import SCHEDULES, admits, parts_of_rank
from chunktune.simulated_trial import step_figures

SHAPES = [Shape(name, 4, row.default_virtual_stages) for name, row in SCHEDULES.items()]
TRUE = Overhead(overhead_s=1e-3, transfer_s_per_byte=0.5e-9, constant_s=2e-3)
REHEARSED_S = 4e-4


def operations(shape: Shape, micro_batch: int = 1) -> Operations:
    parts = range(shape.stages * shape.virtual_stages)
    return Operations(
        parts=tuple(
            PartSeconds(part=part, forward_s=0.01 * micro_batch, backward_s=0.02 * micro_batch) for part in parts
        ),
        update_s=(0.001,) * shape.stages,
        boundary_bytes=(100_000 * micro_batch,) * (len(parts) - 1),
    )


def measured(shape: Shape, chunks: int, micro_batch: int, truth: Overhead = TRUE, factor: float = 1.0) -> Trial:
    """A trial whose step is what the truth gives, times a factor."""
    known = operations(shape, micro_batch)
    step_s = factor * (simulated(shape, chunks, known, truth).step_s + truth.constant_s)
    predicted = Predicted(
        step_s=None,
        peak_bytes=(),
        parts=known.parts,
        update_s=known.update_s,
        boundary_bytes=known.boundary_bytes,
        rehearsed_overhead_s=REHEARSED_S,
    )
    return Trial(
        chunks=chunks,
        micro_batch=micro_batch,
        mini_batch=chunks * micro_batch,
        state="ok",
        step_s=(step_s, step_s),
        step_median_s=step_s,
        predicted=predicted,
    )


def foretold(shape: Shape, chunks: int, micro_batch: int, trials: list[Trial]) -> Predicted:
    return predict(shape, chunks, operations(shape, micro_batch), [1] * shape.stages, trials, REHEARSED_S)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.schedule)
def test_a_few_trials_foretell_the_next_within_a_percent(shape: Shape) -> None:
    trials = [measured(shape, chunks, 64 // chunks) for chunks in (8, 16, 32)]
    truth = measured(shape, 64, 1)
    found = foretold(shape, 64, 1, trials)
    assert found.fitted_from == (8, 16, 32)
    assert found.step_s == pytest.approx(truth.step_median_s, rel=0.01)
    bare_s = simulated(shape, 64, operations(shape), Overhead()).step_s
    assert truth.step_median_s is not None
    assert bare_s < 0.97 * truth.step_median_s, "without overheads it would be low by more than what is allowed"


def test_a_prediction_never_rests_on_its_own_m() -> None:
    shape = SHAPES[0]
    wrong = measured(shape, 16, 4, factor=3.0)
    alone = foretold(shape, 16, 4, [])
    assert foretold(shape, 16, 4, [wrong]) == alone
    assert alone.fitted_from == ()


def test_without_trials_the_overhead_is_a_few_times_what_the_rehearsal_took() -> None:
    found = foretold(SHAPES[0], 16, 4, [])
    assert found.overhead_s is not None
    assert REHEARSED_S <= found.overhead_s <= 5 * REHEARSED_S
    assert (found.constant_s, found.transfer_s_per_byte) == (0, 0)


@pytest.mark.parametrize("factor", [0.85, 1.15])
def test_a_disturbed_trial_of_few_operations_moves_the_next_by_little(factor: float) -> None:
    shape = Shape("gpipe", 2, 1)
    disturbed = measured(shape, 2, 64, factor=factor)
    truth = measured(shape, 64, 2)
    assert foretold(shape, 64, 2, [disturbed]).step_s == pytest.approx(truth.step_median_s, rel=0.1)


def in_company(shape: Shape, chunks: int, micro_batch: int, share: float) -> Trial:
    """A trial in which every operation took longer than in the rehearsal by this share."""
    trial = measured(shape, chunks, micro_batch, replace(TRUE, contention=share))
    step_s = trial.step_median_s
    costs = durations(shape, operations(shape, micro_batch), replace(TRUE, contention=share))
    assert step_s is not None
    figures = step_figures(
        shape, chunks, trial.mini_batch, costs, play(shape, chunks, costs), step_s, (), [(None, None)] * 4
    )
    return Trial.model_validate({**dict(trial), "stages": figures["stages"]})


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.schedule)
def test_operations_that_take_longer_among_peers_do_so_at_the_next_m_too(shape: Shape) -> None:
    trials = [in_company(shape, chunks, 64 // chunks, 0.2) for chunks in (8, 16, 32)]
    truth = in_company(shape, 64, 1, 0.2)
    found = foretold(shape, 64, 1, trials)
    assert found.contention == pytest.approx(0.2 * 3 / 4, rel=0.05)  # one trial's weight speaks for none
    assert found.step_s == pytest.approx(truth.step_median_s, rel=0.05)
    costs = played(shape, found)
    assert costs is not None
    assert play(shape, 64, costs).step_s + (found.constant_s or 0) == pytest.approx(found.step_s)


def test_ranks_that_were_busy_for_less_than_rehearsed_show_no_contention() -> None:
    shape = SHAPES[0]
    disturbed_rehearsals = [in_company(shape, chunks, 64 // chunks, -0.2) for chunks in (2, 4, 8)]
    assert fit_overhead(shape, disturbed_rehearsals, REHEARSED_S).contention == 0


def test_no_overhead_is_ever_below_zero() -> None:
    shape = SHAPES[0]
    fast = [measured(shape, chunks, 64 // chunks, factor=0.9) for chunks in (2, 4, 8, 16)]
    found = fit_overhead(shape, fast, REHEARSED_S)
    assert min(found.overhead_s, found.transfer_s_per_byte, found.constant_s) >= 0


def test_trials_that_failed_or_come_from_an_old_record_say_nothing() -> None:
    shape = SHAPES[0]
    good = measured(shape, 8, 8)
    failed = Trial(chunks=16, micro_batch=4, mini_batch=64, state="oom")
    old = good.model_copy(update={"chunks": 32, "predicted": Predicted(step_s=None, peak_bytes=(1, 2))})
    assert fit_overhead(shape, [good, failed, old], REHEARSED_S) == fit_overhead(shape, [good], REHEARSED_S)
    assert fit_overhead(shape, [failed, old]).fitted_from == ()


def test_a_backward_is_the_sum_of_its_halves_where_only_these_ran() -> None:
    halves = PartSeconds(part=0, forward_s=1.0, input_s=2.0, weight_s=3.0)
    assert backward_s(halves) == 5.0
    assert backward_s(halves.model_copy(update={"backward_s": 4.0})) == 4.0


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.schedule)
def test_every_schedule_has_an_ideal_bubble(shape: Shape) -> None:
    values = [
        ideal_bubble(shape, chunks) for chunks in (8, 16, 32) if admits(shape.schedule, 4, chunks, shape.virtual_stages)
    ]
    assert all(0 <= value < theory.bubble(4, 8) + 1e-9 for value in values)
    assert values == sorted(values, reverse=True)


def test_the_ideal_bubble_of_one_rank_is_none() -> None:
    assert ideal_bubble(Shape("gpipe", 1, 1), 3) == pytest.approx(0)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.schedule)
def test_a_simulated_step_says_all_that_a_measured_one_does(shape: Shape) -> None:
    found = foretold(shape, 16, 2, [])
    costs = played(shape, found)
    assert costs is not None and found.step_s is not None
    step = play(shape, 16, costs)
    figures = step_figures(shape, 16, 32, costs, step, found.step_s, (1, 2, 3, 4), [(100, 90)] * 4)
    trial = Trial.model_validate({"chunks": 16, "micro_batch": 2, "mini_batch": 32, "state": "ok", **figures})
    assert trial.fits and trial.step_median_s == found.step_s
    assert trial.throughput_samples_per_s == pytest.approx(32 / trial.step_median_s)
    assert [stage.parts for stage in trial.stages] == [
        parts_of_rank(shape.schedule, 4, shape.virtual_stages, rank) for rank in range(4)
    ]
    work_s = 16 * shape.virtual_stages * 2 * 0.03 + 0.001
    assert all(stage.busy_s == pytest.approx(work_s) for stage in trial.stages)
    assert trial.bubble is not None and trial.bubble.measured == pytest.approx(1 - work_s / trial.step_median_s)
    assert [stage.peak_bytes for stage in trial.stages] == [1, 2, 3, 4]


def test_bytes_cost_only_between_ranks() -> None:
    shape = Shape("zbv-zero-bubble", 2, 2)  # part 1 hands to part 2 on the same rank
    slow = replace(Overhead(), transfer_s_per_byte=1e-6)
    assert [cost > 0 for cost in durations(shape, operations(shape), slow).transfer_s] == [True, False, True]
