"""Layers to parts: what one micro-batch holds in a part of several layers, operation by operation. Pure.

Levels are bytes of one micro-batch in one part. Not in them: what lives besides (weights, gradients of an earlier
chunk, the tensors that enter and leave the part), which `chunktune.memory.ranks` adds up. Between piece i and i + 1
lie an output and, in the backward, its gradient; they count for as long as one of the two pieces holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from chunktune.results import LayerBytes, LayerFigures, OperationBytes


@dataclass(frozen=True)
class Phase:
    """One operation of a part: the highest level while it runs, and the level when it is over."""

    peak: int
    left: int


@dataclass(frozen=True)
class Piece:
    """One layer of a part, or the loss: its figures at some b, with the bytes of the recomputation asked for."""

    figures: LayerFigures
    bytes: LayerBytes
    loss: bool


class Levels(NamedTuple):
    """All that a rank's play asks of a part: see the properties of `PartBytes` of the same names."""

    output_bytes: int
    gradient_bytes: int
    split_gradient_bytes: int
    scalar_bytes: int
    forward: Phase
    loss: Phase
    backward: int
    first_backward: int


class PartBytes:
    """A part at one b. `pieces`: its layers in order; under the last part the loss comes last."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = list(pieces)
        self._layers = [piece for piece in pieces if not piece.loss]
        self._outputs = _storages(self._layers)
        self._forward = _holders([piece.bytes.forward for piece in pieces])
        *gradients, self._gradient_out = _gradients(pieces)
        self._gradient = gradients
        # What leaves the part, or goes into the loss, is counted by the rank for as long as the stage keeps it.
        self._out = [*self._outputs, *(0 for piece in pieces if piece.loss)]
        for index in reversed(range(len(self._layers))):
            self._out[index] = 0
            if not _passes_on(self._forward[index]):
                break

    @cached_property
    def whole_levels(self) -> Levels:
        """What a play without split backwards depends on; two parts with equal ones play alike."""
        return Levels(*(getattr(self, name) for name in Levels._fields))

    @property
    def input_bytes(self) -> int:
        """The buffer that a rank receives this part's input into."""
        return self._pieces[0].figures.input_bytes

    @property
    def output_bytes(self) -> int:
        """What the part returns."""
        return self._outputs[-1]

    @property
    def gradient_bytes(self) -> int:
        """The gradient of the part's input after a whole backward; 0 where there is none."""
        return self._pieces[0].figures.gradient_bytes

    @property
    def split_gradient_bytes(self) -> int:
        """The same after the first half of a split one; 0 where it is the output's, passed on as it is."""
        return self._gradient_out

    @property
    def batch_bytes(self) -> int:
        """What one micro-batch takes from the batch."""
        return sum(piece.figures.batch_bytes for piece in self._pieces)

    @property
    def scalar_bytes(self) -> int:
        """The loss of one micro-batch; 0 without a loss."""
        return self._pieces[-1].figures.output_bytes if self._pieces[-1].loss else 0

    @cached_property
    def forward(self) -> Phase:
        """The layers' forward; the peak holds the part's output, the level left behind does not."""
        peak = cast = 0
        for index, layer in enumerate(self._layers):
            own = layer.bytes.forward
            level = self._kept_before[index] + cast + self._before(index) + _highest(own)
            peak = max(peak, level)
            cast += own.extra_bytes
        return Phase(peak, self._kept_before[len(self._layers)])

    @cached_property
    def loss(self) -> Phase:
        """The loss after the forward; the number itself is left to the rank."""
        own = self._forward[-1] if self._pieces[-1].loss else OperationBytes()
        return Phase(self.forward.left + _highest(own), self.forward.left + own.left_bytes)

    @cached_property
    def backward(self) -> int:
        """Peak of the whole backward with the gradients of weights in place; holds the gradient of the input."""
        return self._whole([piece.bytes.backward for piece in self._pieces])

    @cached_property
    def first_backward(self) -> int:
        """The same in the first micro-batch: holds the gradients of weights too."""
        return self._whole([piece.bytes.first_backward for piece in self._pieces])

    def _whole(self, own: Sequence[OperationBytes]) -> int:
        peak = self._reversed(own)
        if self.gradient_bytes == self._gradient_out:
            return peak
        # A gradient that is passed on is the sender's buffer, which autograd copies into the input's `.grad`.
        return max(peak, sum(operation.left_bytes for operation in own) + self.gradient_bytes)

    @cached_property
    def input(self) -> Phase:
        """The backward's first half; the peak holds the gradient of the input, the level left behind does not."""
        peak = self._reversed([piece.bytes.input for piece in self._pieces])
        return Phase(peak, self._halfway_after[0])

    @cached_property
    def weight(self) -> int:
        """Peak of the backward's second half, with the gradients of weights in place."""
        return self._weighed([layer.bytes.weight for layer in self._layers], self._end.ending_weight)

    @cached_property
    def first_weight(self) -> int:
        """The same in the first micro-batch: holds the gradients of weights too."""
        return self._weighed([layer.bytes.first_weight for layer in self._layers], self._end.first_ending_weight)

    def _before(self, index: int) -> int:
        """The tensor between a piece and the one before it."""
        return self._out[index - 1] if index else 0

    @cached_property
    def _kept_before(self) -> list[int]:
        """For each piece, and for the end, what all before it keep, the tensor right before left out."""
        levels, own = [0], self._forward
        for index in range(len(own)):
            shared = index > 0 and ("y" in own[index - 1].holds or "x" in own[index].holds)
            levels.append(levels[-1] + own[index].left_bytes + self._before(index) * shared)
        return levels

    def _reversed(self, own: Sequence[OperationBytes]) -> int:
        """The peak over the pieces from the last to the first, what they keep in `_forward` and leave in `own`."""
        peak = done = 0
        following = ""
        for index in reversed(range(len(own))):
            mine = own[index]
            earlier = "y" * (index > 0 and "y" in self._forward[index - 1].holds)
            level = self._kept_before[index] + done
            peak = max([peak, *(level + at for at in self._levels(index, mine.peaks, earlier, following))])
            done += mine.left_bytes + self._gradient[index] * ("g" in mine.holds)
            done += self._out[index] * ("y" in mine.holds or "x" in following)
            following = mine.holds
        return peak

    def _levels(
        self, index: int, peaks: Sequence[tuple[int, str]], earlier: str, following: str, carried: int = 0
    ) -> list[int]:
        """Levels of one piece, the tensors on both its sides included. `earlier`, `following`: held by neighbours."""
        return [
            size
            + self._before(index) * ("x" in letters or "y" in earlier)
            + self._out[index] * ("y" in letters or "x" in following)
            + self._gradient[index] * ("g" in letters)
            + carried * ("c" in letters)
            for size, letters in peaks
        ]

    @cached_property
    def _halfway(self) -> list[_Halfway]:
        """Each layer between the two halves: the graph behind the last weight of the part is gone."""
        ends = True
        found: list[_Halfway] = []
        for layer in reversed(self._layers):
            own = layer.bytes.input
            weightless = not layer.bytes.weight.peaks
            dropped = own.extra_bytes if ends else 0
            holds = own.holds
            if ends:
                holds = "" if weightless else holds.replace("y", "")
            found.append(_Halfway(own.left_bytes - dropped, holds))
            ends = ends and weightless
        return found[::-1]

    @cached_property
    def _halfway_after(self) -> list[int]:
        """For each layer, and for the end, what it and all after it hold halfway, the tensor right before left out."""
        levels, following = [0], ""
        for index in reversed(range(len(self._layers))):
            state = self._halfway[index]
            level = levels[-1] + state.left_bytes + self._gradient[index] * ("g" in state.holds)
            levels.append(level + self._out[index] * ("y" in state.holds or "x" in following))
            following = state.holds
        return levels[::-1]

    @cached_property
    def _end(self) -> LayerBytes:
        """The last layer with weights."""
        weighed = [layer.bytes for layer in self._layers if layer.bytes.weight.peaks]
        return (weighed or [self._layers[-1].bytes])[-1]

    def _weighed(self, inner: Sequence[OperationBytes], end: OperationBytes) -> int:
        """The peak over the layers in order, each freeing what the gradients of its weights needed."""
        peak = done = carried = 0
        earlier = ""
        last = max((index for index, own in enumerate(inner) if own.peaks), default=-1)
        for index, mine in enumerate(inner):
            peaks = end.peaks if index == last else mine.peaks
            following = self._halfway[index + 1].holds if index + 1 < len(inner) else ""
            level = done + self._halfway_after[index + 1]
            peak = max([peak, *(level + at for at in self._levels(index, peaks, earlier, following, carried))])
            state = mine if mine.peaks else self._halfway[index]
            carried = mine.extra_bytes if mine.peaks else carried
            done += state.left_bytes + self._gradient[index] * ("g" in state.holds)
            done += self._before(index) * ("x" in state.holds or "y" in earlier)
            earlier = state.holds
        return peak


