"""The tables of a spec as pydantic models: unknown keys forbidden, frozen. No torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from chunktune import kinds
from chunktune.checks import across
from chunktune.fields import (
    PARTITIONS,
    Count,
    CountFromZero,
    CountOrAbsent,
    Duration,
    Efficiency,
    NameOrAbsent,
    Number,
    NumberOrAbsent,
    Numbers,
    Parts,
    PartSeconds,
    PartSecondsOrAbsent,
    PartSizesOrAbsent,
    PartsOrNull,
    RateOrAbsent,
    Seed,
    Share,
    Size,
    SizeOrAbsent,
    Width,
    WidthOrAbsent,
    choice,
    read_arguments,
    read_chunks,
    read_factory,
    read_partition,
    read_tolerance,
    unless,
    whole,
)
from chunktune.results import Criterion, Frozen
from chunktune.settings import dotted, leaves
from chunktune.units import parse_bytes, parse_duration

ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "interleaved-1f1b",
    "looped-bfs",
    "interleaved-zero-bubble",
    "zbv-zero-bubble",
    "dualpipe-v",
]
Recompute = Literal["none", "full"]
Partition = Literal["uniform", "parameters", "time"] | tuple[int, ...]
Optimizer = Literal["adamw", "sgd", "none"]
Precision = Literal["float32", "bfloat16"]
DeviceKind = Literal["auto", "cuda", "cpu"]

# Marks an error that `spec.load` finds by itself, on what is valid of the spec.
CROSS = "chunktune_cross"
_READ_MEMORY = unless("auto", "auto", lambda value: whole(1, 2**63 - 1)(parse_bytes(value)))
_READ_TIMEOUT = unless("auto", "auto", parse_duration)


class TransformerModel(Frozen):
    """A decoder-only language model of `layers` blocks; `sequence` tokens a sample."""

    family: Literal["transformer"]
    layers: Parts
    hidden: Width
    heads: Width
    vocab: Width
    sequence: Width


class MlpModel(Frozen):
    """A multi-layer perceptron; `features` inputs and `classes` outputs, each `hidden` where absent."""

    family: Literal["mlp"]
    layers: Parts
    hidden: Width
    features: WidthOrAbsent = None
    classes: WidthOrAbsent = None


class SleepModel(Frozen):
    """Layers of known cost: forward of b samples takes (seconds_per_chunk + b seconds_per_sample) slowdown.

    `bytes_per_sample` are kept from forward to backward. `slowdown`: one factor a layer, or empty.
    """

    family: Literal["sleep"]
    layers: Parts
    seconds_per_chunk: Number
    seconds_per_sample: Number
    bytes_per_sample: Size = 0
    slowdown: Numbers = ()
    width: Width = 256


class CostsModel(Frozen):
    """Parts of costs known from elsewhere, for `whatif` alone: seconds of one micro-batch of `micro_batch` samples.

    A value is that of every one of the K V parts, or a list has one a part, first part first. `forward_s`,
    `backward_s`: without recomputation; `backward_s` is the whole gradient, or with `weight_s`, the gradient of the
    weights, that of the input alone. `communication_s`: a boundary tensor from a part to the next and back again its
    gradient, each (the last part's is not used). `update_s`: the optimizer on this part's weights.
    `step_constant_s`: a step besides. Bytes, without which memory is left open: `static_bytes`, weights, gradients
    and optimizer state; `kept_bytes`, what a micro-batch keeps from forward to backward beside the boundary tensors;
    `boundary_bytes`, the tensor that a part hands on; `workspace_bytes`, what an operation takes while it runs.
    """

    family: Literal["costs"]
    micro_batch: Count
    forward_s: PartSeconds
    backward_s: PartSeconds
    weight_s: PartSecondsOrAbsent = None
    communication_s: PartSeconds = 0.0
    update_s: PartSeconds = 0.0
    step_constant_s: Number = 0.0
    static_bytes: PartSizesOrAbsent = None
    kept_bytes: PartSizesOrAbsent = None
    boundary_bytes: PartSizesOrAbsent = None
    workspace_bytes: PartSizesOrAbsent = None


class PythonModel(Frozen):
    """A model of the user's own: `factory` is called with `arguments`."""

    family: Literal["python"]
    factory: Annotated[str, BeforeValidator(read_factory), WithJsonSchema(kinds.FACTORY)]
    arguments: Annotated[dict[str, Any], BeforeValidator(read_arguments)] = {}


Model = Annotated[TransformerModel | MlpModel | SleepModel | CostsModel | PythonModel, Field(discriminator="family")]


class PipelineSpec(Frozen):
    """K ranks (`stages`; null: one per visible device) of V parts each (`virtual_stages`; null: usual)."""

    stages: PartsOrNull = None
    schedule: Annotated[ScheduleName, BeforeValidator(choice(*get_args(ScheduleName)))] = "1f1b"
    virtual_stages: PartsOrNull = None
    recompute: Annotated[Recompute, BeforeValidator(choice(*get_args(Recompute)))] = "none"
    partition: Annotated[Partition, BeforeValidator(read_partition), WithJsonSchema(kinds.partition(PARTITIONS))] = (
        "parameters"
    )


class BatchSpec(Frozen):
    """What is held fixed as M changes, in samples: N (`mini_batch`) or b (`micro_batch`); the other is null.

    `chunks` is "auto", values of M, ascending, or a range "low:high" with both ends included.
    """

    mini_batch: CountOrAbsent = None
    micro_batch: CountOrAbsent = None
    chunks: Annotated[str | tuple[int, ...], BeforeValidator(read_chunks), WithJsonSchema(kinds.CHUNKS)] = "auto"


class TrainingSpec(Frozen):
    """The step as people train."""

    optimizer: Annotated[Optimizer, BeforeValidator(choice(*get_args(Optimizer)))] = "adamw"
    precision: Annotated[Precision, BeforeValidator(choice(*get_args(Precision)))] = "float32"
    seed: Seed = 0


class DeviceSpec(Frozen):
    """`memory`: bytes a rank may use; `headroom`: share kept free; `reserve`: bytes for the real trainer."""

    kind: Annotated[DeviceKind, BeforeValidator(choice(*get_args(DeviceKind)))] = "auto"
    memory: Annotated[Literal["auto"] | int, BeforeValidator(_READ_MEMORY), WithJsonSchema(kinds.MEMORY)] = "auto"
    headroom: Share = 0.05
    reserve: Size = 0


class HardwareSpec(Frozen):
    """The device that `whatif` estimates for: `name` in `chunktune.datasheets`, the other keys over its figures.

    `memory` in bytes; `flops`: dense 16-bit operations a second, `flops_float32`: 32-bit; `bandwidth`: bytes a second
    of the device's memory, `link_bandwidth`: to a neighbour, one way; `link_latency`, `launch_s`: seconds of a
    transfer and of an operation however small; `efficiency`: share of the peaks that is reached. A name that is not
    in the table needs memory, flops, flops_float32, bandwidth and link_bandwidth.
    """

    name: NameOrAbsent = None
    memory: SizeOrAbsent = None
    flops: RateOrAbsent = None
    flops_float32: RateOrAbsent = None
    bandwidth: RateOrAbsent = None
    link_bandwidth: RateOrAbsent = None
    link_latency: NumberOrAbsent = None
    launch_s: NumberOrAbsent = None
    efficiency: Efficiency = 1.0


class SweepSpec(Frozen):
    """How M is chosen; `budget` and `trial_timeout` in seconds."""

    criterion: Annotated[Criterion, BeforeValidator(choice(*get_args(Criterion)))] = "pipeline"
    tolerance: Annotated[float, BeforeValidator(read_tolerance), WithJsonSchema(kinds.TOLERANCE)] = 0.01
    patience: CountFromZero = 1
    budget: Duration = 600.0
    trial_timeout: Annotated[
        Literal["auto"] | float, BeforeValidator(_READ_TIMEOUT), WithJsonSchema(kinds.DURATION_OR_AUTO)
    ] = "auto"


class Spec(Frozen):
    """A whole spec. `Spec.model_validate(spec.model_dump(mode="json")) == spec`."""

    model: Model
    pipeline: PipelineSpec = PipelineSpec()
    batch: BatchSpec = BatchSpec()
    training: TrainingSpec = TrainingSpec()
    device: DeviceSpec = DeviceSpec()
    hardware: HardwareSpec = HardwareSpec()
    sweep: SweepSpec = SweepSpec()

    @model_validator(mode="after")
    def _check_across(self) -> Spec:
        mistakes = list(across(dict(leaves(self.model_dump(mode="json")))))
        if mistakes:
            text = "; ".join(f"{dotted(m.keys)}: {m.fact}; {m.rule}" for m in mistakes)
            raise PydanticCustomError(CROSS, "{text}", {"text": text})
        return self


FAMILIES: dict[str, type[Frozen]] = {
    "transformer": TransformerModel,
    "mlp": MlpModel,
    "sleep": SleepModel,
    "costs": CostsModel,
    "python": PythonModel,
}
SECTIONS: dict[str, type[Frozen]] = {
    "pipeline": PipelineSpec,
    "batch": BatchSpec,
    "training": TrainingSpec,
    "device": DeviceSpec,
    "hardware": HardwareSpec,
    "sweep": SweepSpec,
}
