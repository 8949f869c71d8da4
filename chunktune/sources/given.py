"""Costs that the spec itself says: layers that sleep, and parts of costs known from elsewhere. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeVar

from chunktune import partition, schedules
from chunktune.costs import Basis, Costs, Setting
from chunktune.datasheets import hardware
from chunktune.errors import UsageError
from chunktune.results import LayerBytes, LayerFigures, LayerProfile, OperationBytes
from chunktune.sources.seconds import (
    SPLIT_NOTE,
    Seconds,
    durations,
    per_rank,
    recomputes,
    splits_backward,
    total,
)
from chunktune.spec import Spec
from chunktune.tables import CostsModel, SleepModel

Layers = Callable[[Spec], tuple[LayerProfile, ...] | None]
_Value = TypeVar("_Value", int, float)
_BYTES = ("static_bytes", "kept_bytes", "boundary_bytes", "workspace_bytes")


def capacity_bytes(spec: Spec) -> int | None:
    """The memory of the device that [hardware] names; None where it names none."""
    named = spec.hardware.name is not None or spec.hardware.memory is not None
    return hardware(spec.hardware.model_dump()).sheet.memory_bytes if named else None


class SleepCosts:
    """The family sleep: a layer's forward takes (a + c b) slowdown, and so do the two halves of its backward.

    Neither the runtime nor transfers nor the optimizer take time. `profile`: who profiles the layers' bytes.
    """

    label = "the spec's own seconds (family sleep)"

    def __init__(self, profile: Layers | None = None) -> None:
        self._profile = profile

    def layers(self, spec: Spec) -> tuple[LayerProfile, ...] | None:
        """The layers' bytes, as `profile` finds them."""
        return None if self._profile is None else self._profile(spec)

    def layer_s(self, spec: Spec, micro_batch: int) -> tuple[float, ...]:
        """Forward and backward of every layer at b."""
        return tuple(layer.forward_s + layer.backward_s for layer in _sleeping(_sleep(spec), micro_batch))

    def costs(self, setting: Setting, micro_batch: int) -> Costs:
        """Sums over the layers of every part; a recomputation takes a forward."""
        layers = _sleeping(_sleep(setting.spec), micro_batch)
        parts = [total([layers[i] for i in each]) for each in partition.layers_of_parts(setting.counts)]
        return Costs(durations(setting, parts), 0.0, "given")

    def capacity_bytes(self, spec: Spec) -> int | None:
        """What [hardware] says."""
        return capacity_bytes(spec)


class GivenCosts:
    """The family costs: a part each, measured elsewhere at one micro-batch size, scaled in proportion to others."""

    label = "the spec's own costs (family costs)"

    def layers(self, spec: Spec) -> tuple[LayerProfile, ...] | None:
        """One layer a part with the given bytes, and a loss that takes none; None where no bytes are given."""
        model = _costs(spec)
        if all(getattr(model, name) is None for name in _BYTES):
            return None
        parts = _parts(spec)
        static, kept, boundary, workspace = (_spread(getattr(model, name) or 0, parts) for name in _BYTES)
        entering = [0, *boundary[:-1]]
        layers = [
            _part_profile(model.micro_batch, *figures)
            for figures in zip(static, kept, entering, boundary, workspace, strict=True)
        ]
        return (*_runs(layers), _loss_profile(model.micro_batch, boundary[-1]))

    def layer_s(self, spec: Spec, micro_batch: int) -> tuple[float, ...]:
        """Forward and whole backward of every part at b."""
        parts = _given(_costs(spec), _parts(spec), micro_batch)
        return tuple(part.forward_s + part.backward_s for part in parts)

    def costs(self, setting: Setting, micro_batch: int) -> Costs:
        """The given seconds; at another b than theirs those of a micro-batch grow in proportion to it."""
        model, count = _costs(setting.spec), setting.stages * setting.virtual_stages
        scale = micro_batch / model.micro_batch
        communication_s = _spread(model.communication_s, count)
        played = durations(
            setting,
            _given(model, count, micro_batch),
            transfer_s=[scale * seconds for seconds in communication_s[:-1]],
            update_s=per_rank(setting, _spread(model.update_s, count)),
        )
        basis: Basis = "given" if scale == 1 else "extrapolated"
        return Costs(played, model.step_constant_s, basis, tuple(_notes(setting, model, micro_batch)))

    def capacity_bytes(self, spec: Spec) -> int | None:
        """What [hardware] says."""
        return capacity_bytes(spec)


def _sleep(spec: Spec) -> SleepModel:
    if not isinstance(spec.model, SleepModel):
        raise UsageError(f'model.family is "{spec.model.family}"; only the family sleep says its own seconds a layer')
    return spec.model


def _sleeping(model: SleepModel, micro_batch: int) -> list[Seconds]:
    forward_s = model.seconds_per_chunk + model.seconds_per_sample * micro_batch
    layer = Seconds(forward_s, 2 * forward_s, forward_s, forward_s, forward_s, forward_s)
    return [layer.scaled(slowdown) for slowdown in model.slowdown or (1.0,) * model.layers]


