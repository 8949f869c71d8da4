import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_costs import GIB, FakeCosts, layer, peaks, spec_of

from chunktune import theory
from chunktune.candidates import enumerate_candidates
from chunktune.errors import SpecError, UsageError
from chunktune.report.terminal import render
from chunktune.report.trials import trial_table
from chunktune.report.whatif import CSV_COLUMNS, calibration_lines, grid_csv, grid_json, grid_markdown, grid_text
from chunktune.results import PartSeconds, Record, Trial
from chunktune.spec import Resolved, Spec, resolve, tables_of_record
from chunktune.strict import validated
from chunktune.whatif import Engine, settle
from chunktune.whatif.calibration import foretold, mean_and_worst
from chunktune.whatif.engine import basis_of
from chunktune.whatif.grid import Grid, Row, full_key, memory_word, parse_vary, predict_grid
from chunktune.whatif.runner import short_of
from chunktune.whatif.setting import Room, same_setting


def no_peaks(*_: object) -> tuple[int, ...]:
    return ()


def engine(source: FakeCosts | None = None, record: Record | None = None, memory: bool = False) -> Engine:
    return Engine(source or FakeCosts(), record, peaks if memory else no_peaks)


def trial_at(record: Record, chunks: int) -> Trial:
    return next(trial for trial in record.trials if trial.chunks == chunks)


# --- the engine


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_step_is_the_closed_form_and_the_choice_the_closed_forms_best(stages: int, schedule: str) -> None:
    spec = spec_of(pipeline={"stages": stages, "schedule": schedule})
    record = engine().predict(spec)
    per_stage = 8 // stages
    for trial in (each for each in record.trials if each.state == "ok"):
        expected = theory.sleep_step_s(stages, trial.chunks, 64, 0.001 * per_stage, 0.001 * per_stage)
        assert trial.step_median_s == pytest.approx(expected, rel=1e-9)
        assert trial.throughput_samples_per_s == pytest.approx(64 / expected)
        assert trial.bubble is not None and trial.bubble.ideal is not None
        assert trial.bubble.measured == pytest.approx(trial.bubble.ideal)
    legal = [m for m in (1, 2, 4, 8, 16, 32, 64) if schedule == "gpipe" or m >= stages]
    best = min(theory.sleep_step_s(stages, m, 64, 0.001, 0.001) for m in legal)
    near = [m for m in legal if theory.sleep_step_s(stages, m, 64, 0.001, 0.001) <= best / 0.99]
    assert record.verdict is not None and record.verdict.chunks == max(near)


def test_a_prediction_is_a_whole_record_that_any_reader_takes() -> None:
    record = engine().predict(spec_of(), {"pipeline.stages": "flag --stages"})
    assert (record.mode, record.status, record.layers_per_part) == ("predicted", "complete", (2, 2, 2, 2))
    assert record.spec["pipeline"]["virtual_stages"] == 1
    assert record.environment["costs"] == "a table of the test"
    assert record.sources == {"pipeline.stages": "flag --stages"}
    assert record.warnings.count("basis given") == 1
    assert validated(Record, record.model_dump(mode="json"), "the record") == record


def test_equal_rounds_decide_every_comparison() -> None:
    record = engine().predict(spec_of())
    assert record.verdict is not None and record.verdict.confidence == "clear"
    assert all(comparison.decided for comparison in record.comparisons)
    assert all(comparison.interval == (comparison.ratio, comparison.ratio) for comparison in record.comparisons)


def test_the_stages_hold_what_a_sweep_reports() -> None:
    stage = trial_at(engine().predict(spec_of()), 4).stages[1]
    forward = 2 * (0.001 + 0.001 * 16)
    assert (stage.rank, stage.parts) == (1, (1,))
    assert stage.forward_s == pytest.approx(forward)
    assert stage.backward_s == pytest.approx(2 * forward)
    assert stage.busy_s == pytest.approx(4 * 3 * forward)
    assert stage.samples_per_s == pytest.approx(64 / stage.busy_s)
    assert (stage.peak_bytes, stage.capacity_bytes, stage.budget_bytes) == (None, 10 * GIB, int(9 * GIB))


def test_a_split_backward_is_the_sum_of_its_halves() -> None:
    record = engine().predict(spec_of(pipeline={"schedule": "zbv-zero-bubble", "stages": 2}))
    stage = trial_at(record, 4).stages[0]
    assert stage.parts == (0, 3)
    assert stage.backward_s == pytest.approx(2 * stage.forward_s)


