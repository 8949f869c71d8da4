"""Estimates from fake tensors and a datasheet: nothing is run, and nothing is profiled twice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from on_device import fake_group, rank_work

from chunktune import memory, partition, schedules
from chunktune.costs import Setting
from chunktune.datasheets import Hardware, hardware
from chunktune.device import CpuDevice
from chunktune.errors import SpecError
from chunktune.models import build_model
from chunktune.pipeline.plan import make_plan
from chunktune.pipeline.profile import Profiler
from chunktune.pipeline.rehearsal import rehearse
from chunktune.results import LayerProfile
from chunktune.simulate import Durations
from chunktune.sources.estimated import EstimatedCosts, sizes_of
from chunktune.spec import Spec

TRANSFORMER = {"family": "transformer", "layers": 4, "hidden": 64, "heads": 2, "vocab": 128, "sequence": 32}
MLP = {"family": "mlp", "layers": 4, "hidden": 64, "classes": 10}
LINEAR = {"family": "mlp", "layers": 1, "hidden": 256}
OWN = {"memory": "1GiB", "flops": 1e12, "flops_float32": 1e11, "bandwidth": 1e10, "link_bandwidth": 1e9}


def spec_of(model: dict[str, Any], **sections: Any) -> Spec:
    return Spec.model_validate({"batch": {"mini_batch": 16}, "device": {"kind": "cpu"}, "model": model, **sections})


def setting_of(model: dict[str, Any], stages: int, layers: int, schedule: str = "1f1b", **sections: Any) -> Setting:
    pipeline = {"stages": stages, "schedule": schedule, **sections.pop("pipeline", {})}
    spec = spec_of(model, pipeline=pipeline, **sections)
    virtual = schedules.default_virtual_stages(schedule)
    return Setting(spec, stages, virtual, partition.uniform(layers, stages * virtual))


def durations(setting: Setting, micro_batch: int, source: EstimatedCosts | None = None) -> Durations:
    return (source or EstimatedCosts()).costs(setting, micro_batch).durations


def test_one_linear_layer_by_hand() -> None:
    """y = x W + b, mean squared error: the operations that torch runs, each by the roofline."""
    b, width = 8, 256
    setting = setting_of(LINEAR, 1, 1, hardware={**OWN, "launch_s": 0, "link_latency": 0})
    found = durations(setting, b)
    row, weight = 4 * b * width, 4 * width * width
    product_s = max(2 * b * width**2 / 1e11, (2 * row + weight) / 1e10)
    forward_s = product_s + 4 * width / 1e10  # the bias
    assert found.forward_s[0] == pytest.approx(forward_s + (2 * row + 8) / 1e10, rel=0.05)  # and the loss
    # The gradient of the weight is one product, that of the input is not wanted; it is added to the one before.
    assert found.backward_s[0] > product_s + 3 * weight / 1e10
    assert found.backward_s[0] < product_s + 3 * weight / 1e10 + 20 * row / 1e10
    # AdamW reads the gradient, reads and writes the weight and its two averages.
    assert found.update_s[0] == pytest.approx(7 * (weight + 4 * width) / 1e10, rel=0.01)
    assert (found.transfer_s, found.overhead_s) == ((), 0.0)


def test_seconds_follow_the_datasheet() -> None:
    source = EstimatedCosts()

    def at(**keys: Any) -> Durations:
        return durations(setting_of(TRANSFORMER, 2, 7, hardware={**OWN, "launch_s": 0.0, **keys}), 16, source)

    base, half = at(), at(efficiency=0.5)
    assert half.forward_s == pytest.approx([2 * seconds for seconds in base.forward_s])
    assert half.update_s == pytest.approx([2 * seconds for seconds in base.update_s])
    assert at(link_bandwidth=5e8, link_latency=0).transfer_s[0] == pytest.approx(16 * 32 * 64 * 4 / 5e8)
    assert at(link_latency=0.5).transfer_s[0] == pytest.approx(0.5 + 16 * 32 * 64 * 4 / 1e9)
    launched = at(launch_s=1.0)
    first, last = (more - less for more, less in zip(launched.forward_s, base.forward_s, strict=True))
    # Embedding and three blocks of some ten operations each; a block, norm, head and loss.
    assert 25 < first < 45
    assert 10 < last < 22


def test_recomputation_as_torch_runs_it() -> None:
    """A recomputation stops before the last product; the weight gradient of a block recomputes for each group."""
    plain = durations(setting_of(TRANSFORMER, 1, 7, "zbv-zero-bubble"), 4)
    again = durations(setting_of(TRANSFORMER, 1, 7, "zbv-zero-bubble", pipeline={"recompute": "full"}), 4)
    more = again.backward_s[1] - plain.backward_s[1]
    assert 0.3 * plain.forward_s[1] < more < plain.forward_s[1]
    assert again.input_s[1] - plain.input_s[1] == pytest.approx(more)
    assert again.weight_s[1] - plain.weight_s[1] > 2 * more
    assert again.forward_s == plain.forward_s
    assert (again.input_s[0], again.weight_s[0]) == (0, again.backward_s[0])


def test_precision_chooses_the_peak() -> None:
    slow = {**OWN, "flops": 1e8, "flops_float32": 1e7, "launch_s": 0, "bandwidth": 1e15}
    single = durations(setting_of(MLP, 1, 4, hardware=slow), 16)
    half = durations(setting_of(MLP, 1, 4, hardware=slow, training={"precision": "bfloat16"}), 16)
    assert single.forward_s[0] == pytest.approx(10 * half.forward_s[0], rel=0.01)


def test_an_estimate_says_what_it_is() -> None:
    source = EstimatedCosts()
    found = source.costs(setting_of(MLP, 1, 4, hardware={"name": "a100-40gb", "efficiency": 0.5, "memory": "30GB"}), 2)
    assert (found.basis, found.constant_s) == ("estimated", 0.0)
    (note,) = found.notes
    assert "estimate for a100-40gb with the spec's memory, 50% of the peaks" in note
    assert "NVIDIA A100" in note
    assert "a lower bound on time" in note
    split = source.costs(setting_of(MLP, 1, 4, "zbv-zero-bubble"), 2)
    assert "halves" in split.notes[1]


def test_capacity() -> None:
    source = EstimatedCosts()
    assert source.capacity_bytes(spec_of(MLP)) is None
    assert source.capacity_bytes(spec_of(MLP, hardware={"name": "h100-80gb"})) == 80 * 2**30
    assert source.capacity_bytes(spec_of(MLP, device={"kind": "auto"})) == 80 * 2**30


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        ({"mini_batch": 6}, (1, 2, 3, 6)),
        ({"mini_batch": 16}, (1, 64)),
        ({"mini_batch": 64}, (1, 64)),
        ({"mini_batch": 1000}, (1, 64, 4096)),
        ({"micro_batch": 48}, (48,)),
    ],
)
def test_few_sizes_are_profiled(batch: dict[str, int], sizes: tuple[int, ...]) -> None:
    assert sizes_of(spec_of(MLP, batch=batch)) == sizes


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """(family, sizes) of every profile that is made."""
    made: list[tuple[str, tuple[int, ...]]] = []
    original = Profiler.profiles

    def counted(self: Profiler, micro_batches: Any) -> tuple[LayerProfile, ...]:
        made.append((self._spec.model.family, tuple(micro_batches)))
        return original(self, micro_batches)

    monkeypatch.setattr(Profiler, "profiles", counted)
    return made


def test_a_grid_profiles_a_model_once(profiled: list[tuple[str, tuple[int, ...]]]) -> None:
    source = EstimatedCosts()
    for stages in (1, 2, 4):
        for schedule in ("gpipe", "1f1b"):
            for recompute in ("none", "full"):
                for mini_batch in (16, 32, 64):
                    for device in ("h100-80gb", "a100-80gb"):
                        sections = {"batch": {"mini_batch": mini_batch}, "hardware": {"name": device}}
                        setting = setting_of(MLP, stages, 4, schedule, pipeline={"recompute": recompute}, **sections)
                        source.layers(setting.spec)
                        for b in (1, 2, 4, 8, 16):
                            source.costs(setting, b)
    assert profiled == [("mlp", (1,)), ("mlp", (64,))]


def test_prepare_profiles_ahead(profiled: list[tuple[str, tuple[int, ...]]]) -> None:
    source = EstimatedCosts()
    spec = spec_of(MLP, batch={"micro_batch": 4})
    source.prepare(spec, (4, 2, 4))
    source.layers(spec)
    assert profiled == [("mlp", (2,)), ("mlp", (4,))]


@pytest.mark.parametrize("model", [TRANSFORMER, MLP], ids=["transformer", "mlp"])
def test_seconds_between_profiled_sizes_are_those_profiled_there(model: dict[str, Any]) -> None:
    between, direct = EstimatedCosts(), EstimatedCosts()
    layers = 7 if model is TRANSFORMER else 4
    setting = setting_of(model, 2, layers)
    fixed = setting_of(model, 2, layers, batch={"micro_batch": 4})
    found, wanted = durations(setting, 4, between), durations(fixed, 4, direct)
    for name in ("forward_s", "backward_s", "transfer_s", "update_s"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-6), name
    assert between.layer_s(setting.spec, 4) == pytest.approx(direct.layer_s(fixed.spec, 4), rel=1e-6)


def test_a_size_beyond_those_profiled_is_profiled_itself() -> None:
    found = durations(setting_of(MLP, 1, 4), 100)
    assert found.forward_s == durations(setting_of(MLP, 1, 4, batch={"micro_batch": 100}), 100).forward_s


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["cpu", "auto"])
def test_bytes_between_profiled_sizes(precision: str, kind: str) -> None:
    """Peaks from profiles at 1 and 64, against profiles made at b itself: never below, and within 2 %."""
    between, direct = EstimatedCosts(), EstimatedCosts()
    more = {"training": {"precision": precision}, "device": {"kind": kind}}
    interpolated = between.layers(spec_of(TRANSFORMER, **more))
    for b in (2, 8):
        profiled = direct.layers(spec_of(TRANSFORMER, batch={"micro_batch": b}, **more))
        for schedule, recompute in product(schedules.SCHEDULES, ("none", "full")):
            setting = setting_of(TRANSFORMER, 2, 7, schedule, pipeline={"recompute": recompute}, **more)
            pairs = zip(peaks(setting, interpolated, b), peaks(setting, profiled, b), strict=True)
            assert all(0.999 <= found / wanted < 1.02 for found, wanted in pairs), (schedule, recompute, b)


def peaks(setting: Setting, layers: Sequence[LayerProfile], b: int) -> tuple[int, ...]:
    """Of four micro-batches."""
    pipeline = setting.spec.pipeline
    return memory.peak_bytes(
        layers,
        memory.Pipeline(
            pipeline.schedule, setting.stages, 4, setting.virtual_stages, b, setting.counts, pipeline.recompute
        ),
    )


def test_bytes_of_an_estimate_are_those_of_a_rehearsal() -> None:
    pipeline = {"stages": 2, "schedule": "1f1b", "recompute": "full"}
    spec = spec_of({**TRANSFORMER, "layers": 1}, pipeline=pipeline)
    plan = make_plan(spec, 2, "")
    assert plan.counts is not None
    found = peaks(Setting(spec, 2, 1, plan.counts), EstimatedCosts().layers(spec), 4)
    for rank in range(2):
        with fake_group(rank, 2):
            report = rehearse(rank_work(CpuDevice(1), spec, rank=rank, ranks=2), 4, 4)
        assert found[rank] == pytest.approx(report.peak_bytes, rel=0.02), rank


FACTORY = """
import torch
from torch import nn
def make(width=4):
    return {
        "layers": [lambda: nn.Linear(width, width)] * 2,
        "sample_batch": lambda n, g: (torch.randn(n, width, generator=g), torch.randn(n, width, generator=g)),
        "loss": nn.functional.mse_loss,
    }
