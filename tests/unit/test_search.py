"""What the search asks of the runner, and when it stops."""

from __future__ import annotations

import math

import pytest
from fake_runner import FakeRunner, fixed_b, fixed_n
from hypothesis import given, settings
from hypothesis import strategies as st

from chunktune.candidates import Candidates
from chunktune.results import State, Trial
from chunktune.search import Found, Rules, TrialLost, next_doubling_gain, search
from chunktune.stats import compare, shared_rounds
from chunktune.verdict import comparisons, decide

DIVISORS_64 = (1, 2, 4, 8, 16, 32, 64)
DIVISORS_60 = (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60)


def peak_at(best: float, sharpness: float = 0.5):  # type: ignore[no-untyped-def]
    """A single-peaked speed on a log scale."""
    return lambda chunks: 100 / (1 + sharpness * math.log2(chunks / best) ** 2)


def pipeline_of(stages: int):  # type: ignore[no-untyped-def]
    """With b fixed: T = d (M + K - 1), samples/s of M."""
    return lambda chunks: chunks / (chunks + stages - 1)


def states(found: Found) -> dict[int, State]:
    return {trial.chunks: trial.state for trial in found.trials}


# --- climb


def test_every_rung_is_tried_ascending_while_throughput_rises() -> None:
    runner = FakeRunner(fixed_n(DIVISORS_64), peak_at(64))
    found = search(runner.candidates, runner, Rules())
    assert runner.tried == list(DIVISORS_64)
    assert states(found) == dict.fromkeys(DIVISORS_64, "ok")


@pytest.mark.parametrize(("patience", "last"), [(0, 16), (1, 32), (2, 64)])
def test_climb_passes_a_fall_for_patience_further_values(patience: int, last: int) -> None:
    runner = FakeRunner(fixed_n(DIVISORS_64), peak_at(8))
    found = search(runner.candidates, runner, Rules(patience=patience))
    assert max(runner.tried) == last
    skipped = [trial for trial in found.trials if trial.state == "skipped"]
    assert [trial.chunks for trial in skipped] == [m for m in DIVISORS_64 if m > last]
    assert all("in a row were no improvement" in (trial.reason or "") for trial in skipped)


def test_a_rise_in_between_starts_patience_anew() -> None:
    speed = {1: 10, 2: 20, 4: 15, 8: 30, 16: 25, 32: 35, 64: 30}
    runner = FakeRunner(fixed_n(DIVISORS_64), speed)
    search(runner.candidates, runner, Rules(patience=1))
    assert max(runner.tried) == 64


def test_slow_decline_is_caught_because_all_are_compared_with_the_best() -> None:
    """Each step down is within the tolerance of the one before; against the best they add up."""
    speed = {m: 100 * 0.993**i for i, m in enumerate(DIVISORS_64)}
    runner = FakeRunner(fixed_n(DIVISORS_64), speed, noise=1e-5)
    search(runner.candidates, runner, Rules(patience=1))
    # 2 is 0.7 % down, not slower; 4 and 8 are 1.4 % and 2.1 % down.
    assert runner.tried == [1, 2, 4, 8]


def test_challenger_is_compared_with_the_best_so_far_in_growing_batches() -> None:
    runner = FakeRunner(fixed_n((1, 2)), {1: 100, 2: 99.1}, noise=0.02, drift=0.0)
    search(runner.candidates, runner, Rules())
    assert set(runner.batches) <= {((2, 1), 3), ((1, 2), 3)}
    # The pair cannot be told apart: 12 rounds, and no more in the joint comparison.
    assert sum(count for _, count in runner.batches) == 12


def test_out_of_memory_below_what_fits_is_climbed_past_with_n_fixed() -> None:
    runner = FakeRunner(fixed_n(DIVISORS_64), peak_at(64), states={1: "oom", 2: "oom", 4: "oom"})
    assert states(search(runner.candidates, runner, Rules()))[64] == "ok"


def test_out_of_memory_at_the_first_ends_it_with_b_fixed() -> None:
    runner = FakeRunner(fixed_b(range(2, 65)), peak_at(64), states={2: "oom"})
    found = search(runner.candidates, runner, Rules())
    assert runner.tried == [2]
    assert "more chunks need more memory" in str(found.trials[1].reason)


