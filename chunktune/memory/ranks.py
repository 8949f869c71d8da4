"""One rank's step: the order of its operations, and what torch keeps alive between them. Pure.

How long a tensor lives is torch's doing (torch.distributed.pipelining, 2.13):

* receive buffers, a chunk and direction each, for the stage's life: `_PipelineStage._setup_forward_recv_info`,
  `_create_grad_recv_info`. Between two parts of one rank their place is taken by the neighbour's own tensor, which
  stays until the next step's replaces it: `set_local_fwd_input`, `set_local_bwd_input`.
* outputs: until the backward (`fwd_cache`), and whatever was sent until it is waited for: under GPipe before the
  first backward and at the end, under 1F1B at once, under the other schedules at the end of the step
  (`_PipelineScheduleRuntime._step_microbatches`, `send_ops`). The loops of GPipe and 1F1B hold their latest output
  (`output`), that of 1F1B its latest gradient (`bwd_sends`) until the next one is there.
* split backward: a received input keeps its gradient (`.grad`, `stage_backward_input`) until the next step begins
  (`clear_runtime_states`). The first part of the model runs nothing as I and its whole backward as W.
* losses: until the next step (`_internal_losses`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from chunktune.memory.parts import PartBytes
from chunktune.orders import Compute


class Sizes(NamedTuple):
    """Bytes of one rank at one moment that change during a step; `workspace`: on top of the level before."""

    gradients: int
    activations: int
    held_sends: int
    workspace: int


class Point(NamedTuple):
    """One operation of a rank: F, L (the loss), B, I, W or U (the update, part and chunk -1), with its highest level.

    The level before it is that without the workspace; nothing changes between two operations.
    """

    kind: str
    part: int
    chunk: int
    peak: Sizes


@dataclass(frozen=True)
class RankParts:
    """A rank's parts by their index in the model, of `parts` in all.

    `gradients`: bytes of the weights' gradients, a part each. `update_bytes`: most that the optimizer's step takes
    above the level at its start.
    """

    parts: int
    own: dict[int, PartBytes]
    gradients: dict[int, int]
    update_bytes: int

    def is_local(self, part: int) -> bool:
        """Whether a part lies on this rank."""
        return part in self.own


def rules_of(schedule: str) -> type[Rules]:
    """How torch's class for a schedule keeps tensors."""
    return {"gpipe": Fill, "1f1b": Alternate}.get(schedule, Rules)


