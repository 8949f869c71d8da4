"""What the layers cost by count rather than by clock: bytes and floating-point operations, from fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from chunktune import partition
from chunktune.errors import ChunktuneError
from chunktune.pipeline.plan import Plan
from chunktune.results import LayerFigures, LayerProfile, StageFigures, Trial


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
                from chunktune.pipeline.profile import CUDA_ROUNDING_BYTES, profile_layers

                self._by_size[micro_batch] = profile_layers(
                    self.plan.spec,
                    self.plan.model,
                    (micro_batch,),
                    round_to=CUDA_ROUNDING_BYTES if self.device_kind == "cuda" else 1,
                )
            except (ChunktuneError, ImportError) as error:
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
        of_parts = partition.layers_of_parts(self.counts)
        recomputes = self.plan.spec.pipeline.recompute == "full"
        stages = tuple(
            _with_flops(stage, [every[i] for part in stage.parts for i in of_parts[part]], trial, recomputes)
            for stage in trial.stages
        )
        return trial.model_copy(update={"stages": stages})


def _with_flops(stage: StageFigures, layers: Iterable[LayerFigures], trial: Trial, recomputes: bool) -> StageFigures:
    step_s = trial.step_median_s or 1.0
    held = list(layers)
    forward = trial.chunks * sum(one.forward_flops for one in held)
    backward = trial.chunks * sum(one.backward_flops for one in held)
    again = forward / step_s if recomputes else 0.0
    return stage.model_copy(update={"flops_per_s": (forward + backward) / step_s, "recompute_flops_per_s": again})


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