def test_out_of_memory_above_what_fits_ends_the_climb() -> None:
    runner = FakeRunner(fixed_n(DIVISORS_64), peak_at(64), states={8: "oom", 16: "ok", 32: "ok"})
    search(runner.candidates, runner, Rules(patience=5))
    assert runner.tried == [1, 2, 4, 8]


@pytest.mark.parametrize(("mode", "tried"), [(fixed_n, [1, 2, 64]), (fixed_b, [1, 2])])
def test_same_error_twice_before_anything_fits_aborts(mode, tried: list[int]) -> None:  # type: ignore[no-untyped-def]
    """With N fixed the largest M, which has the smallest chunk, is asked before the sweep is given up."""
    runner = FakeRunner(
        mode(DIVISORS_64), peak_at(8), states=lambda m: "error", reasons=dict.fromkeys(DIVISORS_64, "no such key")
    )
    found = search(runner.candidates, runner, Rules(patience=9))
    assert runner.tried == tried
    assert found.aborted is not None and "no such key" in found.aborted


def test_an_error_of_large_chunks_alone_does_not_abort() -> None:
    fails = {1: "error", 2: "error"}
    runner = FakeRunner(fixed_n(DIVISORS_64), peak_at(8), states=fails, reasons=dict.fromkeys((1, 2), "too large"))
    found = search(runner.candidates, runner, Rules())
    assert found.aborted is None
    assert runner.confirmed == [8]


def test_different_errors_do_not_abort() -> None:
    runner = FakeRunner(fixed_n(DIVISORS_64), peak_at(8), states={1: "error", 2: "error"})
    assert search(runner.candidates, runner, Rules()).aborted is None
    assert runner.tried[:3] == [1, 2, 4]


def test_same_error_above_what_fits_counts_for_patience_only() -> None:
    runner = FakeRunner(fixed_n(DIVISORS_64), peak_at(64), {4: "error", 8: "error"}, reasons={4: "boom", 8: "boom"})
    found = search(runner.candidates, runner, Rules(patience=2))
    assert found.aborted is None
    assert states(found)[16] == "ok"


def test_undecided_values_count_for_patience() -> None:
    """Each may be a little better or worse than 1; none is decided, so the climb does not go on for ever."""
    runner = FakeRunner(fixed_n(DIVISORS_64), lambda m: 99.0 if m > 1 else 100.0, noise=0.02, seed=2)
    found = search(runner.candidates, runner, Rules())
    known = {c.chunks: c.outcome for c in comparisons(runner.candidates, found, Rules())}
    assert set(known.values()) == {"undecided"}
    assert max(runner.tried) == 4


def test_climb_goes_on_where_what_ended_it_is_gone() -> None:
    """4 and 8 fall against 2, which then fails its confirmation: 8 is a contender, and 16 has to be tried."""
    speed = {1: 50, 2: 100, 4: 90, 8: 89.8, 16: 60, 32: 50, 64: 40}
    runner = FakeRunner(fixed_n(DIVISORS_64), speed, unconfirmed={2: "killed"})
    search(runner.candidates, runner, Rules())
    assert runner.tried == [1, 2, 4, 8, 16]
    assert runner.confirmed == [2, 8]


# --- plateau


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("chunks", [8, 32, 128])
@pytest.mark.parametrize("growth", [2, 3])
def test_next_doubling_gain_is_exact_for_the_model(stages: int, chunks: int, growth: int) -> None:
    speed = pipeline_of(stages)
    ratio = speed(chunks * growth) / speed(chunks)
    gain = speed(2 * chunks * growth) / speed(chunks * growth) - 1
    assert next_doubling_gain(chunks * growth, chunks, ratio) == pytest.approx(gain)


def test_next_doubling_gain_at_the_ends() -> None:
    assert next_doubling_gain(8, 4, 1.2) == pytest.approx(0.2 / 1.8)  # g / (2 - g)
    assert next_doubling_gain(8, 4, 2.0) == math.inf
    assert next_doubling_gain(8, 4, 0.9) == 0.0


def test_plateau_ends_the_climb_where_the_next_doubling_gains_too_little() -> None:
    runner = FakeRunner(fixed_b(range(1, 4097)), pipeline_of(4))
    found = search(runner.candidates, runner, Rules())
    # 3 / (M + 3) / (2 M + 3) ... the first rung whose next doubling gains under 1 % is 256 (0.58 %).
    assert max(runner.tried) == 256
    assert found.plateau_gain == pytest.approx(pipeline_of(4)(512) / pipeline_of(4)(256) - 1)
    assert runner.tried == [1, 2, 4, 8, 16, 32, 64, 128, 256]


