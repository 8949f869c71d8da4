"""What a sweep needs at least, known before any device is touched: for `--dry-run`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chunktune import partition, schedules

if TYPE_CHECKING:
    from torch import nn

    from chunktune.models.base import ModelDefinition
    from chunktune.spec import Spec

# AdamW keeps two averages of every weight and one float32 step count of every tensor.
_COPIES = {"adamw": 2, "sgd": 0, "none": 0}
_STEP_BYTES = {"adamw": 4, "sgd": 0, "none": 0}


def static_bytes(spec: Spec, stages: int) -> tuple[int, ...]:
    """Bytes of weights, gradients and optimizer state of each of K = `stages` ranks; activations come on top.

    Layers are built on the meta device: nothing is materialised. Under `partition = "time"` the uniform cut
    stands in for the one that is not measured yet. Raises what building the model and cutting it raise
    (UsageError, SpecError, UserCodeError).
    """
    from chunktune.models import build_model

    definition = build_model(spec.model)
    name, optimizer = spec.pipeline.schedule, spec.training.optimizer
    virtual = spec.pipeline.virtual_stages or schedules.default_virtual_stages(name)
    partition.check_parts(len(definition.layers), stages, virtual)
    modules = meta_layers(definition)
    parts = partition.layers_of_parts(_counts(spec, stages * virtual, modules))
    held = [schedules.parts_of_rank(name, stages, virtual, rank) for rank in range(stages)]
    return tuple(
        sum(_layer_bytes(modules[layer], optimizer) for part in ranks for layer in parts[part]) for ranks in held
    )


def meta_layers(definition: ModelDefinition) -> list[nn.Module]:
    """Every layer on the meta device."""
    import torch

    with torch.device("meta"):
        return [builder() for builder in definition.layers]


def parameters_of_layers(modules: list[nn.Module]) -> list[float]:
    """The number of parameters of every layer: the weights of `partition = "parameters"`."""
    return [float(sum(p.numel() for p in module.parameters())) for module in modules]


def _counts(spec: Spec, parts: int, modules: list[nn.Module]) -> tuple[int, ...]:
    choice = "uniform" if spec.pipeline.partition == "time" else spec.pipeline.partition
    return partition.counts_for(choice, layers=len(modules), parts=parts, weights=parameters_of_layers(modules))


def _layer_bytes(module: nn.Module, optimizer: str) -> int:
    total = sum(buffer.nbytes for buffer in module.buffers())
    for parameter in module.parameters():
        copies = 1 + (1 + _COPIES[optimizer]) * parameter.requires_grad
        total += copies * parameter.nbytes + _STEP_BYTES[optimizer] * parameter.requires_grad
    return total