def test_the_constant_of_a_step_is_idle_time() -> None:
    bare, laden = engine().predict(spec_of()), engine(FakeCosts(constant_s=0.05)).predict(spec_of())
    before, after = trial_at(bare, 4), trial_at(laden, 4)
    assert before.step_median_s is not None and after.step_median_s == pytest.approx(before.step_median_s + 0.05)
    assert after.stages[0].busy_s == before.stages[0].busy_s
    assert after.stages[0].idle_share > before.stages[0].idle_share


def test_costs_of_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="0 seconds"):
        engine(FakeCosts(a_s=0.0, c_s=0.0)).predict(spec_of())


def test_without_k_the_error_names_the_flag() -> None:
    with pytest.raises(UsageError, match="--stages"):
        engine().predict(spec_of(pipeline={"stages": None}))


def test_what_the_source_cannot_say_is_raised() -> None:
    with pytest.raises(UsageError, match="b = 16 is not known"):
        engine(FakeCosts(refused=(16,))).predict(spec_of())


# --- memory


def test_a_peak_within_the_headroom_is_tight_and_no_contender() -> None:
    spec = spec_of(batch={"mini_batch": None, "micro_batch": 4}, device={"memory": 8 * GIB, "headroom": 0.1})
    record = engine(memory=True).predict(spec)
    words = {trial.chunks: memory_word(trial) for trial in record.trials if trial.state != "skipped"}
    assert words[14] == "FITS" and words[15] == words[16] == "TIGHT"
    verdict = record.verdict
    assert verdict is not None and (verdict.chunks, verdict.limit, verdict.next_chunks) == (14, "memory", 15)
    shortage = trial_at(record, 16).shortage
    assert shortage is not None and shortage.where == "prediction" and shortage.needed_bytes == 8 * GIB


@pytest.mark.parametrize(
    ("peak", "word"), [(9 * GIB, None), (9 * GIB + 1, True), (10 * GIB, True), (10 * GIB + 1, False)]
)
def test_the_edges_of_fits_tight_and_oom(peak: int, word: bool | None) -> None:
    room = Room.of(spec_of(), FakeCosts())
    shortage = short_of((peak, 0), room)
    assert word is None if shortage is None else shortage.within_capacity is word


def test_the_reserve_is_never_to_be_had() -> None:
    room = Room.of(spec_of(device={"reserve": GIB}), FakeCosts())
    assert (room.capacity_bytes, room.budget_bytes, room.limit_bytes) == (10 * GIB, 8 * GIB, 9 * GIB)


def test_the_device_says_the_capacity_where_the_spec_does_not() -> None:
    spec = spec_of(device={"memory": "auto"})
    assert Room.of(spec, FakeCosts(capacity=20 * GIB)).capacity_bytes == 20 * GIB
    unknown = engine(memory=True).predict(spec)
    assert all(trial.fits for trial in unknown.trials if trial.state != "skipped")
    assert any("no capacity is known" in warning for warning in unknown.warnings)
    assert "FITS" not in trial_table(unknown)


def test_nothing_fits_says_by_how_much_and_how_tight() -> None:
    record = engine(memory=True).predict(spec_of(device={"memory": GIB}))
    assert record.verdict is not None and record.verdict.chunks is None and record.verdict.limit == "memory"
    text = render(record)
    assert "OOM" in text and "rank 0 needs 8.00 GiB and may use 922 MiB" in text
    with_tight = render(engine(memory=True).predict(spec_of(device={"memory": 8 * GIB})))
    assert "TIGHT: the device has it, headroom keeps it free" in with_tight


# --- parts


def cut(spec: Spec, source: FakeCosts, record: Record | None = None) -> tuple[tuple[int, ...], tuple[str, ...]]:
    stages = spec.pipeline.stages or 4
    setting, notes = settle(spec, stages, enumerate_candidates(spec, stages), source, record)
    return setting.counts, notes


def test_layers_are_cut_by_parameters_without_the_loss() -> None:
    source = FakeCosts(known=(layer(30), layer(10, count=6), layer(30), layer(5, loss=True)))
    assert cut(spec_of(), source)[0] == (1, 3, 3, 1)
    assert cut(spec_of(pipeline={"partition": "uniform"}), source)[0] == (2, 2, 2, 2)
    assert cut(spec_of(pipeline={"partition": [1, 1, 2, 4]}), source)[0] == (1, 1, 2, 4)


