"""The limit in one sentence with its numbers, and why a value of M did not run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from chunktune.report import format_rate, plain, setting, trial_of
from chunktune.results import Comparison, Floor, Record, Shortage, State, Trial, Verdict
from chunktune.units import format_bytes, format_seconds, format_share

STATE_WORDS: Mapping[State, str] = {
    "ok": "ran",
    "oom": "out of memory",
    "illegal": "illegal",
    "killed": "killed",
    "timeout": "timed out",
    "error": "raised an error",
    "skipped": "skipped",
}


_WHERE: Mapping[str, str] = {
    "rehearsal": "in the rehearsal",
    "pipeline": "in the real pipeline",
    "prediction": "predicted",
}


def limit_sentence(record: Record) -> str:
    """The limit that decided M, in one sentence with its numbers; defined for every record."""
    verdict = record.verdict
    if verdict is None:
        return f"none: no verdict, the sweep was {record.status} before it could decide"
    if verdict.chunks is None:
        return plain(f"{verdict.limit}: no value of M is feasible{_nearest_miss(record, verdict)}")
    if verdict.limit_side == "below":
        return plain(f"{verdict.limit}, from below: {_below(record, verdict)}")
    return plain(f"{verdict.limit}: {_ABOVE[verdict.limit](record, verdict)}")


def _memory_above(record: Record, verdict: Verdict) -> str:
    detail = verdict.limit_detail
    above = trial_of(record, verdict.next_chunks)
    return (
        f"{_next(verdict)} does not fit: {_memory_reason(above, detail.shortage, detail.reason, verdict.limit_stage)}"
    )


def _throughput_above(record: Record, verdict: Verdict) -> str:
    comparison = verdict.limit_detail.comparison
    if comparison is None:
        return f"{_next(verdict)} is slower{_rates(record, verdict)}{_lost_most(record, verdict)}"
    return f"{_compared(comparison, verdict.next_chunks)}{_lost_most(record, verdict)}"


def _failed_above(record: Record, verdict: Verdict) -> str:
    trial = trial_of(record, verdict.next_chunks)
    reason = verdict.limit_detail.reason or "it failed"
    return f"{_next(verdict)} did not run: {reason if trial is None or trial.fits else why_not(trial)}"


def _batch_above(record: Record, verdict: Verdict) -> str:
    return f"b is {verdict.micro_batch} at M = {verdict.chunks}: N = {verdict.mini_batch} cannot be cut further"


def _schedule_above(record: Record, verdict: Verdict) -> str:
    return f"{schedule_name(record)} admits no M above {verdict.chunks}{because(verdict.limit_detail.reason)}"


def _range_above(record: Record, verdict: Verdict) -> str:
    chunks = setting(record, "batch", "chunks") or "auto"
    return f"M = {verdict.chunks} is the largest in the range that was searched (batch.chunks = {chunks})"


def _plateau_above(record: Record, verdict: Verdict) -> str:
    detail = verdict.limit_detail
    gain = detail.reason or f"past M = {verdict.chunks} the next doubling can gain little"
    seen = "" if detail.comparison is None else f" ({_compared(detail.comparison, verdict.next_chunks)})"
    less = f"less than the tolerance of {format_share(tolerance(record, verdict))}"
    return f"{gain}, {less}, and a larger batch is not free{seen}"


def _budget_above(record: Record, verdict: Verdict) -> str:
    budget_s = setting(record, "sweep", "budget")
    # A record from elsewhere may hold anything there.
    budget = ""
    if isinstance(budget_s, (int, float)) and 0 <= budget_s < 1e12:
        budget = f" ({format_seconds(budget_s)})"
    left_out = verdict.limit_detail.reason or f"{_next(verdict)} was not tried"
    return f"the time{budget} ran out after {format_seconds(record.elapsed_s)}: {left_out}"


_ABOVE: Mapping[str, Callable[[Record, Verdict], str]] = {
    "memory": _memory_above,
    "throughput": _throughput_above,
    "failed": _failed_above,
    "batch": _batch_above,
    "schedule": _schedule_above,
    "range": _range_above,
    "plateau": _plateau_above,
    "budget": _budget_above,
}


def _below(record: Record, verdict: Verdict) -> str:
    return f"no larger M was shown to be faster{_larger(verdict)}, and {floor_reason(record, verdict)}"


def floor_reason(record: Record, verdict: Verdict) -> str:
    """Why nothing below the smallest feasible M is feasible, with that M; for a verdict that has a floor."""
    floor = verdict.floor or Floor(chunks=verdict.chunks or 1, limit="schedule")
    failed = [trial for trial in record.trials if trial.chunks < floor.chunks and not trial.fits]
    below = max(failed, key=lambda trial: trial.chunks, default=None)
    smaller = "less" if below is None else f"M = {below.chunks}"
    smallest = f"M = {floor.chunks} is the smallest"
    if floor.limit == "memory":
        return f"{smallest} that fits, {smaller} does not: {_memory_reason(below, None, floor.reason, floor.stage)}"
    if floor.limit == "failed":
        return f"{smallest} that runs, {smaller} did not: {floor.reason if below is None else why_not(below)}"
    if floor.limit == "schedule":
        return f"{smallest} that {schedule_name(record)} admits{because(floor.reason)}"
    if floor.limit == "range":
        return f"{smallest} in the range that was searched{because(floor.reason)}"
    return f"{smallest} that was tried before the time ran out{because(floor.reason)}"


def _memory_reason(trial: Trial | None, shortage: Shortage | None, reason: str | None, rank: int | None) -> str:
    if trial is not None:
        shortage, reason = trial.shortage or shortage, trial.reason or reason
    if shortage is not None:
        return _shortage(shortage)
    return reason or f"{'some rank' if rank is None else f'rank {rank}'} ran out of memory"


def _compared(comparison: Comparison, subject: int | None) -> str:
    """One comparison in words, seen from `subject` where that is its second value."""
    chunks, against = comparison.chunks, comparison.against
    ratio, interval = comparison.ratio, comparison.interval
    if against == subject and ratio > 0:
        chunks, against, ratio = against, chunks, 1 / ratio
        interval = None if interval is None or min(interval) <= 0 else (1 / interval[1], 1 / interval[0])
    faster = ratio > 1
    word = "faster" if faster else "slower"
    text = f"M = {chunks} is {_percent(ratio, faster):.1f}% {word} than M = {against}"
    if interval is not None and interval[0] != interval[1]:
        low, high = sorted(_percent(end, faster) for end in interval)
        text += f" [{low:.1f}% to {high:.1f}%]"
    undecided = f", not decided at a tolerance of {format_share(comparison.tolerance)}"
    return text + ("" if comparison.decided else undecided)


def _percent(ratio: float, faster: bool) -> float:
    return round(100 * (ratio - 1 if faster else 1 - ratio), 1) + 0.0  # never "-0.0"


def _rates(record: Record, verdict: Verdict) -> str:
    above, chosen = trial_of(record, verdict.next_chunks), trial_of(record, verdict.chunks)
    if above is None or chosen is None:
        return ""
    if above.throughput_samples_per_s is None or chosen.throughput_samples_per_s is None:
        return ""
    rate, other = above.throughput_samples_per_s, chosen.throughput_samples_per_s
    return f" ({format_rate(rate)} samples/s against {format_rate(other)} at M = {verdict.chunks})"


def _lost_most(record: Record, verdict: Verdict) -> str:
    rank = verdict.limit_stage
    before, after = (_busy_s(record, chunks, rank) for chunks in (verdict.chunks, verdict.next_chunks))
    if rank is None:
        return ""
    if before is None or after is None:
        return f"; rank {rank} lost most"
    work = f"from {format_seconds(before)} to {format_seconds(after)} a step"
    return f"; rank {rank} lost most: its work went {work}"


def _busy_s(record: Record, chunks: int | None, rank: int | None) -> float | None:
    trial = trial_of(record, chunks)
    stages = () if trial is None else trial.stages
    return next((stage.busy_s for stage in stages if stage.rank == rank), None)


def _larger(verdict: Verdict) -> str:
    comparison = verdict.limit_detail.comparison
    return "" if comparison is None else f" ({_compared(comparison, verdict.next_chunks)})"


def _nearest_miss(record: Record, verdict: Verdict) -> str:
    shortage, reason = verdict.limit_detail.shortage, verdict.limit_detail.reason
    if shortage is not None:
        short = [trial.chunks for trial in record.trials if trial.shortage == shortage]
        nearest = f"at M = {short[-1 if verdict.limit_side == 'below' else 0]} " if short else ""
        return f"; {nearest}{_shortage(shortage)}"
    return f"; {reason}" if reason else ""


def _next(verdict: Verdict) -> str:
    return "the next larger M" if verdict.next_chunks is None else f"M = {verdict.next_chunks}"


def because(reason: str | None) -> str:
    """A reason as the end of a sentence, nothing where there is none."""
    return f": {reason}" if reason else ""


def schedule_name(record: Record) -> str:
    """The schedule's name in the spec."""
    return str(setting(record, "pipeline", "schedule") or "the schedule")


