"""What the layers cost by count rather than by clock: bytes and floating-point operations, from fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chunktune import partition, schedules
from chunktune.errors import ChunktuneError
from chunktune.orders import computes
from chunktune.pipeline.plan import Plan
from chunktune.pipeline.profile import profile_layers
from chunktune.results import LayerFigures, LayerProfile, StageFigures, Trial
from chunktune.units import CUDA_ROUNDING_BYTES


@dataclass
class LayerBook:
    """Profiles of the layers at every b that was tried. `counts`: layers of each of the K V parts.

    A model that cannot be profiled leaves the book empty: nothing that is measured depends on it. `failure` says why.
    """

    plan: Plan
    counts: tuple[int, ...]
    device_kind: str
    failure: str | None = None
    _by_size: dict[int, tuple[LayerProfile, ...]] = field(default_factory=dict)

    def at(self, micro_batch: int) -> tuple[LayerProfile, ...]:
        """The layers at b; empty where they cannot be profiled."""
        if micro_batch not in self._by_size and self.failure is None:
            try:
                self._by_size[micro_batch] = profile_layers(
                    self.plan.spec,
                    self.plan.model,
                    (micro_batch,),
                    round_to=CUDA_ROUNDING_BYTES if self.device_kind == "cuda" else 1,
                )
            except ChunktuneError as error:
                self.failure = str(error)
        return self._by_size.get(micro_batch, ())

    def layers(self) -> tuple[LayerProfile, ...]:
        """The layers with their figures at every b that was tried, ascending."""
        return merged(list(self._by_size.values()))

    def counted(self, trial: Trial) -> Trial:
        """The trial with the floating-point operations a second of every rank."""
        layers = self.at(trial.micro_batch) if trial.fits else ()
        if not layers or trial.step_median_s is None:
            return trial
        every = [layer.figures[0] for layer in layers if not layer.loss for _ in range(layer.count)]
        of_parts = {part: [every[i] for i in held] for part, held in enumerate(partition.layers_of_parts(self.counts))}
        times = self._recomputations(trial.chunks) if self.plan.spec.pipeline.recompute == "full" else {}
        stages = tuple(_with_flops(stage, of_parts, times, trial) for stage in trial.stages)
        return trial.model_copy(update={"stages": stages})

    def _recomputations(self, chunks: int) -> dict[tuple[str, int], int]:
        """How often a step runs each kind of backward in each part: B, and I and W where the schedule splits it."""
        spec, plan = self.plan.spec.pipeline, self.plan
        if not schedules.SCHEDULES[spec.schedule].splits_backward:
            return {("B", part): chunks for part in range(plan.parts)}
        ranks = computes(spec.schedule, stages=plan.stages, chunks=chunks, virtual_stages=plan.virtual_stages)
        return Counter((step.kind, step.part) for steps in ranks for step in steps if step.kind != "F")


def _with_flops(
    stage: StageFigures,
    of_parts: Mapping[int, Sequence[LayerFigures]],
    times: Mapping[tuple[str, int], int],
    trial: Trial,
) -> StageFigures:
    step_s = trial.step_median_s or 1.0
    layers = [layer for part in stage.parts for layer in of_parts[part]]
    model = trial.chunks * sum(layer.forward_flops + layer.backward_flops for layer in layers)
    again = sum(
        (layer.recompute_flops or 0) * _forwards(layer, part, times) for part in stage.parts for layer in of_parts[part]
    )
    return stage.model_copy(update={"flops_per_s": model / step_s, "recompute_flops_per_s": again / step_s})


def _forwards(layer: LayerFigures, part: int, times: Mapping[tuple[str, int], int]) -> int:
    """Recomputations of one layer in a step: torch's weight gradient takes one for each group of weights."""
    once = times.get(("B", part), 0) + (times.get(("I", part), 0) if part > 0 else 0)
    # The first part has no input gradient to take: its W is the whole backward.
    return once + times.get(("W", part), 0) * (layer.weight_forwards if part > 0 else 1)


def merged(profiles: Sequence[tuple[LayerProfile, ...]]) -> tuple[LayerProfile, ...]:
    """Profiles of the same layers at different b as one, figures ascending in b."""
    if not profiles:
        return ()
    return tuple(
        runs[0].model_copy(
            update={"figures": tuple(sorted((f for run in runs for f in run.figures), key=lambda f: f.micro_batch))}
        )
        for runs in zip(*profiles, strict=True)
    )
