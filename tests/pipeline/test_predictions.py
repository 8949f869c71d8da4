"""Predictions of real sweeps, made before what they predict, and stages that rehearse in turn."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from running import Finished, despite_noise, sweep
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from chunktune.models import build_model
from chunktune.results import Trial
from chunktune.spec import Spec

SLEEP = """
[model]
family = "sleep"
layers = 4
seconds_per_chunk = 0.004
seconds_per_sample = 0.001
[pipeline]
stages = 4
schedule = "gpipe"
[batch]
mini_batch = 32
"""
TRANSFORMER = """
[model]
family = "transformer"
layers = 2
hidden = 64
heads = 4
vocab = 256
sequence = 32
[pipeline]
stages = 2
schedule = "gpipe"
[batch]
mini_batch = 8
"""


@functools.cache
def slept() -> Finished:
    return sweep(SLEEP, "--quick", "--chunks", "2,4,8,16", "--patience", "0")


@functools.cache
def rehearsed() -> Finished:
    return sweep(SLEEP, "--rehearse", "--quick", "--chunks", "2,4,8,16", "--patience", "0")


@functools.cache
def transformed(recompute: str) -> Finished:
    return sweep(TRANSFORMER, "--quick", "--recompute", recompute, "--chunks", "2,4")


def forget() -> None:
    slept.cache_clear()
    rehearsed.cache_clear()


def ran(finished: Finished) -> list[Trial]:
    return [trial for trial in finished.chosen().trials if trial.fits]


def test_every_prediction_stands_in_the_journal_before_its_trial_and_was_not_touched_since() -> None:
    events = [event for event in slept().events if event["event"] in ("predicted", "trial")]
    assert len(events) >= 4
    for foretold, tried in zip(events[::2], events[1::2], strict=True):
        assert (foretold["event"], tried["event"]) == ("predicted", "trial")
        assert foretold["chunks"] == tried["trial"]["chunks"]
        assert foretold["predicted"] == tried["trial"]["predicted"]
        assert foretold["at"] < tried["at"]


def test_overheads_are_fitted_from_the_trials_before_and_from_no_other() -> None:
    seen: list[int] = []
    for event in slept().events:
        if event["event"] == "predicted":
            assert event["predicted"]["fitted_from"] == sorted(seen)
        elif event["event"] == "trial" and event["trial"]["state"] == "ok":
            seen.append(event["trial"]["chunks"])


@despite_noise(forget)
def test_a_step_is_foretold_where_the_machine_is_still() -> None:
    for trial in ran(slept()):
        assert trial.predicted is not None
        assert trial.predicted.step_s == pytest.approx(trial.step_median_s, rel=0.1), trial.chunks


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_peaks_are_foretold_for_every_rank(recompute: str) -> None:
    for trial in ran(transformed(recompute)):
        assert trial.predicted is not None
        assert [stage.peak_bytes for stage in trial.stages] == pytest.approx(trial.predicted.peak_bytes, rel=0.02)


@functools.cache
def flops_of_a_sample(recompute: str) -> float:
    """What torch counts over forward and backward of the whole model, on the meta device."""
    spec = Spec.model_validate({"model": _model_table(), "batch": {"mini_batch": 1}})
    with torch.device("meta"):
        layers = [builder() for builder in build_model(spec.model).layers]
        value = torch.zeros(1, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        for layer in layers:
            value = checkpoint(layer, value, use_reentrant=False) if recompute == "full" else layer(value)
        value.sum().backward()
    return float(counter.get_total_flops())


def _model_table() -> dict[str, Any]:
    return {"family": "transformer", "layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "sequence": 32}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_floating_point_operations_are_those_that_torch_counts(recompute: str) -> None:
    for trial in ran(transformed(recompute)):
        assert trial.step_median_s is not None
        counted = sum(stage.flops_per_s or 0.0 for stage in trial.stages) * trial.step_median_s
        again = sum(stage.recompute_flops_per_s or 0.0 for stage in trial.stages) * trial.step_median_s
        model = 8 * flops_of_a_sample("none")
        assert counted == pytest.approx(model, rel=0.02)
        assert again == pytest.approx(8 * flops_of_a_sample(recompute) - model, rel=0.02, abs=1)


def test_the_record_profiles_the_layers_at_every_size_that_was_tried() -> None:
    record = transformed("none").chosen()
    assert sum(layer.count for layer in record.layers if not layer.loss) == sum(record.layers_per_part) == 5
    assert all([one.micro_batch for one in layer.figures] == [2, 4] for layer in record.layers)


def test_stages_rehearse_in_turn_in_one_process() -> None:
    record = rehearsed().chosen()
    assert record.mode == "rehearsed"
    (group,) = [event for event in rehearsed().events if event["event"] == "group"]
    assert len(group["pids"]) == 1
    assert all(len(trial.stages) == 4 for trial in ran(rehearsed()))
    assert record.verdict is not None
    assert record.verdict.confirmed == "no"
    assert "rehearsed" in rehearsed().stdout


@despite_noise(forget)
def test_rehearsed_and_real_pipelines_choose_alike() -> None:
    real, alone = slept().chosen(), rehearsed().chosen()
    assert real.verdict is not None and real.verdict.chunks is not None
    assert alone.verdict is not None and alone.verdict.chunks is not None
    legal = [one.chunks for one in real.candidates if one.legal]
    assert abs(legal.index(real.verdict.chunks) - legal.index(alone.verdict.chunks)) <= 1
    here, there = slept().trial(alone.verdict.chunks), rehearsed().trial(alone.verdict.chunks)
    assert there.step_median_s == pytest.approx(here.step_median_s, rel=0.1)


def test_memory_is_enforced_where_stages_rehearse() -> None:
    limited = SLEEP.replace("seconds_per_sample = 0.001", 'seconds_per_sample = 0.001\nbytes_per_sample = "1MiB"')
    finished = sweep(limited, "--rehearse", "--schedule", "1f1b", "--memory", "24MiB", "--chunks", "4,8")
    assert finished.trial(4).state == "oom", finished
    assert finished.trial(8).fits
