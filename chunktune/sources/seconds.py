"""Seconds of one micro-batch, with and without recomputation, whole and in two halves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chunktune import schedules
from chunktune.costs import Setting
from chunktune.simulate import Durations

SPLIT_NOTE = "the input and the weight gradient are taken as halves of the backward"


@dataclass(frozen=True)
class Seconds:
    """A layer's or a part's operations on one micro-batch, without recomputation.

    `backward_s`: the whole gradient; `input_s`, `weight_s`: the halves that a split backward runs. Recomputation adds
    `again_s` to the whole and to the input gradient, and `weight_again_s` to the weight gradient.
    """

    forward_s: float
    backward_s: float
    input_s: float
    weight_s: float
    again_s: float
    weight_again_s: float

    @classmethod
    def halved(cls, forward_s: float, backward_s: float, again_s: float, weight_again_s: float) -> Seconds:
        """Those of a backward of which only the whole is known."""
        return cls(forward_s, backward_s, backward_s / 2, backward_s / 2, again_s, weight_again_s)

    def scaled(self, factor: float) -> Seconds:
        """All of them times a factor."""
        return Seconds(*(factor * seconds for seconds in self.values))

    @property
    def values(self) -> tuple[float, ...]:
        """All of them, in the order of the fields."""
        return (
            self.forward_s,
            self.backward_s,
            self.input_s,
            self.weight_s,
            self.again_s,
            self.weight_again_s,
        )


def total(several: Sequence[Seconds]) -> Seconds:
    """Their sum; of none it is zero."""
    return Seconds(*(sum(column) for column in zip(*(one.values for one in several), strict=True))) if several else ZERO


ZERO = Seconds(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def splits_backward(setting: Setting) -> bool:
    """Whether the schedule runs the two halves of the backward apart."""
    return schedules.SCHEDULES[setting.spec.pipeline.schedule].splits_backward


def recomputes(setting: Setting) -> bool:
    """Whether every layer's forward is run again in its backward."""
    return setting.spec.pipeline.recompute == "full"


def durations(
    setting: Setting,
    parts: Sequence[Seconds],
    *,
    transfer_s: Sequence[float] = (),
    update_s: Sequence[float] = (),
    overhead_s: float = 0.0,
) -> Durations:
    """What the simulator plays. `transfer_s`: K V - 1 of them, `update_s`: K, each zero where it is empty.

    The first part of the model has no gradient of its input: torch runs nothing as its I, and its whole backward as
    its W (`_PipelineStageBase.backward_one_chunk` and `backward_weight_one_chunk` in
    torch.distributed.pipelining.stage).
    """
    again = 1.0 if recomputes(setting) else 0.0
    whole = [max(0.0, part.backward_s + again * part.again_s) for part in parts]
    inputs = [max(0.0, part.input_s + again * part.again_s) for part in parts]
    weights = [max(0.0, part.weight_s + again * part.weight_again_s) for part in parts]
    return Durations(
        forward_s=tuple(part.forward_s for part in parts),
        backward_s=tuple(whole),
        input_s=(0.0, *inputs[1:]),
        weight_s=(whole[0], *weights[1:]),
        transfer_s=tuple(transfer_s) or (0.0,) * (len(parts) - 1),
        update_s=tuple(update_s) or (0.0,) * setting.stages,
        overhead_s=overhead_s,
    )


def per_rank(setting: Setting, of_parts: Sequence[float]) -> tuple[float, ...]:
    """Values of the parts summed over those of each rank."""
    name, stages, virtual = setting.spec.pipeline.schedule, setting.stages, setting.virtual_stages
    return tuple(
        sum(of_parts[part] for part in schedules.parts_of_rank(name, stages, virtual, rank)) for rank in range(stages)
    )