def test_plateau_takes_the_gain_that_the_interval_still_allows() -> None:
    runner = FakeRunner(fixed_b(range(1, 4097)), pipeline_of(4), noise=0.001)
    found = search(runner.candidates, runner, Rules())
    last, against = runner.tried[-1], runner.tried[-2]
    duel = [entry for entry in found.rounds if {block.chunks for block in entry.blocks} == {last, against}][:3]
    interval = compare(duel, last, against, "pipeline", 0.01).interval
    assert interval is not None
    assert found.plateau_gain == next_doubling_gain(last, against, interval[1])


def test_plateau_is_asked_with_b_fixed_only() -> None:
    runner = FakeRunner(fixed_n(DIVISORS_64), lambda m: 100 + 0.01 * m)
    assert search(runner.candidates, runner, Rules()).plateau_gain is None
    assert max(runner.tried) == 64


# --- settle


@pytest.mark.parametrize("last", [1, 2, 3, 17, 31, 32, 33, 63, 64, 100, 127])
def test_exact_last_that_fits_with_b_fixed(last: int) -> None:
    runner = FakeRunner(fixed_b(range(1, 129)), pipeline_of(8), states=lambda m: "ok" if m <= last else "oom")
    found = search(runner.candidates, runner, Rules())
    assert states(found)[last] == "ok" and states(found)[last + 1] == "oom"
    assert runner.confirmed == [last]
    assert len(runner.tried) <= 2 * 7 + 1


def test_boundary_is_found_among_legal_values_only() -> None:
    legal = [m for m in range(3, 100) if m % 3 == 0]
    runner = FakeRunner(fixed_b(legal), pipeline_of(8), states=lambda m: "ok" if m <= 40 else "oom")
    search(runner.candidates, runner, Rules())
    assert runner.confirmed == [39]
    assert 42 in runner.tried


@pytest.mark.parametrize("first", DIVISORS_60)
def test_exact_floor_with_n_fixed(first: int) -> None:
    runner = FakeRunner(fixed_n(DIVISORS_60, size=60), peak_at(60), states=lambda m: "ok" if m >= first else "oom")
    found = search(runner.candidates, runner, Rules())
    tried = states(found)
    assert tried[first] == "ok"
    below = [m for m in DIVISORS_60 if m < first]
    assert not below or tried[below[-1]] == "oom"


def test_peak_between_the_rungs_is_found() -> None:
    """The rungs of 60 are 1 2 4 10 20 60: a peak at 30 lies between two of them."""
    runner = FakeRunner(fixed_n(DIVISORS_60, size=60), peak_at(30, 2))
    assert runner.candidates.ladder == (1, 2, 4, 10, 20, 60)
    search(runner.candidates, runner, Rules())
    assert runner.confirmed == [30]


def test_edge_is_bisected_until_the_next_larger_was_tried() -> None:
    runner = FakeRunner(fixed_b(range(1, 257)), peak_at(21, 0.6))
    found = search(runner.candidates, runner, Rules())
    choice = runner.confirmed[0]
    assert states(found)[choice + 1] == "ok"
    best = max(runner.speed_of(m) for m in runner.tried)
    assert runner.speed_of(choice) >= 0.99 * best > runner.speed_of(choice + 1)


def test_few_trials_are_spent_beside_the_best() -> None:
    runner = FakeRunner(fixed_b(range(1, 1025)), peak_at(300, 0.6))
    search(runner.candidates, runner, Rules())
    assert len(runner.tried) <= 11 + 4 + 9


def test_contenders_meet_in_joint_rounds_with_the_next_larger() -> None:
    speed = {1: 50, 2: 99.5, 4: 100, 8: 99.8, 16: 80, 32: 70, 64: 60}
    runner = FakeRunner(fixed_n(DIVISORS_64), speed, noise=0.0005)
    search(runner.candidates, runner, Rules())
    assert ((2, 4, 8, 16), 3) in runner.batches
    assert runner.confirmed == [8]


