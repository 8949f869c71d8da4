"""Costs that a record measured: operations from its rehearsals, overheads from its measured steps. No torch.

at b        every part's operations as rehearsed, interpolated in b between the sizes that were, and longer by the
            contention that the measured steps show
layers      a part's seconds are its layers', in proportion to their floating-point operations: so they can be
            put together to other parts, on another K or V
overheads   `chunktune.predict.fit_overhead`, as they were on the record's own pipeline
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from chunktune import partition, schedules
from chunktune.costs import Basis, Costs, Setting, weakest
from chunktune.errors import UsageError
from chunktune.predict import Overhead, Shape, fit_overhead
from chunktune.results import LayerFigures, LayerProfile, PartSeconds, Predicted, Record, Trial
from chunktune.settings import leaves
from chunktune.sources.figures import filled, sizes_asked
from chunktune.sources.interpolation import at, reach
from chunktune.sources.seconds import SPLIT_NOTE, Seconds, durations, per_rank, splits_backward, total
from chunktune.spec import HardwareSpec, PipelineSpec, Spec
from chunktune.units import shorten, shown

_NEEDED_VERSION = 2
_SPOKEN_FOR = ("training.optimizer", "training.precision")
"""What changes every cost, beside the model; a record of one value says nothing of another."""

Kind = Literal["forward_s", "backward_s", "input_s", "weight_s"]


class RecordedCosts:
    """What the record of a sweep says. Raises UsageError for one without operation times, or not whole in itself."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._trials = _usable(record)
        self._shape = _whole_shape(record, self._trials)
        pipeline = record.spec["pipeline"]
        self._recomputes = pipeline["recompute"] == "full"
        self._splits = schedules.SCHEDULES[self._shape.schedule].splits_backward
        self._slices = partition.layers_of_parts(record.layers_per_part)
        self._rehearsals = _by_size(self._trials)
        self._sizes = tuple(self._rehearsals)
        self._cache: dict[int, tuple[Seconds, ...]] = {}
        self._filled: dict[tuple[int, ...], tuple[LayerProfile, ...]] = {}

    @property
    def label(self) -> str:
        """The record by its time, its pipeline and its sizes."""
        return f"record of {shorten(self._record.started_at)} ({self._pipeline}, b = {_listed(self._sizes)})"

    def layers(self, spec: Spec) -> tuple[LayerProfile, ...] | None:
        """The record's profiles, also between its sizes; None without any. Raises UsageError for another model."""
        self._check(spec)
        asked = sizes_asked(spec)
        if asked not in self._filled:
            self._filled[asked] = filled(self._record.layers, asked)
        return self._filled[asked] or None

    def layer_s(self, spec: Spec, micro_batch: int) -> tuple[float, ...]:
        """Forward and backward of every layer at b, without recomputation. Raises UsageError for another model."""
        self._check(spec)
        return tuple(max(0.0, layer.forward_s + layer.backward_s) for layer in self._layers_at(micro_batch))

    def costs(self, setting: Setting, micro_batch: int) -> Costs:
        """The record's operations put together to the setting's parts. Raises UsageError for another model."""
        self._check(setting.spec)
        layers = self._layers_at(micro_batch)
        if sum(setting.counts) != len(layers):
            raise UsageError(f"the setting has {sum(setting.counts)} layers; the record's model has {len(layers)}")
        slices = partition.layers_of_parts(setting.counts)
        sizes = self._boundary_bytes(setting, slices, micro_batch)
        played = durations(
            setting,
            [total([layers[i] for i in each]) for each in slices],
            transfer_s=[self._overhead.transfer_s_per_byte * size for size in sizes],
            update_s=per_rank(setting, [sum(self._update_of_layers[i] for i in each) for each in slices]),
            overhead_s=self._overhead.overhead_s,
        )
        known = reach(self._sizes, micro_batch)
        notes = tuple(self._notes(setting, known))
        derived: Basis = "interpolated" if any(self._differences(setting)) else "measured"
        return Costs(played, self._overhead.constant_s, weakest(known, derived), notes)

    def capacity_bytes(self, spec: Spec) -> int | None:
        """The smallest capacity of the record's devices; None where its spec set one instead of asking them."""
        device = self._record.spec.get("device")
        if isinstance(device, Mapping) and device.get("memory", "auto") != "auto":
            return None
        stages = [stage for trial in self._trials for stage in trial.stages]
        return min((stage.capacity_bytes for stage in stages if stage.capacity_bytes is not None), default=None)

    @property
    def _pipeline(self) -> str:
        return f"{self._shape.schedule}, K = {self._shape.stages}, V = {self._shape.virtual_stages}"

    def _check(self, spec: Spec) -> None:
        """Raise UsageError where the spec has a model or a training that the record cannot speak for."""
        wanted, recorded = (_flat(tables) for tables in (spec.model_dump(mode="json"), self._record.spec))
        names = [name for name in {**recorded, **wanted} if name.startswith("model.") or name in _SPOKEN_FOR]
        wrong = [name for name in names if wanted.get(name) != recorded.get(name)]
        # Older records have no [hardware]; what a sweep ran on does not come from there.
        usual = {f"hardware.{key}": value for key, value in HardwareSpec().model_dump(mode="json").items()}
        wrong += [name for name in usual if wanted.get(name) not in (usual[name], recorded.get(name))]
        if wrong:
            facts = [f"{name} is {_told(wanted, name)}, in the record {_told(recorded, name)}" for name in wrong]
            raise UsageError(
                f"{'; '.join(facts)}; a record speaks for its own model, optimizer, precision and device alone; "
                "leave out --from to estimate, or keep the record's values"
            )

    # --- seconds of layers

    def _layers_at(self, micro_batch: int) -> tuple[Seconds, ...]:
        if micro_batch not in self._cache:
            weights, traits = self._weights(micro_batch), self._traits(micro_batch)
            found: list[Seconds] = []
            for part, each in enumerate(self._slices):
                shares = _shares([[of_layers[i] for i in each] for of_layers in weights])
                found += self._layers_of_part(part, micro_batch, shares, [traits[i] for i in each])
            self._cache[micro_batch] = tuple(found)
        return self._cache[micro_batch]

    def _layers_of_part(
        self, part: int, micro_batch: int, shares: Sequence[float], traits: Sequence[_Trait]
    ) -> list[Seconds]:
        """A part's seconds, what recomputation took of them taken off, handed out to its layers."""
        forward_s = self._at("forward_s", part, micro_batch) or 0.0
        again_s = forward_s * sum(share * trait.again for share, trait in zip(shares, traits, strict=True))
        weight_again_s = forward_s * sum(s * t.again * t.weight_forwards for s, t in zip(shares, traits, strict=True))
        whole_s, input_s, weight_s = self._backward(part, micro_batch, again_s, weight_again_s)
        return [
            Seconds(
                forward_s=share * forward_s,
                backward_s=share * whole_s,
                input_s=share * input_s,
                weight_s=share * weight_s,
                again_s=share * forward_s * trait.again,
                weight_again_s=share * forward_s * trait.again * trait.weight_forwards,
            )
            for share, trait in zip(shares, traits, strict=True)
        ]

    def _backward(
        self, part: int, micro_batch: int, again_s: float, weight_again_s: float
    ) -> tuple[float, float, float]:
        """Whole backward, input and weight gradient of a part, without recomputation.

        Of the first part torch runs the whole as W; its halves are as those of the other parts are on average.
        """
        took = 1.0 if self._recomputes else 0.0
        whole_s = self._at("backward_s", part, micro_batch)
        input_s, weight_s = (self._at(kind, part, micro_batch) for kind in ("input_s", "weight_s"))
        if input_s is None or weight_s is None:
            whole_s = (whole_s or 0.0) - took * again_s
            return whole_s, whole_s / 2, whole_s / 2
        if part == 0:
            whole_s = (input_s + weight_s if whole_s is None else whole_s) - took * again_s
            share = self._input_share(micro_batch)
            return whole_s, share * whole_s, (1 - share) * whole_s
        input_s, weight_s = input_s - took * again_s, weight_s - took * weight_again_s
        return input_s + weight_s if whole_s is None else whole_s - took * again_s, input_s, weight_s

    def _input_share(self, micro_batch: int) -> float:
        """What part of the two halves the input gradient is, over all parts but the first; a half without any."""
        parts = range(1, len(self._slices))
        input_s = sum(self._at("input_s", part, micro_batch) or 0.0 for part in parts)
        weight_s = sum(self._at("weight_s", part, micro_batch) or 0.0 for part in parts)
        return input_s / (input_s + weight_s) if input_s + weight_s > 0 else 0.5

    def _at(self, kind: Kind, part: int, micro_batch: int) -> float | None:
        """Seconds of one operation of one part at b; None where it was never run."""
        points = []
        for size, rehearsals in self._rehearsals.items():
            seconds = [value for each in rehearsals if (value := getattr(_part(each, part), kind)) is not None]
            if not seconds:
                return None
            points.append((size, statistics.fmean(seconds)))
        return (1 + self._overhead.contention) * at(points, micro_batch)

    def _weights(self, micro_batch: int) -> list[list[float]]:
        """By what a part's seconds are handed out: floating-point operations, else parameters, else evenly.

        Of layers that sleep the slowdown says it.
        """
        even = [1.0] * sum(self._record.layers_per_part)
        model = self._record.spec["model"]
        if model["family"] == "sleep":
            return [[float(factor) for factor in model["slowdown"] or even], even]
        if not self._profiles:
            return [even]
        near = [_nearest(profile, micro_batch) for profile in self._profiles]
        flops = [float(one.forward_flops + one.backward_flops) if one else 0.0 for one in near]
        return [flops, self._parameters, even]

    @property
    def _parameters(self) -> list[float]:
        return [float(profile.parameters) for profile in self._profiles]

    def _traits(self, micro_batch: int) -> list[_Trait]:
        """How each layer recomputes; as its whole forward where nothing is known of it."""
        near = [_nearest(profile, micro_batch) for profile in self._profiles]
        return [_Trait.of(figures) for figures in near] or [_Trait()] * sum(self._record.layers_per_part)

    @cached_property
    def _profiles(self) -> list[LayerProfile]:
        """The record's layers one by one, the loss left out; empty where it has no profiles."""
        layers = [profile for profile in self._record.layers if not profile.loss for _ in range(profile.count)]
        return layers if len(layers) == sum(self._record.layers_per_part) else []

    # --- the rest of a step

    @cached_property
    def _overhead(self) -> Overhead:
        """What the runtime adds; where no steps were measured, what its rehearsals make likely."""
        every = [each.rehearsed_overhead_s for rehearsals in self._rehearsals.values() for each in rehearsals]
        known = [seconds for seconds in every if seconds is not None]
        measured = self._trials if self._record.mode == "measured" else ()
        return fit_overhead(self._shape, measured, statistics.median(known) if known else None)

    @cached_property
    def _update_of_layers(self) -> list[float]:
        """Seconds of the optimizer on each layer: its rank's, in proportion to parameters."""
        even = [1.0] * sum(self._record.layers_per_part)
        found = [0.0] * len(even)
        for rank, update_s in enumerate(self._update_of_ranks):
            held = schedules.parts_of_rank(self._shape.schedule, self._shape.stages, self._shape.virtual_stages, rank)
            layers = [layer for part in held for layer in self._slices[part]]
            shares = _shares([[of[layer] for layer in layers] for of in (self._parameters, even) if of])
            for layer, share in zip(layers, shares, strict=True):
                found[layer] = share * update_s
        return found

    @property
    def _update_of_ranks(self) -> list[float]:
        every = [each.update_s for rehearsals in self._rehearsals.values() for each in rehearsals]
        return [statistics.fmean(of_rank) for of_rank in zip(*every, strict=True)]

    def _boundary_bytes(self, setting: Setting, slices: Sequence[range], micro_batch: int) -> list[float]:
        """Bytes of the tensor before each part but the first: as rehearsed, from the layers, or the rehearsed mean."""
        rehearsed = {size: each[0].boundary_bytes for size, each in self._rehearsals.items()}
        recorded = [
            at([(size, row[place]) for size, row in rehearsed.items()], micro_batch)
            for place in range(len(self._slices) - 1)
        ]
        if setting.counts == self._record.layers_per_part:
            return recorded
        if self._profiles:
            return [_entering(self._profiles[each.start], micro_batch) for each in slices[1:]]
        return [statistics.fmean(recorded) if recorded else 0.0] * (len(slices) - 1)

    # --- what has to be said

    def _differences(self, setting: Setting) -> tuple[bool, bool, bool]:
        """Whether the setting has other parts, recomputes otherwise, and splits the backward otherwise."""
        shape = (setting.stages, setting.virtual_stages, setting.counts)
        own = (self._shape.stages, self._shape.virtual_stages, self._record.layers_per_part)
        recomputes = setting.spec.pipeline.recompute == "full"
        return shape != own, recomputes != self._recomputes, splits_backward(setting) != self._splits

    def _notes(self, setting: Setting, known: Basis) -> Iterator[str]:
        moved, recomputes, splits = self._differences(setting)
        sizes = f"the record measured b = {_listed(self._sizes)}"
        if known == "extrapolated" and len(self._sizes) == 1:
            yield f"{sizes} alone; operations at other b are scaled in proportion to b"
        elif known == "extrapolated":
            yield f"{sizes}; operations beyond follow the line of the nearest two"
        if moved:
            by = "slowdown" if self._record.spec["model"]["family"] == "sleep" else "floating-point operations"
            yield f"other parts than the record's ({self._pipeline}): a part's seconds are its layers', by their {by}"
        if moved or setting.spec.pipeline.schedule != self._shape.schedule:
            yield f"the runtime's overheads are taken as they were under {self._pipeline}"
        if recomputes:
            verb = "off" if self._recomputes else "on"
            yield f"the record's recompute is the other: recomputation is put {verb} top, from the forward's seconds"
        if splits and not self._splits:
            yield f"the record's schedule does not split the backward: {SPLIT_NOTE}"
        if splits and self._splits:
            yield "the record's schedule splits the backward: a whole one is taken as the sum of the two"


