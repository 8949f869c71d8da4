"""What every layer of a model holds and computes, read off fake tensors: no device, nothing materialised.

Each distinct layer runs alone over a bench (`bench.py`); `chunktune.memory` puts the layers together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chunktune.blame import place_of
from chunktune.errors import ChunktuneError, UsageError, UserCodeError
from chunktune.models.base import ModelDefinition
from chunktune.pipeline.bench import FAKE_DEVICE, Bench, FakeLayer, FakeLoss, Kernels, LayerKind, TensorShape
from chunktune.pipeline.runtime import fake_tensors
from chunktune.pipeline.upkeep import bare_profile
from chunktune.results import LayerFigures, LayerProfile
from chunktune.spec import Spec
from chunktune.units import MAX_BYTES, format_bytes

_RULE = (
    "memory is foretold by running each layer forward and backward on tensors without values: a layer must not call "
    ".item(), branch on what a tensor holds, or cache tensors outside the module; measure with sweep instead"
)


def profile_layers(
    spec: Spec, model: ModelDefinition, micro_batches: Sequence[int], *, round_to: int = 1
) -> tuple[LayerProfile, ...]:
    """Profiles of the layers of a model at each b, equal neighbours in one, and last the profile of the loss.

    `micro_batches`: samples a chunk, 1 or more each. `round_to`: what the device's allocator rounds a storage up to,
    512 bytes on CUDA, where the optimizer also updates all weights together. Precision and optimizer are the spec's.
    Raises UserCodeError where a layer or the loss fails on tensors without values.
    """
    return Profiler(spec, model, round_to).profiles(sorted(set(micro_batches)))


def kernels_of_layers(spec: Spec, model: ModelDefinition, micro_batch: int) -> tuple[Kernels, ...]:
    """The operations of each of the L layers and, last, of the loss at one b; equal layers share one object.

    Raises UserCodeError as `profile_layers` does.
    """
    return Profiler(spec, model, 1).kernels(micro_batch)


@dataclass
class _Found:
    """What one kind of layer turned out to be at one b."""

    figures: LayerFigures
    kernels: Kernels
    exit: TensorShape


class Profiler:
    """The layers of one model, built fake once, and what is known about them so far: for who asks again and again.

    Arguments and errors are those of `profile_layers`. `halves`: whether the two halves of a split backward are
    profiled too, which takes twice as long again; only schedules that split it ask for them.
    """

    def __init__(self, spec: Spec, model: ModelDefinition, round_to: int, *, halves: bool = True) -> None:
        self._spec = spec
        self._model = model
        self._round_to = round_to
        self._halves = halves
        self._autocast = torch.bfloat16 if spec.training.precision == "bfloat16" else None
        self._mode = fake_tensors()
        self._known: dict[LayerKind, _Found] = {}
        self._bare: dict[Any, LayerProfile] = {}
        self._samples = model.sample_batch(1, torch.Generator().manual_seed(spec.training.seed))
        with self._mode, FAKE_DEVICE:
            self._layers = [self._build(index) for index in range(len(model.layers))]

    def _build(self, index: int) -> FakeLayer:
        name = f"layer {index}"
        with _Blaming(name):
            module = self._model.layers[index]()
            return FakeLayer(name, module, _signature(module))

    def profiles(self, micro_batches: Sequence[int]) -> tuple[LayerProfile, ...]:
        """Every layer at every b."""
        rows = [self._row(micro_batch) for micro_batch in micro_batches]
        layers = [*self._layers, self._loss(micro_batches[0])]
        profiles: list[LayerProfile] = []
        for layer, column in zip(layers, zip(*rows, strict=True), strict=True):
            figures = tuple(found.figures for found in column)
            one = self._bare[layer.signature].model_copy(update={"figures": figures})
            if profiles and profiles[-1].model_copy(update={"count": 1}) == one:
                one = one.model_copy(update={"count": profiles.pop().count + 1})
            profiles.append(one)
        return tuple(profiles)

    def kernels(self, micro_batch: int) -> tuple[Kernels, ...]:
        """Every layer at one b."""
        return tuple(found.kernels for found in self._row(micro_batch))

    def _row(self, micro_batch: int) -> list[_Found]:
        """Every layer and the loss at one b, each fed with what the one before it returns."""
        found: list[_Found] = []
        with self._mode:
            entry, differentiable = _batch_shape(self._samples[0], micro_batch), False
            for layer in [*self._layers, self._loss(micro_batch)]:
                one = self._find(layer, LayerKind(layer.signature, entry, differentiable, not found), micro_batch)
                found.append(one)
                entry, differentiable = one.exit, one.exit.dtype.is_floating_point
        return found

    def _loss(self, micro_batch: int) -> FakeLayer:
        with self._mode, torch.device(FAKE_DEVICE):
            target = _batch_shape(self._samples[1], micro_batch).empty()
        return FakeLayer("the loss", FakeLoss(self._model.loss, target), ("loss", micro_batch), loss=True)

    def _find(self, layer: FakeLayer, kind: LayerKind, micro_batch: int) -> _Found:
        if kind not in self._known:
            with _Blaming(layer.name):
                self._known[kind] = self._examine(layer, kind, micro_batch)
                if layer.signature not in self._bare:
                    self._bare[layer.signature] = bare_profile(layer, self._spec.training.optimizer, self._round_to)
        return self._known[kind]

    def _examine(self, layer: FakeLayer, kind: LayerKind, micro_batch: int) -> _Found:
        bench = Bench(layer, kind, self._autocast, self._round_to)
        plain = bench.all_operations(recompute=False, halves=self._halves)
        recomputed = None if layer.loss else bench.all_operations(recompute=True, halves=self._halves)
        kernels = bench.kernels()
        entry_bytes = bench.rounded(_storage_bytes(kind.entry))
        batch_bytes = entry_bytes if kind.first else 0
        if layer.loss:
            target = layer.module.target
            assert isinstance(target, torch.Tensor)
            batch_bytes = bench.rounded(target.untyped_storage().nbytes())
        figures = LayerFigures(
            micro_batch=micro_batch,
            input_bytes=entry_bytes,
            output_bytes=bench.output_bytes,
            gradient_bytes=bench.gradient_bytes,
            batch_bytes=batch_bytes,
            forward_flops=kernels.forward_flops,
            backward_flops=kernels.backward_flops,
            recompute_flops=kernels.again_flops,
            weight_forwards=bench.weight_forwards,
            plain=plain,
            recomputed=recomputed,
        )
        return _Found(figures, kernels, bench.exit)


def _batch_shape(sample: torch.Tensor, samples: int) -> TensorShape:
    """A contiguous batch of rows like those of a sample, (1, ...). Raises UsageError where no tensor can hold it."""
    if samples * sample[0].numel() * sample.element_size() > MAX_BYTES:
        one = format_bytes(sample[0].numel() * sample.element_size())
        raise UsageError(f"{samples} samples of {one} each are more than any tensor can hold; give a smaller batch")
    like = torch.empty((samples, *sample.shape[1:]), dtype=sample.dtype, device="meta")
    return TensorShape.of(like)


def _storage_bytes(shape: TensorShape) -> int:
    if 0 in shape.size:
        return 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape.size, shape.stride, strict=True))
    return span * shape.dtype.itemsize


_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.Size)


def _signature(module: nn.Module) -> Any:
    """Everything in which two layers can differ: classes, shapes and attributes, objects by identity."""
    parts = []
    for name, child in module.named_modules():
        tensors = [*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)]
        shapes = tuple((key, TensorShape.of(tensor), tensor.requires_grad) for key, tensor in tensors)
        attributes = tuple(
            (key, _comparable(value)) for key, value in sorted(vars(child).items()) if not key.startswith("_")
        )
        parts.append((name, type(child), shapes, attributes))
    return tuple(parts)


def _comparable(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple | list):
        return tuple(_comparable(item) for item in value)
    return ("object", id(value))


class _Blaming:
    """Turns what a layer raises into one clear error that names it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, ChunktuneError):
            return
        lines = str(error).strip().splitlines()
        place = place_of(error)
        where = f" ({place})" if place else ""
        said = f"{type(error).__name__}: {lines[0][:200] if lines else '(no message)'}{where}"
        raise UserCodeError(f"{self._name} failed on tensors without values: {said}; {_RULE}") from error
