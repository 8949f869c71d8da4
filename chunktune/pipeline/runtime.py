"""Everything that chunktune takes from torch under a private name, and nothing else.

When torch changes, this file changes: `tests/pipeline/test_runtime.py` says which name broke. The rest of the
project sees only what is defined here:

* `PipelineStep`  one step of torch's own schedule class, every operation timed
* `rehearsing`    the same schedule with the communication left out
* `boundaries`    the tensors that cross between parts, from a fake-tensor pass
* `StorageMeter`  exact bytes of live tensors, on the CPU
* `NamingMeter`   the same, with a few tensors told apart; `fake_tensors`, `input_backward`, `weight_backward`
* `KernelMeter`   floating-point operations and bytes of every operation
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed.pipelining.schedules as torch_schedules
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

Mark = Any
"""A point on a device's time line: a float of seconds on the CPU, an event on CUDA."""


def quiet_logs() -> None:
    """Stop torch from printing a whole schedule at ERROR level when a step raises; the exception says it too."""
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)


class StorageMeter(TorchDispatchMode):
    """Counts the bytes of every storage that an operation returns, from its birth to its last reference.

    Counts storages, not modules, so it survives any schedule, split backward and many steps, and equals the
    totals of torch's profiler. It slows what it watches: never for timed steps. It does not see workspaces
    inside one operation. `round_to` rounds each storage up, as an allocator does.
    """

    def __init__(self, round_to: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current_bytes = 0
        self.peak_bytes = 0
        self._round_to = round_to
        self._known: Any = WeakIdKeyDictionary()

    def restart_peak(self) -> None:
        """Read the peak from here on."""
        self.peak_bytes = self.current_bytes

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        size = math.ceil(storage.nbytes() / self._round_to) * self._round_to
        box = self._known.get(storage)
        if box is None:
            box = self._known[storage] = [0]
            weakref.finalize(storage, self._forget, box)
        self.current_bytes += size - box[0]
        box[0] = size

    def _forget(self, box: list[int]) -> None:
        self.current_bytes -= box[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then count what it returned."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            # Meta tensors have a size and no memory: those of a fake-tensor pass run through here too.
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._count(leaf)
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        return result


class NamingMeter(StorageMeter):
    """A meter that does not count a few named storages, and keeps the peak apart for each set of them that is alive.

    `peaks`: most counted bytes after any operation since `restart`, by the names alive then, in alphabetic order.
    `last`: (counted bytes, names alive) after the latest operation. A storage named "" is left out for good.
    """

    def __init__(self, round_to: int = 1) -> None:
        super().__init__(round_to)
        self.peaks: dict[str, int] = {}
        self.last = (0, "")
        self._names: Any = WeakIdKeyDictionary()
        self._alive: list[str] = []
        self._recording = True

    def rounded(self, size: int) -> int:
        """Bytes of a storage as an allocator gives them."""
        return math.ceil(size / self._round_to) * self._round_to

    def alive(self) -> str:
        """The names of the named storages that are alive."""
        return "".join(sorted(self._alive))

    def restart(self) -> None:
        """Forget the peaks so far."""
        self.peaks, self._recording = {}, True

    def stop(self) -> None:
        """Take no further peaks."""
        self._recording = False

    def name(self, name: str, *tensors: torch.Tensor) -> None:
        """Give storages a name; one that has a name keeps it."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage in self._names:
                continue
            self._names[storage] = name
            box = self._known.get(storage)
            if box is not None:
                self.current_bytes -= box[0]
                box[0] = 0
            if name:
                self._alive.append(name)
                weakref.finalize(storage, self._alive.remove, name)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name of a tensor's storage; None where it has none."""
        found: str | None = self._names.get(tensor.untyped_storage())
        return found

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage() not in self._names:
            super()._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, count what it returned, and note the level."""
        # Autograd asks every fake tensor for its device, twice as often as anything is computed.
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        result = super().__torch_dispatch__(func, types, args, kwargs)
        alive = self.alive()
        self.last = (self.current_bytes, alive)
        if self._recording:
            self.peaks[alive] = max(self.peaks.get(alive, 0), self.current_bytes)
        return result


_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda args: sdpa_flop_count(
        *(tensor.shape for tensor in args[:3])
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda args: sdpa_backward_flop_count(
        *(tensor.shape for tensor in args[:4])
    ),
}
"""Attention on the CPU, which torch's flop counter does not know: the formulas that it has for CUDA's kernel."""


_FREE = ("empty", "new_empty", "detach", "_unsafe_view")
"""Operations by the start of their name that move no bytes, though not marked as views."""


class KernelMeter(TorchDispatchMode):
    """Lists (floating-point operations, bytes read and written) of every operation that touches memory.

    The operations are those of `torch.utils.flop_counter`, by its own formulas. The bytes are what the operation's
    arguments and results hold; views cost nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and list it."""
        result = func(*args, **(kwargs or {}))
        # What returns no tensor (prim.device, asked of every fake tensor) only looks at one.
        touches = any(isinstance(leaf, torch.Tensor) for leaf in tree_iter(result)) and not func.is_view
        if touches and not func._overloadpacket.__name__.startswith(_FREE):
            tensors = [leaf for leaf in tree_iter((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
            # An operation in place returns its argument: read and written.
            moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.kernels.append((_flops(func, args, kwargs or {}, result), moved))
        return result


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    packet = func._overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    attention = _CPU_ATTENTION.get(packet)
    return int(attention(args)) if attention else 0


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """Inside, tensors have types and sizes and no memory. A module must not be moved (`Module.to`) in there."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def input_backward(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor] | None,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[nn.Parameter],
) -> Any:
    """The half of a backward that a split schedule runs as I; what `weight_backward` needs for the other half."""
    given = None if gradients is None else list(gradients)
    _, groups = stage_backward_input(list(outputs), given, list(inputs), iter(weights))
    return groups


def weight_backward(weights: Sequence[nn.Parameter], groups: Any) -> None:
    """The half of a backward that a split schedule runs as W."""
    stage_backward_weight(iter(weights), groups)


@dataclass(frozen=True)
class Boundary:
    """What enters and leaves one part for one micro-batch: meta tensors of the type it really returns."""

    inputs: torch.Tensor
    outputs: torch.Tensor


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return meta.requires_grad_(tensor.is_floating_point())


class BoundaryReader:
    """Reads boundary tensors by running the parts on fake tensors: exact types, no memory, no arithmetic.

    The parts are built once, fake; a pass for another micro-batch size costs microseconds an operation.
    `build_parts` is called under the fake mode and must not call `Module.to` (torch cannot swap fake tensors).
    """

    def __init__(self, build_parts: Callable[[], Sequence[nn.Module]], device: torch.device) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        with self._mode, torch.device(device):
            self._parts = list(build_parts())

    def read(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Boundary, ...]:
        """Boundary of every part for a micro-batch of this shape, (b, ...), and type.

        Raises TypeError when a part returns anything but one tensor.
        """
        found = []
        with self._mode, torch.no_grad():
            value = torch.empty(tuple(shape), dtype=dtype, device=self._device)
            for index, part in enumerate(self._parts):
                result = part(value)
                if not isinstance(result, torch.Tensor):
                    raise TypeError(f"part {index} returned {type(result).__name__}; a part returns one tensor")
                found.append((value, result))
                value = result
        boundaries = [Boundary(_as_meta(before), _as_meta(after)) for before, after in found]
        first = boundaries[0]
        boundaries[0] = Boundary(first.inputs.requires_grad_(False), first.outputs)
        return tuple(boundaries)


@dataclass(frozen=True)
class Operation:
    """One timed operation of a step. `kind`: forward, backward, input, weight, loss or optimizer.

    `start_s`: seconds from the origin that the log was taken with, 0 without one. `chunk`: -1 for the optimizer.
    """

    kind: str
    part: int
    seconds: float
    start_s: float = 0.0
    chunk: int = -1


class Clock(Protocol):
    """A device's time line."""

    def mark(self) -> Mark:
        """Now, on the device's own time line."""

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        """Seconds between two marks; the device has been synchronised."""


Marked = tuple[str, int, int, Mark, Mark]
"""Kind, part and chunk of an operation, and the marks around it."""


@dataclass
class OperationLog:
    """Times operations by marks that cost next to nothing, and adds them up when asked."""

    clock: Clock
    _open: list[Marked] = field(default_factory=list)

    def timed(self, kind: str, part: int, run: Callable[[], Any], chunk: int = -1) -> Any:
        """Run, and remember how long it took."""
        start = self.clock.mark()
        result = run()
        self._open.append((kind, part, chunk, start, self.clock.mark()))
        return result

    @property
    def last_chunk(self) -> int:
        """The chunk of the latest operation, -1 where there is none since the last `take`."""
        return self._open[-1][2] if self._open else -1

    def take(self, origin: Mark = None) -> list[Operation]:
        """Every operation since the last call, in order, started so long after `origin`; the device is synchronised."""
        return self.read(self.cut(), origin)

    def cut(self) -> list[Marked]:
        """The marks since the last call, still to be read."""
        marks, self._open = self._open, []
        return marks

    def read(self, marks: Iterable[Marked], origin: Mark = None) -> list[Operation]:
        """The operations of these marks, started so long after `origin`; the device is synchronised."""
        return [
            Operation(
                kind,
                part,
                self.clock.elapsed_s(start, end),
                0.0 if origin is None else self.clock.elapsed_s(origin, start),
                chunk,
            )
            for kind, part, chunk, start, end in marks
        ]


class TimedStage(PipelineStage):
    """torch's stage; each forward and backward is entered in a log. Waiting for a peer lies outside of both."""

    operations: OperationLog
    boundary: Boundary
    _output_checked = False

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Forward of one chunk, timed."""
        run = super().forward_one_chunk
        output = self.operations.timed(
            "forward", self.stage_index, lambda: run(fwd_chunk_id, *args, **kwargs), fwd_chunk_id
        )
        if not self._output_checked:
            self._check_output(output)
        return output

    def _check_output(self, output: torch.Tensor) -> None:
        """Once: a tensor unlike the receiver's buffer would end the peer's process, or be read as stale rows."""
        self._output_checked = True
        expected = self.boundary.outputs
        if (output.shape, output.dtype) != (expected.shape, expected.dtype):
            raise TypeError(
                f"part {self.stage_index} returned {tuple(output.shape)} {output.dtype} where it returned "
                f"{tuple(expected.shape)} {expected.dtype} on tensors without values"
            )

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        """Backward of one chunk, or only its input gradient, timed."""
        run = super().backward_one_chunk
        return self.operations.timed(
            "backward" if full_backward else "input",
            self.stage_index,
            lambda: run(bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward),
            bwd_chunk_id,
        )

    def _get_init_p2p_neighbors_ops(self) -> Any:
        # torch 2.11 lets a rank greet itself where it holds neighbouring parts; gloo has no such connection.
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Weight gradient of one chunk, timed."""
        run = super().backward_weight_one_chunk
        return self.operations.timed(
            "weight", self.stage_index, lambda: run(bwd_chunk_id, *args, **kwargs), bwd_chunk_id
        )


class _RehearsedStage(TimedStage):
    """A stage whose receive buffers hold plausible numbers, since no peer will ever fill them."""

    def stand_in(self, rank: int, ranks: int) -> None:
        """Be that rank of so many, whatever process this is: a rehearsal needs no process of its own."""
        self.group_rank, self.group_size = rank, ranks
        self.stage_index_to_group_rank = {index: index % ranks for index in range(self.num_stages)}

    def _setup_forward_recv_info(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._setup_forward_recv_info(*args, **kwargs)
        for infos in self.args_recv_info.values():
            for info in infos:
                _fill(getattr(info, "buffer", None), 1.0)
        return result

    def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> Any:
        infos = super()._create_grad_recv_info(*args, **kwargs)
        for info in infos:
            _fill(getattr(info, "buffer", None), 0.02)
        return infos


def _fill(buffer: torch.Tensor | None, spread: float) -> None:
    if buffer is None:
        return
    with torch.no_grad():
        buffer.normal_(0.0, spread) if buffer.is_floating_point() else buffer.zero_()


class _HeldTransfer:
    """A transfer that nobody receives; like a real one it keeps its tensor until it is waited for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor

    def wait(self, *_: Any) -> bool:
        self._tensor = None
        return True


@contextlib.contextmanager
def rehearsing() -> Iterator[None]:
    """Inside, schedules run without communication: receives find their buffers ready, sends are dropped.

    Every transfer of every schedule class goes through one function of torch's module, replaced here.
    """
    original = torch_schedules._batch_p2p

    def held(ops: Any, desc: Any = None) -> Any:
        return [_HeldTransfer(op.tensor) for op in ops]

    torch_schedules._batch_p2p = held  # type: ignore[assignment]
    try:
        yield
    finally:
        torch_schedules._batch_p2p = original


def _agree_alone(schedule: Any) -> None:
    """Skip the vote over static or dynamic shapes: it needs peers. torch before 2.13 has none."""
    if not hasattr(schedule, "_warmup_p2p"):
        return
    from torch.distributed.pipelining._utils import InferenceMode

    def decide(stages: Any, *_: Any, **__: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    schedule._warmup_p2p = decide


@dataclass(frozen=True)
class StepPlan:
    """What one rank needs to build a step: which parts it holds and how the batch is cut.

    `modules`: the rank's parts by global index. `boundaries`: of all parts. `loss`: mean over a micro-batch.
    """

    rank: int
    ranks: int
    schedule: str
    chunks: int
    parts: int
    modules: dict[int, nn.Module]
    boundaries: Sequence[Boundary]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    device: torch.device


class PipelineStep:
    """Forward and backward of one mini-batch by torch's own schedule class, with static shapes.

    Built anew for each (M, micro-batch shape): a stage reused at another shape reads stale rows or aborts.
    The loss of a chunk is divided by M and gradients are not scaled again, which is exact also where a
    parameter is shared by two parts of a rank.
    """

    def __init__(self, plan: StepPlan, clock: Clock, *, rehearsal: bool) -> None:
        self.operations = OperationLog(clock)
        self._rehearsal = rehearsal
        self._first = 0 in plan.modules
        self._last = plan.parts - 1 in plan.modules
        stage_class = _RehearsedStage if rehearsal else TimedStage
        stages = [self._stage(stage_class, plan, index) for index in plan.modules]
        schedule_class = get_schedule_class(plan.schedule)
        single = issubclass(schedule_class, PipelineScheduleSingle)
        self._schedule: Any = schedule_class(
            stages[0] if single else stages,
            n_microbatches=plan.chunks,
            loss_fn=self._chunk_loss(plan),
            scale_grads=False,
        )
        if rehearsal:
            _agree_alone(self._schedule)

    def _stage(self, stage_class: type[TimedStage], plan: StepPlan, index: int) -> TimedStage:
        boundary = plan.boundaries[index]
        stage = stage_class(
            plan.modules[index],
            index,
            plan.parts,
            plan.device,
            input_args=boundary.inputs,
            output_args=boundary.outputs,
        )
        if isinstance(stage, _RehearsedStage):
            stage.stand_in(plan.rank, plan.ranks)
        stage.operations = self.operations
        stage.boundary = boundary
        return stage

    def _chunk_loss(self, plan: StepPlan) -> Callable[..., torch.Tensor]:
        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            # torch calls it right after the forward of the same chunk, and does not say which that was.
            return self.operations.timed(  # type: ignore[no-any-return]
                "loss", plan.parts - 1, lambda: plan.loss(output, target) / plan.chunks, self.operations.last_chunk
            )

        return loss

    def run(self, inputs: torch.Tensor | None, targets: torch.Tensor | None) -> list[torch.Tensor]:
        """One step; returns the losses of the chunks on the rank with the last part, else an empty list.

        `inputs`, `targets`: the whole mini-batch, N rows. Raises whatever the layers raise, wrapped by torch.
        """
        losses: list[torch.Tensor] = []
        args = (inputs,) if self._first else ()
        kwargs = {"target": targets, "losses": losses} if self._last else {}
        with rehearsing() if self._rehearsal else contextlib.nullcontext():
            self._schedule.step(*args, return_outputs=False, **kwargs)
        return losses