def tolerance(record: Record, verdict: Verdict) -> float:
    """The tolerance that the choice was made with, as a fraction; the default where the record lacks it."""
    comparison = verdict.limit_detail.comparison
    value = setting(record, "sweep", "tolerance") if comparison is None else comparison.tolerance
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e12 else 0.01


def trial_reason(trial: Trial) -> str:
    """Why this M did not run, with its numbers, on one line."""
    return f"M = {trial.chunks}: {why_not(trial)}"


def why_not(trial: Trial) -> str:
    """The state of a trial that did not run, in words, with its numbers or its reason."""
    word = STATE_WORDS[trial.state]
    if trial.shortage is not None:
        return (
            _shortage(trial.shortage)
            if trial.shortage.where == "prediction"
            else f"{word}: {_shortage(trial.shortage)}"
        )
    named = (trial.reason or "").startswith(f"rank {trial.rank}: ")
    where = "" if trial.rank is None or named else f" on rank {trial.rank}"
    return plain(f"{word}{where}: {trial.reason}" if trial.reason else f"{word}{where}")


def _shortage(shortage: Shortage) -> str:
    place = _WHERE[shortage.where]
    may_use = f"may use {format_bytes(shortage.budget_bytes)}"
    asked = "" if shortage.asked_bytes is None else f", asking for {format_bytes(shortage.asked_bytes)} more"
    if shortage.needed_bytes is None:
        return f"rank {shortage.rank} {may_use} and ran out {place}{asked}"
    short_bytes = shortage.needed_bytes - shortage.budget_bytes
    by = f", {format_bytes(short_bytes)} too little" if short_bytes > 0 else ""
    # What is predicted is the whole need; what is measured ended with the allocation that failed.
    needs = "needs" if shortage.where == "prediction" else "needs at least"
    tight = "; TIGHT: the device has it, headroom keeps it free" if shortage.within_capacity else ""
    return f"rank {shortage.rank} {needs} {format_bytes(shortage.needed_bytes)} and {may_use}{by} ({place}{tight})"