def _costs(spec: Spec) -> CostsModel:
    if not isinstance(spec.model, CostsModel):
        raise UsageError(f'model.family is "{spec.model.family}"; only the family costs says its own costs a part')
    return spec.model


def _parts(spec: Spec) -> int:
    """K V of a spec; raises UsageError where K is not given."""
    stages, name = spec.pipeline.stages, spec.pipeline.schedule
    if stages is None:
        raise UsageError("pipeline.stages is not given; the family costs has a cost for each part; give --stages")
    return stages * (spec.pipeline.virtual_stages or schedules.default_virtual_stages(name))


def _spread(value: _Value | Sequence[_Value], parts: int) -> list[_Value]:
    """One value a part. Raises UsageError for a list of another length."""
    if not isinstance(value, Sequence):
        return [value] * parts
    if len(value) != parts:
        raise UsageError(f"the spec lists the costs of {len(value)} parts; K x V = {parts}; give as many of each")
    return list(value)


def _given(model: CostsModel, parts: int, micro_batch: int) -> list[Seconds]:
    scale = micro_batch / model.micro_batch
    forward_s, backward_s = _spread(model.forward_s, parts), _spread(model.backward_s, parts)
    if model.weight_s is None:
        found = [Seconds.halved(f, b, f, f) for f, b in zip(forward_s, backward_s, strict=True)]
    else:
        triples = zip(forward_s, backward_s, _spread(model.weight_s, parts), strict=True)
        found = [Seconds(f, i + w, i, w, f, f) for f, i, w in triples]
    return [part.scaled(scale) for part in found]


def _notes(setting: Setting, model: CostsModel, micro_batch: int) -> list[str]:
    found: list[str] = []
    if micro_batch != model.micro_batch:
        found.append(
            f"costs are given at b = {model.micro_batch} alone; at others they are scaled in proportion to b, "
            "which leaves out that small micro-batches are less efficient"
        )
    if splits_backward(setting) and model.weight_s is None:
        found.append(f"model.weight_s is not given: {SPLIT_NOTE}")
    if splits_backward(setting) and recomputes(setting):
        found.append("recomputation under a split backward counts one forward for the weight gradient; it may be more")
    absent = [name for name in _BYTES if getattr(model, name) is None]
    if 0 < len(absent) < len(_BYTES):
        found.append(f"{', '.join(f'model.{name}' for name in absent)} not given and counted as 0 bytes")
    return found


def _part_profile(
    micro_batch: int, static: int, kept: int, entering: int, leaving: int, workspace: int
) -> LayerProfile:
    """One part whose boundary tensors are counted by who holds them; the rest is as given."""
    figures = LayerFigures(
        micro_batch=micro_batch,
        input_bytes=entering,
        output_bytes=leaving,
        gradient_bytes=entering,
        batch_bytes=0,
        forward_flops=0,
        backward_flops=0,
        plain=_bytes(kept, kept, entering, leaving, workspace),
        recomputed=_bytes(0, kept, entering, leaving, workspace),
    )
    return LayerProfile(
        count=1, parameters=0, weight_bytes=static, gradient_bytes=0, optimizer_bytes=0, figures=(figures,)
    )


def _bytes(left: int, kept: int, entering: int, leaving: int, workspace: int) -> LayerBytes:
    """`left` from forward to backward; `kept`, which a recomputation brings back, while a backward runs."""
    backward = OperationBytes(peaks=((kept + workspace + entering, ""),))
    weight = OperationBytes(peaks=((kept + workspace, ""),))
    forward = OperationBytes(peaks=((kept + workspace + leaving, ""),), left_bytes=left)
    named = {"forward": forward, "input": backward.model_copy(update={"left_bytes": kept})}
    others = {name: weight if name.endswith("weight") else backward for name in LayerBytes.model_fields}
    return LayerBytes(**{**others, **named})


def _loss_profile(micro_batch: int, entering: int) -> LayerProfile:
    nothing = OperationBytes(peaks=((0, ""),))
    plain = LayerBytes(**dict.fromkeys(LayerBytes.model_fields, nothing))
    figures = LayerFigures(
        micro_batch=micro_batch,
        input_bytes=entering,
        output_bytes=0,
        gradient_bytes=entering,
        batch_bytes=0,
        forward_flops=0,
        backward_flops=0,
        plain=plain,
        recomputed=None,
    )
    return LayerProfile(
        count=1, loss=True, parameters=0, weight_bytes=0, gradient_bytes=0, optimizer_bytes=0, figures=(figures,)
    )


def _runs(layers: Sequence[LayerProfile]) -> list[LayerProfile]:
    grouped = ((layer, len(list(same))) for layer, same in groupby(layers))
    return [layer.model_copy(update={"count": count}) for layer, count in grouped]