@dataclass(frozen=True)
class _Trait:
    """How a layer recomputes: a recomputation over its forward, and how often the weight gradient does it."""

    again: float = 1.0
    weight_forwards: int = 1

    @classmethod
    def of(cls, figures: LayerFigures | None) -> _Trait:
        if figures is None:
            return cls()
        known = figures.recompute_flops is not None and figures.forward_flops > 0
        return cls((figures.recompute_flops or 0) / figures.forward_flops if known else 1.0, figures.weight_forwards)


def _usable(record: Record) -> list[Trial]:
    """The trials that ran and were rehearsed. Raises UsageError where there is none."""
    found = [t for t in record.trials if t.fits and t.predicted is not None and t.predicted.parts]
    if record.mode != "predicted" and found and record.layers_per_part:
        return found
    if record.mode == "predicted":
        fact = "the record was predicted, not measured"
    elif record.schema_version < _NEEDED_VERSION:
        fact = f"the record has schema version {record.schema_version}, which holds no times of single operations"
    else:
        fact = f"none of the record's {len(record.trials)} trials ran, so it holds no times of single operations"
    raise UsageError(
        f"{fact}; a prediction needs the operations of one trial or more, which a sweep records from schema version "
        f"{_NEEDED_VERSION} on; run chunktune sweep again, or leave out --from to estimate"
    )