def test_joint_rounds_go_on_until_decided_and_no_further() -> None:
    runner = FakeRunner(fixed_n((4, 8, 16)), {4: 100, 8: 99.1, 16: 80}, noise=0.01, seed=3, drift=0.0)
    found = search(runner.candidates, runner, Rules(max_rounds=12))
    shared = sum({4, 8} <= {block.chunks for block in entry.blocks} for entry in found.rounds)
    assert shared <= 12


def test_a_machine_that_drifts_gets_twice_the_rounds_for_what_is_undecided_only() -> None:
    undecided = FakeRunner(fixed_n((1, 2)), {1: 100, 2: 99.1}, noise=0.02, drift=0.6)
    search(undecided.candidates, undecided, Rules())
    assert sum(count for _, count in undecided.batches) == 24
    plain = FakeRunner(fixed_n((1, 2)), {1: 100, 2: 50}, noise=0.02, drift=0.6)
    search(plain.candidates, plain, Rules())
    assert sum(count for _, count in plain.batches) <= 6


def test_a_trial_cut_short_by_the_budget_ends_the_search_and_is_no_trial() -> None:
    runner = FakeRunner(fixed_n((1, 2, 4)), {1: 10, 2: 20, 4: 40}, states={4: "skipped"})
    found = search(runner.candidates, runner, Rules())
    assert found.budget_spent
    assert [trial.state for trial in found.trials] == ["ok", "ok", "skipped"]
    assert runner.confirmed == []


def test_a_confirmation_cut_short_by_the_budget_fails_nothing() -> None:
    runner = FakeRunner(fixed_n((1, 2, 4)), {1: 10, 2: 20, 4: 40}, unconfirmed={4: "skipped"})
    found = search(runner.candidates, runner, Rules())
    assert found.budget_spent and found.confirmation is None
    assert found.failed_confirmations == ()
    assert all(trial.fits for trial in found.trials)


def test_values_that_were_compared_through_others_meet_the_best_directly() -> None:
    """After the best moved from 8 to 12, both neighbours of the choice have rounds with it."""
    runner = FakeRunner(fixed_n((1, 2, 4, 8, 12, 16, 24, 48), size=48), peak_at(12, 1))
    found = search(runner.candidates, runner, Rules())
    assert runner.confirmed == [12]
    together = [{block.chunks for block in entry.blocks} for entry in found.rounds]
    assert sum({12, 16} <= values for values in together) >= 3


def test_a_single_value_is_timed_too() -> None:
    runner = FakeRunner(fixed_n([4]), {4: 10.0})
    found = search(runner.candidates, runner, Rules())
    assert runner.calls == [("trial", 4), ("rounds", (4,), 3), ("confirm", 4)]
    assert len(found.rounds) == 3


# --- losses, confirmation, budget


def test_a_value_that_dies_in_rounds_takes_that_state_and_the_search_goes_on() -> None:
    runner = FakeRunner(fixed_n(DIVISORS_64), peak_at(16), lost={4: ("killed", 1)})
    found = search(runner.candidates, runner, Rules())
    assert states(found)[4] == "killed"
    assert runner.confirmed == [16]


def test_the_best_may_die_too() -> None:
    runner = FakeRunner(fixed_n(DIVISORS_64), peak_at(16), lost={16: ("oom", 2)})
    found = search(runner.candidates, runner, Rules())
    assert states(found)[16] == "oom"
    assert runner.confirmed and runner.confirmed[0] != 16
    verdict = decide(runner.candidates, found, Rules())
    assert verdict.chunks in (8, 32)


def test_lost_trial_must_have_failed() -> None:
    trial = Trial(chunks=1, micro_batch=1, mini_batch=1, state="ok")
    with pytest.raises(ValueError, match="only a failed one can be lost"):
        TrialLost(trial)


def test_a_loss_of_a_value_that_was_not_asked_for_is_not_swallowed() -> None:
    class Confused(FakeRunner):
        def rounds(self, values, count):  # type: ignore[no-untyped-def]
            raise TrialLost(self.trial_of(64, "killed"))

    runner = Confused(fixed_n(DIVISORS_64), peak_at(4))
    with pytest.raises(TrialLost):
        search(runner.candidates, runner, Rules())


