"""What a sweep would do: candidates, refusals, memory and the longest it may take; no device is touched."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from chunktune.candidates import Candidates
from chunktune.errors import ChunktuneError
from chunktune.request import SweepRequest
from chunktune.spec import Spec
from chunktune.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Plan:
    """A sweep before it starts. `static_bytes`: weights, gradients and optimizer state of every rank, or null."""

    name: str
    schedule: str
    stages: int
    virtual_stages: int
    candidates: Candidates
    static_bytes: tuple[int, ...] | None
    budget_s: float
    warnings: tuple[str, ...]

    def to_json(self) -> str:
        """The plan as a JSON object: counts, bytes and seconds."""
        found = self.candidates
        return json.dumps(
            {
                "dry_run": True,
                "name": self.name,
                "schedule": self.schedule,
                "stages": self.stages,
                "virtual_stages": self.virtual_stages,
                "candidates": [_row(found, chunks) for chunks in found.legal],
                "refused": [refused.model_dump(mode="json") for refused in found.refused],
                "static_bytes": self.static_bytes,
                "budget_s": self.budget_s,
                "warnings": self.warnings,
            },
            indent=2,
            allow_nan=False,
        )

    def to_text(self) -> str:
        """The plan for a reader."""
        found = self.candidates
        between = len(found.legal) - len(found.ladder)
        lines = [
            f"dry run of {self.name}: {self.schedule}, K = {self.stages}, V = {self.virtual_stages}; nothing was run",
            "",
            f"{'M':>8} {'b':>8} {'N':>8}",
            *(f"{chunks:>8} {b:>8} {n:>8}" for chunks, (b, n) in _rungs(found)),
        ]
        if between:
            lines.append(f"and {between} more between them, tried where the choice is refined")
        lines += ["", *(f"refused: M = {refused.chunks}: {refused.reason}" for refused in found.refused)]
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [f"weights, gradients and optimizer state a rank: {_bytes(self.static_bytes)}"]
        lines += [f"longest duration: {format_seconds(self.budget_s)} of trials (sweep.budget), and the start-up"]
        return "\n".join(lines) + "\n"


def plan(request: SweepRequest) -> Plan:
    """What `request` would do.

    Raises SpecError or UsageError where no candidate can be named, UserCodeError where the user's factory fails.
    """
    from chunktune.candidates import enumerate_candidates

    spec = request.spec
    warnings: list[str] = []
    stages = spec.pipeline.stages or _visible_stages(spec, warnings)
    static_bytes = _static_bytes(request, stages, warnings)
    candidates = enumerate_candidates(spec, stages)
    warnings += _too_large(spec, static_bytes)
    return Plan(
        name=request.name,
        schedule=spec.pipeline.schedule,
        stages=stages,
        virtual_stages=_virtual_stages(spec),
        candidates=candidates,
        static_bytes=static_bytes,
        budget_s=spec.sweep.budget,
        warnings=(*warnings, *candidates.warnings),
    )


def _virtual_stages(spec: Spec) -> int:
    from chunktune.schedules import default_virtual_stages

    return spec.pipeline.virtual_stages or default_virtual_stages(spec.pipeline.schedule)


def _visible_stages(spec: Spec, warnings: list[str]) -> int:
    """K where the spec does not say it; a machine that cannot be asked must not keep a plan from being shown."""
    try:
        from chunktune.pipeline.launch import visible_stages

        return visible_stages(spec)
    except (ChunktuneError, ImportError, OSError, RuntimeError) as error:
        warnings.append(f"the visible devices could not be counted ({error}); the plan is for one stage")
        return 1


def _static_bytes(request: SweepRequest, stages: int, warnings: list[str]) -> tuple[int, ...] | None:
    if request.spec_dir not in sys.path:
        sys.path.insert(0, request.spec_dir)
    try:
        from chunktune.estimate import static_bytes

        return static_bytes(request.spec, stages)
    except ChunktuneError:
        raise
    except Exception as error:
        warnings.append(f"the memory estimate failed: {type(error).__name__}: {error}")
        return None


def _too_large(spec: Spec, static_bytes: tuple[int, ...] | None) -> list[str]:
    """A warning for a rank whose weights alone do not fit the capacity that the spec names."""
    if static_bytes is None or spec.device.memory == "auto":
        return []
    usable = int(int(spec.device.memory) * (1 - spec.device.headroom)) - spec.device.reserve
    rank, most = max(enumerate(static_bytes), key=lambda item: item[1])
    if most <= usable:
        return []
    return [
        f"rank {rank} needs {format_bytes(most)} for weights, gradients and optimizer state alone and may use "
        f"{format_bytes(max(0, usable))}: no M will fit"
    ]


def _rungs(found: Candidates) -> list[tuple[int, tuple[int, int]]]:
    return [(chunks, found.batch_of(chunks)) for chunks in found.ladder]


def _row(found: Candidates, chunks: int) -> dict[str, Any]:
    micro_batch, mini_batch = found.batch_of(chunks)
    on_ladder = chunks in found.ladder
    return {"chunks": chunks, "micro_batch": micro_batch, "mini_batch": mini_batch, "ladder": on_ladder}


def _bytes(figures: tuple[int, ...] | None) -> str:
    return "not available" if figures is None else ", ".join(format_bytes(figure) for figure in figures)