def _whole_shape(record: Record, trials: Sequence[Trial]) -> Shape:
    """The pipeline that the record ran. Raises UsageError where what it says of it does not fit together."""
    try:
        spec = Spec.model_validate(_known_of(record.spec))
        pipeline = spec.pipeline
        shape = Shape(pipeline.schedule, int(pipeline.stages or 0), int(pipeline.virtual_stages or 0))
        parts = len(shape.ranks_of_parts)
    except (ValueError, LookupError, ArithmeticError, UsageError) as error:
        raise _not_whole(f"its spec is no spec ({type(error).__name__})") from error
    if parts != shape.stages * shape.virtual_stages or parts == 0:
        raise _not_whole(f"its spec has K = {shape.stages} and V = {shape.virtual_stages}")
    if len(record.layers_per_part) != parts or min(record.layers_per_part) < 1:
        raise _not_whole(f"it has {parts} parts and the layers of {len(record.layers_per_part)}")
    if spec.model.family == "sleep" and len(spec.model.slowdown) not in (0, sum(record.layers_per_part)):
        raise _not_whole(f"it slows down {len(spec.model.slowdown)} of {sum(record.layers_per_part)} layers")
    for trial in trials:
        _check_rehearsal(trial, parts, shape)
    _check_profiles(record)
    return shape


