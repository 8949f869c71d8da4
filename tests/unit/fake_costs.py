"""A source of costs in closed form, and records to predict from: what the engine should say is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from chunktune.costs import Basis, Costs, Setting
from chunktune.errors import UsageError
from chunktune.results import LayerProfile
from chunktune.simulate import Durations
from chunktune.spec import Spec

GIB = 2**30


def spec_of(**sections: Any) -> Spec:
    """A sleep spec on K = 4, N = 64, sections put over it."""
    tables: dict[str, dict[str, Any]] = {
        "model": {"family": "sleep", "layers": 8, "seconds_per_chunk": 0.001, "seconds_per_sample": 0.001},
        "pipeline": {"stages": 4, "schedule": "gpipe"},
        "batch": {"mini_batch": 64},
        "device": {"memory": 10 * GIB, "headroom": 0.1},
    }
    for name, keys in sections.items():
        tables[name] = {**tables.get(name, {}), **keys}
    if sections.get("batch", {}).get("micro_batch"):
        tables["batch"].pop("mini_batch")
    return Spec.model_validate(tables)


def layer(parameters: int = 10, count: int = 1, **keys: Any) -> LayerProfile:
    """A profile without figures: what the engine itself reads of one."""
    fields = {"count": count, "parameters": parameters, "weight_bytes": 0, "gradient_bytes": 0, "optimizer_bytes": 0}
    return LayerProfile(**{**fields, "figures": (), **keys})


@dataclass
class FakeCosts:
    """A layer's forward takes a + c b seconds, its backward twice that; recomputation adds a forward.

    `asked`: every (K, b) that costs were asked for.
    """

    a_s: float = 0.001
    c_s: float = 0.001
    label: str = "a table of the test"
    basis: Basis | Callable[[int], Basis] = "given"
    known: tuple[LayerProfile, ...] | None = (layer(count=8), layer(loss=True))
    capacity: int | None = None
    constant_s: float = 0.0
    refused: Sequence[int] = ()
    asked: list[tuple[int, int]] = field(default_factory=list)

    def layers(self, spec: Spec) -> tuple[LayerProfile, ...] | None:
        return self.known

    def layer_s(self, spec: Spec, micro_batch: int) -> tuple[float, ...] | None:
        return None

    def capacity_bytes(self, spec: Spec) -> int | None:
        return self.capacity

    def costs(self, setting: Setting, micro_batch: int) -> Costs:
        self.asked.append((setting.stages, micro_batch))
        if micro_batch in self.refused:
            raise UsageError(f"b = {micro_batch} is not known")
        forward = tuple(count * (self.a_s + self.c_s * micro_batch) for count in setting.counts)
        again = 1 if setting.spec.pipeline.recompute == "full" else 0
        durations = Durations(
            forward_s=forward,
            backward_s=tuple((2 + again) * each for each in forward),
            input_s=tuple((1 + again) * each for each in forward),
            weight_s=forward,
            transfer_s=(0.0,) * (len(forward) - 1),
            update_s=(0.0,) * setting.stages,
        )
        basis = self.basis(micro_batch) if callable(self.basis) else self.basis
        return Costs(durations, self.constant_s, basis, (f"basis {basis}",))


def peaks(setting: Setting, layers: Sequence[LayerProfile], chunks: int, micro_batch: int) -> tuple[int, ...]:
    """GPipe's memory in GiB: the first rank holds all of the batch, 1/8 GiB a sample; recomputation holds b only."""
    samples = micro_batch if setting.spec.pipeline.recompute == "full" else chunks * micro_batch
    first = samples * GIB // 8 // (setting.stages // 4 or 1)
    return (first, *(first // 2,) * (setting.stages - 1))
