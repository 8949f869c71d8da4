"""Whether the choice is the M that is expected, or one that the record itself finds as good. Pure."""

from __future__ import annotations

from chunktune.gate.finding import Conditions, Finding, Outcome
from chunktune.results import Comparison, Record, Trial
from chunktune.standing import Standing
from chunktune.units import format_share

_CHECK = "chunks"


def chunks(record: Record, conditions: Conditions, baseline: Record | None) -> tuple[Finding, ...]:
    """The choice against the baseline's and against the M that is expected; without either, that there is one."""
    chosen = record.chosen
    wanted = conditions.expect_chunks
    theirs = None if baseline is None else baseline.chosen
    if chosen is None:
        return (_nothing_chosen(record, wanted if theirs is None else theirs),)
    findings = [] if theirs is None else [_against(record, chosen, theirs, _CHECK, "the baseline's")]
    if wanted is not None:
        findings.append(_against(record, chosen, wanted, "expected chunks" if findings else _CHECK, "the expected"))
    return tuple(findings) or (_chosen(chosen),)


def standing_of(record: Record) -> Standing | None:
    """Where the values of M that fit stand against the best, from the record's comparisons; None where none fits."""
    fits = tuple(sorted({trial.chunks for trial in record.trials if trial.fits}))
    if not fits:
        return None
    best = next((each.against for each in record.comparisons), None)
    chosen = record.chosen
    if best not in fits:
        best = chosen if chosen in fits else fits[0]
    against = {each.chunks: each for each in record.comparisons if each.against == best}
    tolerance = next((each.tolerance for each in against.values()), 0.0)
    plateau = record.verdict is not None and record.verdict.limit == "plateau"
    return Standing(fits=fits, best=best or fits[0], comparisons=against, plateau=plateau, tolerance=tolerance)


def _chosen(chosen: int) -> Finding:
    return Finding(check=_CHECK, outcome="passed", words=f"M = {chosen} was chosen", found=chosen, unit="chunks")


def _nothing_chosen(record: Record, expected: int | None) -> Finding:
    verdict = record.verdict
    words = "the record has no verdict" if verdict is None else f"no M is feasible, limit {verdict.limit}"
    return Finding(check=_CHECK, outcome="failed", words=words, expected=expected, unit="chunks")


def _against(record: Record, chosen: int, expected: int, check: str, whose: str) -> Finding:
    """Passed where the expected M is chosen or a contender, a warning where that is not decided."""
    if chosen == expected:
        outcome: Outcome = "passed"
        words = f"M = {chosen} was chosen, {whose} M"
    else:
        outcome, why = _other_than_chosen(record, expected)
        words = f"M = {chosen} was chosen, and {whose} M = {expected} {why}"
    return Finding(
        check=check,
        outcome=outcome,
        words=words,
        expected=expected,
        found=chosen,
        unit="chunks",
        by=float(chosen - expected),
    )


def _other_than_chosen(record: Record, expected: int) -> tuple[Outcome, str]:
    """How an M that was not chosen stands in the record, as the end of a sentence about it."""
    standing = standing_of(record)
    if standing is None or expected not in standing.fits:
        return "failed", _not_running(record, expected)
    if expected == standing.best:
        return "passed", "is the best of this record by its estimate"
    comparison = standing.comparisons.get(expected)
    if comparison is None:
        return "failed", f"was not compared with its best, M = {standing.best}"
    if comparison.outcome == "slower":
        return "failed", f"is slower in this record: {_compared(comparison)}"
    if comparison.outcome == "undecided":
        return "warning", f"is not decided to be slower: {_compared(comparison)}"
    return "passed", f"is as good in this record: {_compared(comparison)}"


def _compared(comparison: Comparison) -> str:
    low, high = comparison.interval or (comparison.ratio, comparison.ratio)
    interval = f"{format_share(comparison.ratio)} of the throughput of M = {comparison.against}"
    spread = "no interval" if comparison.interval is None else f"{format_share(low)} to {format_share(high)}"
    return f"{interval} [{spread}] at a tolerance of {format_share(comparison.tolerance)}"


def _not_running(record: Record, expected: int) -> str:
    trial = next((trial for trial in record.trials if trial.chunks == expected), None)
    if trial is not None:
        return f"does not run in this record: {_why(trial)}"
    refused = next((each for each in record.candidates if each.chunks == expected and not each.legal), None)
    if refused is not None:
        return f"is illegal: {refused.reason or 'no reason was recorded'}"
    return "was not tried in this record"


def _why(trial: Trial) -> str:
    return f"{trial.state}: {trial.reason}" if trial.reason else trial.state
