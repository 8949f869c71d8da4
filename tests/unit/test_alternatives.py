from typing import Any

import pytest
from fake_costs import GIB, FakeCosts, layer, peaks, spec_of

from chunktune.alternatives import advice, alternatives, changed, sentence, with_alternatives
from chunktune.costs import Setting
from chunktune.errors import UsageError
from chunktune.results import Alternative, Record, Verdict
from chunktune.spec import Spec
from chunktune.whatif import Engine


def engine(**costs: Any) -> Engine:
    return Engine(FakeCosts(**costs), None, peaks)


def verdict_of(spec: Spec, by: Engine) -> Verdict:
    verdict = by.predict(spec).verdict
    assert verdict is not None
    return verdict


def found(spec: Spec, by: Engine | None = None) -> dict[str, Alternative]:
    asked = by or engine()
    return {one.change: one for one in alternatives(spec, verdict_of(spec, asked), asked.predict)}


MEMORY_BOUND = {
    "batch": {"mini_batch": None, "micro_batch": 4},
    "device": {"memory": 8 * GIB, "headroom": 0.0},
    "model": {"layers": 8},
}


def test_memory_wants_recomputation_or_more_stages() -> None:
    made = found(spec_of(**MEMORY_BOUND))
    assert list(made) == ['pipeline.recompute = "full"', "8 stages"]
    recomputed, spread = made.values()
    assert recomputed.settings == {"pipeline.recompute": "full"} and recomputed.devices == 4
    assert recomputed.chunks > 16 and recomputed.peak_bytes == GIB // 2 and recomputed.fits is True
    assert (spread.devices, spread.chunks, spread.peak_bytes, spread.peak_rank) == (8, 32, 8 * GIB, 0)


def test_shares_are_against_the_same_engine_s_prediction_of_the_choice() -> None:
    spec, by = spec_of(**MEMORY_BOUND), engine()
    verdict = verdict_of(spec, by)
    now = next(trial for trial in by.predict(spec).trials if trial.chunks == verdict.chunks)
    for one in found(spec, by).values():
        assert one.share == pytest.approx(one.throughput_samples_per_s / (now.throughput_samples_per_s or 0))


def test_the_share_is_of_the_choice_even_where_the_engine_would_choose_another_m() -> None:
    spec, by = spec_of(device={"memory": 40 * GIB}), engine()
    chosen_otherwise = verdict_of(spec, by).model_copy(update={"chunks": 2})
    batch = next(one for one in alternatives(spec, chosen_otherwise, by.predict) if one.change == "mini_batch = 128")
    at_two = by.predict(spec_of(batch={"chunks": [2]})).trials[0].throughput_samples_per_s
    assert at_two is not None and batch.share == pytest.approx(batch.throughput_samples_per_s / at_two)


def test_a_memory_floor_is_answered_too() -> None:
    spec = spec_of(device={"memory": 4 * GIB, "headroom": 0.0}, pipeline={"recompute": "full"})
    asked = engine()
    verdict = verdict_of(spec, asked)
    assert verdict.floor is not None and verdict.floor.limit == "memory"
    assert "8 stages" in found(spec, asked) and 'pipeline.recompute = "full"' not in found(spec, asked)


def test_nothing_feasible_is_answered_without_a_share() -> None:
    made = found(spec_of(device={"memory": 4 * GIB, "headroom": 0.0}))
    assert made['pipeline.recompute = "full"'].share is None
    assert made["8 stages"].fits is True


def test_where_neither_helps_memory_both_may() -> None:
    def needs_both(setting: Setting, layers: object, chunks: int, micro_batch: int) -> tuple[int, ...]:
        enough = setting.stages == 8 and setting.spec.pipeline.recompute == "full"
        return (GIB if enough else 99 * GIB,) * setting.stages

    made = found(spec_of(), Engine(FakeCosts(), None, needs_both))
    assert list(made) == ['pipeline.recompute = "full" and 8 stages']


def test_throughput_wants_fewer_stages_more_samples_or_another_schedule() -> None:
    made = found(spec_of(device={"memory": 40 * GIB}))
    replicas, batch = made["2 stages in 2 replicas of mini_batch = 32 each"], made["mini_batch = 128"]
    assert replicas.settings == {"pipeline.stages": 2, "batch.mini_batch": 32}
    assert (replicas.replicas, replicas.devices, replicas.mini_batch) == (2, 4, 32)
    assert batch.mini_batch == 128 and (batch.share or 0) > 1
    one_pipeline = engine().predict(spec_of(pipeline={"stages": 2}, batch={"mini_batch": 32}))
    best = max(trial.throughput_samples_per_s or 0 for trial in one_pipeline.trials)
    assert replicas.throughput_samples_per_s == pytest.approx(2 * best, rel=0.01)
    schedules = [change for change in made if change.startswith("schedule ")]
    assert "schedule 1f1b" in schedules and "schedule gpipe" not in schedules
    assert made["schedule zbv-zero-bubble"].settings["pipeline.virtual_stages"] is None