def test_failed_confirmation_falls_back_and_confirms_the_next() -> None:
    runner = FakeRunner(fixed_n(DIVISORS_64), peak_at(16), unconfirmed={16: "oom"})
    found = search(runner.candidates, runner, Rules())
    assert runner.confirmed[0] == 16 and len(runner.confirmed) == 2
    assert found.confirmation is not None and found.confirmation.chunks == runner.confirmed[1]
    assert states(found)[16] == "oom"
    assert [trial.chunks for trial in found.failed_confirmations] == [16]


def test_failed_confirmation_at_the_boundary_ends_one_below() -> None:
    runner = FakeRunner(
        fixed_b(range(1, 65)), pipeline_of(8), lambda m: "ok" if m <= 40 else "oom", unconfirmed={40: "oom"}
    )
    found = search(runner.candidates, runner, Rules())
    assert runner.confirmed == [40, 39]
    assert decide(runner.candidates, found, Rules()).limit == "memory"


def test_a_best_that_was_found_late_meets_the_other_contenders() -> None:
    """39 is tried only after 40 failed its confirmation; what is within 5 % then gets rounds with it."""
    runner = FakeRunner(
        fixed_b(range(1, 65)), pipeline_of(8), lambda m: "ok" if m <= 40 else "oom", unconfirmed={40: "oom"}
    )
    found = search(runner.candidates, runner, Rules(tolerance=0.05))
    assert runner.confirmed == [40, 39]
    near = [m for m, state in states(found).items() if state == "ok" and 32 <= m < 39]
    assert len(near) >= 2
    assert all(shared_rounds(found.rounds, m, 39) >= 3 for m in near)


def test_every_confirmation_may_fail() -> None:
    runner = FakeRunner(fixed_n((1, 2, 4)), peak_at(2), unconfirmed=dict.fromkeys((1, 2, 4), "killed"))
    found = search(runner.candidates, runner, Rules())
    assert sorted(runner.confirmed) == [1, 2, 4]
    assert found.confirmation is None
    assert decide(runner.candidates, found, Rules()).chunks is None


def test_no_confirmation_unless_wanted() -> None:
    runner = FakeRunner(fixed_n(DIVISORS_64), peak_at(16))
    assert search(runner.candidates, runner, Rules(confirm=False)).confirmation is None
    assert runner.confirmed == []


def test_spent_budget_stops_everything() -> None:
    runner = FakeRunner(fixed_n(DIVISORS_64), peak_at(16), budget_s=4.0)
    found = search(runner.candidates, runner, Rules())
    assert found.budget_spent
    assert runner.confirmed == []
    assert states(found)[64] == "skipped"
    assert "budget" in str(found.trials[-1].reason)
    # The call that overran was begun in time; none was begun after it.
    assert runner.spent_s < 4.0 + runner.trial_s


def test_no_budget_at_all() -> None:
    runner = FakeRunner(fixed_n(DIVISORS_64), peak_at(16), budget_s=0.0)
    found = search(runner.candidates, runner, Rules())
    assert runner.calls == [] and found.budget_spent
    assert set(states(found).values()) == {"skipped"}


def test_runner_that_measures_nothing_ends_the_search() -> None:
    class Idle(FakeRunner):
        def rounds(self, values, count):  # type: ignore[no-untyped-def]
            return []

    runner = Idle(fixed_n(DIVISORS_64), peak_at(16))
    assert search(runner.candidates, runner, Rules()).budget_spent


@pytest.mark.parametrize(
    ("field", "value"),
    [("tolerance", -0.1), ("tolerance", 1.0), ("patience", -1), ("min_rounds", 0), ("max_rounds", 2)],
)
def test_rules_are_checked(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=r"rounds are|is -?[0-9]"):
        Rules(**{field: value})  # type: ignore[arg-type]


# --- any machine


STATES = st.sampled_from(["ok", "ok", "ok", "ok", "oom", "killed", "timeout", "error"])


