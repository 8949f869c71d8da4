"""What a model is to chunktune: layers that can be built one by one, a batch, and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LayerBuilder = Callable[[], nn.Module]
SampleBatch = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelDefinition:
    """A model before it is built.

    `layers`: L builders, first layer first; a rank calls only those of its own parts, under the device and the
    seed that it wants, so a builder makes a fresh module each time. A layer takes one tensor and returns one.
    `sample_batch(samples, generator)`: (inputs, targets) with `samples` rows each, on the CPU.
    `loss(outputs, targets)`: a scalar, the mean over the samples, so that cutting a batch does not change it.
    `tokens_per_sample`: for tokens/s; None where a sample is not a sequence.
    """

    layers: tuple[LayerBuilder, ...]
    sample_batch: SampleBatch
    loss: Loss
    tokens_per_sample: int | None = None
