"""Advice in numbers for a sweep that has just ended: what its own record predicts for other settings. Pure."""

from __future__ import annotations

from chunktune.alternatives import with_alternatives
from chunktune.errors import ChunktuneError
from chunktune.results import Record, Verdict
from chunktune.sources.recorded import RecordedCosts
from chunktune.spec import Spec
from chunktune.whatif.engine import Engine


def advised(record: Record, verdict: Verdict) -> Verdict:
    """The verdict of a record with its alternatives; unchanged where the record cannot be calibrated from."""
    try:
        engine = Engine(RecordedCosts(record), record)
    except ChunktuneError:
        return verdict
    return with_alternatives(Spec.model_validate(record.spec), verdict, engine.predict)
