"""Advice in numbers for a sweep that has just ended: what its own record predicts for other settings. Pure."""

from __future__ import annotations

from chunktune.alternatives import with_alternatives
from chunktune.errors import ChunktuneError
from chunktune.results import Record, Verdict
from chunktune.sources.recorded import RecordedCosts
from chunktune.spec import Spec
from chunktune.whatif.engine import Engine

TRUSTED = 0.2
"""Relative error of the predicted step at the choice, above which nobody should buy devices by the same predictor."""


def advised(record: Record, verdict: Verdict) -> Verdict:
    """The verdict of a record with its alternatives; unchanged where the record cannot be calibrated from."""
    try:
        engine = Engine(RecordedCosts(record), record)
    except ChunktuneError:
        return verdict
    told = with_alternatives(Spec.model_validate(record.spec), verdict, engine.predict)
    error = _error_at_choice(record, verdict)
    if verdict.limit == "memory" or not told.alternatives or abs(error) <= TRUSTED:
        return told
    silent = (
        f"the predicted step at the choice is {100 * error:+.0f}% off what was measured: what was predicted of other "
        "settings stands in the record (verdict.alternatives), and is no advice"
    )
    return told.model_copy(update={"advice": (*verdict.advice, silent)})


def _error_at_choice(record: Record, verdict: Verdict) -> float:
    """The larger of the predictions' relative errors at the choice, in its trial and its confirmation."""
    tried = [trial for trial in record.trials if trial.chunks == verdict.chunks]
    errors = [0.0]
    for trial in [*tried, *([record.confirmation] if record.confirmation else [])]:
        if trial.predicted is not None and trial.predicted.step_s and trial.step_median_s:
            errors.append(trial.predicted.step_s / trial.step_median_s - 1)
    return max(errors, key=abs)
