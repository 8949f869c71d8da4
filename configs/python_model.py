"""A model of one's own for chunktune: a small convolutional classifier of 32 x 32 images.

In a spec beside this file:

    [model]
    family = "python"
    factory = "python_model:build"

    [model.arguments]
    channels = 16
    blocks = 4

The factory returns three things:

* `layers`: builders, functions without arguments that make one nn.Module each. chunktune cuts the model between
  them, and a rank calls only those of its own part. A layer takes one tensor and returns one tensor.
* `sample_batch(samples, generator)`: (inputs, targets) on the CPU, with `samples` rows each.
* `loss(outputs, targets)`: one number, the mean over the samples, so that cutting the batch does not change it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    """(b, channels, height, width) to the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # Not batch statistics: those would make the result depend on how the batch is cut.
        self.norm = nn.GroupNorm(4, channels)
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, convolve, add."""
        return x + F.gelu(self.convolution(self.norm(x)))


def stem(channels: int) -> nn.Module:
    """Images to feature maps of half the size."""
    return nn.Conv2d(3, channels, 3, stride=2, padding=1)


def head(channels: int, classes: int) -> nn.Module:
    """Feature maps to one score a class."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def sample_batch(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random images and classes; a real one would read a data set."""
    images = torch.randn(samples, 3, 32, 32, generator=generator)
    return images, torch.randint(10, (samples,), generator=generator)


def build(channels: int = 16, blocks: int = 4) -> dict[str, Any]:
    """What chunktune calls, with the arguments of the spec."""
    return {
        "layers": [
            partial(stem, channels),
            *[partial(ResidualBlock, channels) for _ in range(blocks)],
            partial(head, channels, 10),
        ],
        "sample_batch": sample_batch,
        "loss": F.cross_entropy,
    }
