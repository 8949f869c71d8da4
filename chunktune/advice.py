"""Advice and findings in sentences, each with the numbers that were measured. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean

from chunktune.results import Limit, Shortage, Trial, Verdict
from chunktune.standing import DRIFT, Case, Standing
from chunktune.stats import drift
from chunktune.units import format_bytes, format_seconds

MOVED = 1.2  # a step of the confirmation over that of the trial, either way, from which on it is said
IMBALANCE = 1.1  # busy seconds of the slowest rank over the mean, above which balance comes first

Writer = Callable[[Verdict, Case], list[str]]


def advise(verdict: Verdict, case: Case) -> tuple[str, ...]:
    """What to change next, from the limit and from the balance of the ranks at the choice."""
    unsure = _unclear(case) if verdict.confidence == "unclear" and verdict.limit != "budget" else []
    return (*_balance(verdict, case), *_WRITERS[verdict.limit](verdict, case), *unsure)


def find(verdict: Verdict, case: Case) -> tuple[str, ...]:
    """What was seen besides: each a fact that the reader would not expect."""
    found = [*_losses(case), *_infinite_losses(case), *_unconfirmed(verdict, case), *_moved(case)]
    if len(case.candidates.legal) == 1:
        found.append(f"M = {case.candidates.legal[0]} is the only legal value: there was nothing to choose")
    if case.standing is not None:
        found += [*_late_shortage(case, case.standing), *_dips(case.standing), *_drift(case, case.standing)]
    return tuple(found)


# --- advice, a limit each


def _memory(verdict: Verdict, case: Case) -> list[str]:
    fewer_layers = "more stages (pipeline.stages) leave fewer layers on a rank"
    recompute = 'recomputation (pipeline.recompute = "full") keeps only the input of each layer'
    ways = [fewer_layers] if case.facts.recompute else [recompute, fewer_layers]
    if case.candidates.mode == "micro_batch":
        ways.append(f"a batch.micro_batch below {case.candidates.size} needs less for each chunk")
    return [f"{_shortage_text(verdict, case)}: {'; '.join(ways)}"]


def _shortage_text(verdict: Verdict, case: Case) -> str:
    shortage = verdict.limit_detail.shortage
    if shortage is None:
        return verdict.limit_detail.reason or "Out of memory"
    chunks = next((m for m, trial in case.trials.items() if trial.shortage == shortage), None)
    at = "" if chunks is None else f"M = {chunks}: "
    return f"{at}rank {shortage.rank} {_needs(shortage)}"


def _needs(shortage: Shortage) -> str:
    may = f"the {format_bytes(shortage.budget_bytes)} that it may use"
    if shortage.needed_bytes is None:
        asked = "" if shortage.asked_bytes is None else f" by an allocation of {format_bytes(shortage.asked_bytes)}"
        return f"exceeds {may}{asked}"
    short = max(0, shortage.needed_bytes - shortage.budget_bytes)
    return f"needs at least {format_bytes(shortage.needed_bytes)} of {may}, {format_bytes(short)} short"


def _throughput(verdict: Verdict, case: Case) -> list[str]:
    fall = _fall_text(verdict) + _bubble_text(verdict, case)
    if case.candidates.mode == "micro_batch":
        return [f"{fall}; with b fixed it should rise: look for what slows down with the batch, such as swapping"]
    if _ranks(verdict, case) == 1:
        return [f"{fall}; a larger batch.mini_batch keeps the micro-batches large at the same M"]
    return [
        f"{fall}; the pipeline has more stages than N = {case.candidates.size} can feed: fewer stages and "
        "more replicas, or a larger batch.mini_batch"
    ]


def _fall_text(verdict: Verdict) -> str:
    comparison = verdict.limit_detail.comparison
    if comparison is None:
        return f"M = {verdict.next_chunks} is no contender"
    share = f"{100 * comparison.ratio:.3g} %"
    return f"M = {comparison.chunks} reaches {share} of the throughput of M = {comparison.against}"


def _bubble_text(verdict: Verdict, case: Case) -> str:
    trial = _choice(verdict, case)
    bubble = None if trial is None else trial.bubble
    if bubble is None or bubble.measured is None:
        return ""
    ideal = "" if bubble.ideal is None else f" (ideal {100 * bubble.ideal:.3g} %)"
    return f"; at M = {verdict.chunks} the ranks idle {100 * bubble.measured:.3g} % of the step{ideal}"


def _ranks(verdict: Verdict, case: Case) -> int:
    trial = _choice(verdict, case)
    return 0 if trial is None else len(trial.stages)


def _choice(verdict: Verdict, case: Case) -> Trial | None:
    return None if verdict.chunks is None else case.trials[verdict.chunks]


def _failed(verdict: Verdict, case: Case) -> list[str]:
    reason = verdict.limit_detail.reason or "A trial failed"
    return [f"{reason}: the workers' logs in the output directory say more"]


def _batch(verdict: Verdict, case: Case) -> list[str]:
    return [f"b is already 1 at M = {verdict.chunks}: a batch.mini_batch above {case.candidates.size} allows more"]


def _schedule(verdict: Verdict, case: Case) -> list[str]:
    why = f" ({verdict.limit_detail.reason})" if verdict.limit_detail.reason else ""
    if verdict.chunks is None:
        return [f"No M is legal{why}: another pipeline.schedule, or another batch"]
    side = "smaller" if verdict.limit_side == "below" else "larger"
    return [f"pipeline.schedule admits no {side} M than {verdict.chunks}{why}: another schedule or batch may admit one"]


def _range(verdict: Verdict, case: Case) -> list[str]:
    side, change = ("smallest", "lower") if verdict.limit_side == "below" else ("largest", "raise")
    return [f"M = {verdict.chunks} is the {side} that batch.chunks allows: {change} it to go on"]


def _plateau(verdict: Verdict, case: Case) -> list[str]:
    reason = verdict.limit_detail.reason or "the next doubling of M gains less than the tolerance"
    return [f"{reason}: M = {verdict.chunks} is the smallest within sweep.tolerance, and a larger batch is not free"]


def _budget(verdict: Verdict, case: Case) -> list[str]:
    return [f"{verdict.limit_detail.reason or 'Not every M was tried'}: raise sweep.budget"]


_WRITERS: Mapping[Limit, Writer] = {
    "memory": _memory,
    "throughput": _throughput,
    "failed": _failed,
    "batch": _batch,
    "schedule": _schedule,
    "range": _range,
    "plateau": _plateau,
    "budget": _budget,
}


def _unclear(case: Case) -> list[str]:
    return [
        "The measurements do not decide every comparison: run again on a quieter machine, or with a "
        f"sweep.tolerance above {100 * case.rules.tolerance:g} %"
    ]


def _balance(verdict: Verdict, case: Case) -> list[str]:
    """The slowest rank sets the pace: where it stands out, balance comes before everything else."""
    trial = _choice(verdict, case)
    stages = () if trial is None else trial.stages
    mean_s = fmean(stage.busy_s for stage in stages) if stages else 0.0
    slowest = max(stages, key=lambda stage: (stage.busy_s, -stage.rank), default=None)
    if slowest is None or slowest.busy_s <= IMBALANCE * mean_s:
        return []
    return [
        f"Rank {slowest.rank} is busy {format_seconds(slowest.busy_s)} a step at M = {verdict.chunks}, "
        f"{slowest.busy_s / mean_s:.3g} times the mean of {format_seconds(mean_s)}: balance the stages first "
        '(pipeline.partition = "time")'
    ]


# --- findings


def _losses(case: Case) -> list[str]:
    """With N fixed the first step's loss from equal weights must agree over M."""
    losses = {m: trial.loss for m, trial in case.trials.items() if trial.fits and trial.loss is not None}
    if case.candidates.mode == "micro_batch" or len(losses) < 2:
        return []
    low, high = min(losses, key=lambda m: losses[m]), max(losses, key=lambda m: losses[m])
    scale = max(abs(losses[low]), abs(losses[high]))
    if losses[high] - losses[low] <= case.facts.loss_tolerance * scale:
        return []
    return [
        f"M changes this model's training: with N = {case.candidates.size} fixed the first step's loss is "
        f"{losses[low]:.6g} at M = {low} and {losses[high]:.6g} at M = {high}; batch statistics, a summed "
        "loss, or random layers do that"
    ]


