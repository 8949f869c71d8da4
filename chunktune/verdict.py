"""The verdict: which M, which limit bound, how sure. Pure; every input has one, and every verdict a limit.

The limit is decided by the state of the next larger legal M than the choice. Where the choice is the floor
and what stands above is slower, the floor is what bound: the limit is the floor's and its side is "below".
"""

from __future__ import annotations

from dataclasses import dataclass

from chunktune.advice import advise, find
from chunktune.candidates import Candidates
from chunktune.results import (
    ByRule,
    Candidate,
    Comparison,
    Criterion,
    Floor,
    FloorLimit,
    Limit,
    LimitDetail,
    Trial,
    Verdict,
)
from chunktune.standing import Case, Facts, Found, Fresh, Rules, Standing, case_of, stand
from chunktune.stats import compare, shared_rounds

__all__ = ["Found", "Rules", "comparisons", "decide"]


@dataclass(frozen=True)
class _Bound:
    """The limit with its numbers; `next_chunks` is the next larger M, also where the side is "below"."""

    limit: Limit
    detail: LimitDetail
    stage: int | None = None
    next_chunks: int | None = None
    below: bool = False


def decide(
    candidates: Candidates,
    found: Found,
    rules: Rules,
    *,
    recompute: bool = False,
    loss_tolerance: float = 2e-3,
    fresh: Fresh = "fresh processes",
) -> Verdict:
    """The verdict on what a search found. Where data lack it says "unclear", or no M; it does not raise.

    `recompute`: recomputation is on already. `loss_tolerance`: relative difference of the first step's loss over
    M, with N fixed, that rounding may cause. `fresh`: how the group of the confirmation was made.
    """
    case = case_of(candidates, found, rules, Facts(recompute, loss_tolerance, fresh))
    verdict = _infeasible(case) if case.standing is None else _feasible(case, case.standing)
    return verdict.model_copy(update={"advice": advise(verdict, case), "findings": find(verdict, case)})


def comparisons(candidates: Candidates, found: Found, rules: Rules) -> tuple[Comparison, ...]:
    """Every fitting M against the best under the rules' criterion, by M: what the verdict rests on.

    Values that never shared a round with the best come through a chain of others (`rounds`: weakest link).
    """
    standing = stand(candidates, found, rules)
    return () if standing is None else tuple(standing.comparisons[m] for m in sorted(standing.comparisons))


# --- an M is feasible


def _feasible(case: Case, standing: Standing) -> Verdict:
    floor = _floor(case, standing.fits[0])
    above = _plateau(case, standing) if standing.plateau else _above(case, standing)
    at_floor = floor is not None and floor.chunks == standing.chosen and above.limit == "throughput"
    bound = _below(case, floor, above) if floor is not None and at_floor else above
    reasons = _doubts(case, standing, bound)
    micro_batch, mini_batch = case.candidates.batch_of(standing.chosen)
    return Verdict(
        chunks=standing.chosen,
        micro_batch=micro_batch,
        mini_batch=mini_batch,
        limit=bound.limit,
        limit_side="below" if bound.below else "above",
        limit_stage=bound.stage,
        limit_detail=bound.detail,
        next_chunks=bound.next_chunks,
        floor=floor,
        confidence="unclear" if reasons else "clear",
        confidence_reasons=reasons,
        by_rule=ByRule(pipeline=_rule(case, "pipeline"), stage=_rule(case, "stage")),
        smallest_within_tolerance=standing.contenders[0],
        confirmed="no" if case.found.confirmation is None else case.facts.fresh,
    )


def _above(case: Case, standing: Standing) -> _Bound:
    """The limit from the state of the next larger legal M."""
    following = min((m for m in case.candidates.legal if m > standing.chosen), default=None)
    if following is None:
        return _Bound(case.candidates.above, LimitDetail(reason=_refusal_above(case, standing.chosen)))
    trial, comparison = case.trials.get(following), standing.comparisons.get(following)
    if trial is None:
        return _Bound("budget", LimitDetail(reason=f"M = {following} was not tried"), None, following)
    if not trial.fits:
        return _not_running(trial)
    if comparison is None and following != standing.best:
        reason = f"M = {following} runs, but was not compared"
        return _Bound("budget", LimitDetail(reason=reason), None, following)
    loser = slowed_stage(case.trials[standing.chosen], trial)
    return _Bound("throughput", LimitDetail(comparison=comparison), loser, following)


def _not_running(trial: Trial) -> _Bound:
    """The limit that an M which does not run is: memory where it ran out of it, else a failure."""
    limit: Limit = "memory" if trial.state == "oom" else "failed"
    detail = LimitDetail(reason=_why(trial), shortage=trial.shortage)
    return _Bound(limit, detail, _stage(trial), trial.chunks)


def _plateau(case: Case, standing: Standing) -> _Bound:
    known = (*case.trials, *case.candidates.ladder)
    following = min((m for m in known if m > standing.chosen), default=None)
    gain = case.found.plateau_gain or 0.0
    reason = f"the next doubling of M can gain {100 * gain:.2g} % at most"
    comparison = None if following is None else standing.comparisons.get(following)
    return _Bound("plateau", LimitDetail(reason=reason, comparison=comparison), None, following)


def _below(case: Case, floor: Floor, above: _Bound) -> _Bound:
    """The floor's limit, with the comparison that keeps the choice from moving up."""
    smaller = max((m for m in case.trials if m < floor.chunks), default=None)
    shortage = case.trials[smaller].shortage if smaller is not None and floor.limit == "memory" else None
    detail = LimitDetail(reason=floor.reason, shortage=shortage, comparison=above.detail.comparison)
    return _Bound(floor.limit, detail, floor.stage, above.next_chunks, below=True)


