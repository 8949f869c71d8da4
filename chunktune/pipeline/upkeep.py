"""What a layer holds for as long as it lives, and what its optimizer's step takes, read off fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from chunktune.pipeline.bench import FAKE_DEVICE, FakeLayer
from chunktune.pipeline.runtime import NamingMeter
from chunktune.pipeline.work import make_optimizer
from chunktune.results import LayerProfile


def bare_profile(layer: FakeLayer, optimizer: str, round_to: int) -> LayerProfile:
    """What a layer, whose weights have gradients, holds for as long as it lives, and what its update takes."""
    meter = NamingMeter(round_to)
    parameters = layer.parameters()
    standing = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in [*parameters, *layer.module.buffers()]}
    updated = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [p.grad.untyped_storage().nbytes() for p in updated if p.grad is not None]
    update = _Update(updated, optimizer, round_to)
    return LayerProfile(
        count=1,
        loss=layer.loss,
        parameters=sum(parameter.numel() for parameter in parameters),
        weight_bytes=sum(map(meter.rounded, standing.values())),
        gradient_bytes=sum(map(meter.rounded, gradients)),
        optimizer_bytes=update.state_bytes,
        update_peak_bytes=update.peak_bytes,
        update_first_bytes=update.first_bytes,
        update_left_bytes=update.left_bytes,
        updates_together=update.together,
        figures=(),
    )


class _Update:
    """The optimizer's step over one layer's weights, followed by a weight of one number that is not counted."""

    def __init__(self, weights: Sequence[nn.Parameter], optimizer: str, round_to: int) -> None:
        self._optimizer = optimizer
        self._round_to = round_to
        # On CUDA torch's optimizers take all weights at once, and keep their step counts on the host.
        self.together = round_to > 1
        self.state_bytes = self.peak_bytes = self.first_bytes = self.left_bytes = 0
        if weights and optimizer != "none":
            levels, self.state_bytes = self._levels(weights)
            self.peak_bytes = max(levels, default=0)
            self.first_bytes = max(self._levels(weights[:1])[0], default=0)
            after = self._levels([*weights, _number()])[0][len(levels) :]
            self.left_bytes = after[0] if after and not self.together else 0

    def _levels(self, weights: Sequence[nn.Parameter]) -> tuple[list[int], int]:
        """Bytes above the state after each operation of the second step, and bytes of the state."""
        optimizer = make_optimizer(self._optimizer, weights)
        if optimizer is None:
            return [], 0
        for group in optimizer.param_groups:
            group["foreach"] = self.together
        optimizer.step()
        state = [t for kept in optimizer.state.values() for t in kept.values() if isinstance(t, torch.Tensor)]
        meter = _Levels(self._round_to)
        with meter:
            meter.name("", *weights, *(w.grad for w in weights if w.grad is not None), *state)
            optimizer.step()
        counted = [tensor for tensor in state if tensor.dim() or not self.together]
        return meter.levels, sum(meter.rounded(tensor.untyped_storage().nbytes()) for tensor in counted)


class _Levels(NamingMeter):
    """A meter that remembers the level after every operation."""

    def __init__(self, round_to: int) -> None:
        super().__init__(round_to)
        self.levels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run, count, remember."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.levels.append(self.current_bytes)
        return result


def _number() -> nn.Parameter:
    weight = nn.Parameter(torch.zeros((), device=FAKE_DEVICE))
    weight.grad = torch.zeros((), device=FAKE_DEVICE)
    return weight
