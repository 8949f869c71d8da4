"""Costs of a model that nobody ran: bytes from fake tensors, seconds from a device's datasheet.

An operation takes the roofline's time (`chunktune.datasheets.Hardware.operation_s`): peaks that no real program
reaches, so what comes out is a lower bound. torch is imported once something is asked, and nothing is materialised.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from chunktune import partition
from chunktune.costs import Costs, Setting
from chunktune.datasheets import Hardware, hardware
from chunktune.results import LayerProfile
from chunktune.schedules import SCHEDULES
from chunktune.sources.figures import filled, sizes_asked
from chunktune.sources.interpolation import at
from chunktune.sources.seconds import SPLIT_NOTE, Seconds, durations, per_rank, splits_backward, total
from chunktune.spec import Spec
from chunktune.units import CUDA_ROUNDING_BYTES, format_share

if TYPE_CHECKING:
    from chunktune.pipeline.bench import Kernel, Kernels
    from chunktune.pipeline.profile import Profiler

_SMALL, _LARGE = 8, 64
_PASSES = 3
"""The optimizer reads gradients, reads and writes weights, and besides reads and writes its state."""


class EstimatedCosts:
    """The spec's model against the device of [hardware]. `spec_dir`: where a factory's module is looked for first.

    What was profiled is kept: settings that differ in K, V, schedule, recompute or N profile a model once.
    """

    label = "an estimate: fake tensors for bytes, a device's datasheet for seconds"

    def __init__(self, spec_dir: str = "") -> None:
        self._spec_dir = spec_dir
        self._models: dict[str, _Model] = {}

    def prepare(self, spec: Spec, micro_batches: Iterable[int]) -> None:
        """Profile the model at these b, all at once. Raises as `layers` does."""
        self._model(spec).learn(sorted(set(micro_batches)))

    def layers(self, spec: Spec) -> tuple[LayerProfile, ...]:
        """Profiles with figures at every b that the spec can come to, profiled at those of `sizes_of`.

        Raises SpecError or UserCodeError for a factory that fails, and for a layer that does on fake tensors.
        """
        return self._model(spec).profiles(sizes_of(spec), sizes_asked(spec))

    def layer_s(self, spec: Spec, micro_batch: int) -> tuple[float, ...]:
        """Forward and backward of every layer at b. Raises as `layers` does."""
        *layers, _ = self._seconds(spec, micro_batch)
        return tuple(layer.forward_s + layer.backward_s for layer in layers)

    def costs(self, setting: Setting, micro_batch: int) -> Costs:
        """The roofline's seconds of every part; the loss belongs to the last one. Raises as `layers` does."""
        spec, device = setting.spec, hardware(setting.spec.hardware.model_dump())
        *layers, loss = self._seconds(spec, micro_batch)
        slices = partition.layers_of_parts(setting.counts)
        parts = [[layers[i] for i in each] for each in slices]
        parts[-1].append(loss)
        model, sizes = self._model(spec), sizes_of(spec)
        updated = [device.memory_s(moved) for moved in model.update_bytes(sizes)]
        entering = [model.entering_bytes(sizes, each.start, micro_batch) for each in slices[1:]]
        played = durations(
            setting,
            [total(part) for part in parts],
            transfer_s=[device.transfer_s(size) for size in entering],
            update_s=per_rank(setting, [sum(updated[i] for i in each) for each in slices]),
        )
        return Costs(played, 0.0, "estimated", tuple(_notes(setting, device)))

    def capacity_bytes(self, spec: Spec) -> int | None:
        """The device's memory; None for a CPU that [hardware] gives none."""
        if spec.device.kind == "cpu" and spec.hardware.name is None and spec.hardware.memory is None:
            return None
        return hardware(spec.hardware.model_dump()).sheet.memory_bytes

    def _seconds(self, spec: Spec, micro_batch: int) -> tuple[Seconds, ...]:
        """Every layer at b, and last the loss."""
        device = hardware(spec.hardware.model_dump())
        return self._model(spec).seconds(sizes_of(spec), micro_batch, device)

    def _model(self, spec: Spec) -> _Model:
        key = f"{spec.model.model_dump_json()} {spec.training.precision} {spec.training.optimizer} {spec.device.kind}"
        halves = SCHEDULES[spec.pipeline.schedule].splits_backward
        known = self._models.get(key)
        if known is None or (halves and not known.halves):
            known = self._models[key] = _Model(spec, self._spec_dir, halves)
        return known


def sizes_of(spec: Spec) -> tuple[int, ...]:
    """The b at which a spec's layers are profiled, ascending; between them figures lie on a line.

    They depend on the spec alone, so that a prediction does not depend on what was predicted before it, and are the
    same for many N, so that a grid profiles few.
    """
    most = sizes_asked(spec)[-1]
    if spec.batch.micro_batch is not None or most <= _SMALL:
        return sizes_asked(spec)
    top = _LARGE
    while top < most:
        top *= _LARGE
    return tuple(sorted({1, _LARGE, top}))


