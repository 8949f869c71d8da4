"""The gate: chunks, throughput, memory, soundness, differences; a record against itself; monotone in throughput."""

from __future__ import annotations

from typing import Any

import pytest
import sample_record as sample
from hypothesis import given
from hypothesis import strategies as st

from chunktune.gate import Conditions, Finding, baseline_refusals, check
from chunktune.gate.differences import allowable_keys, unknown_key
from chunktune.results import Comparison, Record, Trial

DEFAULTS = Conditions()
RANK = {"failed": 0, "warning": 1, "passed": 2, "noted": 3}
MIB = 2**20


def found(findings: tuple[Finding, ...]) -> dict[str, Finding]:
    assert len({finding.check for finding in findings}) == len(findings)
    return {finding.check: finding for finding in findings}


def outcomes(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {finding.check: finding.outcome for finding in findings}


def slowed(trial: Trial, factor: float) -> Trial:
    low, high = trial.step_interval_s or (0.1, 0.1)
    return trial.model_copy(
        update={
            "step_s": tuple(step * factor for step in trial.step_s),
            "step_median_s": (trial.step_median_s or 0.1) * factor,
            "step_interval_s": (low * factor, high * factor),
        }
    )


def slower(record: Record, factor: float) -> Record:
    confirmation = None if record.confirmation is None else slowed(record.confirmation, factor)
    trials = tuple(slowed(trial, factor) if trial.fits else trial for trial in record.trials)
    return record.model_copy(update={"trials": trials, "confirmation": confirmation})


def chose(chunks: int, *comparisons: Comparison, **changes: Any) -> Record:
    answer = sample.verdict("throughput", chunks=chunks, smallest_within_tolerance=chunks)
    changes = {"comparisons": comparisons, "verdict": answer, **changes}
    return sample.record(confirmation=sample.ok_trial(chunks), **changes)


# --- chunks


def test_a_record_against_itself_passes_every_check() -> None:
    record = sample.record()
    assert set(outcomes(check(record, DEFAULTS, record)).values()) == {"passed"}


def test_another_m_fails_with_how_much_slower_the_expected_one_is() -> None:
    finding = found(check(chose(8, sample.comparison(4, 8, 0.9)), DEFAULTS, sample.record()))["chunks"]
    assert (finding.outcome, finding.expected, finding.found, finding.by) == ("failed", 4, 8, 4.0)
    assert "M = 4 is slower in this record: 90% of the throughput of M = 8 [89% to 91%]" in finding.words


def test_a_plateau_does_not_make_the_gate_flap() -> None:
    record = chose(8, sample.comparison(4, 8, 0.998))
    assert outcomes(check(record, DEFAULTS, sample.record()))["chunks"] == "passed"
    by_estimate = chose(8, sample.comparison(8, 4, 0.998))  # the baseline's M is this record's best
    assert outcomes(check(by_estimate, DEFAULTS, sample.record()))["chunks"] == "passed"


def test_an_m_that_is_not_decided_slower_passes_with_a_warning() -> None:
    unsure = sample.comparison(4, 8, 0.97, outcome="undecided", interval=(0.9, 1.04))
    finding = found(check(chose(8, unsure), DEFAULTS, sample.record()))["chunks"]
    assert finding.outcome == "warning"
    assert "not decided to be slower" in finding.words


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (chose(8, trials=(sample.ok_trial(8), sample.failed_trial(4, "oom"))), "does not run in this record: oom"),
        (chose(8, trials=(sample.ok_trial(8),)), "was not tried in this record"),
        (chose(8), "was not compared with its best, M = 8"),
        (
            chose(
                8, trials=(sample.ok_trial(8),), candidates=(sample.candidates()[0].model_copy(update={"chunks": 4}),)
            ),
            "is illegal: 1f1b needs M >= K = 2",
        ),
    ],
)
def test_an_m_that_the_record_does_not_vouch_for_fails(record: Record, words: str) -> None:
    finding = found(check(record, DEFAULTS, sample.record()))["chunks"]
    assert finding.outcome == "failed"
    assert words in finding.words