def _known_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The tables and keys of a record's spec that this chunktune knows; a newer one may know more."""
    tables: dict[str, Any] = {"model": spec.get("model"), "batch": spec.get("batch")}
    pipeline = spec.get("pipeline")
    if isinstance(pipeline, Mapping):
        tables["pipeline"] = {key: value for key, value in pipeline.items() if key in PipelineSpec.model_fields}
    return tables


def _check_rehearsal(trial: Trial, parts: int, shape: Shape) -> None:
    predicted, stages = trial.predicted, shape.stages
    assert predicted is not None  # else the trial is not among the usable ones
    counts = {
        "parts": (len(predicted.parts), parts),
        "update_s": (len(predicted.update_s), stages),
        "boundary_bytes": (len(predicted.boundary_bytes), parts - 1),
    }
    for name, (count, wanted) in counts.items():
        if count != wanted:
            raise _not_whole(f"at M = {trial.chunks} {name} has {count} values and should have {wanted}")
    if [part.part for part in predicted.parts] != list(range(parts)):
        raise _not_whole(f"at M = {trial.chunks} its parts are not numbered 0 to {parts - 1}")
    ranks = [stage.rank for stage in trial.stages]
    if ranks and ranks != list(range(stages)):
        raise _not_whole(f"at M = {trial.chunks} it has the ranks {shown(ranks)} of {stages}")
    if not schedules.admits(shape.schedule, stages, trial.chunks, shape.virtual_stages):
        raise _not_whole(f"at M = {trial.chunks} it ran what {shape.schedule} cannot at K = {stages}")
    if trial.micro_batch < 1:
        raise _not_whole(f"at M = {trial.chunks} it has micro_batch = {trial.micro_batch}")


