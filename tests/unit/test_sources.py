"""Sources of costs that need no torch: what a spec gives, and what a record measured."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunktune import memory, partition, schedules
from chunktune.costs import Basis, Costs, Setting, weakest
from chunktune.errors import UsageError
from chunktune.predict import Operations, Overhead, Shape, fit_overhead, simulated
from chunktune.results import (
    LayerBytes,
    LayerFigures,
    LayerProfile,
    OperationBytes,
    PartSeconds,
    Predicted,
    Record,
    Trial,
)
from chunktune.simulate import simulate
from chunktune.sources.figures import figures_at, filled, sizes_asked
from chunktune.sources.given import GivenCosts, SleepCosts
from chunktune.sources.interpolation import at, reach
from chunktune.sources.recorded import RecordedCosts
from chunktune.spec import Spec

SLEEP: dict[str, Any] = {
    "family": "sleep",
    "layers": 8,
    "seconds_per_chunk": 0.01,
    "seconds_per_sample": 0.002,
    "slowdown": [1, 1, 1, 1, 2, 1, 1, 3],
}
MLP: dict[str, Any] = {"family": "mlp", "layers": 8, "hidden": 16}
COSTS: dict[str, Any] = {"family": "costs", "micro_batch": 6, "forward_s": 0.02, "backward_s": 0.05}
ALL_SCHEDULES = tuple(schedules.SCHEDULES)


def spec_of(model: dict[str, Any], mini_batch: int = 16, **sections: Any) -> Spec:
    return Spec.model_validate({"model": model, "batch": {"mini_batch": mini_batch}, **sections})


def setting_of(
    model: dict[str, Any],
    stages: int = 2,
    schedule: str = "1f1b",
    recompute: str = "none",
    counts: Sequence[int] | None = None,
    **sections: Any,
) -> Setting:
    virtual = schedules.default_virtual_stages(schedule)
    pipeline = {"stages": stages, "schedule": schedule, "recompute": recompute}
    spec = spec_of(model, pipeline=pipeline, **sections)
    layers = stages * virtual if model["family"] == "costs" else model["layers"]
    return Setting(spec, stages, virtual, tuple(counts or partition.uniform(layers, stages * virtual)))


def step_s(setting: Setting, chunks: int, costs: Costs) -> float:
    played = simulate(
        setting.spec.pipeline.schedule,
        stages=setting.stages,
        chunks=chunks,
        virtual_stages=setting.virtual_stages,
        durations=costs.durations,
    )
    return played.step_s + costs.constant_s


def test_the_weakest_basis_counts() -> None:
    assert weakest("given") == "given"
    assert weakest("measured", "extrapolated", "interpolated") == "extrapolated"
    assert weakest("estimated", "given") == "estimated"


# --- family sleep


def test_sleep_is_its_closed_form() -> None:
    found = SleepCosts().costs(setting_of({**SLEEP, "slowdown": []}), 4)
    assert found.durations.forward_s == pytest.approx((0.072, 0.072))
    assert found.durations.backward_s == pytest.approx((0.144, 0.144))
    assert (found.basis, found.constant_s, found.notes) == ("given", 0.0, ())
    # T = (M + K - 1) (f + b), Huang et al. 2018
    assert step_s(setting_of({**SLEEP, "slowdown": []}), 4, found) == pytest.approx(5 * 0.216)


def test_sleep_sums_the_slowdown_of_a_parts_layers() -> None:
    found = SleepCosts().costs(setting_of(SLEEP, counts=(5, 3)), 5)
    assert found.durations.forward_s == pytest.approx((0.12, 0.10))
    assert SleepCosts().layer_s(spec_of(SLEEP), 5) == pytest.approx([0.06 * factor for factor in SLEEP["slowdown"]])


def test_the_first_part_runs_its_whole_backward_as_a_weight_gradient() -> None:
    found = SleepCosts().costs(setting_of(SLEEP, schedule="zbv-zero-bubble"), 5).durations
    assert found.input_s == pytest.approx((0, 0.04, 0.06, 0.08))
    assert found.weight_s == pytest.approx((0.08, 0.04, 0.06, 0.08))
    assert found.backward_s == pytest.approx((0.08, 0.08, 0.12, 0.16))


def test_recomputation_is_paid_by_every_half_of_a_backward() -> None:
    found = SleepCosts().costs(setting_of(SLEEP, schedule="zbv-zero-bubble", recompute="full"), 5).durations
    assert found.forward_s == pytest.approx((0.04, 0.04, 0.06, 0.08))
    assert found.backward_s == pytest.approx((0.12, 0.12, 0.18, 0.24))
    assert found.input_s == pytest.approx((0, 0.08, 0.12, 0.16))
    assert found.weight_s == pytest.approx((0.12, 0.08, 0.12, 0.16))


def test_sleep_layers_are_whoever_profiles_them() -> None:
    assert SleepCosts().layers(spec_of(SLEEP)) is None
    assert SleepCosts(lambda spec: (profile(3),)).layers(spec_of(SLEEP)) == (profile(3),)


def test_a_source_of_one_family_refuses_another() -> None:
    with pytest.raises(UsageError, match='"mlp"; only the family sleep'):
        SleepCosts().layer_s(spec_of(MLP), 1)
    with pytest.raises(UsageError, match='"mlp"; only the family costs'):
        GivenCosts().layer_s(spec_of(MLP), 1)


@pytest.mark.parametrize("source", [SleepCosts(), GivenCosts()])
def test_capacity_is_what_hardware_says(source: SleepCosts | GivenCosts) -> None:
    assert source.capacity_bytes(spec_of(SLEEP)) is None
    assert source.capacity_bytes(spec_of(SLEEP, hardware={"name": "a100-40gb"})) == 40 * 2**30
    assert source.capacity_bytes(spec_of(SLEEP, hardware={"memory": "1GiB"})) == 2**30


# --- family costs


def test_costs_at_their_own_size() -> None:
    model = {**COSTS, "communication_s": 0.003, "step_constant_s": 0.5, "update_s": [0.1, 0.2]}
    found = GivenCosts().costs(setting_of(model), 6)
    assert found.durations.forward_s == (0.02, 0.02)
    assert found.durations.backward_s == (0.05, 0.05)
    assert found.durations.transfer_s == (0.003,)
    assert found.durations.update_s == (0.1, 0.2)
    assert (found.constant_s, found.basis, found.notes) == (0.5, "given", ())


def test_costs_at_another_size_are_scaled_and_said_so() -> None:
    model = {**COSTS, "communication_s": 0.003, "step_constant_s": 0.5, "update_s": 0.1}
    found = GivenCosts().costs(setting_of(model), 3)
    assert found.durations.forward_s == pytest.approx((0.01, 0.01))
    assert found.durations.transfer_s == pytest.approx((0.0015,))
    assert found.durations.update_s == (0.1, 0.1)
    assert (found.constant_s, found.basis) == (0.5, "extrapolated")
    assert "given at b = 6 alone" in found.notes[0]


def test_costs_with_and_without_a_weight_gradient() -> None:
    halves = GivenCosts().costs(setting_of(COSTS, schedule="zbv-zero-bubble"), 6)
    assert halves.durations.input_s == pytest.approx((0, 0.025, 0.025, 0.025))
    assert "model.weight_s is not given" in halves.notes[0]
    split = GivenCosts().costs(setting_of({**COSTS, "weight_s": 0.01}, schedule="zbv-zero-bubble"), 6)
    assert split.durations.input_s == pytest.approx((0, 0.05, 0.05, 0.05))
    assert split.durations.weight_s == pytest.approx((0.06, 0.01, 0.01, 0.01))
    assert split.durations.backward_s == pytest.approx((0.06,) * 4)
    assert split.notes == ()


def test_costs_of_a_rank_are_those_of_its_parts() -> None:
    model = {**COSTS, "update_s": [1, 2, 3, 4]}
    assert GivenCosts().costs(setting_of(model, schedule="interleaved-1f1b"), 6).durations.update_s == (4, 6)
    assert GivenCosts().costs(setting_of(model, schedule="dualpipe-v"), 6).durations.update_s == (5, 5)


def test_costs_recompute_a_forward() -> None:
    found = GivenCosts().costs(setting_of(COSTS, recompute="full"), 6)
    assert found.durations.backward_s == pytest.approx((0.07, 0.07))
    assert found.notes == ()


def test_lists_of_another_length_are_refused() -> None:
    setting = setting_of({**COSTS, "forward_s": [0.1, 0.2]})
    with pytest.raises(UsageError, match="costs of 2 parts; K x V = 4"):
        GivenCosts().costs(Setting(setting.spec, 4, 1, (1,) * 4), 6)


def test_costs_without_bytes_leave_memory_open() -> None:
    assert GivenCosts().layers(setting_of(COSTS).spec) is None


@pytest.mark.parametrize(("schedule", "in_flight"), [("gpipe", (4, 4, 4)), ("1f1b", (3, 2, 1))])
def test_given_bytes_come_back_as_peaks(schedule: str, in_flight: tuple[int, ...]) -> None:
    """Static bytes, what the chunks in flight keep, and the workspace; boundary tensors left out."""
    model = {**COSTS, "static_bytes": [1000, 2000, 3000], "kept_bytes": 100, "workspace_bytes": 7}
    setting = setting_of(model, 3, schedule)
    layers = GivenCosts().layers(setting.spec)
    assert layers is not None
    found = peaks(setting, layers, chunks=4, micro_batch=6)
    assert found == tuple(1000 * (rank + 1) + 100 * each + 7 for rank, each in enumerate(in_flight))
    assert peaks(setting, layers, chunks=4, micro_batch=12)[0] == 1000 + 2 * (100 * in_flight[0] + 7)


def test_given_boundaries_are_buffers_of_every_chunk() -> None:
    setting = setting_of({**COSTS, "boundary_bytes": [10, 20, 30]}, 3, "gpipe")
    layers = GivenCosts().layers(setting.spec)
    assert layers is not None
    first, middle, last = peaks(setting, layers, chunks=4, micro_batch=6)
    assert first >= 4 * (10 + 10)  # its outputs, and a buffer for the gradient of each
    assert middle >= 4 * (10 + 20 + 20)
    assert last >= 4 * (20 + 30)


def test_recomputation_keeps_given_bytes_only_while_a_backward_runs() -> None:
    setting = setting_of({**COSTS, "kept_bytes": 100}, 2, "gpipe", recompute="full")
    layers = GivenCosts().layers(setting.spec)
    assert layers is not None
    assert peaks(setting, layers, chunks=4, micro_batch=6) == (100, 100)


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_given_bytes_under_every_schedule(schedule: str) -> None:
    model = {**COSTS, "static_bytes": 1000, "kept_bytes": 100, "boundary_bytes": 1, "workspace_bytes": 10}
    setting = setting_of(model, 2, schedule)
    layers = GivenCosts().layers(setting.spec)
    assert layers is not None
    assert sum(layer.count for layer in layers if not layer.loss) == len(setting.counts)
    held = setting.virtual_stages * 1000
    assert all(held + 100 <= peak <= held + 8 * 150 for peak in peaks(setting, layers, chunks=4, micro_batch=6))


def test_bytes_that_are_left_out_are_said() -> None:
    found = GivenCosts().costs(setting_of({**COSTS, "kept_bytes": 3}), 6)
    assert "model.static_bytes, model.boundary_bytes, model.workspace_bytes not given" in found.notes[0]


def peaks(setting: Setting, layers: Sequence[LayerProfile], chunks: int, micro_batch: int) -> tuple[int, ...]:
    pipeline = setting.spec.pipeline
    return memory.peak_bytes(
        layers,
        memory.Pipeline(
            schedule=pipeline.schedule,
            stages=setting.stages,
            chunks=chunks,
            virtual_stages=setting.virtual_stages,
            micro_batch=micro_batch,
            counts=setting.counts,
            recompute=pipeline.recompute,
        ),
    )


# --- between and beyond sizes

COSTS_AT = st.lists(st.floats(0, 1e6), min_size=1, max_size=5)


@given(COSTS_AT, st.integers(1, 200))
def test_costs_in_b_are_never_negative(values: list[float], b: int) -> None:
    points = [(3 * 2**index, value) for index, value in enumerate(values)]
    assert at(points, b) >= 0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=5, unique=True), st.integers(1, 200), st.integers(1, 200))
def test_rising_costs_rise_everywhere(values: list[float], one: int, other: int) -> None:
    points = [(3 * 2**index, value) for index, value in enumerate(sorted(values))]
    low, high = sorted((one, other))
    assert at(points, low) <= at(points, high) * (1 + 1e-12)


@given(st.floats(0, 10), st.floats(0, 10), st.integers(1, 100))
def test_a_line_is_found_again(a: float, c: float, b: int) -> None:
    assert at([(size, a + c * size) for size in (4, 8, 32)], b) == pytest.approx(a + c * b)


def test_beyond_the_sizes() -> None:
    assert at([(4, 8.0)], 1) == 2.0
    assert at([(4, 8.0)], 8) == 16.0
    assert at([(4, 8.0), (8, 4.0)], 16) == 4.0  # a fall does not go on
    assert at([(4, 8.0), (8, 80.0)], 2) == 4.0  # in proportion at least
    assert at([(4, 8.0), (8, 4.0)], 2) == 8.0


def test_reach() -> None:
    assert [reach((2, 8), b) for b in (1, 2, 4, 8, 16)] == [
        "extrapolated",
        "measured",
        "interpolated",
        "measured",
        "extrapolated",
    ]


def operation(size: int) -> OperationBytes:
    return OperationBytes(peaks=((5 * size, ""), (3 * size, "gx")), left_bytes=2 * size, extra_bytes=1, holds="x")


def figures(micro_batch: int, flops: int = 100, again: int | None = None) -> LayerFigures:
    whole = LayerBytes(**dict.fromkeys(LayerBytes.model_fields, operation(micro_batch)))
    return LayerFigures(
        micro_batch=micro_batch,
        input_bytes=8 * micro_batch,
        output_bytes=8 * micro_batch,
        gradient_bytes=8 * micro_batch,
        batch_bytes=0,
        forward_flops=flops * micro_batch,
        backward_flops=2 * flops * micro_batch,
        recompute_flops=None if again is None else again * micro_batch,
        weight_forwards=2,
        plain=whole,
        recomputed=whole,
    )


def profile(count: int, flops: int = 100, parameters: int = 10, again: int | None = None) -> LayerProfile:
    return LayerProfile(
        count=count,
        parameters=parameters,
        weight_bytes=40,
        gradient_bytes=40,
        optimizer_bytes=80,
        figures=(figures(2, flops, again), figures(8, flops, again)),
    )


def loss() -> LayerProfile:
    return profile(1).model_copy(update={"loss": True})


def test_figures_between_two_sizes_lie_on_the_line() -> None:
    (found,) = filled([profile(1)], (1, 3, 4, 8, 16))
    assert [one.micro_batch for one in found.figures] == [2, 3, 4, 8]
    assert found.figures[2] == figures(4)
    assert figures_at((figures(2),), 5) == figures(2)


def test_a_peak_that_only_one_size_has_is_kept() -> None:
    low, high = figures(2), figures(8)
    bare = low.plain.model_copy(update={"backward": OperationBytes(peaks=((10, "x"),))})
    found = figures_at((low.model_copy(update={"plain": bare}), high), 5)
    # Of (24, "gx") and (40, "") at 8: with x held 24 at most, with nothing said 40.
    assert found.plain.backward.peaks == ((25, ""), (12, "gx"), (17, "x"))


def test_sizes_that_a_spec_can_come_to() -> None:
    assert sizes_asked(spec_of(SLEEP, 12)) == (1, 2, 3, 4, 6, 12)
    assert sizes_asked(Spec.model_validate({"model": SLEEP, "batch": {"micro_batch": 5}})) == (5,)


# --- records


def recorded(
    setting: Setting,
    sizes: Sequence[int] = (2, 4, 8),
    *,
    overhead: Overhead = Overhead(0.001, 1e-9, 0.002),
    layers: tuple[LayerProfile, ...] = (),
    **changes: Any,
) -> Record:
    """The record that a sweep of a sleeping model would leave, if the runtime took just this overhead."""
    shape = Shape(setting.spec.pipeline.schedule, setting.stages, setting.virtual_stages)
    spec = setting.spec.model_dump(mode="json")
    spec["pipeline"] |= {"stages": setting.stages, "virtual_stages": setting.virtual_stages}
    fields: dict[str, Any] = {
        "schema_version": 2,
        "tool": {"name": "chunktune", "version": "0"},
        "mode": "measured",
        "status": "complete",
        "quick": False,
        "spec": spec,
        "sources": {},
        "environment": {},
        "layers_per_part": setting.counts,
        "layers": layers,
        "candidates": (),
        "trials": tuple(trial(setting, shape, b, overhead) for b in sorted(sizes, reverse=True)),
        "comparisons": (),
        "verdict": None,
        "started_at": "2026-01-02T03:04:05+00:00",
        "elapsed_s": 1.0,
    }
    return Record(**{**fields, **changes})


def trial(setting: Setting, shape: Shape, b: int, overhead: Overhead) -> Trial:
    parts = rehearsed_parts(setting, b)
    update_s = tuple(0.01 * (rank + 1) for rank in range(setting.stages))
    operations = Operations(parts, update_s, (1000 * b,) * (len(parts) - 1))
    chunks = 16 // b
    measured_s = simulated(shape, chunks, operations, overhead).step_s + overhead.constant_s
    predicted = Predicted(
        step_s=None,
        peak_bytes=(0,) * setting.stages,
        parts=parts,
        update_s=update_s,
        boundary_bytes=operations.boundary_bytes,
        rehearsed_overhead_s=0.0003,
    )
    return Trial(chunks=chunks, micro_batch=b, mini_batch=16, state="ok", step_median_s=measured_s, predicted=predicted)


def rehearsed_parts(setting: Setting, b: int) -> tuple[PartSeconds, ...]:
    """What torch's schedule runs of a sleeping part: all three kinds only under dualpipe-v."""
    played = SleepCosts().costs(setting, b).durations
    splits = schedules.SCHEDULES[setting.spec.pipeline.schedule].splits_backward
    whole = not splits or setting.spec.pipeline.schedule == "dualpipe-v"
    return tuple(
        PartSeconds(
            part=part,
            forward_s=played.forward_s[part],
            backward_s=played.backward_s[part] if whole else None,
            input_s=played.input_s[part] if splits else None,
            weight_s=played.weight_s[part] if splits else None,
        )
        for part in range(len(setting.counts))
    )


