"""A multi-layer perceptron of `layers` linear layers, GELU between them; a classifier where `classes` is given."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chunktune.models.base import LayerBuilder, ModelDefinition
from chunktune.spec import MlpModel


def _layer(inputs: int, outputs: int, last: bool) -> nn.Module:
    linear = nn.Linear(inputs, outputs)
    return linear if last else nn.Sequential(linear, nn.GELU())


def _layers(widths: Sequence[int]) -> list[LayerBuilder]:
    last = len(widths) - 2
    return [partial(_layer, widths[i], widths[i + 1], i == last) for i in range(last + 1)]


def _class_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.float(), targets)


def _square_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs.float(), targets)


def build(spec: MlpModel) -> ModelDefinition:
    """The perceptron of a spec, on random features: mean squared error, or cross-entropy with `classes`."""
    features = spec.features or spec.hidden
    widths = [features, *[spec.hidden] * (spec.layers - 1), spec.classes or spec.hidden]

    def sample_batch(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(samples, features, generator=generator)
        if spec.classes:
            return inputs, torch.randint(spec.classes, (samples,), generator=generator)
        return inputs, torch.randn(samples, spec.hidden, generator=generator)

    return ModelDefinition(tuple(_layers(widths)), sample_batch, _class_loss if spec.classes else _square_loss)