def test_without_profiles_the_spec_says_the_layers_and_the_cut_is_even() -> None:
    counts, notes = cut(spec_of(model={"layers": 6}), FakeCosts(known=None))
    assert counts == (2, 2, 1, 1) and "6 layers are cut evenly" in notes[0]


def test_too_few_layers_name_the_nearest() -> None:
    with pytest.raises(UsageError, match="stages <= 8"):
        cut(spec_of(pipeline={"stages": 16}), FakeCosts())


def test_time_needs_seconds_of_layers() -> None:
    with pytest.raises(UsageError, match='partition = "time" needs the seconds of single layers'):
        cut(spec_of(pipeline={"partition": "time"}), FakeCosts())


# --- beside what was measured


def measured(spec: Spec, factor: float = 1.02, **changes: Any) -> Record:
    """The prediction of a spec as if a sweep had measured it, every step `factor` times as long."""
    made = engine(memory=True).predict(spec)
    trials = tuple(_as_measured(trial, factor) for trial in made.trials if trial.fits)
    return made.model_copy(update={"mode": "measured", "trials": trials, **changes})


def _as_measured(trial: Trial, factor: float) -> Trial:
    assert trial.predicted is not None and trial.step_median_s is not None
    parts = tuple(
        PartSeconds(part=stage.rank, forward_s=stage.forward_s, backward_s=stage.backward_s) for stage in trial.stages
    )
    predicted = trial.predicted.model_copy(
        update={"parts": parts, "update_s": (0.0,) * len(parts), "boundary_bytes": (0,) * (len(parts) - 1)}
    )
    return trial.model_copy(update={"step_median_s": trial.step_median_s * factor, "predicted": predicted})


def test_what_was_measured_stands_beside_the_prediction() -> None:
    ran = measured(spec_of(), 1.02)
    record = engine(record=ran, memory=True).predict(spec_of())
    trial = trial_at(record, 8)
    assert trial.measured_step_s == pytest.approx(1.02 * (trial.step_median_s or math.nan))
    assert trial.measured_peak_bytes == (8 * GIB, 4 * GIB, 4 * GIB, 4 * GIB)
    assert "(-2.0%)" in trial_table(record) and "measured peak" in trial_table(record)
    other = engine(record=ran, memory=True).predict(spec_of(pipeline={"recompute": "full"}))
    assert all(trial.measured_step_s is None for trial in other.trials)
    assert "measured step" not in trial_table(other)


def test_a_measured_record_shows_what_was_predicted() -> None:
    text = trial_table(measured(spec_of(), 1.02))
    assert "predicted step" in text and "predicted peak" in text and "(-2.0%)" in text


def test_another_setting_is_not_the_same() -> None:
    ran = measured(spec_of())
    setting = settle(spec_of(), 4, enumerate_candidates(spec_of(), 4), FakeCosts())[0]
    assert same_setting(setting, ran)
    assert not same_setting(setting, ran.model_copy(update={"layers_per_part": (1, 2, 2, 3)}))
    assert not same_setting(setting, ran.model_copy(update={"spec": {**ran.spec, "training": {"seed": 7}}}))


def test_k_and_parts_come_from_the_record() -> None:
    ran = measured(spec_of(), layers_per_part=(1, 2, 2, 3))
    spec = spec_of(pipeline={"stages": None})
    assert engine(record=ran).predict(spec).layers_per_part == (1, 2, 2, 3)
    assert engine(record=ran).predict(spec_of(pipeline={"partition": "uniform"})).layers_per_part == (2, 2, 2, 2)
    assert engine(record=ran).predict(spec_of(pipeline={"stages": 2})).layers_per_part == (4, 4)


def test_a_trial_is_foretold_from_the_others() -> None:
    rows = foretold(measured(spec_of(), 1.0))
    assert [row.chunks for row in rows] and all(abs(row.error) < 0.01 for row in rows)
    ran = measured(spec_of(), 1.0)
    odd = tuple(
        trial.model_copy(update={"step_median_s": 2 * (trial.step_median_s or 0)}) if trial.chunks == 4 else trial
        for trial in ran.trials
    )
    errors = {row.chunks: row.error for row in foretold(ran.model_copy(update={"trials": odd}))}
    assert errors[4] == pytest.approx(-0.5, abs=0.01)
    mean, worst = mean_and_worst(foretold(ran.model_copy(update={"trials": odd})))
    assert 0 < mean < 0.5 and abs(worst) >= mean