"""


def test_a_factory_beside_the_spec(tmp_path: Path) -> None:
    (tmp_path / "beside_the_spec.py").write_text(FACTORY)
    model = {"family": "python", "factory": "beside_the_spec:make"}
    source = EstimatedCosts(str(tmp_path))
    layers = source.layers(spec_of(model))
    assert [(layer.count, layer.loss, layer.parameters) for layer in layers[1:]] == [(1, False, 20), (1, True, 0)]
    wider = source.layers(spec_of({**model, "arguments": {"width": 8}}))
    assert wider[0].parameters == 72
    with pytest.raises(SpecError, match="no_such"):
        source.layers(spec_of({**model, "factory": "beside_the_spec:no_such"}))


@pytest.mark.parametrize("name", ["h100-80gb", "a100-40gb"])
def test_seventy_billion_parameters_materialise_nothing(name: str) -> None:
    model = {"family": "transformer", "layers": 80, "hidden": 8192, "heads": 64, "vocab": 32000, "sequence": 4096}
    setting = setting_of(
        model, 8, 83, batch={"micro_batch": 1}, training={"precision": "bfloat16"}, hardware={"name": name}
    )
    found = LARGE.costs(setting, 1)
    assert sum(layer.count * layer.parameters for layer in LARGE.layers(setting.spec)) > 64e9
    work = 6 * 65e9 * 4096  # floating-point operations of one sample, attention left out
    device: Hardware = hardware({"name": name})
    total_s = sum(found.durations.forward_s) + sum(found.durations.backward_s)
    # Above the arithmetic alone, since not every operation is a product; within what large models come to.
    assert 1 < total_s * device.peak_flops_per_s("bfloat16") / work < 2
    assert torch.cuda.is_available() or max(layer.weight_bytes for layer in LARGE.layers(setting.spec)) > 3e9


LARGE = EstimatedCosts()


def test_sleeping_layers_have_bytes() -> None:
    model = {"family": "sleep", "layers": 2, "seconds_per_chunk": 1, "seconds_per_sample": 1, "bytes_per_sample": 1000}
    layers = EstimatedCosts().layers(spec_of(model))
    assert sum(layer.count for layer in layers) == 3
    kept = {one.micro_batch: one.plain.forward.left_bytes for one in layers[0].figures}
    assert kept[8] - kept[4] == 4000
    assert build_model(spec_of(model).model).tokens_per_sample is None
