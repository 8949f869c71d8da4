"""What a sweep is going to do, known before any process starts: model, ranks, parts, candidates. No device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from chunktune import partition, schedules
from chunktune.candidates import Candidates, enumerate_candidates
from chunktune.errors import UsageError
from chunktune.estimate import meta_layers, parameters_of_layers
from chunktune.models import build_model, code_digest
from chunktune.models.base import ModelDefinition
from chunktune.spec import Spec


@dataclass(frozen=True)
class Plan:
    """A spec made concrete for K ranks. `counts`: layers a part, None while layers have to be timed first.

    `code`: a digest of the user's factory, None where chunktune brings the model.
    """

    spec: Spec
    model: ModelDefinition
    stages: int
    virtual_stages: int
    candidates: Candidates
    counts: tuple[int, ...] | None
    code: str | None = None

    @property
    def parts(self) -> int:
        """K V, the parts that the model is cut into."""
        return self.stages * self.virtual_stages


def make_plan(spec: Spec, stages: int, spec_dir: str) -> Plan:
    """Check everything that needs no device.

    Raises UsageError or SpecError for what the spec asks, UserCodeError for what its factory does.
    """
    if spec_dir not in sys.path:
        sys.path.insert(0, spec_dir)
    name = spec.pipeline.schedule
    virtual = spec.pipeline.virtual_stages or schedules.default_virtual_stages(name)
    refused = schedules.virtual_stages_refusal(name, virtual)
    if refused:
        raise UsageError(f"pipeline.virtual_stages: {refused}")
    model = build_model(spec.model)
    partition.check_parts(len(model.layers), stages, virtual)
    candidates = enumerate_candidates(spec, stages)
    choice = spec.pipeline.partition
    timed = choice == "time"
    counts = counts_for("uniform" if timed else choice, model, stages * virtual)
    return Plan(spec, model, stages, virtual, candidates, None if timed else counts, code_digest(spec.model))


def counts_for(
    choice: str | Sequence[int], model: ModelDefinition, parts: int, layer_s: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Layers of each part under a choice of partition. `layer_s`: seconds a layer, needed for "time"."""
    weights = layer_s
    if choice == "parameters":
        weights = parameters_of_layers(meta_layers(model))
    return partition.counts_for(choice, layers=len(model.layers), parts=parts, weights=weights)
