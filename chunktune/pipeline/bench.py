"""One layer on fake tensors, alone between two ends that stand for its neighbours:

    token, weight ── Source ── x ── layer ── y ── Sink ── scalar
                                                  │
                                                weight

Source makes the input and sees its gradient arrive, Sink makes the gradient of the output; both have a weight, so
that the groups in which torch's split backward takes the weights end where they do between real neighbours. Nobody
but the layer's graph holds x, y and the gradient, which is how one finds out when the layer lets go of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from chunktune.pipeline.runtime import KernelMeter, NamingMeter, input_backward, weight_backward
from chunktune.pipeline.work import autocasting, through
from chunktune.results import LayerBytes, OperationBytes

_CHUNKS = 2
"""By what the loss is divided: any M gives the same operations."""
FAKE_DEVICE = torch.device("cpu")
"""Fake tensors of the CPU stand for those of any device: fake CUDA tensors end the process without a GPU."""

Backward = Literal["whole", "split", "ending"]
"""How a backward is run: in one, in its two halves, in halves with nothing behind the layer."""
Kernel = tuple[int, int]


@dataclass(frozen=True)
class Kernels:
    """(floating-point operations, bytes read and written) of every operation of one layer, without recomputation.

    `again`: of one recomputation, which stops once it has all that the backward needs.
    """

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    again: tuple[Kernel, ...] = ()

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of the forward."""
        return sum(flops for flops, _ in self.forward)

    @property
    def backward_flops(self) -> int:
        """Floating-point operations of the backward."""
        return sum(flops for flops, _ in self.backward)

    @property
    def again_flops(self) -> int:
        """Floating-point operations of one recomputation."""
        return sum(flops for flops, _ in self.again)


@dataclass(frozen=True)
class TensorShape:
    """A tensor's type, its memory layout included."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorShape:
        """That of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def empty(self) -> torch.Tensor:
        """A fake tensor of this shape, under the fake mode."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=FAKE_DEVICE)


@dataclass(frozen=True)
class LayerKind:
    """What makes two layers equal: their making (`signature`) and what enters them."""

    signature: Any
    entry: TensorShape
    differentiable: bool
    first: bool


@dataclass(frozen=True)
class FakeLayer:
    """A layer of the model, built fake; the loss is one too."""

    name: str
    module: nn.Module
    signature: Any
    loss: bool = False

    def parameters(self) -> list[nn.Parameter]:
        """Its weights."""
        return list(self.module.parameters())


class FakeLoss(nn.Module):
    """The loss of one micro-batch, as `PipelineStep` takes it."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], target: torch.Tensor) -> None:
        super().__init__()
        self._loss = loss
        self.target = target

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """The chunk's share of the loss."""
        return self._loss(value, self.target) / _CHUNKS


class _Source(torch.autograd.Function):
    """Makes the layer's input; its gradient ends here."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, weight: torch.Tensor, bench: Bench) -> torch.Tensor:
        ctx.bench = bench
        return bench.make_input()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        bench: Bench = ctx.bench
        if bench.weighing:
            return None, bench.start_weights(), None
        bench.arrived(gradients[0])
        return bench.ignored(), bench.ignored(), None


class _Sink(torch.autograd.Function):
    """Takes the layer's output, holds nothing of it, and makes its gradient."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, weight: torch.Tensor | None, bench: Bench) -> torch.Tensor:
        ctx.bench, ctx.shape, ctx.weighted = bench, TensorShape.of(output), weight is not None
        return bench.ignored()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        bench: Bench = ctx.bench
        if bench.weighing:
            return None, bench.end_weights(), None
        return bench.make_gradient(ctx.shape), bench.ignored() if ctx.weighted else None, None


class _Runs:
    """Counts how often a module runs forward."""

    def __init__(self, module: nn.Module) -> None:
        self.count = 0
        self._hook = module.register_forward_pre_hook(self._seen)

    def _seen(self, *_: object) -> None:
        self.count += 1

    def __enter__(self) -> _Runs:
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


@dataclass
class _Seen:
    """One run over the bench, operation by operation."""

    forward: OperationBytes = field(default_factory=OperationBytes)
    backward: OperationBytes = field(default_factory=OperationBytes)
    input: OperationBytes = field(default_factory=OperationBytes)
    weight: OperationBytes = field(default_factory=OperationBytes)