def test_calibration_in_words() -> None:
    lines = calibration_lines(foretold(measured(spec_of(), 1.0)))
    assert lines[0].startswith("M = 1 (b = 64): predicted ") and "+0.0%" in lines[0]
    assert lines[-1].startswith("error of a step predicted without its own trial: mean 0.")
    assert calibration_lines(()) == []


def test_a_predicted_record_foretells_nothing() -> None:
    assert foretold(engine().predict(spec_of())) == ()


# --- how sure


def test_an_extrapolated_choice_is_unclear_and_says_so() -> None:
    record = engine(FakeCosts(basis=lambda b: "extrapolated" if b < 16 else "measured")).predict(spec_of())
    assert record.verdict is not None and record.verdict.confidence == "unclear"
    chosen = trial_at(record, record.verdict.chunks or 0)
    assert basis_of(chosen) == "extrapolated"
    assert f"b = {chosen.micro_batch}" in record.verdict.confidence_reasons[0]


@pytest.mark.parametrize("width", [None, 80, 40])
def test_the_report_says_predicted_and_from_what(width: int | None) -> None:
    text = render(engine(memory=True).predict(spec_of()), width)
    assert "predicted from a table of the test, nothing was run" in " ".join(text.split())
    assert "confirmed" not in text and "measured, ideal" not in text
    assert "given: the costs stand in the spec" in " ".join(text.split())


# --- what is varied


def test_a_record_s_spec_leaves_v_to_the_schedule() -> None:
    record = engine().predict(spec_of(), {"pipeline.virtual_stages": "default", "pipeline.stages": "default"})
    tables = tables_of_record(record)
    assert "virtual_stages" not in tables["pipeline"] and tables["pipeline"]["stages"] == 4
    resolved = resolve(tables, Path("record.json"), source="record", environ={}, varied={"pipeline.schedule": "1f1b"})
    assert resolved.sources["pipeline.stages"] == "record"
    assert resolved.sources["pipeline.schedule"] == "--vary"
    kept = engine().predict(spec_of(), {"pipeline.virtual_stages": "file"})
    assert tables_of_record(kept)["pipeline"]["virtual_stages"] == 1


def test_varied_n_replaces_a_given_b() -> None:
    tables = spec_of(batch={"mini_batch": None, "micro_batch": 4}).model_dump(mode="json", exclude_none=True)
    resolved = resolve(tables, Path("a.toml"), environ={}, varied={"batch.mini_batch": 32})
    assert (resolved.spec.batch.mini_batch, resolved.spec.batch.micro_batch) == (32, None)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("K", "pipeline.stages"),
        ("V", "pipeline.virtual_stages"),
        ("N", "batch.mini_batch"),
        ("b", "batch.micro_batch"),
        ("M", "batch.chunks"),
        ("device", "hardware.name"),
        ("memory", "device.memory"),
        ("schedule", "pipeline.schedule"),
        ("hidden", "model.hidden"),
        ("training.precision", "training.precision"),
    ],
)
def test_keys_stand_by_symbol_last_part_or_whole(name: str, key: str) -> None:
    assert full_key(name, "transformer") == key


def test_values_are_read_as_by_set() -> None:
    varied = parse_vary(
        ["K=2,4", "schedule=gpipe, 1f1b", "M=4,1:64,[2,8]", "partition=[1,3],uniform", "memory=12GiB", "N=8,8"],
        {},
        "sleep",
    )
    assert varied == {
        "pipeline.stages": (2, 4),
        "pipeline.schedule": ("gpipe", "1f1b"),
        "batch.chunks": ([4], "1:64", [2, 8]),
        "pipeline.partition": ([1, 3], "uniform"),
        "device.memory": ("12GiB",),
        "batch.mini_batch": (8,),
    }


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        parse_vary(["K", "shedule=gpipe", "N=1", "b=2", "M=[1", "seed=1", "training.seed=2"], {}, "sleep")
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert "key=value" in lines[0] and "did you mean schedule?" in lines[1] and "no TOML value" in lines[2]
    assert "training.seed is varied twice" in lines[3] and "mini_batch (N) and batch.micro_batch (b)" in lines[4]


