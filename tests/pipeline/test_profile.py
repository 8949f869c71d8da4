"""Bytes foretold from fake layers against those that a rehearsal counts, operation for operation."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from on_device import fake_group
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from chunktune import partition, schedules
from chunktune.device import open_device
from chunktune.errors import UserCodeError
from chunktune.memory import Pipeline, memory_curve, peak_bytes
from chunktune.models import build_model
from chunktune.models.base import ModelDefinition
from chunktune.models.sleep import SleepLayer
from chunktune.pipeline import rehearsal
from chunktune.pipeline.profile import kernels_of_layers, profile_layers
from chunktune.pipeline.rehearsal import rehearse
from chunktune.pipeline.runtime import StorageMeter
from chunktune.pipeline.work import RankWork, Trainer, TrainingStep
from chunktune.results import LayerProfile
from chunktune.spec import Spec
from chunktune.units import CUDA_ROUNDING_BYTES

DEVICE = open_device("cpu", 0, 1)
TRANSFORMER = {"family": "transformer", "layers": 1, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 16}
DEEPER = {**TRANSFORMER, "layers": 5}
MLP = {"family": "mlp", "layers": 8, "hidden": 64, "features": 48, "classes": 10}
FAMILIES = {"transformer": TRANSFORMER, "mlp": MLP, "deeper": DEEPER}
BILLIONS = {"family": "transformer", "layers": 80, "hidden": 8192, "heads": 64, "vocab": 32000, "sequence": 4096}

# (M, b): with N = 12 held fixed, then with b = 2.
BOTH_MODES = [(4, 3), (6, 2), (4, 2)]


def spec_of(model: dict[str, Any], precision: str = "float32", optimizer: str = "adamw", **pipeline: str) -> Spec:
    return Spec.model_validate(
        {
            "model": model,
            "pipeline": pipeline,
            "batch": {"micro_batch": 2},
            "training": {"precision": precision, "optimizer": optimizer},
        }
    )


@pytest.fixture(autouse=True, scope="module")
def lean_process() -> Iterator[None]:
    """One thread, since tiny tensors wait for each other; torch's garbage left alone; steps counted, not timed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsal, "timed_rehearsal", lambda *_: None)
        yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@cache
def profiled(family: str, precision: str, optimizer: str) -> tuple[LayerProfile, ...]:
    spec = spec_of(FAMILIES[family], precision, optimizer)
    both = precision == "float32" and optimizer == "adamw"
    return profile_layers(spec, build_model(spec.model), (2, 3) if both else (2,))


def rehearsed(spec: Spec, model: ModelDefinition, asked: Pipeline, ranks: Sequence[int]) -> list[int]:
    peaks = []
    for rank in ranks:
        with fake_group(rank, asked.stages):
            work = RankWork(spec, model, asked.counts, rank=rank, ranks=asked.stages, device=DEVICE)
            report = rehearse(work, asked.chunks, asked.micro_batch)
        assert report.state == "ok", report.log
        peaks.append(report.peak_bytes)
    return peaks


def pipeline_of(schedule: str, layers: int, stages: int, chunks: int, micro_batch: int, recompute: str) -> Pipeline:
    virtual = schedules.default_virtual_stages(schedule)
    counts = partition.uniform(layers, stages * virtual)
    return Pipeline(schedule, stages, chunks, virtual, micro_batch, counts, "full" if recompute == "full" else "none")


def check(
    family: str,
    schedule: str,
    recompute: str,
    stages: int,
    sizes: Sequence[tuple[int, int]],
    *,
    precision: str = "float32",
    optimizer: str = "adamw",
    ranks: Sequence[int] | None = None,
) -> None:
    """Every rank within 0.2 % of what its rehearsal counts (2 % is promised; here it is exact)."""
    spec = spec_of(FAMILIES[family], precision, optimizer, schedule=schedule, recompute=recompute)
    model = build_model(spec.model)
    for chunks, micro_batch in sizes:
        asked = pipeline_of(schedule, len(model.layers), stages, chunks, micro_batch, recompute)
        foretold = peak_bytes(profiled(family, precision, optimizer), asked)
        ranks = ranks or range(stages)
        counted = rehearsed(spec, model, asked, ranks)
        assert [foretold[rank] for rank in ranks] == pytest.approx(counted, rel=0.002), (chunks, micro_batch)


# mlp without recomputation takes the ways of the others: three schedules, one of each kind, stand for all there.
GRID = [
    (family, schedule, recompute)
    for family in ("transformer", "mlp")
    for schedule in schedules.SCHEDULES
    for recompute in ("none", "full")
    if (family, recompute) != ("mlp", "none") or schedule in ("gpipe", "1f1b", "zbv-zero-bubble")
]


@pytest.mark.parametrize(("family", "schedule", "recompute"), GRID)
def test_peaks_of_two_ranks_in_both_batch_modes(family: str, schedule: str, recompute: str) -> None:
    check(family, schedule, recompute, 2, BOTH_MODES if recompute == "none" else BOTH_MODES[:2])


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_peaks_of_four_ranks(schedule: str) -> None:
    chunks = 8 if schedule == "dualpipe-v" else 4
    check("deeper", schedule, "none", 4, [(chunks, 2)], ranks=(0, 3))
    check("mlp", schedule, "full", 4, [(8, 3)], ranks=(1,))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv-zero-bubble"])