@dataclass(frozen=True)
class _Halfway:
    """What a layer has and holds after its input gradient."""

    left_bytes: int
    holds: str


def _passes_on(own: OperationBytes) -> bool:
    """Whether what a layer returns is the storage that it was given, as a reshape does."""
    return "a" in own.holds


def _storages(layers: Sequence[Piece]) -> list[int]:
    """Bytes of the storage that each layer returns; 0 where it is the part's own input."""
    sizes: list[int] = []
    for layer in layers:
        before = sizes[-1] if sizes else 0
        sizes.append(before if _passes_on(layer.bytes.forward) else layer.figures.output_bytes)
    return sizes


def _gradients(pieces: Sequence[Piece]) -> list[int]:
    """The gradient of each piece's output, and last of the first one's input; 0 for what comes from without."""
    sizes = [0]
    for piece in reversed(pieces):
        sizes.append(sizes[-1] if "p" in piece.bytes.backward.holds else piece.figures.gradient_bytes)
    return [*sizes[-2::-1], sizes[-1]]


def _holders(forward: Sequence[OperationBytes]) -> list[OperationBytes]:
    """Who holds what after the forward, a storage that is passed on being held where it comes out last."""
    found = list(forward)
    for index in reversed(range(len(found))):
        own = found[index]
        if not _passes_on(own):
            continue
        held = "x" in own.holds or (index > 0 and "y" in found[index - 1].holds)
        found[index] = own.model_copy(update={"holds": "ay" if held else "a"})
        if index > 0:
            before = found[index - 1]
            found[index - 1] = before.model_copy(update={"holds": before.holds.replace("y", "")})
    return found


def _highest(own: OperationBytes) -> int:
    return max((size for size, _ in own.peaks), default=0)