def test_a_flag_and_a_vary_of_one_key_clash() -> None:
    with pytest.raises(UsageError, match=r"--stages and --vary both set pipeline\.stages"):
        parse_vary(["K=2,4"], {"pipeline.stages": "--stages"}, None)


def test_too_many_combinations_are_refused_with_their_number() -> None:
    seeds = ",".join(map(str, range(100)))
    with pytest.raises(UsageError, match=r"100 x 100 = 10000 combinations; at most 4096"):
        parse_vary([f"N={seeds}", f"seed={seeds}"], {}, None)


# --- the grid


def grid(texts: list[str], source: FakeCosts | None = None, **sections: Mapping[str, Any]) -> Grid:
    tables = spec_of(**sections).model_dump(mode="json", exclude_none=True)
    asked = engine(source, memory=True)

    def load(varied: Mapping[str, Any]) -> Resolved:
        return resolve(tables, Path("a.toml"), environ={}, varied=varied)

    return predict_grid(parse_vary(texts, {}, "sleep"), load, lambda one: asked.predict(one.spec, one.sources))


def test_rows_are_ranked_by_samples_a_second_and_device() -> None:
    rows = grid(["K=1,2,4,8", "recompute=none,full"]).rows
    speeds = [row.samples_per_s_a_device for row in rows]
    assert len(rows) == 8 and speeds == sorted(speeds, reverse=True, key=lambda each: each or 0)
    assert rows[0].settings == {"pipeline.stages": 1, "pipeline.recompute": "none"}
    for row in rows:
        assert row.throughput_samples_per_s is not None and row.stages is not None
        assert row.samples_per_s_a_device == pytest.approx(row.throughput_samples_per_s / row.stages)
        assert (row.memory, row.basis) == ("FITS", "given")


def test_a_bad_combination_is_a_row_and_ends_nothing() -> None:
    made = grid(["K=4,16", "schedule=gpipe,dualpipe-v", "N=64,2,999"], FakeCosts())
    assert len(made.rows) == 12
    reasons = {tuple(row.settings.values()): row.reason for row in made.rows}
    assert reasons[(4, "gpipe", 64)] is None
    assert "each part needs one layer" in (reasons[(16, "gpipe", 64)] or "")
    assert "no divisor of N = 2 is legal" in (reasons[(4, "dualpipe-v", 2)] or "")
    assert "no M fits" in (reasons[(4, "gpipe", 999)] or "")
    assert all("\n" not in (row.reason or "") for row in made.rows)
    assert [row.chunks is None for row in made.rows] == sorted(row.chunks is None for row in made.rows)


def test_an_unfit_row_says_tight_or_oom() -> None:
    rows = grid(["memory=8GiB,4GiB,12GiB"]).rows
    assert [(row.settings["device.memory"], row.memory) for row in rows] == [
        ("12GiB", "FITS"),
        ("8GiB", "TIGHT"),
        ("4GiB", "OOM"),
    ]
    assert rows[1].peak_bytes == 8 * GIB and rows[1].budget_bytes == int(8 * GIB * 0.9)


def test_a_value_wrong_everywhere_is_a_mistake_of_the_command_line() -> None:
    with pytest.raises(SpecError, match=r"--vary: pipeline\.schedule"):
        grid(["schedule=gpip"])


def test_the_grid_in_every_format() -> None:
    made = grid(["K=2,4,16", "M=4"])
    text, lines = grid_text(made), grid_csv(made).splitlines()
    assert "|  K |" in text or "| K |" in text
    assert "K = 16, M = 4: " in text and "best" in text
    assert lines[0].split(",")[:2] == ["pipeline.stages", "batch.chunks"] and len(lines) == 4
    assert lines[0].endswith(",".join(CSV_COLUMNS))
    data = json.loads(grid_json(made))
    assert (data["mode"], data["varied"], len(data["rows"])) == ("predicted", list(made.varied), 3)
    assert list(data["rows"][0]) == list(Row.model_fields)
    assert grid_markdown(made).count("\n| ") == 5
    assert max(map(len, grid_text(made, 60).splitlines())) <= 60


def test_nothing_is_asked_twice() -> None:
    source = FakeCosts()
    made = grid(["memory=9GiB,10GiB,11GiB", "tolerance=0.01,0.02", "criterion=pipeline,stage"], source)
    assert len(made.rows) == 12 and len(source.asked) == len(set(source.asked))