def test_peaks_under_autocast(schedule: str, recompute: str) -> None:
    check("transformer", schedule, recompute, 2, [(4, 2)], precision="bfloat16")


@pytest.mark.parametrize("optimizer", ["sgd", "none"])
def test_peaks_with_other_optimizers(optimizer: str) -> None:
    check("mlp", "1f1b", "none", 2, [(8, 2)], optimizer=optimizer)


def measured_curve(spec: Spec, model: ModelDefinition, asked: Pipeline, rank: int) -> list[tuple[str, int]]:
    """(kind, peak) of every operation of a rank's second step."""
    found: list[tuple[str, int]] = []
    with fake_group(rank, asked.stages):
        work = RankWork(spec, model, asked.counts, rank=rank, ranks=asked.stages, device=DEVICE)
        work.boundaries(asked.micro_batch)
        with StorageMeter() as meter:
            step = TrainingStep(Trainer(work), asked.chunks, asked.micro_batch, rehearsal=True)
            step.run()
            run = step.operations.timed

            def timed(kind: str, part: int, operation: Callable[[], Any], *chunk: int) -> Any:
                meter.restart_peak()
                result = run(kind, part, operation, *chunk)
                found.append((kind, meter.peak_bytes))
                return result

            step.operations.timed = timed  # type: ignore[method-assign]
            step.run()
    return found


@pytest.mark.parametrize(
    ("family", "schedule", "recompute"),
    [
        ("transformer", "1f1b", "none"),
        ("transformer", "interleaved-zero-bubble", "full"),
        ("mlp", "gpipe", "full"),
        ("mlp", "dualpipe-v", "full"),
    ],
)
def test_every_operation_has_the_level_that_it_really_has(family: str, schedule: str, recompute: str) -> None:
    spec = spec_of(FAMILIES[family], schedule=schedule, recompute=recompute)
    model = build_model(spec.model)
    asked = pipeline_of(schedule, len(model.layers), 2, 6, 2, recompute)
    letters = {"forward": "F", "loss": "L", "backward": "B", "input": "I", "weight": "W", "optimizer": "U"}
    for rank in range(2):
        curve = memory_curve(profiled(family, "float32", "adamw"), asked, rank)
        counted = measured_curve(spec, model, asked, rank)
        assert [moment.kind for moment in curve] == [letters[kind] for kind, _ in counted]
        assert [moment.peak_bytes for moment in curve] == pytest.approx([peak for _, peak in counted], rel=0.002)