@pytest.mark.parametrize("record", [sample.infeasible_record(), sample.record(verdict=None, status="interrupted")])
def test_a_record_without_a_choice_fails_and_nothing_else_is_compared(record: Record) -> None:
    for baseline in (None, sample.record()):
        findings = outcomes(check(record, DEFAULTS, baseline))
        assert findings["chunks"] == "failed"
        assert not {"throughput", "headroom", "confidence"} & set(findings)


def test_an_expected_m_needs_no_baseline() -> None:
    assert outcomes(check(sample.record(), Conditions(expect_chunks=4)))["chunks"] == "passed"
    assert outcomes(check(sample.record(), Conditions(expect_chunks=2)))["chunks"] == "failed"
    both = outcomes(check(sample.record(), Conditions(expect_chunks=2), sample.record()))
    assert (both["chunks"], both["expected chunks"]) == ("passed", "failed")


def test_without_any_condition_a_clear_complete_choice_is_asked_for() -> None:
    assert outcomes(check(sample.record(), DEFAULTS)) == dict.fromkeys(("chunks", "status", "confidence"), "passed")


# --- throughput


def test_a_clear_slowdown_fails_with_its_numbers() -> None:
    finding = found(check(slower(sample.record(), 1.25), DEFAULTS, sample.record()))["throughput"]
    assert finding.outcome == "failed"
    assert finding.ratio == pytest.approx(0.8)
    assert finding.ratio_interval == pytest.approx((0.8 * 0.99 / 1.01, 0.8 * 1.01 / 0.99))
    assert finding.expected == pytest.approx(0.95 * 32 / 0.08)
    assert finding.found == pytest.approx(32 / 0.1)
    assert "20.0% slower than the baseline [18.4% to 21.6%]" in finding.words
    assert "100 ms at M = 4 a step against 80.0 ms at M = 4, both in fresh processes" in finding.words


def test_a_slowdown_within_the_noise_of_both_is_not_called_one() -> None:
    record, baseline = slower(sample.record(), 1.06), sample.record()
    finding = found(check(record, DEFAULTS, baseline))["throughput"]
    assert finding.outcome == "warning"
    assert finding.words.endswith("not decided: within the noise of both")
    strict = found(check(record, Conditions(max_slowdown=0.01), baseline))["throughput"]
    assert strict.outcome == "failed"


def test_a_single_sample_decides_nothing() -> None:
    one = sample.ok_trial(4).model_copy(
        update={"step_s": (0.16,), "step_median_s": 0.16, "step_interval_s": (0.16, 0.16)}
    )
    record = sample.record(trials=(one,), confirmation=None)
    finding = found(check(record, DEFAULTS, sample.record()))["throughput"]
    assert (finding.outcome, finding.ratio_interval) == ("warning", None)


def test_the_confirmations_are_compared_where_both_have_one() -> None:
    slow_confirmation = slowed(sample.ok_trial(4), 2.0)
    record = sample.record(confirmation=slow_confirmation)
    assert outcomes(check(record, DEFAULTS, sample.record()))["throughput"] == "failed"
    assert outcomes(check(record, DEFAULTS, sample.record(confirmation=None)))["throughput"] == "passed"


def test_where_m_differs_the_same_m_is_compared_too() -> None:
    findings = found(check(slower(chose(8, sample.comparison(4, 8, 0.999)), 1.5), DEFAULTS, sample.record()))
    assert findings["throughput"].ratio == pytest.approx(0.08 / 0.0833 / 1.5)
    assert findings["throughput at M = 4"].ratio == pytest.approx(1 / 1.5)
    assert not findings["throughput at M = 4"].passed


@pytest.mark.parametrize("step_s", [0.0, 1e-320])
def test_a_step_that_nobody_can_have_measured_is_not_compared(step_s: float) -> None:
    odd = sample.ok_trial(4).model_copy(update={"step_median_s": step_s})
    record = sample.record(trials=(odd,), confirmation=None)
    finding = found(check(record, DEFAULTS, sample.record()))["throughput"]
    assert (finding.outcome, finding.ratio) == ("failed", None)