@dataclass
class Rules:
    """The generic runtime, which executes a list: what was sent stays until the end of the step."""

    rank: RankParts
    chunks: int
    gradients: int = 0
    activations: int = 0
    held: int = 0
    _kept: dict[tuple[int, int], int] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)
    _until_next_step: int = 0

    def play(self, order: Iterable[Compute]) -> Iterator[Point]:
        """Every operation of a step in order, the update last."""
        for compute in order:
            part = self.rank.own[compute.part]
            if compute.kind == "F":
                yield from self._forward(part, compute)
            elif compute.kind == "I":
                yield self._input(part, compute)
            else:
                yield self._backward(part, compute)
        yield self._updated()

    def _now(self, workspace: int = 0) -> Sizes:
        return Sizes(self.gradients, self.activations, self.held, workspace)

    def _forward(self, part: PartBytes, at: Compute) -> Iterator[Point]:
        peak = self._now(part.forward.peak)
        self._keep(at, part.forward.left)
        if not self.rank.is_local(at.part + 1):
            self.activations += part.output_bytes
        self.output_replaced(part, at)
        yield Point("F", at.part, at.chunk, peak)
        if at.part == self.rank.parts - 1:
            peak = self._now(part.loss.peak - part.forward.left)
            self._keep(at, part.loss.left)
            self.activations += part.scalar_bytes
            yield Point("L", at.part, at.chunk, peak)

    def _keep(self, at: Compute, size: int) -> None:
        """Set what a chunk keeps in a part besides its output."""
        key = (at.part, at.chunk)
        self.activations += size - self._kept.pop(key, 0)
        if size:
            self._kept[key] = size

    def _input(self, part: PartBytes, at: Compute) -> Point:
        if at.part == 0:
            return Point("I", at.part, at.chunk, self._now())
        peak = self._during(part.input.peak, at)
        self._keep(at, part.input.left)
        if at.part == self.rank.parts - 1:
            self.activations -= part.output_bytes
        self._send_gradient(part, at, kept=True)
        return Point("I", at.part, at.chunk, peak)

    def _during(self, peak: int, at: Compute) -> Sizes:
        """The peak of an operation that starts from what the chunk keeps."""
        return self._now(max(0, peak - self._kept.get((at.part, at.chunk), 0)))

    def _backward(self, part: PartBytes, at: Compute) -> Point:
        """B, or W: of the first part of the model the whole backward too."""
        whole = at.kind == "B" or at.part == 0
        first = at.part not in self._begun
        self._begun.add(at.part)
        if whole:
            highest = part.first_backward if first else part.backward
        else:
            highest = part.first_weight if first else part.weight
        peak = self._during(highest, at)
        self._keep(at, 0)
        if first:
            self.gradients += self.rank.gradients[at.part]
        if whole:
            self._send_gradient(part, at, kept=False)
        self._release_output(part, at, whole)
        return Point(at.kind, at.part, at.chunk, peak)

    def _release_output(self, part: PartBytes, at: Compute, whole: bool) -> None:
        if at.part == self.rank.parts - 1:
            if whole:
                self.output_done(part, at)
        elif not self.rank.is_local(at.part + 1):
            self.output_done(part, at)

    def _send_gradient(self, part: PartBytes, at: Compute, *, kept: bool) -> None:
        """The gradient of the input goes to the rank before; on one rank it takes the place of the last step's."""
        if at.part == 0 or self.rank.is_local(at.part - 1):
            return
        size = part.split_gradient_bytes if kept else part.gradient_bytes
        self.gradient_sent(size)
        if kept:
            self._until_next_step += size

    def output_replaced(self, part: PartBytes, at: Compute) -> None:
        """A forward is over: what its loop held of the one before is free."""

    def output_done(self, part: PartBytes, at: Compute) -> None:
        """A backward is over: the output is free, or was sent and is still held."""
        self.activations -= part.output_bytes
        if at.part < self.rank.parts - 1:
            self.held += part.output_bytes

    def gradient_sent(self, size: int) -> None:
        """A gradient was handed over to be sent."""
        self.held += size

    def _updated(self) -> Point:
        losses = self.chunks * sum(part.scalar_bytes for part in self.rank.own.values())
        self.activations, self.held = losses, self._until_next_step
        return Point("U", -1, -1, self._now(self.rank.update_bytes))


class Fill(Rules):
    """GPipe's loop: sent outputs are free before the backwards, sent gradients at the end."""

    def output_done(self, part: PartBytes, at: Compute) -> None:
        """The output is free, the loop's latest excepted."""
        if at.chunk < self.chunks - 1:
            self.activations -= part.output_bytes


@dataclass
class Alternate(Rules):
    """1F1B's loop: every transfer is waited for at once; the latest output and gradient are held."""

    _latest: int = -1
    _latest_is_done: bool = False
    _sent: int = 0

    def output_replaced(self, part: PartBytes, at: Compute) -> None:
        """The output before is free where its backward is over."""
        if self._latest_is_done:
            self.activations -= part.output_bytes
        self._latest, self._latest_is_done = at.chunk, False

    def output_done(self, part: PartBytes, at: Compute) -> None:
        """The output is free, unless it is the loop's latest."""
        if at.chunk == self._latest:
            self._latest_is_done = True
        else:
            self.activations -= part.output_bytes

    def gradient_sent(self, size: int) -> None:
        """The gradient before is free."""
        self.held += size - self._sent
        self._sent = size


def receive_buffers(parts: Sequence[PartBytes], own: Sequence[int], splits: bool) -> int:
    """Bytes of what enters a rank's parts from the parts before and after them, for one chunk.

    `splits`: the schedule splits the backward.
    """
    total = 0
    for part in own:
        if part > 0:
            total += parts[part - 1].output_bytes if part - 1 in own else parts[part].input_bytes
        if part + 1 < len(parts):
            following = parts[part + 1]
            # A tensor that has no gradient, such as one of integers, gets no buffer for it.
            received = following.input_bytes if following.gradient_bytes else 0
            local = following.split_gradient_bytes if splits else following.gradient_bytes
            total += local if part + 1 in own else received
    return total
