"""The record for people, in plain characters: the table of trials, then the verdict block.

No colour and no control code is ever written: what goes to a log is what stands on the screen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

from chunktune.report import (
    columns_of,
    encodable,
    format_rate,
    fullest_stage,
    plain,
    setting,
    share_of_budget,
    slowest_stage,
    tokens_per_sample,
    trial_of,
    wrap,
)
from chunktune.report.limit import (
    because,
    floor_reason,
    limit_sentence,
    schedule_name,
    tolerance,
    why_not,
)
from chunktune.report.progress import progress_line
from chunktune.report.trials import trial_table
from chunktune.results import Record, Trial, Verdict
from chunktune.units import format_bytes, format_seconds, format_share

__all__ = ["head_line", "limit_sentence", "print_record", "progress_line", "render", "verdict_line", "verdict_rows"]

_LABEL_COLUMNS = 15


def print_record(record: Record, file: TextIO) -> None:
    """Write the table and the verdict block, as wide as the terminal, or as wide as they are off one."""
    file.write(encodable(render(record, columns_of(file)), file))
    file.flush()


def render(record: Record, width: int | None = None) -> str:
    """The table of trials and the verdict block, at most `width` columns wide (None: unlimited)."""
    chosen = record.verdict is not None and record.verdict.chunks is not None
    table = trial_table(record, width, reasons=chosen)  # without a choice the block gives every reason
    return "\n".join([*wrap(head_line(record), width), "", table, "", *_block(verdict_rows(record), width), ""])


def verdict_line(record: Record) -> str:
    """The answer in one line: M with b and N, its throughput, the limit."""
    verdict = record.verdict
    if verdict is None or verdict.chunks is None:
        return f"{_chosen(verdict)}. Limit: {limit_sentence(record)}"
    throughput = _throughput(record, trial_of(record, verdict.chunks))
    return f"{_chosen(verdict)}: {throughput}. Limit: {limit_sentence(record)}"


def verdict_rows(record: Record) -> list[tuple[str, str]]:
    """The verdict block as (label, text) rows, without control characters."""
    verdict = record.verdict
    rows = [("chosen", _chosen(verdict))]
    if verdict is not None and verdict.chunks is not None:
        rows += _chosen_rows(record, verdict)
    else:
        rows += [("limit", limit_sentence(record)), *_infeasible_rows(record)]
    if verdict is not None:
        rows += [("finding", text) for text in verdict.findings]
        rows += [("advice", text) for text in verdict.advice]
    rows += [("note", text) for text in _notes(record)]
    rows += [("warning", text) for text in record.warnings]
    return [(label, plain(text)) for label, text in rows]


def _chosen_rows(record: Record, verdict: Verdict) -> list[tuple[str, str]]:
    trial = trial_of(record, verdict.chunks)
    return [
        ("throughput", _throughput(record, trial)),
        ("limit", limit_sentence(record)),
        ("floor", _floor(record, verdict)),
        ("bubble", _bubble(record, trial)),
        ("fullest stage", _fullest_text(trial)),
        ("slowest stage", _slowest_text(trial)),
        ("rules", _rules(record, verdict)),
        ("smallest M", _smallest(record, verdict)),
        ("confidence", _confidence(record, verdict)),
        *([] if record.mode == "predicted" else [("confirmed", _confirmed(record, verdict))]),
    ]


def _chosen(verdict: Verdict | None) -> str:
    if verdict is None:
        return "no verdict"
    if verdict.chunks is None:
        return "no M is feasible"
    return f"M = {verdict.chunks} (b = {verdict.micro_batch}, N = {verdict.mini_batch})"


_SAME_RATE = 0.05


def _throughput(record: Record, trial: Trial | None) -> str:
    if trial is None or trial.throughput_samples_per_s is None:
        return "not known"
    rate = trial.throughput_samples_per_s
    tokens = tokens_per_sample(record)
    of_tokens = "" if tokens is None else f", {format_rate(rate * tokens)} tokens/s"
    return f"{format_rate(rate)} samples/s{of_tokens}{_when_confirmed(record, rate)}"


def _when_confirmed(record: Record, rate: float) -> str:
    """The confirmation's throughput, where it is another one than the trial's."""
    confirmed = None if record.confirmation is None else record.confirmation.throughput_samples_per_s
    if confirmed is None or abs(confirmed / rate - 1) <= _SAME_RATE:
        return ""
    return f" in its trial, {format_rate(confirmed)} when it was confirmed"


def _floor(record: Record, verdict: Verdict) -> str:
    return "none: M = 1 is feasible" if verdict.floor is None else floor_reason(record, verdict)


def _bubble(record: Record, trial: Trial | None) -> str:
    bubble = None if trial is None else trial.bubble
    if bubble is None:
        return "not known"
    measured = "not" if bubble.measured is None else format_share(bubble.measured)
    ideal = "not known" if bubble.ideal is None else format_share(bubble.ideal)
    how = "predicted" if record.mode == "predicted" else "measured"
    return f"{measured} {how}, ideal {ideal} (share of the step a rank stands idle)"


def _fullest_text(trial: Trial | None) -> str:
    stage = None if trial is None else fullest_stage(trial)
    if stage is None:
        return "not known" if trial is None else _highest_peak(trial)
    share = format_share(share_of_budget(stage) or 0.0)
    sizes = f"{format_bytes(stage.peak_bytes or 0)} at the peak of {format_bytes(stage.budget_bytes or 0)} usable"
    return f"rank {stage.rank}: {sizes} ({share})"


def _highest_peak(trial: Trial) -> str:
    """The highest predicted peak where no capacity is known."""
    peaks = [(stage.peak_bytes, stage.rank) for stage in trial.stages if stage.peak_bytes is not None]
    if not peaks:
        return "not known"
    peak_bytes, rank = max(peaks)
    return f"rank {rank}: {format_bytes(peak_bytes)} at the peak; what it may use is not known"


def _slowest_text(trial: Trial | None) -> str:
    stage = None if trial is None else slowest_stage(trial)
    if trial is None or stage is None:
        return "not known"
    of_step = "" if trial.step_median_s is None else f" of a step of {format_seconds(trial.step_median_s)}"
    busy = f"busy {format_seconds(stage.busy_s)}{of_step}"
    return f"rank {stage.rank}: {busy}, {format_rate(stage.samples_per_s)} samples/s while busy"


def _rules(record: Record, verdict: Verdict) -> str:
    rules = verdict.by_rule
    if rules.pipeline == rules.stage:
        return f"pipeline and stage both name {_named(rules.pipeline)}"
    names = f"pipeline names {_named(rules.pipeline)}, stage names {_named(rules.stage)}"
    return names + _bought(trial_of(record, rules.pipeline), trial_of(record, rules.stage))


def _bought(by_pipeline: Trial | None, by_stage: Trial | None) -> str:
    """What the difference between the two rules buys, from the trials' own throughputs."""
    if by_pipeline is None or by_stage is None:
        return ""
    rate, other = by_pipeline.throughput_samples_per_s, by_stage.throughput_samples_per_s
    if not rate or not other:
        return ""
    more = f"{abs(100 * (rate / other - 1)):.1f}% {'more' if rate >= other else 'less'}"
    than = f"than the {format_rate(other)} of M = {by_stage.chunks}"
    text = f": M = {by_pipeline.chunks} gives {format_rate(rate)} samples/s, {more} {than}"
    slow, slow_other = slowest_stage(by_pipeline), slowest_stage(by_stage)
    if slow is None or slow_other is None:
        return text
    busy, busy_other = format_rate(slow.samples_per_s), format_rate(slow_other.samples_per_s)
    return f"{text}; while busy its slowest stage does {busy} samples/s, that of M = {by_stage.chunks} {busy_other}"


