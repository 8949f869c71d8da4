"""The baseline of `chunktune check`: which record may be one, and what a new one replaces."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from chunktune.errors import UsageError
from chunktune.reading import STDIN, load_record
from chunktune.results import Record
from chunktune.units import shorten

_RULE = "a baseline is a complete measured sweep that chose an M: chunktune sweep SPEC makes one"


def accepted(baseline: Path, record: Path) -> Record:
    """The baseline's record. Raises UsageError where there is none, or it may be none, with the way to one."""
    from chunktune.gate import baseline_refusals

    if _is_missing(baseline):
        names = [shlex.quote(str(path)) for path in (record, baseline)]
        way = f"chunktune check {names[0]} --baseline {names[1]} --update makes one of this record"
        raise UsageError(f"{baseline}: there is no such file; a baseline is a record that was accepted before: {way}")
    found = load_record(baseline)
    if refusals := baseline_refusals(found):
        raise _refused(str(baseline), refusals)
    return found


def replaced(
    found: Record, record: Path, baseline: Path, say: Callable[[str], None], *, allow_unclear: bool
) -> Record | None:
    """The baseline that a record replaces, None where there is none to compare with, which is said.

    Raises UsageError where the record may be no baseline, or what lies there is no record.
    """
    from chunktune.gate import baseline_refusals

    refusals = list(baseline_refusals(found))
    if found.verdict is not None and found.verdict.confidence == "unclear" and not allow_unclear:
        refusals.append(
            "its confidence is unclear (sweep again with --force on a quieter machine or with a larger --tolerance; "
            "--allow-unclear takes it all the same)"
        )
    if refusals:
        raise _refused(str(record), refusals)
    if _is_missing(baseline):
        say(f"{baseline}: there was no baseline")
        return None
    before = load_record(baseline)
    if reasons := baseline_refusals(before):
        say(f"{baseline}: what lay there may be no baseline, and is not compared: {'; '.join(reasons)}")
        return None
    return before


def _refused(where: str, refusals: Sequence[str]) -> UsageError:
    return UsageError(f"{where} may be no baseline: {'; '.join(refusals)}; {_RULE}")


def _is_missing(path: Path) -> bool:
    try:
        return str(path) != STDIN and not path.exists()
    except OSError as error:
        raise UsageError(f"{shorten(str(path), 200)}: the baseline cannot be read ({error.strerror})") from error