@dataclass
class _Model:
    """One model under one training: what its profiler found so far. `halves`: of a split backward too."""

    spec: Spec
    spec_dir: str
    halves: bool
    _figures: dict[int, list[LayerProfile]] = field(default_factory=dict)
    _kernels: dict[int, tuple[Kernels, ...]] = field(default_factory=dict)
    _profiles: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[LayerProfile, ...]] = field(default_factory=dict)
    _timed: dict[tuple[tuple[int, ...], int, Hardware, str], tuple[Seconds, ...]] = field(default_factory=dict)

    @cached_property
    def _profiler(self) -> Profiler:
        from chunktune.models import build_model
        from chunktune.pipeline.profile import Profiler

        if self.spec_dir and self.spec_dir not in sys.path:
            sys.path.insert(0, self.spec_dir)
        round_to = 1 if self.spec.device.kind == "cpu" else CUDA_ROUNDING_BYTES
        return Profiler(self.spec, build_model(self.spec.model), round_to, halves=self.halves)

    def learn(self, sizes: Iterable[int]) -> None:
        """Profile what is not known yet."""
        for size in sizes:
            if size not in self._figures:
                self._figures[size] = _one_by_one(self._profiler.profiles([size]))
                self._kernels[size] = self._profiler.kernels(size)

    def profiles(self, sizes: tuple[int, ...], asked: tuple[int, ...]) -> tuple[LayerProfile, ...]:
        """The layers, equal neighbours in one, with their figures at `sizes` and at the `asked` b between these."""
        if (sizes, asked) not in self._profiles:
            self.learn(sizes)
            columns = zip(*(self._figures[size] for size in sizes), strict=True)
            self._profiles[sizes, asked] = filled(tuple(_runs(_merged(column) for column in columns)), asked)
        return self._profiles[sizes, asked]

    def seconds(self, sizes: tuple[int, ...], micro_batch: int, device: Hardware) -> tuple[Seconds, ...]:
        """Every layer at b, and last the loss."""
        precision = self.spec.training.precision
        key = (sizes, micro_batch, device, precision)
        if key not in self._timed:
            self.learn(sizes)
            layers = self._kernels_at(sizes, micro_batch)
            again = [profile.figures[0].weight_forwards for profile in self._figures[sizes[0]]]
            known: dict[tuple[int, int], Seconds] = {}
            for one, count in zip(layers, again, strict=True):
                if (id(one), count) not in known:
                    known[id(one), count] = _roofline(one, count, device, precision)
            self._timed[key] = tuple(known[id(one), count] for one, count in zip(layers, again, strict=True))
        return self._timed[key]

    def _kernels_at(self, sizes: Sequence[int], micro_batch: int) -> Sequence[Kernels]:
        """Every layer's operations at b: profiled there, or affine between two sizes that have the same ones."""
        below, above = [b for b in sizes if b < micro_batch], [b for b in sizes if b > micro_batch]
        if micro_batch not in self._kernels and below and above:
            low, high = self._kernels[below[-1]], self._kernels[above[0]]
            if all(_alike(*pair) for pair in zip(low, high, strict=True)):
                return _between(low, high, (micro_batch - below[-1]) / (above[0] - below[-1]))
        self.learn([micro_batch])
        return self._kernels[micro_batch]

    def entering_bytes(self, sizes: Sequence[int], layer: int, micro_batch: int) -> float:
        """The tensor that a layer takes at b."""
        self.learn(sizes)
        return at([(size, self._figures[size][layer].figures[0].input_bytes) for size in sizes], micro_batch)

    def update_bytes(self, sizes: Sequence[int]) -> list[int]:
        """What the optimizer reads and writes for each layer, and last for the loss."""
        self.learn(sizes)
        if self.spec.training.optimizer == "none":
            return [0] * len(self._figures[sizes[0]])
        return [_PASSES * one.gradient_bytes + 2 * one.optimizer_bytes for one in self._figures[sizes[0]]]


def _one_by_one(profiles: Iterable[LayerProfile]) -> list[LayerProfile]:
    return [profile.model_copy(update={"count": 1}) for profile in profiles for _ in range(profile.count)]


def _merged(same: Sequence[LayerProfile]) -> LayerProfile:
    """One layer's profiles at several b, ascending, in one."""
    return same[0].model_copy(update={"figures": tuple(profile.figures[0] for profile in same)})


def _runs(layers: Iterable[LayerProfile]) -> Iterable[LayerProfile]:
    for layer, equal in groupby(layers):
        yield layer.model_copy(update={"count": len(list(equal))})


def _alike(one: Kernels, other: Kernels) -> bool:
    lists = ((one.forward, other.forward), (one.backward, other.backward), (one.again, other.again))
    return all(len(mine) == len(others) for mine, others in lists)


def _between(low: Sequence[Kernels], high: Sequence[Kernels], share: float) -> list[Kernels]:
    """Operation by operation on the line from `low` to `high`; equal layers stay one object."""
    known: dict[tuple[int, int], Kernels] = {}
    for one, other in zip(low, high, strict=True):
        if (id(one), id(other)) not in known:
            known[id(one), id(other)] = replace(
                one,
                forward=_line(one.forward, other.forward, share),
                backward=_line(one.backward, other.backward, share),
                again=_line(one.again, other.again, share),
            )
    return [known[id(one), id(other)] for one, other in zip(low, high, strict=True)]


def _line(low: Sequence[Kernel], high: Sequence[Kernel], share: float) -> tuple[Kernel, ...]:
    return tuple(
        (round(flops + share * (more_flops - flops)), round(moved + share * (more_moved - moved)))
        for (flops, moved), (more_flops, more_moved) in zip(low, high, strict=True)
    )


def _roofline(layer: Kernels, weight_forwards: int, device: Hardware, precision: str) -> Seconds:
    forward_s, backward_s, again_s = (
        sum(device.operation_s(flops, moved, precision) for flops, moved in operations)
        for operations in (layer.forward, layer.backward, layer.again)
    )
    return Seconds.halved(forward_s, backward_s, again_s, weight_forwards * again_s)


def _notes(setting: Setting, device: Hardware) -> Iterable[str]:
    reached = "" if device.efficiency == 1 else f", {format_share(device.efficiency)} of the peaks"
    yield (
        f"seconds are an estimate for {device.label}{reached}, by a datasheet's peaks ({device.sheet.source}): "
        "a lower bound on time"
    )
    if splits_backward(setting):
        yield f"under a schedule that splits the backward {SPLIT_NOTE}"
