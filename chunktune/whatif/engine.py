"""A spec and a source of costs to a record with mode "predicted": the sweep's search and verdict, nothing run."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import chunktune
from chunktune.candidates import Candidates, described, enumerate_candidates
from chunktune.costs import Costs, CostSource, Setting
from chunktune.results import SCHEMA_VERSION, Basis, LayerProfile, Record, Trial, Verdict
from chunktune.search import search
from chunktune.simulate import Durations, Simulated, simulate
from chunktune.spec import Spec
from chunktune.standing import Found, Rules
from chunktune.verdict import comparisons, decide
from chunktune.whatif.runner import PredictedRunner
from chunktune.whatif.setting import Room, measured_trials, settle, stages_of

if TYPE_CHECKING:
    from chunktune.memory.pipeline import Known

RankPeaks = Callable[[Setting, Sequence[LayerProfile], int, int], tuple[int, ...]]
"""A setting, the profiles of its layers, M and b -> the peak bytes of every rank."""

# A ratio without noise needs two equal rounds to have an interval, and gains nothing from more.
_ROUNDS = 2
_KEPT = 4096
_Value = TypeVar("_Value")


class Engine:
    """Predicts settings from one source of costs, and asks it for nothing twice.

    `record`: the one that the source reads, where there is one: its parts and its measurements stand beside.
    """

    def __init__(self, source: CostSource, record: Record | None = None, peaks: RankPeaks | None = None) -> None:
        self.source = source
        self._record = record
        self._peaks = peaks or partial(rank_peaks, known={})
        self._memo: dict[Hashable, Any] = {}

    def predict(self, spec: Spec, sources: Mapping[str, str] | None = None) -> Record:
        """The record that a sweep of this spec would leave, predicted. `sources`: where its values came from.

        Raises UsageError where the spec names no K or no legal M, where its parts do not fit the model, and what
        the source raises where it cannot say.
        """
        started_s, started_at = time.monotonic(), datetime.now(UTC)
        stages = stages_of(spec, self._record)
        candidates = enumerate_candidates(spec, stages)
        setting, notes = settle(spec, stages, candidates, self.source, self._record)
        runner = self._runner(setting, candidates)
        rules = _rules(spec)
        found = search(candidates, runner, rules)
        verdict = _doubted(decide(candidates, found, rules, recompute=spec.pipeline.recompute != "none"), found)
        return Record(
            schema_version=SCHEMA_VERSION,
            tool={"name": "chunktune", "version": chunktune.__version__},
            mode="predicted",
            status="complete",
            quick=False,
            spec=_resolved(setting),
            sources=dict(sources or {}),
            environment=self._environment(spec),
            layers_per_part=setting.counts,
            candidates=described(candidates),
            trials=found.trials,
            comparisons=comparisons(candidates, found, rules),
            warnings=tuple(dict.fromkeys((*candidates.warnings, *notes, *_memory_notes(runner, found), *runner.notes))),
            verdict=verdict,
            started_at=started_at.isoformat(timespec="seconds"),
            elapsed_s=time.monotonic() - started_s,
        )

    def _runner(self, setting: Setting, candidates: Candidates) -> PredictedRunner:
        key = _cost_key(setting)
        return PredictedRunner(
            setting,
            candidates,
            costs_at=partial(self._costs, setting, key),
            simulate=partial(self._simulate, setting),
            peaks=partial(self._rank_peaks, setting, key),
            room=Room.of(setting.spec, self.source),
            measured=measured_trials(setting, self._record),
        )

    def _costs(self, setting: Setting, key: str, micro_batch: int) -> Costs:
        return self._once(("costs", key, micro_batch), lambda: self.source.costs(setting, micro_batch))

    def _simulate(self, setting: Setting, chunks: int, durations: Durations) -> Simulated:
        name, stages, virtual = setting.spec.pipeline.schedule, setting.stages, setting.virtual_stages
        return self._once(
            ("simulated", name, stages, virtual, chunks, durations),
            lambda: simulate(name, stages=stages, chunks=chunks, virtual_stages=virtual, durations=durations),
        )

    def _rank_peaks(self, setting: Setting, key: str, chunks: int, micro_batch: int) -> tuple[int, ...]:
        layers = self.source.layers(setting.spec)
        if not layers:
            return ()
        return self._once(
            ("peaks", key, chunks, micro_batch), lambda: self._peaks(setting, layers, chunks, micro_batch)
        )

    def _once(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        if key not in self._memo:
            if len(self._memo) >= _KEPT:
                self._memo.clear()
            self._memo[key] = make()
        value: _Value = self._memo[key]
        return value

    def _environment(self, spec: Spec) -> dict[str, Any]:
        return {"costs": self.source.label, "device": spec.hardware.name}


def rank_peaks(
    setting: Setting, layers: Sequence[LayerProfile], chunks: int, micro_batch: int, known: Known | None = None
) -> tuple[int, ...]:
    """The peak bytes of every rank at M and b, from the profiles of single layers; `known` as in `breakdowns`."""
    from chunktune import memory

    pipeline = setting.spec.pipeline
    return memory.peak_bytes(
        layers,
        memory.Pipeline(
            schedule=pipeline.schedule,
            stages=setting.stages,
            chunks=chunks,
            virtual_stages=setting.virtual_stages,
            micro_batch=micro_batch,
            counts=setting.counts,
            recompute=pipeline.recompute,
        ),
        known,
    )


def basis_of(trial: Trial | None) -> Basis | None:
    """How the costs of a predicted trial are known."""
    return None if trial is None or trial.predicted is None else trial.predicted.basis


def _rules(spec: Spec) -> Rules:
    sweep = spec.sweep
    return Rules(sweep.criterion, sweep.tolerance, sweep.patience, _ROUNDS, _ROUNDS, confirm=False)


def _doubted(verdict: Verdict, found: Found) -> Verdict:
    """A choice at costs beyond what was measured is unclear: the data do not support it."""
    chosen = next((trial for trial in found.trials if trial.chunks == verdict.chunks), None)
    if chosen is None or basis_of(chosen) != "extrapolated":
        return verdict
    reason = f"the costs at M = {chosen.chunks} (b = {chosen.micro_batch}) lie beyond what is known (extrapolated)"
    return verdict.model_copy(
        update={"confidence": "unclear", "confidence_reasons": (*verdict.confidence_reasons, reason)}
    )


def _memory_notes(runner: PredictedRunner, found: Found) -> list[str]:
    """What keeps memory from being compared, where something does."""
    if not any(trial.predicted is not None and trial.predicted.peak_bytes for trial in found.trials):
        return ["no bytes are known of these layers: memory was not predicted, and every M is taken to fit"]
    if runner.room.capacity_bytes is None:
        return [
            'no capacity is known (device.memory = "auto", and no device named): every M is taken to fit; give --memory'
        ]
    return []


def _resolved(setting: Setting) -> dict[str, Any]:
    spec = setting.spec.model_dump(mode="json")
    spec["pipeline"] |= {"stages": setting.stages, "virtual_stages": setting.virtual_stages}
    return spec


def _cost_key(setting: Setting) -> str:
    """All that costs and peaks may depend on beside M and b; N decides where a source looks between sizes."""
    asked = setting.spec.model_dump_json(
        exclude={"batch": {"chunks"}, "sweep": True, "device": {"memory", "headroom", "reserve"}}
    )
    return f"{setting.stages} {setting.virtual_stages} {setting.counts} {asked}"
