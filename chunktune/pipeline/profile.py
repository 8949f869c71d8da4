"""What every layer of a model holds and computes, read off fake tensors: no device, nothing materialised.

Each distinct layer runs alone between two ends that stand for its neighbours:

    token, weight ── Source ── x ── layer ── y ── Sink ── scalar
                                                  │
                                                weight

Source makes the input and sees its gradient arrive, Sink makes the gradient of the output; both have a weight, so
that the groups in which torch's split backward takes the weights end where they do between real neighbours. Nobody
but the layer's graph holds x, y and the gradient, which is how one finds out when the layer lets go of them.
`chunktune.memory` puts the layers together again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from chunktune.blame import place_of
from chunktune.errors import ChunktuneError, UsageError, UserCodeError
from chunktune.models.base import ModelDefinition
from chunktune.pipeline.runtime import KernelMeter, NamingMeter, fake_tensors, input_backward, weight_backward
from chunktune.pipeline.work import autocasting, make_optimizer, through
from chunktune.results import LayerBytes, LayerFigures, LayerProfile, OperationBytes
from chunktune.spec import Spec
from chunktune.units import MAX_BYTES, format_bytes

_RULE = (
    "memory is foretold by running each layer forward and backward on tensors without values: a layer must not call "
    ".item(), branch on what a tensor holds, or cache tensors outside the module; measure with sweep instead"
)
CUDA_ROUNDING_BYTES = 512
"""What CUDA's caching allocator rounds a storage up to (c10/cuda/CUDACachingAllocator: kMinBlockSize)."""
_CHUNKS = 2
"""By what the loss is divided: any M gives the same operations."""
_DEVICE = torch.device("cpu")
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


def profile_layers(
    spec: Spec, model: ModelDefinition, micro_batches: Sequence[int], *, round_to: int = 1
) -> tuple[LayerProfile, ...]:
    """Profiles of the layers of a model at each b, equal neighbours in one, and last the profile of the loss.

    `micro_batches`: samples a chunk, 1 or more each. `round_to`: what the device's allocator rounds a storage up to,
    512 bytes on CUDA, where the optimizer also updates all weights together. Precision and optimizer are the spec's.
    Raises UserCodeError where a layer or the loss fails on tensors without values.
    """
    return Profiler(spec, model, round_to).profiles(sorted(set(micro_batches)))


def kernels_of_layers(spec: Spec, model: ModelDefinition, micro_batch: int) -> tuple[Kernels, ...]:
    """The operations of each of the L layers and, last, of the loss at one b; equal layers share one object.

    Raises UserCodeError as `profile_layers` does.
    """
    return Profiler(spec, model, 1).kernels(micro_batch)


@dataclass(frozen=True)
class _Shape:
    """A tensor's type, its memory layout included."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Shape:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=_DEVICE)


@dataclass(frozen=True)
class _Kind:
    """What makes two layers equal: their making (`signature`) and what enters them."""

    signature: Any
    entry: _Shape
    differentiable: bool
    first: bool


@dataclass
class _Found:
    """What one kind of layer turned out to be at one b."""

    figures: LayerFigures
    kernels: Kernels
    exit: _Shape


@dataclass(frozen=True)
class _Layer:
    """A layer of the model, built fake; the loss is one too."""

    name: str
    module: nn.Module
    signature: Any
    loss: bool = False

    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())


class _Loss(nn.Module):
    """The loss of one micro-batch, as `PipelineStep` takes it."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], target: torch.Tensor) -> None:
        super().__init__()
        self._loss = loss
        self.target = target

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """The chunk's share of the loss."""
        return self._loss(value, self.target) / _CHUNKS


