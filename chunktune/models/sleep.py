"""Layers of known cost, the instrument for seeing that the tuner is right: sleeping needs no core.

A forward of b samples sleeps t = (seconds_per_chunk + seconds_per_sample b) slowdown. A backward sleeps t for
the gradient of its input and t for that of its weight, each in an autograd node of its own:

    x ──── InputSleep ──┐
                        + ──── y          InputSleep  backward: sleeps, passes the gradient on
    bias ─ WeightSleep ─┘                 WeightSleep backward: sleeps, sums the gradient; keeps the bytes

so that a schedule that splits the backward runs one node at a time and pays each once, and a whole backward
pays both. With K equal stages a step takes T = 3 (M+K-1)(a + c N/M) (`chunktune.theory`). Nothing sleeps where
a tensor has no memory behind it (meta and fake tensors).
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chunktune.models.base import LayerBuilder, ModelDefinition
from chunktune.spec import SleepModel


def _sleep(seconds: float, like: Tensor) -> None:
    if seconds > 0 and like.untyped_storage().device.type != "meta":
        time.sleep(seconds)


class _InputSleep(torch.autograd.Function):
    """The input unchanged; its gradient takes `seconds`. `anchor` gives a node where the input needs no gradient.

    An empty tensor is saved and asked back: under `torch.utils.checkpoint` that is what runs the forward again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, seconds: float) -> Tensor:
        ctx.seconds, ctx.anchored = seconds, anchor is not None
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        _ = ctx.saved_tensors
        (gradient,) = gradients
        _sleep(ctx.seconds, gradient)
        return gradient, gradient.new_zeros(()) if ctx.anchored else None, None


class _WeightSleep(torch.autograd.Function):
    """The bias as one row a sample; its gradient takes `seconds`, and until then `kept` bytes are kept."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, samples: int, kept: int, seconds: float) -> Tensor:
        ctx.seconds = seconds
        # Not filled: writing megabytes would take time that the closed form does not know.
        ctx.save_for_backward(torch.empty(kept, dtype=torch.uint8, device=bias.device))
        return bias.expand(samples, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        _ = ctx.saved_tensors
        (gradient,) = gradients
        _sleep(ctx.seconds, gradient)
        return gradient.sum(0), None, None, None


class SleepLayer(nn.Module):
    """(b, width) to (b, width): adds a bias, and sleeps as the module's docstring says."""

    def __init__(self, width: int, seconds_per_chunk: float, seconds_per_sample: float, bytes_per_sample: int) -> None:
        super().__init__()
        self.seconds_per_chunk = seconds_per_chunk
        self.seconds_per_sample = seconds_per_sample
        self.bytes_per_sample = bytes_per_sample
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, then add."""
        samples = x.shape[0]
        seconds = self.seconds_per_chunk + self.seconds_per_sample * samples
        _sleep(seconds, x)
        # The first stage's inputs need no gradient, yet its backward has to cost what every other stage's does.
        anchor = None if x.requires_grad else x.new_zeros((), requires_grad=torch.is_grad_enabled())
        row: Tensor = _WeightSleep.apply(self.bias, samples, self.bytes_per_sample * samples, seconds)  # type: ignore[no-untyped-call]
        passed: Tensor = _InputSleep.apply(x, anchor, seconds)  # type: ignore[no-untyped-call]
        return passed + row


def _layers(spec: SleepModel) -> list[LayerBuilder]:
    return [
        partial(
            SleepLayer,
            spec.width,
            spec.seconds_per_chunk * slowdown,
            spec.seconds_per_sample * slowdown,
            spec.bytes_per_sample,
        )
        for slowdown in spec.slowdown or (1.0,) * spec.layers
    ]


def build(spec: SleepModel) -> ModelDefinition:
    """The sleeping layers of a spec, mean squared error against random numbers."""

    def sample_batch(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(samples, spec.width, generator=generator)
        return inputs, torch.randn(samples, spec.width, generator=generator)

    return ModelDefinition(tuple(_layers(spec)), sample_batch, F.mse_loss)