class Bench:
    """One layer between its two ends, at one b."""

    def __init__(self, layer: FakeLayer, kind: LayerKind, autocast: torch.dtype | None, round_to: int) -> None:
        self._layer = layer
        self._kind = kind
        self._autocast = autocast
        self._round_to = round_to
        self._trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        self.exit = kind.entry
        self.output_bytes = self.gradient_bytes = 0
        self.weight_forwards = 1
        self.weighing = False
        self._meter = NamingMeter(round_to)
        self._arrival: OperationBytes | None = None
        self._carried = 0
        self._passed_on = False

    def rounded(self, size: int) -> int:
        """Bytes of a storage as the allocator gives them."""
        return self._meter.rounded(size)

    def all_operations(self, *, recompute: bool, halves: bool) -> LayerBytes:
        """Every operation of the layer, with and without gradients of its weights in place."""
        self._clear_gradients()
        first = self._run("whole", recompute)
        later = self._run("whole", recompute)
        if not (self._kind.differentiable and halves):
            return _layer_bytes(first, later, *[_Seen()] * 4)
        split, ending = self._run("split", recompute), self._run("ending", recompute)
        # The last of these leaves gradients, from which the size of all of them is read.
        fresh = []
        for backward in ("split", "ending"):
            self._clear_gradients()
            fresh.append(self._run(backward, recompute))
        return _layer_bytes(first, later, split, ending, *fresh)

    def _clear_gradients(self) -> None:
        for parameter in self._trained:
            parameter.grad = None

    def _run(self, backward: Backward, recompute: bool) -> _Seen:
        """Forward, and a backward of one sort, under a fresh meter."""
        meter = self._meter = NamingMeter(self._round_to)
        self.weighing, self._arrival, seen = False, None, _Seen()
        with meter:
            meter.name("", *self._standing())
            self._token = self.ignored().requires_grad_(True)
            self._ends = [nn.Parameter(self.ignored()) for _ in range(2)]
            for end in self._ends:
                end.grad = self.ignored()
            result = self._forward(seen, recompute, ended=backward != "ending")
            if result.requires_grad:
                if backward == "whole":
                    self._whole(seen, result)
                else:
                    self._split(seen, result, backward)
            del result
        return seen

    def _standing(self) -> list[torch.Tensor]:
        """What is there before the layer runs: weights and their gradients, buffers, targets."""
        module = self._layer.module
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        targets = [module.target] if isinstance(module, FakeLoss) else []
        return [*module.parameters(), *module.buffers(), *gradients, *targets]

    def ignored(self) -> torch.Tensor:
        """A number that is not counted."""
        number = torch.zeros((), device=FAKE_DEVICE)
        self._meter.name("", number)
        return number

    def make_input(self) -> torch.Tensor:
        """The layer's input."""
        value = self._kind.entry.empty()
        self._meter.name("x", value)
        return value

    def _forward(self, seen: _Seen, recompute: bool, ended: bool) -> torch.Tensor:
        meter, last = self._meter, self._ends[1] if ended else None
        if self._kind.differentiable:
            value: torch.Tensor = _Source.apply(self._token, self._ends[0], self)  # type: ignore[no-untyped-call]
        else:
            value = self.make_input()
        meter.restart()
        with autocasting(FAKE_DEVICE.type, self._autocast):
            output = through(self._layer.module, value, recompute=recompute)
            meter.stop()
            if not isinstance(output, torch.Tensor):
                raise TypeError(f"returned {type(output).__name__}; a layer returns one tensor")
            peak = max(meter.peaks.values(), default=0)
            passed_on = meter.name_of(output) == "x"
            meter.name("y", output)
            self.exit = TensorShape.of(output)
            self.output_bytes = 0 if passed_on else self.rounded(output.untyped_storage().nbytes())
            del value
            inside = meter.current_bytes
        left = meter.current_bytes
        result: torch.Tensor = (
            output if self._layer.loss else _Sink.apply(output, last, self)  # type: ignore[no-untyped-call]
        )
        del output
        holds = meter.alive() if not self._layer.loss else meter.alive().replace("y", "")
        seen.forward = OperationBytes(
            peaks=((peak, ""),), left_bytes=left, extra_bytes=inside - left, holds=holds + "a" * passed_on
        )
        return result

    def _start_gradients(self) -> list[torch.Tensor] | None:
        """The gradient that a backward starts from; of a loss torch makes it itself."""
        self._meter.restart()
        return None if self._layer.loss else [self.ignored()]

    def make_gradient(self, shape: TensorShape) -> torch.Tensor:
        """The gradient of the layer's output; the backward proper starts here."""
        gradient = shape.empty()
        self._meter.name("g", gradient)
        self._meter.restart()
        return gradient

    def arrived(self, gradient: torch.Tensor) -> None:
        """The gradient of the layer's input is there: the backward proper is over."""
        meter = self._meter
        meter.stop()
        self.gradient_bytes = self.rounded(gradient.untyped_storage().nbytes())
        # A gradient that is passed on as it is counts as the one of the layer before.
        self._passed_on = meter.name_of(gradient) == "g"
        meter.name("", gradient)
        self._arrival = OperationBytes(peaks=_highest(meter.peaks), left_bytes=meter.current_bytes, holds=self._held())

    def _held(self) -> str:
        alive = self._meter.alive()
        return alive.replace("g", "") + "p" if self._passed_on else alive

    def _whole(self, seen: _Seen, result: torch.Tensor) -> None:
        torch.autograd.backward([result], self._start_gradients())
        self._meter.stop()
        seen.backward = self._arrival or OperationBytes(
            peaks=_highest(self._meter.peaks), left_bytes=self._meter.current_bytes
        )

    def _split(self, seen: _Seen, result: torch.Tensor, backward: Backward) -> None:
        meter = self._meter
        weights = [self._ends[0], *self._layer.parameters(), *([self._ends[1]] if backward == "split" else [])]
        groups = input_backward([result], self._start_gradients(), [self._token], weights)
        meter.stop()
        # A layer may pass no gradient on, and then it does not arrive.
        arrival = self._arrival or OperationBytes(peaks=_highest(meter.peaks), left_bytes=meter.current_bytes)
        if self._layer.loss:
            seen.input = arrival
            return
        seen.input = arrival.model_copy(update={"left_bytes": meter.current_bytes, "holds": self._held()})
        if not self._trained:
            self.weight_forwards = 0
            return
        self.weighing = True
        with _Runs(self._layer.module) as runs:
            weight_backward(weights, groups)
        self.weight_forwards = runs.count
        meter.stop()
        left, holds = meter.last
        carried = self._carried - left if backward == "split" else 0
        seen.weight = OperationBytes(
            peaks=_highest(meter.peaks), left_bytes=left, extra_bytes=carried, holds=holds.replace("c", "")
        )

    def start_weights(self) -> torch.Tensor:
        """The weight gradient of the layer before is there; what follows is this layer's."""
        number = torch.zeros((), device=FAKE_DEVICE)
        self._meter.name("c", number)
        self._meter.restart()
        return number

    def end_weights(self) -> torch.Tensor:
        """The layer's weight gradients are there."""
        self._meter.stop()
        self._carried = self._meter.current_bytes
        return self.ignored()

    def kernels(self) -> Kernels:
        """The operations of one forward and one backward, and what recomputation adds to the backward."""
        forward, backward = self._listed(recompute=False)
        more = [] if self._layer.loss else self._listed(recompute=True)[1]
        return Kernels(tuple(forward), tuple(backward), tuple((Counter(more) - Counter(backward)).elements()))

    def _listed(self, *, recompute: bool) -> tuple[list[Kernel], list[Kernel]]:
        self._meter, self.weighing = NamingMeter(), False
        value = self._kind.entry.empty()
        if self._kind.differentiable:
            value.requires_grad_(True)
        with KernelMeter() as forward, autocasting(FAKE_DEVICE.type, self._autocast):
            output = through(self._layer.module, value, recompute=recompute)
        gradient = None if self._layer.loss else TensorShape.of(output).empty()
        with KernelMeter() as backward:
            if output.requires_grad:
                torch.autograd.backward([output], [gradient])
        return forward.kernels, backward.kernels


def _layer_bytes(
    first: _Seen, later: _Seen, split: _Seen, ending: _Seen, first_split: _Seen, first_ending: _Seen
) -> LayerBytes:
    dropped = split.input.left_bytes - ending.input.left_bytes
    return LayerBytes(
        forward=later.forward,
        backward=later.backward,
        first_backward=first.backward,
        input=split.input.model_copy(update={"extra_bytes": dropped}) if dropped else split.input,
        weight=split.weight,
        first_weight=first_split.weight,
        ending_weight=ending.weight,
        first_ending_weight=first_ending.weight,
    )


def _highest(peaks: dict[str, int]) -> tuple[tuple[int, str], ...]:
    """The peaks that no other exceeds while it holds the same boundary tensors and more."""
    return tuple(
        (size, letters)
        for letters, size in sorted(peaks.items())
        if not any(set(letters) < set(other) and size <= other_size for other, other_size in peaks.items())
    )
