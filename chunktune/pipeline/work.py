"""What one rank holds during a sweep: its parts of the model, its optimizer, its share of the batch, its budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chunktune import partition, schedules
from chunktune.device import Device
from chunktune.models.base import ModelDefinition
from chunktune.pipeline.runtime import Boundary, BoundaryReader, PipelineStep, StepPlan
from chunktune.spec import Spec

LEARNING_RATE = 1e-4


class Part(nn.Module):
    """Consecutive layers of one part, run as they are trained: autocast and recomputation included."""

    def __init__(self, layers: Sequence[nn.Module], *, recompute: bool, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._recompute = recompute
        self._autocast = autocast

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """One micro-batch through the layers, in order."""
        with autocasting(value.device.type, self._autocast):
            for layer in self.layers:
                value = through(layer, value, recompute=self._recompute)
        return value


def through(layer: nn.Module, value: torch.Tensor, *, recompute: bool) -> torch.Tensor:
    """One layer as a part runs it: recomputed in its backward, or not."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(layer, value, use_reentrant=False)  # type: ignore[no-any-return]
    return layer(value)  # type: ignore[no-any-return]


def autocasting(device_type: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """Autocast to a type; nothing for None, since a context that is entered disabled costs a chunk 10 us."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)


@dataclass(frozen=True)
class Budget:
    """Bytes that a rank may use: the capacity, and what is left of it after headroom, reserve and overhead."""

    capacity_bytes: int
    budget_bytes: int


class RankWork:
    """One rank's share of the work, made anew from the seed for every M.

    `counts`: layers of each of the K V parts. Only this rank's parts are ever materialised; the boundary
    tensors of the others are read from fake tensors.
    """

    def __init__(
        self,
        spec: Spec,
        model: ModelDefinition,
        counts: Sequence[int],
        *,
        rank: int,
        ranks: int,
        device: Device,
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.ranks = ranks
        self.device = device
        self.parts = len(counts)
        self._model = model
        self._slices = partition.layers_of_parts(counts)
        self._schedule = schedules.SCHEDULES[spec.pipeline.schedule]
        self.own_parts = schedules.parts_of_rank(spec.pipeline.schedule, ranks, self.parts // ranks, rank)
        self._autocast = torch.bfloat16 if spec.training.precision == "bfloat16" else None
        self._boundaries: dict[int, tuple[Boundary, ...]] = {}
        self._reader: BoundaryReader | None = None
        self._of_layers: dict[int, tuple[Boundary, ...]] = {}

    def budget(self) -> Budget:
        """Capacity and budget of this rank now; on CUDA what lies outside the allocator is taken off."""
        asked = self.spec.device.memory
        capacity = self.device.capacity_bytes() if asked == "auto" else int(asked)
        free = int(capacity * (1 - self.spec.device.headroom))
        return Budget(capacity, max(0, free - self.spec.device.reserve - self.device.overhead_bytes()))

    def build_modules(self) -> dict[int, nn.Module]:
        """This rank's parts, with the weights that the seed gives; the same for every partition."""
        with self.device.torch_device:
            return {index: self._part(index, recompute=self._recomputes) for index in self.own_parts}

    @property
    def _recomputes(self) -> bool:
        return self.spec.pipeline.recompute == "full"

    def _part(self, index: int, *, recompute: bool) -> Part:
        layers = [self.build_layer(layer) for layer in self._slices[index]]
        return Part(layers, recompute=recompute, autocast=self._autocast)

    def build_layer(self, layer: int) -> nn.Module:
        """One layer with the weights that the seed gives it."""
        torch.manual_seed(self.spec.training.seed + layer)
        return self._model.layers[layer]()

    def boundaries(self, micro_batch: int) -> tuple[Boundary, ...]:
        """The tensors between the parts at a micro-batch of b samples."""
        if micro_batch not in self._boundaries:
            self._boundaries[micro_batch] = self._reader_of_parts().read(*self._input(micro_batch))
        return self._boundaries[micro_batch]

    def boundary_bytes(self, micro_batch: int) -> tuple[int, ...]:
        """Bytes of the tensor between part p and p + 1, K V - 1 of them, for b samples."""
        return tuple(one.outputs.nbytes for one in self.boundaries(micro_batch)[:-1])

    def _reader_of_parts(self) -> BoundaryReader:
        if self._reader is None:
            parts = range(self.parts)
            self._reader = BoundaryReader(
                lambda: [self._part(index, recompute=False) for index in parts], self.device.torch_device
            )
        return self._reader

    def _input(self, micro_batch: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of what enters the first part, from a single sample."""
        row = self._sample(1)[0]
        return (micro_batch, *row.shape[1:]), row.dtype

    def _sample(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.spec.training.seed)
        return self._model.sample_batch(samples, generator)

    def batch(self, mini_batch: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Inputs where the first part is, targets where the last is; the same N rows for every M."""
        first, last = 0 in self.own_parts, self.parts - 1 in self.own_parts
        if not first and not last:
            return None, None
        inputs, targets = self._sample(mini_batch)
        place = self.device.torch_device
        return (inputs.to(place) if first else None), (targets.to(place) if last else None)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The model's loss of one micro-batch, under the same autocast as the layers."""
        with autocasting(output.device.type, self._autocast):
            return self._model.loss(output, target)

    def layer_count(self) -> int:
        """Layers of the whole model."""
        return len(self._model.layers)

    def layer_seconds(self, layer: int, micro_batch: int, repeats: int) -> float:
        """Forward and backward seconds of one layer alone on b samples: the least of a few, after a warm-up."""
        boundary = self._layer_boundaries(micro_batch)[layer]
        with self.device.torch_device:
            part = Part([self.build_layer(layer)], recompute=self._recomputes, autocast=self._autocast)
        place = self.device.torch_device
        value = self._sample(micro_batch)[0].to(place) if layer == 0 else _random(boundary, place)
        return min([self._forward_backward_s(part, value) for _ in range(repeats + 1)][1:])

    def _forward_backward_s(self, part: Part, value: torch.Tensor) -> float:
        self.device.synchronise()
        start = self.device.mark()
        output = part(value)
        if output.requires_grad:
            output.backward(torch.ones_like(output))
        end = self.device.mark()
        self.device.synchronise()
        return self.device.elapsed_s(start, end)

    def _layer_boundaries(self, micro_batch: int) -> tuple[Boundary, ...]:
        if micro_batch not in self._of_layers:
            layers = range(self.layer_count())
            reader = BoundaryReader(
                lambda: [Part([self.build_layer(i)], recompute=False, autocast=self._autocast) for i in layers],
                self.device.torch_device,
            )
            self._of_layers[micro_batch] = reader.read(*self._input(micro_batch))
        return self._of_layers[micro_batch]

    def step_plan(self, modules: dict[int, nn.Module], chunks: int, micro_batch: int) -> StepPlan:
        """What torch's schedule is built from, at M chunks of b samples."""
        return StepPlan(
            rank=self.rank,
            ranks=self.ranks,
            schedule=self._schedule.torch_name,
            chunks=chunks,
            parts=self.parts,
            modules=modules,
            boundaries=self.boundaries(micro_batch),
            loss=self.loss,
            device=self.device.torch_device,
        )


class Trainer:
    """A rank's weights, optimizer and batch, all at their start: made from the seed, never kept as a copy."""

    def __init__(self, work: RankWork) -> None:
        self.work = work
        self.modules = work.build_modules()
        self.parameters = [p for module in self.modules.values() for p in module.parameters()]
        self._optimizer = make_optimizer(work.spec.training.optimizer, self.parameters)
        self._batch: tuple[int, tuple[torch.Tensor | None, torch.Tensor | None]] | None = None
        torch.manual_seed(work.spec.training.seed + work.rank)

    def batch(self, mini_batch: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The rank's share of N samples; made again only when N changes."""
        if self._batch is None or self._batch[0] != mini_batch:
            self._batch = None
            self._batch = (mini_batch, self.work.batch(mini_batch))
        return self._batch[1]

    def update(self) -> None:
        """Optimizer step and zero_grad."""
        if self._optimizer is not None:
            self._optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None


class TrainingStep:
    """One step as people train: forward, backward, optimizer, zero_grad, at M chunks of b samples."""

    def __init__(self, trainer: Trainer, chunks: int, micro_batch: int, *, rehearsal: bool) -> None:
        self.chunks = chunks
        self.micro_batch = micro_batch
        self._trainer = trainer
        self._inputs, self._targets = trainer.batch(chunks * micro_batch)
        work = trainer.work
        plan = work.step_plan(trainer.modules, chunks, micro_batch)
        self._pipeline = PipelineStep(plan, work.device, rehearsal=rehearsal)
        self.operations = self._pipeline.operations

    def run(self) -> list[torch.Tensor]:
        """One step; the chunks' shares of the loss on the rank that has the last part, else an empty list."""
        losses = self._pipeline.run(self._inputs, self._targets)
        self.operations.timed("optimizer", -1, self._trainer.update)
        return losses


def make_optimizer(name: str, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer | None:
    """The optimizer of a spec over a rank's own parameters; None for "none" or a part without parameters."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(trained, lr=LEARNING_RATE),
        "sgd": lambda: torch.optim.SGD(trained, lr=LEARNING_RATE),
    }
    return makers[name]() if trained and name in makers else None


def _random(boundary: Boundary, place: torch.device) -> torch.Tensor:
    """What enters a layer: a leaf on the device itself, so that its gradient is not copied anywhere."""
    like = boundary.inputs
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype, device=place)
    return torch.randn(like.shape, dtype=like.dtype, device=place).requires_grad_(True)