@st.composite
def runners(draw: st.DrawFn) -> FakeRunner:
    legal = sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=14)))
    make = draw(st.sampled_from([fixed_n, fixed_b]))
    above = draw(st.sampled_from(["batch", "schedule", "range"] if make is fixed_n else ["schedule", "range"]))
    candidates: Candidates = make(legal, 64, above=above, below=draw(st.sampled_from(["schedule", "range"])))
    return FakeRunner(
        candidates,
        speed={m: draw(st.floats(1, 100)) for m in legal}
        if draw(st.booleans())
        else {m: 100.0 + draw(st.floats(-1.5, 1.5)) for m in legal},
        states={m: draw(STATES) for m in legal},
        reasons={m: draw(st.sampled_from(["boom", "bang"])) for m in legal},
        lost={m: ("killed", draw(st.integers(1, 4))) for m in legal if draw(st.integers(0, 9)) == 0},
        unconfirmed={m: "oom" for m in legal if draw(st.integers(0, 4)) == 0},
        noise=draw(st.sampled_from([0.0, 0.002, 0.02, 0.3])),
        seed=draw(st.integers(0, 5)),
        budget_s=draw(st.sampled_from([1e9, 1e9, 0.0, 3.0, 20.0])),
    )


RULES = st.builds(
    Rules,
    criterion=st.sampled_from(["pipeline", "stage"]),
    tolerance=st.sampled_from([0.0, 0.01, 0.1]),
    patience=st.integers(0, 3),
    max_rounds=st.sampled_from([3, 5, 12]),
    confirm=st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(runner=runners(), rules=RULES)
def test_any_machine_gets_a_verdict_after_a_bounded_search(runner: FakeRunner, rules: Rules) -> None:
    found = search(runner.candidates, runner, rules)
    verdict = decide(runner.candidates, found, rules)
    legal = runner.candidates.legal
    assert len(runner.tried) <= len(legal)
    assert len(runner.confirmed) <= len(legal)
    # A pair takes four batches at most, and the best seldom moves.
    assert len(runner.batches) <= 8 * len(runner.tried)
    assert [trial.chunks for trial in found.trials] == sorted({trial.chunks for trial in found.trials})
    after = states(found)
    assert verdict.limit in runner_limits(runner)
    if verdict.chunks is None:
        assert "ok" not in after.values()
    else:
        assert after[verdict.chunks] == "ok"
        assert verdict.by_rule.model_dump()[rules.criterion] == verdict.chunks
        assert verdict.smallest_within_tolerance is not None
        assert verdict.smallest_within_tolerance <= verdict.chunks
    if found.confirmation is not None:
        assert found.confirmation.chunks == verdict.chunks


def runner_limits(runner: FakeRunner) -> set[str]:
    always = {"memory", "throughput", "failed", "budget", runner.candidates.above, runner.candidates.below}
    return always | ({"plateau"} if runner.candidates.mode == "micro_batch" else set())


@settings(max_examples=100, deadline=None)
@given(runner=runners(), rules=RULES)
def test_with_time_enough_the_next_larger_was_tried(runner: FakeRunner, rules: Rules) -> None:
    runner.budget_s = math.inf
    found = search(runner.candidates, runner, rules)
    verdict = decide(runner.candidates, found, rules)
    assert verdict.limit != "budget" and not found.budget_spent
    if verdict.chunks is not None and verdict.limit not in ("plateau", "batch", "range", "schedule"):
        assert verdict.next_chunks in runner.tried
        assert verdict.next_chunks == min(m for m in runner.candidates.legal if m > verdict.chunks)
    if verdict.floor is not None:
        below = [m for m in runner.candidates.legal if m < verdict.floor.chunks]
        assert not below or below[-1] in runner.tried


@settings(max_examples=60, deadline=None)
@given(runner=runners(), rules=RULES)
def test_same_answers_same_questions(runner: FakeRunner, rules: Rules) -> None:
    """A second search is given the first one's answers, in their order, and asks the same."""
    answers: list[object] = []

    class Recorder:
        def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
            def ask(*args: object) -> object:
                try:
                    answer = getattr(runner, name)(*args)
                except TrialLost as lost:
                    answer = lost
                answers.append((name, args, answer))
                if isinstance(answer, TrialLost):
                    raise answer
                return answer

            return ask

    class Replay:
        def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
            def ask(*args: object) -> object:
                asked, given_args, answer = answers.pop(0)  # type: ignore[misc]
                assert (name, args) == (asked, given_args)
                if isinstance(answer, TrialLost):
                    raise answer
                return answer

            return ask

    first = search(runner.candidates, Recorder(), rules)  # type: ignore[arg-type]
    assert search(runner.candidates, Replay(), rules) == first  # type: ignore[arg-type]
    assert answers == []