def _unconfirmed(verdict: Verdict, case: Case) -> list[str]:
    failed = [
        f"M = {trial.chunks} ran in the sweep but not in a fresh group: {trial.reason or trial.state}"
        for trial in case.found.failed_confirmations
    ]
    if case.rules.confirm and verdict.chunks is not None and verdict.confirmed == "no":
        failed.append(f"M = {verdict.chunks} was not confirmed in a fresh group: sweep.budget is spent")
    return failed


def _moved(case: Case) -> list[str]:
    """A confirmation far from the trial of the same M: one of the two was disturbed, and nobody knows which."""
    confirmed = case.found.confirmation
    trial = None if confirmed is None else case.trials.get(confirmed.chunks)
    if confirmed is None or trial is None or not (confirmed.step_median_s and trial.step_median_s):
        return []
    ratio = confirmed.step_median_s / trial.step_median_s
    if 1 / MOVED <= ratio <= MOVED:
        return []
    return [
        f"M = {trial.chunks} took {format_seconds(trial.step_median_s)} a step in its trial and "
        f"{format_seconds(confirmed.step_median_s)} when it was confirmed: the machine's speed moves, and only "
        "the paired rounds allow for that"
    ]


def _late_shortage(case: Case, standing: Standing) -> list[str]:
    """With N fixed memory does not grow with M: running out above an M that fits is a surprise."""
    if case.candidates.mode == "micro_batch":
        return []
    late = [m for m, trial in case.trials.items() if trial.state == "oom" and m > standing.fits[0]]
    if not late:
        return []
    fitting = max(m for m in standing.fits if m < late[0])
    return [
        f"M = {late[0]} runs out of memory although M = {fitting} fits and N = {case.candidates.size} is "
        "fixed: a leak, or a buffer kept for each chunk"
    ]