class Profiler:
    """The layers of one model, built fake once, and what is known about them so far: for who asks again and again.

    Arguments and errors are those of `profile_layers`. `halves`: whether the two halves of a split backward are
    profiled too, which takes twice as long again; only schedules that split it ask for them.
    """

    def __init__(self, spec: Spec, model: ModelDefinition, round_to: int, *, halves: bool = True) -> None:
        self._spec = spec
        self._model = model
        self._round_to = round_to
        self._halves = halves
        self._autocast = torch.bfloat16 if spec.training.precision == "bfloat16" else None
        self._mode = fake_tensors()
        self._known: dict[_Kind, _Found] = {}
        self._bare: dict[Any, LayerProfile] = {}
        self._samples = model.sample_batch(1, torch.Generator().manual_seed(spec.training.seed))
        with self._mode, _DEVICE:
            self._layers = [self._build(index) for index in range(len(model.layers))]

    def _build(self, index: int) -> _Layer:
        name = f"layer {index}"
        with _Blaming(name):
            module = self._model.layers[index]()
            return _Layer(name, module, _signature(module))

    def profiles(self, micro_batches: Sequence[int]) -> tuple[LayerProfile, ...]:
        """Every layer at every b."""
        rows = [self._row(micro_batch) for micro_batch in micro_batches]
        layers = [*self._layers, self._loss(micro_batches[0])]
        profiles: list[LayerProfile] = []
        for layer, column in zip(layers, zip(*rows, strict=True), strict=True):
            figures = tuple(found.figures for found in column)
            one = self._bare[layer.signature].model_copy(update={"figures": figures})
            if profiles and profiles[-1].model_copy(update={"count": 1}) == one:
                one = one.model_copy(update={"count": profiles.pop().count + 1})
            profiles.append(one)
        return tuple(profiles)

    def kernels(self, micro_batch: int) -> tuple[Kernels, ...]:
        """Every layer at one b."""
        return tuple(found.kernels for found in self._row(micro_batch))

    def _row(self, micro_batch: int) -> list[_Found]:
        """Every layer and the loss at one b, each fed with what the one before it returns."""
        found: list[_Found] = []
        with self._mode:
            entry, differentiable = _batch_shape(self._samples[0], micro_batch), False
            for layer in [*self._layers, self._loss(micro_batch)]:
                one = self._find(layer, _Kind(layer.signature, entry, differentiable, not found), micro_batch)
                found.append(one)
                entry, differentiable = one.exit, one.exit.dtype.is_floating_point
        return found

    def _loss(self, micro_batch: int) -> _Layer:
        with self._mode, torch.device(_DEVICE):
            target = _batch_shape(self._samples[1], micro_batch).empty()
        return _Layer("the loss", _Loss(self._model.loss, target), ("loss", micro_batch), loss=True)

    def _find(self, layer: _Layer, kind: _Kind, micro_batch: int) -> _Found:
        if kind not in self._known:
            with _Blaming(layer.name):
                self._known[kind] = self._examine(layer, kind, micro_batch)
                if layer.signature not in self._bare:
                    self._bare[layer.signature] = _bare_profile(layer, self._spec.training.optimizer, self._round_to)
        return self._known[kind]

    def _examine(self, layer: _Layer, kind: _Kind, micro_batch: int) -> _Found:
        bench = _Bench(layer, kind, self._autocast, self._round_to)
        plain = bench.all_operations(recompute=False, halves=self._halves)
        recomputed = None if layer.loss else bench.all_operations(recompute=True, halves=self._halves)
        kernels = bench.kernels()
        entry_bytes = bench.rounded(_storage_bytes(kind.entry))
        batch_bytes = entry_bytes if kind.first else 0
        if layer.loss:
            target = layer.module.target
            assert isinstance(target, torch.Tensor)
            batch_bytes = bench.rounded(target.untyped_storage().nbytes())
        figures = LayerFigures(
            micro_batch=micro_batch,
            input_bytes=entry_bytes,
            output_bytes=bench.output_bytes,
            gradient_bytes=bench.gradient_bytes,
            batch_bytes=batch_bytes,
            forward_flops=kernels.forward_flops,
            backward_flops=kernels.backward_flops,
            recompute_flops=kernels.again_flops,
            weight_forwards=bench.weight_forwards,
            plain=plain,
            recomputed=recomputed,
        )
        return _Found(figures, kernels, bench.exit)