def assert_same_operations(found: Costs, wanted: Costs) -> None:
    for name in ("forward_s", "backward_s", "input_s", "weight_s"):
        assert getattr(found.durations, name) == pytest.approx(getattr(wanted.durations, name), abs=1e-12), name


def chunks_of(setting: Setting) -> tuple[int, ...]:
    return (2, 4, 8) if setting.spec.pipeline.schedule != "dualpipe-v" else (4, 8)


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_was_measured_comes_back(schedule: str, recompute: str) -> None:
    setting = setting_of(SLEEP, 2, schedule, recompute)
    sizes = [16 // chunks for chunks in chunks_of(setting)]
    record = recorded(setting, sizes)
    source = RecordedCosts(record)
    for each in record.trials:
        found = source.costs(setting, each.micro_batch)
        assert_same_operations(found, SleepCosts().costs(setting, each.micro_batch))
        assert (found.basis, found.notes) == ("measured", ())
        assert step_s(setting, each.chunks, found) == pytest.approx(each.step_median_s, rel=0.01)


def test_overheads_are_fitted_from_the_measured_steps() -> None:
    setting = setting_of(SLEEP, 2, "gpipe")
    record = recorded(setting, overhead=Overhead(0.002, 1e-8, 0.001))
    fitted = fit_overhead(Shape("gpipe", 2, 1), record.trials)
    found = RecordedCosts(record).costs(setting, 4)
    assert found.durations.overhead_s == fitted.overhead_s > 0.0009
    assert found.durations.transfer_s == pytest.approx((4000 * fitted.transfer_s_per_byte,))
    assert found.constant_s == fitted.constant_s
    assert found.durations.update_s == pytest.approx((0.01, 0.02))


def test_operations_that_took_longer_among_peers_than_rehearsed_do_so_in_every_setting() -> None:
    setting = setting_of(SLEEP, 2, "gpipe")
    record = recorded(setting)
    shape = Shape("gpipe", 2, 1)
    busy = [busier(shape, each, 1.2) for each in record.trials]
    found = RecordedCosts(record.model_copy(update={"trials": tuple(busy)})).costs(setting, 4)
    alone = RecordedCosts(record).costs(setting, 4)
    longer = 1 + fit_overhead(shape, busy).contention
    assert longer == pytest.approx(1 + 0.2 * 3 / 4)  # one trial's weight speaks for none
    assert found.durations.forward_s == pytest.approx([longer * seconds for seconds in alone.durations.forward_s])
    assert found.durations.update_s == alone.durations.update_s


def busier(shape: Shape, trial: Trial, factor: float) -> Trial:
    """The trial with what its ranks were busy with: this much longer than rehearsed."""
    assert trial.predicted is not None
    operations = Operations.of(trial.predicted)
    assert operations is not None
    busy_s = simulated(shape, trial.chunks, operations, Overhead()).busy_s
    stages = [
        {"rank": rank, "parts": [rank], "forward_s": 1, "backward_s": 1, "busy_s": factor * seconds}
        | {"idle_share": 0, "samples_per_s": 1, "peak_bytes": None, "reserved_bytes": None}
        | {"capacity_bytes": None, "budget_bytes": None}
        for rank, seconds in enumerate(busy_s)
    ]
    return Trial.model_validate({**dict(trial), "step_s": (trial.step_median_s,), "stages": stages})


def test_a_rehearsed_record_has_the_overhead_that_its_rehearsals_make_likely() -> None:
    setting = setting_of(SLEEP, 2, "gpipe")
    found = RecordedCosts(recorded(setting, mode="rehearsed")).costs(setting, 4)
    assert found.durations.overhead_s == fit_overhead(Shape("gpipe", 2, 1), (), 0.0003).overhead_s > 0.0003
    assert found.constant_s == 0.0


@pytest.mark.parametrize(
    ("sizes", "b", "basis", "note"),
    [
        ((2, 8), 4, "interpolated", None),
        ((2, 8), 16, "extrapolated", "measured b = 2, 8; operations beyond follow the line"),
        ((2, 8), 1, "extrapolated", "measured b = 2, 8"),
        ((4,), 4, "measured", None),
    ],
)
def test_other_sizes(sizes: tuple[int, ...], b: int, basis: Basis, note: str | None) -> None:
    setting = setting_of(SLEEP)
    found = RecordedCosts(recorded(setting, sizes)).costs(setting, b)
    assert_same_operations(found, SleepCosts().costs(setting, b))  # affine in b, so the line is right everywhere
    assert found.basis == basis
    assert (note is None and found.notes == ()) or (note is not None and note in found.notes[0])


def test_a_single_size_is_scaled() -> None:
    setting = setting_of(SLEEP)
    found = RecordedCosts(recorded(setting, (4,))).costs(setting, 8)
    at_four = SleepCosts().costs(setting, 4).durations
    assert found.durations.forward_s == pytest.approx([2 * seconds for seconds in at_four.forward_s])
    assert found.basis == "extrapolated"
    assert "measured b = 4 alone" in found.notes[0]


@pytest.mark.parametrize(("stages", "schedule"), [(1, "gpipe"), (4, "1f1b"), (8, "gpipe"), (2, "interleaved-1f1b")])
def test_layers_are_put_together_to_other_parts(stages: int, schedule: str) -> None:
    source = RecordedCosts(recorded(setting_of(SLEEP, 2, "1f1b")))
    asked = setting_of(SLEEP, stages, schedule)
    found = source.costs(asked, 4)
    assert_same_operations(found, SleepCosts().costs(asked, 4))  # handed out by slowdown, so exact
    assert found.basis == "interpolated"
    assert any("K = 2, V = 1" in note and "slowdown" in note for note in found.notes)
    assert sum(found.durations.update_s) == pytest.approx(0.03)
    assert len(found.durations.transfer_s) == len(asked.counts) - 1


@pytest.mark.parametrize("recorded_as", ALL_SCHEDULES)
@pytest.mark.parametrize("asked_for", ALL_SCHEDULES)
@pytest.mark.parametrize("recompute", [("none", "full"), ("full", "none"), ("none", "none")])
def test_another_schedule_and_recomputation(recorded_as: str, asked_for: str, recompute: tuple[str, str]) -> None:
    """Sleeping layers have equal halves and recompute a forward, so that every derivation is exact."""
    had = setting_of(SLEEP, 2, recorded_as, recompute[0])
    asked = setting_of(SLEEP, 2, asked_for, recompute[1])
    source = RecordedCosts(recorded(had, [16 // chunks for chunks in chunks_of(had)]))
    found = source.costs(asked, 4)
    assert_same_operations(found, SleepCosts().costs(asked, 4))
    splits = [schedules.SCHEDULES[name].splits_backward for name in (recorded_as, asked_for)]
    assert any("split" in note for note in found.notes) is (splits[0] != splits[1])
    assert any("recompute" in note for note in found.notes) is (recompute[0] != recompute[1])
    if splits[0] != splits[1] or recompute[0] != recompute[1]:
        assert found.basis == "interpolated"


def mlp_record(**changes: Any) -> tuple[Setting, Record]:
    """Four layers of 100, 100, 100 and 300 operations on two parts; costs are those of the sleeping model."""
    setting = setting_of({**SLEEP, "layers": 4, "slowdown": []}, 2, "1f1b")
    layers = (profile(3), profile(1, 300, 30), loss())
    record = recorded(setting, layers=layers)
    spec = {**record.spec, "model": {"family": "mlp", "layers": 4, "hidden": 16, "features": None, "classes": None}}
    return setting, record.model_copy(update={"spec": spec, **changes})


def asked_of_mlp(setting: Setting, stages: int, **pipeline: Any) -> Setting:
    return setting_of({"family": "mlp", "layers": 4, "hidden": 16}, stages, **pipeline)


def test_parts_are_handed_out_by_floating_point_operations() -> None:
    setting, record = mlp_record()
    found = RecordedCosts(record).costs(asked_of_mlp(setting, 4), 4)
    part_s = 2 * 0.018
    assert found.durations.forward_s == pytest.approx((part_s / 2, part_s / 2, part_s / 4, part_s * 3 / 4))
    # The update by parameters, the boundaries from the layers.
    per_byte = fit_overhead(Shape("1f1b", 2, 1), record.trials).transfer_s_per_byte
    assert found.durations.update_s == pytest.approx((0.005, 0.005, 0.005, 0.015))
    assert RecordedCosts(record).costs(asked_of_mlp(setting, 2), 4).durations.transfer_s == pytest.approx(
        (4000 * per_byte,)
    )
    assert found.durations.transfer_s == pytest.approx((32 * per_byte,) * 3)
    assert any("floating-point operations" in note for note in found.notes)
    assert RecordedCosts(record).layer_s(setting_like(record), 4) == pytest.approx(
        [3 * seconds for seconds in found.durations.forward_s]
    )


def test_recomputation_costs_what_the_profile_counts() -> None:
    """Layers that recompute half of their forward, twice in the weight gradient."""
    setting, record = mlp_record(layers=(profile(3, again=50), profile(1, 300, 30, again=150), loss()))
    plain = RecordedCosts(record).costs(asked_of_mlp(setting, 2), 4).durations
    found = RecordedCosts(record).costs(asked_of_mlp(setting, 2, recompute="full"), 4).durations
    assert found.backward_s == pytest.approx(
        [b + f / 2 for f, b in zip(plain.forward_s, plain.backward_s, strict=True)]
    )
    split = RecordedCosts(record).costs(asked_of_mlp(setting, 1, schedule="zbv-zero-bubble", recompute="full"), 4)
    f = split.durations.forward_s[1]
    assert split.durations.input_s == pytest.approx((0, f + f / 2))
    assert split.durations.weight_s[1] == pytest.approx(f + 2 * f / 2)


@pytest.mark.parametrize(
    ("layers", "shares"),
    [
        ((profile(3, 0), profile(1, 0, 30), loss()), (0.5, 0.5, 0.25, 0.75)),
        ((profile(4, 0, 0), loss()), (0.5, 0.5, 0.5, 0.5)),
        ((), (0.5, 0.5, 0.5, 0.5)),
    ],
    ids=["parameters", "evenly", "no profile"],
)
def test_layers_without_operations(layers: tuple[LayerProfile, ...], shares: tuple[float, ...]) -> None:
    setting, record = mlp_record(layers=layers)
    source = RecordedCosts(record)
    found = source.costs(asked_of_mlp(setting, 4), 4)
    assert found.durations.forward_s == pytest.approx([0.036 * share for share in shares])
    assert (source.layers(setting_like(record)) is None) is (layers == ())


def setting_like(record: Record) -> Spec:
    return Spec.model_validate(record.spec)


def test_layers_of_a_record_are_filled_between_its_sizes() -> None:
    _, record = mlp_record()
    layers = RecordedCosts(record).layers(setting_like(record))
    assert layers is not None
    assert [[one.micro_batch for one in layer.figures] for layer in layers] == [[2, 4, 8]] * 3


@pytest.mark.parametrize(
    ("tables", "parts"),
    [
        ({"model": {"hidden": 32}}, ["model.hidden is 32, in the record 16"]),
        ({"model": {"classes": 5}}, ["model.classes is 5, in the record not given"]),
        ({"training": {"optimizer": "sgd"}}, ['training.optimizer is "sgd", in the record "adamw"']),
        ({"training": {"precision": "bfloat16"}, "model": {"layers": 5}}, ["training.precision", "model.layers is 5"]),
        # What the record measured is not what another device would take.
        ({"hardware": {"name": "a100-40gb"}}, ['hardware.name is "a100-40gb", in the record not given', "and device"]),
    ],
)
def test_a_record_speaks_for_its_own_model(tables: dict[str, dict[str, Any]], parts: list[str]) -> None:
    _, record = mlp_record()
    spec = {**record.spec, **{name: {**record.spec[name], **keys} for name, keys in tables.items()}}
    source = RecordedCosts(record)
    for ask in (source.layers, lambda asked: source.layer_s(asked, 1)):
        with pytest.raises(UsageError) as caught:
            ask(Spec.model_validate(spec))
        assert all(part in str(caught.value) for part in [*parts, "leave out --from"])


def test_what_a_record_does_not_need_to_agree_on() -> None:
    _, record = mlp_record()
    spec = {**record.spec, "training": {**record.spec["training"], "seed": 5}}
    assert RecordedCosts(record).layers(Spec.model_validate(spec))
    older = record.model_copy(update={"spec": {k: v for k, v in record.spec.items() if k != "hardware"}})
    assert RecordedCosts(older).layers(Spec.model_validate(spec))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"schema_version": 1}, "schema version 1"),
        ({}, "none of the record's 3 trials ran"),
        ({"mode": "predicted"}, "was predicted, not measured"),
    ],
)
def test_records_without_operation_times(changes: dict[str, Any], part: str) -> None:
    record = recorded(setting_of(SLEEP))
    bare = tuple(each.model_copy(update={"predicted": None}) for each in record.trials)
    with pytest.raises(UsageError, match=part):
        RecordedCosts(record.model_copy(update={"trials": bare, **changes}))