def _smallest(record: Record, verdict: Verdict) -> str:
    within = f"within {format_share(tolerance(record, verdict))} of the best"
    return f"{_named(verdict.smallest_within_tolerance)} is the smallest {within}"


_BASIS: Mapping[str, str] = {
    "given": "given: the costs stand in the spec",
    "measured": "measured: the costs of this micro-batch were measured, the step is simulated",
    "interpolated": "interpolated: the costs lie between measured ones, the step is simulated",
    "extrapolated": "extrapolated: the costs lie beyond what was measured",
    "estimated": "estimated: from a datasheet's peaks, so a lower bound on time; nothing was measured",
}


def _confidence(record: Record, verdict: Verdict) -> str:
    reasons = "; ".join(verdict.confidence_reasons)
    trial = trial_of(record, verdict.chunks)
    basis = None if trial is None or trial.predicted is None else trial.predicted.basis
    if record.mode == "predicted" and basis is not None:
        return _BASIS[basis] + (f"; {reasons}" if reasons else "")
    return f"{verdict.confidence}: {reasons}" if reasons else verdict.confidence


def _confirmed(record: Record, verdict: Verdict) -> str:
    trial = record.confirmation
    if verdict.confirmed == "no":
        return "no"
    text = f"in {'' if verdict.confirmed == 'fresh processes' else 'a '}{verdict.confirmed}"
    if trial is None or trial.step_median_s is None:
        return text
    return f"{text}: M = {trial.chunks} ran at {format_seconds(trial.step_median_s)} a step"