def _batch_shape(sample: torch.Tensor, samples: int) -> _Shape:
    """A contiguous batch of rows like those of a sample, (1, ...). Raises UsageError where no tensor can hold it."""
    if samples * sample[0].numel() * sample.element_size() > MAX_BYTES:
        one = format_bytes(sample[0].numel() * sample.element_size())
        raise UsageError(f"{samples} samples of {one} each are more than any tensor can hold; give a smaller batch")
    like = torch.empty((samples, *sample.shape[1:]), dtype=sample.dtype, device="meta")
    return _Shape.of(like)


def _storage_bytes(shape: _Shape) -> int:
    if 0 in shape.size:
        return 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape.size, shape.stride, strict=True))
    return span * shape.dtype.itemsize


_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.Size)


def _signature(module: nn.Module) -> Any:
    """Everything in which two layers can differ: classes, shapes and attributes, objects by identity."""
    parts = []
    for name, child in module.named_modules():
        tensors = [*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)]
        shapes = tuple((key, _Shape.of(tensor), tensor.requires_grad) for key, tensor in tensors)
        attributes = tuple(
            (key, _comparable(value)) for key, value in sorted(vars(child).items()) if not key.startswith("_")
        )
        parts.append((name, type(child), shapes, attributes))
    return tuple(parts)


def _comparable(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple | list):
        return tuple(_comparable(item) for item in value)
    return ("object", id(value))


class _Blaming:
    """Turns what a layer raises into one clear error that names it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, ChunktuneError):
            return
        lines = str(error).strip().splitlines()
        place = place_of(error)
        where = f" ({place})" if place else ""
        said = f"{type(error).__name__}: {lines[0][:200] if lines else '(no message)'}{where}"
        raise UserCodeError(f"{self._name} failed on tensors without values: {said}; {_RULE}") from error


class _Source(torch.autograd.Function):
    """Makes the layer's input; its gradient ends here."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, weight: torch.Tensor, bench: _Bench) -> torch.Tensor:
        ctx.bench = bench
        return bench.make_input()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        bench: _Bench = ctx.bench
        if bench.weighing:
            return None, bench.start_weights(), None
        bench.arrived(gradients[0])
        return bench.ignored(), bench.ignored(), None


class _Sink(torch.autograd.Function):
    """Takes the layer's output, holds nothing of it, and makes its gradient."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, weight: torch.Tensor | None, bench: _Bench) -> torch.Tensor:
        ctx.bench, ctx.shape, ctx.weighted = bench, _Shape.of(output), weight is not None
        return bench.ignored()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        bench: _Bench = ctx.bench
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


class _Bench:
    """One layer between its two ends, at one b."""

    def __init__(self, layer: _Layer, kind: _Kind, autocast: torch.dtype | None, round_to: int) -> None:
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
        targets = [module.target] if isinstance(module, _Loss) else []
        return [*module.parameters(), *module.buffers(), *gradients, *targets]

    def ignored(self) -> torch.Tensor:
        """A number that is not counted."""
        number = torch.zeros((), device=_DEVICE)
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
        with autocasting(_DEVICE.type, self._autocast):
            output = through(self._layer.module, value, recompute=recompute)
            meter.stop()
            if not isinstance(output, torch.Tensor):
                raise TypeError(f"returned {type(output).__name__}; a layer returns one tensor")
            peak = max(meter.peaks.values(), default=0)
            passed_on = meter.name_of(output) == "x"
            meter.name("y", output)
            self.exit = _Shape.of(output)
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

    def make_gradient(self, shape: _Shape) -> torch.Tensor:
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
        number = torch.zeros((), device=_DEVICE)
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
        with KernelMeter() as forward, autocasting(_DEVICE.type, self._autocast):
            output = through(self._layer.module, value, recompute=recompute)
        gradient = None if self._layer.loss else _Shape.of(output).empty()
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


def _bare_profile(layer: _Layer, optimizer: str, round_to: int) -> LayerProfile:
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
    weight = nn.Parameter(torch.zeros((), device=_DEVICE))
    weight.grad = torch.zeros((), device=_DEVICE)
    return weight