def test_an_old_record_is_refused_with_the_way_out() -> None:
    with open("tests/data/record_v1.json") as file:  # noqa: PTH123
        old = Record.model_validate(json.load(file))
    with pytest.raises(UsageError, match="from schema version 2 on; run chunktune sweep again"):
        RecordedCosts(old)


@given(st.integers(1, 64), st.sampled_from(ALL_SCHEDULES), st.sampled_from(["none", "full"]))
@settings(max_examples=50, deadline=None)
def test_recorded_seconds_are_never_negative(b: int, schedule: str, recompute: str) -> None:
    record = recorded(setting_of(SLEEP, 2, "zbv-zero-bubble", "full"), (2, 8))
    noisy = tuple(each.model_copy(update={"predicted": shrunk(each.predicted)}) for each in record.trials)
    source = RecordedCosts(record.model_copy(update={"trials": noisy}))
    found = source.costs(setting_of(SLEEP, 2, schedule, recompute), b).durations
    assert min(*found.forward_s, *found.backward_s, *found.input_s, *found.weight_s, *found.transfer_s) >= 0


def shrunk(predicted: Predicted | None) -> Predicted:
    """A rehearsal whose backwards were, by noise, shorter than the forward that they recompute."""
    assert predicted is not None
    parts = [part.model_copy(update={"input_s": 0.001, "weight_s": 0.001}) for part in predicted.parts]
    return predicted.model_copy(update={"parts": tuple(parts)})


def test_the_label_says_what_was_measured() -> None:
    label = RecordedCosts(recorded(setting_of(SLEEP, 2, "gpipe"))).label
    assert label == "record of 2026-01-02T03:04:05+00:00 (gpipe, K = 2, V = 1, b = 2, 4, 8)"


def test_no_torch() -> None:
    code = "import sys, chunktune.sources.given, chunktune.sources.recorded, chunktune.sources.estimated; "
    code += "assert not {'torch', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
