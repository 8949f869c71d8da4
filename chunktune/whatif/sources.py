"""Which source of costs speaks for a spec: its record, the spec itself, or a device's datasheet."""

from __future__ import annotations

from chunktune.costs import CostSource
from chunktune.results import Record
from chunktune.spec import Spec


def source_of(spec: Spec, record: Record | None, spec_dir: str) -> CostSource:
    """The record where there is one; what the spec gives (families sleep and costs); else an estimate.

    `spec_dir`: absolute directory of the spec, from which factories import. Raises UsageError for a record that
    cannot serve as a source.
    """
    if record is not None:
        from chunktune.sources.recorded import RecordedCosts

        return RecordedCosts(record)
    from chunktune.sources.estimated import EstimatedCosts

    estimated = EstimatedCosts(spec_dir)
    if spec.model.family in ("sleep", "costs"):
        from chunktune.sources.given import GivenCosts, SleepCosts

        return SleepCosts(estimated.layers) if spec.model.family == "sleep" else GivenCosts()
    return estimated