# --- memory


@pytest.mark.parametrize(("share", "outcome"), [(0.1, "passed"), (0.3, "failed")])
def test_headroom_is_that_of_the_fullest_rank(share: float, outcome: str) -> None:
    finding = found(check(sample.record(), Conditions(min_headroom=share)))["headroom"]
    assert finding.outcome == outcome
    assert finding.found == pytest.approx(1 - 900 / 1100)
    assert finding.words.startswith("rank 0 keeps 18.2%")


def test_by_default_the_headroom_is_that_of_the_baselines_spec() -> None:
    baseline = sample.record(spec={**sample.spec(), "device": {"headroom": 0.1}})
    assert found(check(baseline, DEFAULTS, baseline))["headroom"].expected == 0.1
    tight = sample.ok_trial(4).stages[0].model_copy(update={"peak_bytes": 1095 * MIB})
    fuller = baseline.model_copy(update={"confirmation": sample.ok_trial(4).model_copy(update={"stages": (tight,)})})
    assert outcomes(check(fuller, DEFAULTS, baseline))["headroom"] == "failed"
    assert outcomes(check(fuller, DEFAULTS, fuller))["headroom"] == "passed"
    noted = found(check(fuller, DEFAULTS, baseline))["peak against the baseline"]
    assert (noted.outcome, noted.by) == ("noted", 195.0 * MIB)


@pytest.mark.parametrize(("most_bytes", "outcome"), [(900 * MIB, "passed"), (900 * MIB - 1, "failed")])
def test_the_highest_peak_is_held_to_a_size(most_bytes: int, outcome: str) -> None:
    finding = found(check(sample.record(), Conditions(max_peak_bytes=most_bytes)))["peak"]
    assert (finding.outcome, finding.found, finding.by) == (outcome, 900 * MIB, 900.0 * MIB - most_bytes)


def test_what_is_not_known_fails_only_where_it_is_asked_for() -> None:
    unknown = sample.ok_trial(4).stages[1].model_copy(update={"peak_bytes": None, "capacity_bytes": None})
    trial = sample.ok_trial(4).model_copy(update={"stages": (sample.ok_trial(4).stages[0], unknown)})
    record = sample.record(trials=(trial,), confirmation=None)
    asked = outcomes(check(record, Conditions(min_headroom=0.0, max_peak_bytes=2**60)))
    assert (asked["headroom"], asked["peak"]) == ("failed", "failed")
    baseline = sample.record(spec={**sample.spec(), "device": {"headroom": 0.05}})
    assert outcomes(check(record, DEFAULTS, baseline))["headroom"] == "noted"


# --- sound


def test_an_unclear_choice_fails_unless_it_is_allowed() -> None:
    unclear = sample.record(
        verdict=sample.verdict("budget", confidence="unclear", confidence_reasons=("M = 8 is open",))
    )
    finding = found(check(unclear, DEFAULTS))["confidence"]
    assert (finding.outcome, finding.words) == ("failed", "M = 4 is unclear: M = 8 is open")
    assert outcomes(check(unclear, Conditions(allow_unclear=True)))["confidence"] == "warning"
    assert outcomes(check(sample.record(), DEFAULTS, unclear))["baseline"] == "warning"


@pytest.mark.parametrize("changes", [{"quick": True}, {"mode": "predicted"}, {"mode": "rehearsed"}])
def test_what_is_not_measured_in_full_fails_against_a_baseline_alone(changes: dict[str, Any]) -> None:
    record = sample.record().model_copy(update=changes)
    assert outcomes(check(record, DEFAULTS))["mode"] == "warning"
    finding = found(check(record, DEFAULTS, sample.record()))["mode"]
    assert finding.outcome == "failed"
    assert "cannot be compared" in finding.words