def test_the_illegal_and_the_unfit_are_left_out() -> None:
    few_layers = spec_of(**{**MEMORY_BOUND, "model": {"layers": 4}})
    assert list(found(few_layers, engine(known=(layer(count=4),)))) == ['pipeline.recompute = "full"']
    odd = found(spec_of(pipeline={"stages": 3}, batch={"mini_batch": 63}))
    assert not any("replicas" in change for change in odd)
    one = found(spec_of(pipeline={"stages": 1}))
    assert not any("replicas" in change for change in one)


def test_written_counts_are_given_up_where_the_parts_change() -> None:
    made = found(spec_of(pipeline={"partition": [2, 2, 2, 2]}))
    assert made["2 stages in 2 replicas of mini_batch = 32 each"].settings["pipeline.partition"] == "parameters"


@pytest.mark.parametrize("limit", ["batch", "range", "schedule", "plateau", "budget", "failed"])
def test_other_limits_have_none(limit: str) -> None:
    spec, by = spec_of(), engine()
    verdict = verdict_of(spec, by).model_copy(update={"limit": limit, "floor": None})
    assert alternatives(spec, verdict, by.predict) == ()


def test_without_k_there_are_none() -> None:
    spec, by = spec_of(), engine()
    assert alternatives(spec_of(pipeline={"stages": None}), verdict_of(spec, by), by.predict) == ()


# --- advice


def test_the_verdict_comes_back_with_alternatives_and_sentences() -> None:
    spec, by = spec_of(**MEMORY_BOUND), engine()
    verdict = verdict_of(spec, by)
    made = with_alternatives(spec, verdict, by.predict)
    assert len(made.alternatives) == 2 and made.advice[: len(verdict.advice)] == verdict.advice
    first = made.advice[len(verdict.advice)]
    assert first.startswith('With pipeline.recompute = "full" the prediction is M = ')
    assert "samples/s" in first and "rank 0 peaking at 512 MiB of 8.00 GiB usable" in first and "basis: given" in first
    assert " less than predicted for the choice as it is" in first
    assert "on 8 devices" in made.advice[-1]


@pytest.mark.parametrize("error", [UsageError("no"), ValueError("a bug"), KeyError("x")])
def test_no_error_of_the_engine_loses_the_verdict(error: Exception) -> None:
    def broken(spec: Spec) -> Record:
        raise error

    verdict = verdict_of(spec_of(), engine())
    made = with_alternatives(spec_of(), verdict, broken)
    assert made.advice == verdict.advice and made.alternatives == ()


def test_an_engine_that_cannot_say_gives_none() -> None:
    verdict = verdict_of(spec_of(), engine())
    assert alternatives(spec_of(), verdict, lambda spec: None) == ()


def one_of(change: str, share: float | None, **fields: Any) -> Alternative:
    return Alternative(
        **{
            **{"change": change, "settings": {}, "devices": 4, "chunks": 8, "micro_batch": 4, "mini_batch": 32},
            **{"throughput_samples_per_s": 100.0, "share": share, "basis": "measured"},
            **fields,
        }
    )


def test_only_what_improves_is_worth_a_sentence_and_four_at_most() -> None:
    made = [one_of(f"change {share}", share) for share in (0.5, 1.001, 1.1, 1.2, 1.3, 1.4, 1.5)]
    told = advice(made, answering_memory=False)
    assert [text.split(" the ")[0] for text in told] == [f"With change {share}" for share in (1.5, 1.4, 1.3, 1.2)]


def test_what_answers_memory_comes_first_even_if_slower() -> None:
    made = [one_of("schedule x", 1.5), one_of("more", 0.7, settings={"pipeline.recompute": "full"})]
    assert [text.split(" the ")[0] for text in advice(made, answering_memory=True)] == ["With more", "With schedule x"]
    assert len(advice(made, answering_memory=False)) == 1


def test_replicas_say_what_is_left_out() -> None:
    text = sentence(one_of("2 stages in 2 replicas", 1.2, replicas=2, settings={"pipeline.stages": 2}))
    assert "on 4 devices" in text and "20% more" in text and "exchange is left out" in text


def test_a_change_that_makes_no_spec_is_none() -> None:
    assert changed(spec_of(), {"pipeline.stages": 0}) is None
    assert changed(spec_of(), {"batch.micro_batch": 4}) is None
    remade = changed(spec_of(), {"pipeline.stages": 8})
    assert remade is not None and remade.pipeline.stages == 8