def _infinite_losses(case: Case) -> list[str]:
    """A loss that is no number: what was measured of time and memory stands."""
    chunks = [m for m, trial in case.trials.items() if trial.loss_is_finite is False]
    if not chunks:
        return []
    named = ", ".join(map(str, chunks))
    return [
        f"the loss of the first step is NaN or infinite at M = {named}: times and memory stand, but a model that "
        "trains like this learns nothing"
    ]


def _drift(case: Case, standing: Standing) -> list[str]:
    """A machine whose speed moved so much that a comparison took more rounds than usual, or stayed undecided."""
    moved = {
        chunks: drift(case.found.rounds, chunks, standing.best)
        for chunks, one in standing.comparisons.items()
        if not one.decided or one.rounds > case.rules.max_rounds
    }
    worst = max(moved, key=lambda m: moved[m], default=None)
    if worst is None or moved[worst] <= DRIFT:
        return []
    return [
        f"the machine's speed moved by {moved[worst]:.2g}x while M = {worst} and M = {standing.best} were compared in "
        f"{standing.comparisons[worst].rounds} rounds: something else uses it too; what is paired allows for that, the "
        "steps and samples/s of single trials do not"
    ]


def _dips(standing: Standing) -> list[str]:
    """Throughput that falls by more than the tolerance and rises again."""
    dips = [m for m in standing.fits if standing.outcome(m) == "slower" and _is_dip(m, standing)]
    if not dips:
        return []
    ratios = ", ".join(f"{100 * standing.ratio(m, 0.0):.3g} % at M = {m}" for m in dips)
    return [f"Throughput dips between larger values on both sides: {ratios} of that at M = {standing.best}"]


def _is_dip(chunks: int, standing: Standing) -> bool:
    least = standing.ratio(chunks, 0.0) / (1 - standing.tolerance)
    rises = [m for m in standing.fits if standing.ratio(m, 0.0) > least]
    return any(m < chunks for m in rises) and any(m > chunks for m in rises)