@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_a_sweep_that_did_not_end_fails(status: str) -> None:
    assert outcomes(check(sample.record(status=status), DEFAULTS))["status"] == "failed"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quick": True}, "a quick run"),
        ({"mode": "predicted"}, "it is predicted, not measured"),
        ({"mode": "rehearsed"}, "it is rehearsed, not measured"),
        ({"status": "interrupted"}, "its sweep is interrupted, not complete"),
        ({"verdict": None}, "it has no verdict"),
        ({"verdict": sample.infeasible_record().verdict}, "its verdict chose no M"),
        ({"trials": ()}, "it holds no step time of its own choice, M = 4"),
    ],
)
def test_what_may_be_no_baseline_is_refused_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    assert baseline_refusals(sample.record()) == ()
    assert any(reason in refusal for refusal in baseline_refusals(sample.record().model_copy(update=changes)))


# --- differences

GPU = {"kind": "cuda", "name": "NVIDIA H200", "driver": "570.1"}
CPU = {"kind": "cpu", "name": "Xeon", "cores": 2}
HERE = {"torch": "2.13.0", "cuda": None, "nccl": None, "python": "3.11.7", "devices": [CPU, CPU]}


def against(here: dict[str, Any], there: dict[str, Any], *allowed: str) -> dict[str, Finding]:
    record, baseline = sample.record(environment=here), sample.record(environment=there)
    return found(check(record, Conditions(allowed=allowed), baseline))


@pytest.mark.parametrize(
    ("key", "changes", "words"),
    [
        ("torch", {"torch": "2.14.0"}, "2.14.0 here, 2.13.0 in the baseline"),
        ("cuda", {"cuda": "12.8"}, "12.8 here, none in the baseline"),
        ("nccl", {"nccl": "2.27"}, "2.27 here"),
        ("device", {"devices": [CPU] * 4}, "4 x Xeon (2 cores) here, 2 x Xeon (2 cores) in the baseline"),
        ("device", {"devices": [{**CPU, "cores": 64}] * 2}, "2 x Xeon (64 cores) here"),
        ("device", {"devices": [GPU] * 2}, "2 x NVIDIA H200 here"),
    ],
)
def test_another_machine_or_version_is_named_and_fails_unless_allowed(
    key: str, changes: dict[str, Any], words: str
) -> None:
    finding = against({**HERE, **changes}, HERE)[key]
    assert finding.outcome == "failed"
    assert words in finding.words
    assert f"--allow-different {key} " in finding.words
    assert against({**HERE, **changes}, HERE, key)[key].outcome == "noted"


def test_a_driver_is_compared_where_both_have_it() -> None:
    there = {**HERE, "devices": [GPU]}
    assert "driver" not in against(HERE, HERE)
    assert against(there, {**there, "driver": "570.1"})["driver"].outcome == "passed"
    assert against({**there, "driver": "580.2"}, there)["driver"].outcome == "failed"
    one_sided = against(there, HERE)["driver"]
    assert (one_sided.outcome, one_sided.words) == ("noted", "not recorded in the baseline")


def test_what_nobody_asked_to_be_equal_is_a_note() -> None:
    findings = against({**HERE, "python": "3.13.1"}, HERE)
    assert (findings["python"].outcome, findings["python"].words) == ("noted", "3.13.1 here, 3.11.7 in the baseline")


def with_spec(section: str, **values: Any) -> Record:
    spec = sample.spec()
    return sample.record(spec={**spec, section: {**spec.get(section, {}), **values}})


@pytest.mark.parametrize(
    "allowed", ["pipeline.schedule", "spec.pipeline.schedule", "pipeline", "spec.pipeline", "spec"]
)
def test_a_key_of_the_spec_is_allowed_by_its_name_or_a_table_above_it(allowed: str) -> None:
    record = with_spec("pipeline", schedule="gpipe")
    refused = found(check(record, DEFAULTS, sample.record()))["spec.pipeline.schedule"]
    assert (refused.outcome, refused.expected, refused.found) == ("failed", "1f1b", "gpipe")
    assert outcomes(check(record, Conditions(allowed=(allowed,)), sample.record()))["spec.pipeline.schedule"] == "noted"
    other = with_spec("sweep", tolerance=0.02)
    assert (
        outcomes(check(other, Conditions(allowed=("pipeline",)), sample.record()))["spec.sweep.tolerance"] == "failed"
    )