def _infeasible_rows(record: Record) -> list[tuple[str, str]]:
    tried = {trial.chunks for trial in record.trials}
    rows = [("candidate", f"M = {t.chunks}: {'it ran' if t.fits else why_not(t)}") for t in record.trials]
    others = [candidate for candidate in record.candidates if candidate.chunks not in tried]
    refused = [each for each in others if not each.legal]
    rows += [("candidate", f"M = {each.chunks}: illegal{because(each.reason)}") for each in refused]
    untried = [str(each.chunks) for each in others if each.legal]
    if untried:
        shown = ", ".join(untried[:8]) + (f" and {len(untried) - 8} more" if len(untried) > 8 else "")
        rows.append(("candidate", f"M = {shown}: not tried"))
    return rows


_ENDED = {"interrupted": "was interrupted", "failed": "failed", "complete": "ended"}


def _notes(record: Record) -> list[str]:
    notes = []
    if record.mode != "measured":
        notes.append(f"these figures are {record.mode}, not measured on the real pipeline")
    if record.quick:
        notes.append("a quick run: few samples, no baseline for later checks")
    if record.status != "complete":
        notes.append(f"the sweep {_ENDED[record.status]} after {format_seconds(record.elapsed_s)}; this is what it had")
    if record.group_restarts:
        times = "once" if record.group_restarts == 1 else f"{record.group_restarts} times"
        notes.append(f"the worker group was lost {times} and started again")
    return notes


def _named(chunks: int | None) -> str:
    return "no M" if chunks is None else f"M = {chunks}"


def head_line(record: Record) -> str:
    """What ran: the version, the schedule, K, and whether it was measured."""
    version = record.tool.get("version", "")
    stages = len(next((trial.stages for trial in record.trials if trial.stages), ())) or None
    ranks = stages or setting(record, "pipeline", "stages")
    source = record.environment.get("costs")
    facts = [
        f"chunktune {version}".strip(),
        schedule_name(record),
        f"K = {ranks}" if ranks else "",
        f"predicted from {source}, nothing was run" if record.mode == "predicted" and source else record.mode,
    ]
    return plain(", ".join(fact for fact in facts if fact))


def _block(rows: Sequence[tuple[str, str]], width: int | None) -> list[str]:
    return [line for label, text in rows for line in wrap(text, width, label.ljust(_LABEL_COLUMNS))]
