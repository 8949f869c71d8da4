"""What a step's operations cost, whoever says so: the one interface of all sources. Pure.

    given      chunktune.sources.given       the spec says it (families sleep and costs)
    measured   chunktune.sources.recorded    a record's rehearsals, and overheads fitted from its measured steps
    estimated  chunktune.sources.estimated   fake tensors for bytes, a datasheet for seconds

The predictor (`chunktune.whatif`) asks a source for the costs of one setting at one micro-batch size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, get_args

from chunktune.results import Basis, LayerProfile
from chunktune.simulate import Durations
from chunktune.spec import Spec

__all__ = ["Basis", "CostSource", "Costs", "Setting", "weakest"]


def weakest(*bases: Basis) -> Basis:
    """The one of several that says least, in the order of `results.Basis`; at least one."""
    return max(bases, key=get_args(Basis).index)


@dataclass(frozen=True)
class Setting:
    """A pipeline to predict: the spec made concrete. `counts`: layers of each of the K V parts."""

    spec: Spec
    stages: int
    virtual_stages: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Costs:
    """The costs of a setting at one b. `constant_s`: seconds a step besides. `notes`: what a reader has to know."""

    durations: Durations
    constant_s: float
    basis: Basis
    notes: tuple[str, ...] = ()


class CostSource(Protocol):
    """Who says what operations cost."""

    @property
    def label(self) -> str:
        """The source in a few words, for the head of a table."""

    def layers(self, spec: Spec) -> tuple[LayerProfile, ...] | None:
        """Bytes, parameters and operations of the layers of this spec's model; None where the source knows none.

        The loss stands last. Figures hold at least one b; between and beyond them the reader interpolates. Raises
        ChunktuneError where this model cannot be asked about (a record of another model; a factory that fails).
        """

    def layer_s(self, spec: Spec, micro_batch: int) -> tuple[float, ...] | None:
        """Forward and backward seconds of every layer at b, for `partition = "time"`; None where not known."""

    def costs(self, setting: Setting, micro_batch: int) -> Costs:
        """Seconds of everything at b. Raises ChunktuneError where the source cannot say."""

    def capacity_bytes(self, spec: Spec) -> int | None:
        """What one device has, where the spec leaves `device.memory` to the device; None where not known."""