def test_device_alone_is_the_machine_and_not_the_table_of_the_spec() -> None:
    record = with_spec("device", memory=2**30)
    allowed = outcomes(check(record, Conditions(allowed=("device",)), sample.record()))
    assert allowed["spec.device.memory"] == "failed"
    allowed = outcomes(check(record, Conditions(allowed=("spec.device",)), sample.record()))
    assert allowed["spec.device.memory"] == "noted"


@pytest.mark.parametrize(("section", "values"), [("sweep", {"budget": 90.0}), ("hardware", {"name": "h100-80gb"})])
def test_what_decides_nothing_may_differ(section: str, values: dict[str, Any]) -> None:
    assert outcomes(check(with_spec(section, **values), DEFAULTS, sample.record()))["spec"] == "passed"


def test_a_key_that_an_older_chunktune_did_not_have_counts_with_its_default() -> None:
    assert outcomes(check(with_spec("training", seed=0), DEFAULTS, sample.record()))["spec"] == "passed"
    assert outcomes(check(with_spec("training", seed=1), DEFAULTS, sample.record()))["spec.training.seed"] == "failed"


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ([1, 2], [1, 2], True),
        ([1, 2], [2, 1], False),
        (1, True, False),
        (1, 1.0, True),
        ({}, None, False),
        ([1], 1, False),
    ],
)
def test_values_are_equal_as_json_has_it(one: object, other: object, equal: bool) -> None:
    findings = check(with_spec("model", extra=one), DEFAULTS, with_spec("model", extra=other))
    assert ("spec" in outcomes(findings)) is equal


def test_what_is_suggested_is_taken() -> None:
    for key in allowable_keys():
        assert unknown_key(key) is None
    findings = check(with_spec("model", extra=1), DEFAULTS, with_spec("model", extra=2))
    assert found(findings)["spec.model.extra"].words.endswith("--allow-different spec lets it pass")


def test_a_spec_that_is_nested_without_end_is_compared_all_the_same() -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"a": deep}
    assert outcomes(check(with_spec("model", arguments=deep), DEFAULTS, sample.record()))


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("torch", None),
        ("spec", None),
        ("pipeline.stages", None),
        ("spec.device", None),
        ("model.arguments.width", None),
        ("torhc", "torch"),
        ("pipeline.stage", "pipeline.stages"),
        ("mini_batch", "batch.mini_batch"),
        ("stages", "pipeline.stages"),
        ("", ""),
        ("qqqqq", ""),
    ],
)
def test_an_unknown_key_has_a_nearest_one(key: str, nearest: str | None) -> None:
    assert unknown_key(key) == nearest


# --- properties

RECORDS = st.sampled_from([record for record in sample.every_record() if not baseline_refusals(record)])
FACTORS = st.floats(0.5, 3.0)
CONDITIONS = st.builds(Conditions, max_slowdown=st.floats(0, 0.9), min_headroom=st.none())


@given(RECORDS, FACTORS)
def test_a_record_that_may_be_a_baseline_passes_against_itself(record: Record, factor: float) -> None:
    mine = slower(record, factor)
    assert all(finding.passed for finding in check(mine, DEFAULTS, mine))


@given(RECORDS, FACTORS, st.floats(1.0, 3.0), CONDITIONS)
def test_worse_throughput_never_turns_a_fail_into_a_pass(
    record: Record, factor: float, further: float, conditions: Conditions
) -> None:
    before = outcomes(check(slower(record, factor), conditions, record))
    after = outcomes(check(slower(record, factor * further), conditions, record))
    assert set(before) == set(after)
    assert all(RANK[after[key]] <= RANK[before[key]] for key in before)


@given(RECORDS, RECORDS, CONDITIONS)
def test_failed_checks_come_first(record: Record, baseline: Record, conditions: Conditions) -> None:
    ranks = [RANK[finding.outcome] for finding in check(record, conditions, baseline)]
    assert ranks == sorted(ranks)