def _floor(case: Case, smallest: int) -> Floor | None:
    """The smallest M that fits and why the next smaller legal one does not; None where that M is 1."""
    smaller = max((m for m in case.candidates.legal if m < smallest), default=None)
    if smaller is None:
        reason = _refusal_below(case, smallest)
        return None if smallest == 1 else Floor(chunks=smallest, limit=case.candidates.below, reason=reason)
    trial = case.trials.get(smaller)
    if trial is None:
        return Floor(chunks=smallest, limit="budget", reason=f"M = {smaller} was not tried")
    limit: FloorLimit = "memory" if trial.state == "oom" else "failed"
    return Floor(chunks=smallest, limit=limit, stage=_stage(trial), reason=_why(trial))


def _rule(case: Case, criterion: Criterion) -> int | None:
    """What a rule names: the choice for the one in use, an estimate within tolerance for the other."""
    standing = stand(case.candidates, case.found, case.rules, criterion)
    if standing is None:
        return None
    return standing.chosen if criterion == case.rules.criterion else standing.chosen_by_estimate


def slowed_stage(before: Trial, after: Trial) -> int | None:
    """The rank whose busy seconds a sample grew most between two trials; None where none grew."""
    seconds = {stage.rank: stage.busy_s / before.mini_batch for stage in before.stages}
    growth = {
        stage.rank: stage.busy_s / after.mini_batch - seconds[stage.rank]
        for stage in after.stages
        if stage.rank in seconds
    }
    rank = max(growth, key=lambda key: (growth[key], -key), default=None)
    return rank if rank is not None and growth[rank] > 0 else None


# --- how sure


def _doubts(case: Case, standing: Standing, bound: _Bound) -> tuple[str, ...]:
    """Every comparison that the choice rests on and that is not decided, in words with its numbers."""
    untried = [bound.detail.reason or "the next M was not tried"] if bound.limit == "budget" else []
    undecided = [
        _undecided(m, standing)
        for m in standing.fits
        if m != standing.best and standing.outcome(m) == "undecided" and _rests_on(m, case, standing)
    ]
    return (*untried, *undecided)


def _rests_on(chunks: int, case: Case, standing: Standing) -> bool:
    """Whether an undecided M could still change the choice.

    On the side that would be preferred (larger; smaller on a plateau) it could be a contender. On the other
    side it could only by being better than the choice by more than the tolerance.
    """
    preferred = chunks < standing.chosen if standing.plateau else chunks > standing.chosen
    if preferred or not shared_rounds(case.found.rounds, standing.chosen, chunks):
        return True
    rules = case.rules
    rival = compare(case.found.rounds, standing.chosen, chunks, rules.criterion, rules.tolerance)
    return rival.outcome != "not slower"


def _undecided(chunks: int, standing: Standing) -> str:
    comparison = standing.comparisons.get(chunks)
    if comparison is None:
        return f"M = {chunks} was not compared with M = {standing.best}"
    interval = comparison.interval
    spread = "no interval" if interval is None else f"95 % interval {interval[0]:.4g} to {interval[1]:.4g}"
    return (
        f"M = {chunks} against M = {standing.best}: throughput ratio {comparison.ratio:.4g}, {spread} in "
        f"{comparison.rounds} rounds, undecided at a tolerance of {100 * standing.tolerance:g} %"
    )


# --- no M is feasible


def _infeasible(case: Case) -> Verdict:
    bound = _nothing_fits(case)
    reasons = (f"not every M was tried: {bound.detail.reason}",) if case.found.budget_spent else ()
    return Verdict(
        chunks=None,
        micro_batch=None,
        mini_batch=None,
        limit=bound.limit,
        limit_side="below" if bound.below else "above",
        limit_stage=bound.stage,
        limit_detail=bound.detail,
        next_chunks=None,
        floor=None,
        confidence="unclear" if reasons else "clear",
        confidence_reasons=reasons,
        by_rule=ByRule(pipeline=None, stage=None),
        smallest_within_tolerance=None,
        confirmed="no",
    )


def _nothing_fits(case: Case) -> _Bound:
    """Memory where any M ran out of it, else a failure, else what kept every M from being tried."""
    if not case.candidates.legal:
        return _Bound("schedule", LimitDetail(reason=_refusal_above(case, 0)))
    if not case.trials:
        return _Bound("budget", LimitDetail(reason="no value of M was tried"))
    short = [trial for trial in case.trials.values() if trial.state == "oom"]
    with_n_fixed = case.candidates.mode == "mini_batch"
    # The one nearest to fitting: with N fixed memory falls as M rises, with b fixed it grows.
    nearest = (short or list(case.trials.values()))[-1 if with_n_fixed else 0]
    bound = _not_running(nearest)
    return _Bound(bound.limit, bound.detail, bound.stage, below=with_n_fixed and bound.limit == "memory")


# --- words


def _stage(trial: Trial) -> int | None:
    return trial.rank if trial.shortage is None else trial.shortage.rank


def _why(trial: Trial) -> str:
    return f"M = {trial.chunks}: {trial.reason or trial.state}"


def _refusal_above(case: Case, chunks: int) -> str | None:
    refused = [candidate for candidate in case.candidates.refused if candidate.chunks > chunks]
    return _rule_of(min(refused, key=lambda candidate: candidate.chunks, default=None))


def _refusal_below(case: Case, chunks: int) -> str | None:
    refused = [candidate for candidate in case.candidates.refused if candidate.chunks < chunks]
    return _rule_of(max(refused, key=lambda candidate: candidate.chunks, default=None))


def _rule_of(refused: Candidate | None) -> str | None:
    """Why it is refused, without the way out: the way out is the M that was found."""
    return None if refused is None or refused.reason is None else refused.reason.partition("; nearest legal M")[0]