def _check_profiles(record: Record) -> None:
    """The loss comes last, once, and before it every layer; each size once and ascending."""
    losses = [profile.loss for profile in record.layers]
    layers = sum(profile.count for profile in record.layers if not profile.loss)
    if not losses:
        return
    if losses != [False] * (len(losses) - 1) + [True] or layers != sum(record.layers_per_part):
        raise _not_whole(f"it has {sum(record.layers_per_part)} layers and a loss, and profiles of {layers} layers")
    for profile in record.layers:
        sizes = [figures.micro_batch for figures in profile.figures]
        if sizes != sorted(set(sizes)) or min(sizes, default=0) < 1 or profile.count < 1:
            raise _not_whole(f"a profile of {profile.count} layers has the sizes {shown(sizes)}")


def _not_whole(fact: str) -> UsageError:
    rule = "a prediction needs a record as a sweep wrote it"
    return UsageError(f"the record is damaged: {fact}; {rule}: run chunktune sweep again, or leave out --from")


def _by_size(trials: Sequence[Trial]) -> dict[int, list[Predicted]]:
    """The rehearsals by b, ascending."""
    found: dict[int, list[Predicted]] = {}
    for trial in sorted(trials, key=lambda trial: trial.micro_batch):
        if trial.predicted is not None:
            found.setdefault(trial.micro_batch, []).append(trial.predicted)
    return found


def _part(rehearsal: Predicted, part: int) -> PartSeconds:
    return rehearsal.parts[part]


def _shares(weights: Sequence[Sequence[float]]) -> list[float]:
    """Shares in proportion to the first of these rows that is not all zero; the last one is not."""
    row = next(row for row in weights if sum(row) > 0)
    return [weight / sum(row) for weight in row]


def _nearest(profile: LayerProfile, micro_batch: int) -> LayerFigures | None:
    return min(profile.figures, key=lambda figures: abs(figures.micro_batch - micro_batch), default=None)


def _entering(profile: LayerProfile, micro_batch: int) -> float:
    return at([(figures.micro_batch, figures.input_bytes) for figures in profile.figures], micro_batch)


def _flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {".".join(keys): value for keys, value in leaves(tables)}


def _told(values: Mapping[str, Any], name: str) -> str:
    return shown(values[name]) if values.get(name) is not None else "not given"


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