class Frozen(nn.Module):
    """A residual layer, half of whose weights are not trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fixed = nn.Linear(width, width).requires_grad_(False)
        self.trained = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.trained(self.fixed(x)))


def convolution(channels_in: int, channels: int, inplace: bool) -> nn.Module:
    pieces = nn.Conv2d(channels_in, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace)
    return nn.Sequential(*pieces)


def image_model() -> ModelDefinition:
    """Layers of many kinds: without weights, in place, reshaping, frozen, with state."""

    def sample_batch(samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randn(samples, 3, 8, 8, generator=generator)
        return images, torch.randint(10, (samples,), generator=generator)

    layers = (
        partial(convolution, 3, 8, False),
        partial(convolution, 8, 16, False),
        partial(nn.MaxPool2d, 2),
        partial(convolution, 16, 16, True),
        partial(nn.Dropout, 0.1),
        nn.Flatten,
        partial(nn.Linear, 256, 64),
        nn.ReLU,
        partial(Frozen, 64),
        partial(nn.LayerNorm, 64),
        partial(nn.Linear, 64, 10),
    )
    return ModelDefinition(layers, sample_batch, F.cross_entropy)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-zero-bubble"])
def test_layers_of_a_users_own(schedule: str) -> None:
    model = image_model()
    layers = profile_layers(spec_of(MLP), model, [2])
    for recompute in ("none", "full"):
        spec = spec_of(MLP, schedule=schedule, recompute=recompute)
        asked = pipeline_of(schedule, len(model.layers), 2, 4, 2, recompute)
        if schedule != "1f1b":
            # A part that ends with a reshape cannot be split: torch detaches its output in place.
            asked = replace(asked, counts=(3, 2, 4, 2))
        assert peak_bytes(layers, asked) == pytest.approx(rehearsed(spec, model, asked, range(2)), rel=0.002)


def test_sizes_that_were_not_profiled_are_met_all_the_same() -> None:
    spec = spec_of(TRANSFORMER, schedule="1f1b")
    model = build_model(spec.model)
    for micro_batch in (1, 5):
        asked = pipeline_of("1f1b", len(model.layers), 2, 8, micro_batch, "none")
        foretold = peak_bytes(profiled("transformer", "float32", "adamw"), asked)
        assert foretold == pytest.approx(rehearsed(spec, model, asked, range(2)), rel=0.002)


# --- the profile itself ------------------------------------------------------------------------------------


def test_equal_neighbours_are_one_profile_and_the_loss_comes_last() -> None:
    layers = profiled("deeper", "float32", "adamw")
    assert [(one.count, one.loss) for one in layers] == [(1, False), (5, False), (1, False), (1, False), (1, True)]
    assert [figures.micro_batch for figures in layers[1].figures] == [2, 3]
    block = layers[1]
    assert (block.weight_bytes, block.gradient_bytes) == (block.parameters * 4, block.parameters * 4)
    assert block.optimizer_bytes == pytest.approx(2 * block.weight_bytes, rel=0.01)


def test_layers_that_differ_in_an_attribute_alone_are_told_apart() -> None:
    sound = build_model(spec_of(MLP).model)
    keeping = [partial(SleepLayer, 64, 0.0, 0.0, size) for size in (100, 100, 300, 100)]
    model = ModelDefinition((sound.layers[0], *keeping, sound.layers[-1]), sound.sample_batch, sound.loss)
    layers = profile_layers(spec_of(MLP), model, [2])
    assert [one.count for one in layers] == [1, 2, 1, 1, 1, 1]
    kept = [one.figures[0].plain.forward.left_bytes for one in layers[1:4]]
    assert kept == [200, 600, 200]


def test_storages_are_rounded_as_cuda_rounds_them() -> None:
    spec = spec_of(MLP)
    exact, rounded = (profile_layers(spec, build_model(spec.model), [2], round_to=n) for n in (1, CUDA_ROUNDING_BYTES))
    weights = [48 * 64 * 4, 64 * 4]
    assert exact[0].weight_bytes == sum(weights)
    assert rounded[0].weight_bytes == sum(-(-size // 512) * 512 for size in weights)
    assert all(f.output_bytes % 512 == 0 for one in rounded for f in one.figures)
    assert rounded[0].optimizer_bytes == 2 * rounded[0].weight_bytes, "the step counts lie on the host"
    assert rounded[0].updates_together and not exact[0].updates_together


def test_operations_are_those_of_torchs_own_counter() -> None:
    spec = spec_of({**TRANSFORMER, "layers": 2})
    model = build_model(spec.model)
    kernels = kernels_of_layers(spec, model, 2)
    inputs, targets = model.sample_batch(2, torch.Generator())
    layers = nn.Sequential(*[builder() for builder in model.layers])
    # On the CPU torch's counter does not know its attention: the mathematical one has the same products.
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = model.loss(layers(inputs), targets)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    assert sum(one.forward_flops for one in kernels) == forward.get_total_flops()
    # A fused attention takes its first product again in the backward.
    scores = 2 * 2 * 4 * 16 * 16 * 8 * 2
    assert sum(one.backward_flops for one in kernels) == backward.get_total_flops() + scores
    assert len(kernels) == len(model.layers) + 1 and kernels[1] is kernels[2]
    figures = profiled("transformer", "float32", "adamw")[1].figures[0]
    assert (figures.forward_flops, figures.backward_flops) == (kernels[1].forward_flops, kernels[1].backward_flops)


def test_bytes_of_operations_are_what_they_read_and_write() -> None:
    spec = spec_of({"family": "mlp", "layers": 2, "hidden": 64})
    kernels = kernels_of_layers(spec, build_model(spec.model), 8)[1]
    weight, bias, rows = 64 * 64 * 4, 64 * 4, 8 * 64 * 4
    assert kernels.forward == ((2 * 8 * 64 * 64, bias + rows + weight + rows),)


def test_a_model_of_seventy_billion_weights_is_profiled_without_any_memory() -> None:
    spec = spec_of(BILLIONS, schedule="1f1b")
    model = build_model(spec.model)
    before = resident_bytes()
    layers = profile_layers(spec, model, [1], round_to=CUDA_ROUNDING_BYTES)
    assert resident_bytes() - before < 200 * 2**20
    assert sum(one.count * one.parameters for one in layers) > 60e9
    counts = partition.uniform(len(model.layers), 16)
    peaks = peak_bytes(layers, Pipeline("1f1b", 16, 64, 1, 1, counts))
    assert all(50e9 < peak < 1e12 for peak in peaks)


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


class Branching(nn.Module):
    """Looks at the numbers in a tensor, which a fake one does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x)
        return result if x.sum().item() > 0 else -result


class BlindBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * gradients[0].sum().item()


class Blind(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = BlindBackward.apply(x)
        return result


@pytest.mark.parametrize("broken", [Branching, Blind])
def test_a_layer_that_fails_on_fake_tensors_is_named_in_one_line(broken: type[nn.Module]) -> None:
    spec = spec_of(MLP)
    sound = build_model(spec.model)
    model = ModelDefinition((*sound.layers[:2], broken, *sound.layers[2:]), sound.sample_batch, sound.loss)
    with pytest.raises(UserCodeError, match=r"layer 2 failed on tensors without values: .*must not call .item\(\)"):
        profile_layers(spec, model, [2])
