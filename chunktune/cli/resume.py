"""`chunktune sweep --resume DIR`: the spec and the answers of a sweep that ended early."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunktune.errors import UsageError
from chunktune.results import Record

if TYPE_CHECKING:
    from chunktune.request import SweepRequest
    from chunktune.spec import Resolved


@dataclass(frozen=True)
class Unfinished:
    """A sweep to go on with: its directory, and what its journal says of how it was asked."""

    directory: Path
    events: list[dict[str, Any]]
    quick: bool
    rehearse: bool

    def resolved(self, sets: Sequence[str], flags: Mapping[str, tuple[str, Any]]) -> Resolved:
        """The spec of the journal under the settings of this command. Raises SpecError."""
        from chunktune.journal import start_of
        from chunktune.record import assemble

        start = start_of(self.events) or {}
        path = Path(start.get("spec_dir") or Path.cwd()) / f"{start.get('name') or 'sweep'}.toml"
        from chunktune.spec import resolve, tables_of_record

        tables = tables_of_record(assemble(self.events))
        return resolve(tables, path, source="record", environ=os.environ, sets=sets, flags=flags)

    def again(self, request: SweepRequest, spec: Path | None) -> SweepRequest:
        """The request to go on; without a SPEC, --quick and --rehearse are those of the sweep."""
        own = spec is None
        return replace(
            request,
            resume=True,
            quick=request.quick or (own and self.quick),
            rehearse=request.rehearse or (own and self.rehearse),
        )

    def finished(self, request: SweepRequest) -> Record | None:
        """The record, where the sweep had come to its end and the budget takes it no further.

        Raises UsageError where it was asked something else, whether it had or not.
        """
        from chunktune.journal import start_of
        from chunktune.record import assemble, write_record
        from chunktune.resume import as_recorded, is_finished, refuse_other_question

        settled = (start_of(self.events) or {})["spec"]["pipeline"]
        own = request.spec.pipeline
        stages, virtual_stages = own.stages or settled["stages"], own.virtual_stages or settled["virtual_stages"]
        spec = as_recorded(request.spec.model_dump(mode="json"), stages, virtual_stages)
        refuse_other_question(self.events, request, spec)
        if not is_finished(self.events, request.spec.sweep.budget):
            return None
        record = assemble(self.events, "complete")
        if not (self.directory / "record.json").is_file():
            write_record(record, self.directory / "record.json")
        return record


def unfinished(directory: Path, given: Mapping[str, object]) -> Unfinished:
    """The sweep in `directory`. `given`: flag -> value of the options that exclude --resume.

    Raises UsageError where there is none, or where the command line says two things.
    """
    from chunktune.journal import start_of
    from chunktune.resume import journal_of

    for flag, value in given.items():
        if value:
            raise UsageError(f"--resume and {flag} exclude each other; --resume DIR goes on in DIR itself")
    events = journal_of(directory)
    start = start_of(events) or {}
    return Unfinished(directory.absolute(), events, bool(start.get("quick")), start.get("mode") == "rehearsed")
