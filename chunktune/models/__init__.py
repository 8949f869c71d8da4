"""The model families, a file each: from the `[model]` table of a spec to layers, a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chunktune.models import mlp, python, sleep, transformer
from chunktune.models.base import ModelDefinition

FAMILIES: dict[str, Callable[[Any], ModelDefinition]] = {
    "transformer": transformer.build,
    "mlp": mlp.build,
    "sleep": sleep.build,
    "python": python.build,
}

__all__ = ["FAMILIES", "ModelDefinition", "build_model", "code_digest"]


def build_model(model_spec: Any) -> ModelDefinition:
    """The model that a spec's `[model]` table describes; no layer is built yet.

    Raises SpecError or UserCodeError for the `python` family, as `chunktune.models.python.build` says.
    """
    return FAMILIES[model_spec.family](model_spec)


def code_digest(model_spec: Any) -> str | None:
    """What tells the user's own code, once built from, from a changed one; None where chunktune brings the model."""
    return python.code_digest(model_spec) if model_spec.family == "python" else None
