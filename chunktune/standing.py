"""Where the values of M stand against the best one, as measured: shared by search and verdict. Pure.

The rule (Huang et al. 2018, GPipe, arXiv 1811.06965): raise M until memory runs out or throughput starts
falling, and take the last value before. In the words used here: a *contender* fits and is decided "not
slower" than the best; chosen is the largest contender. An undecided value is none, however wide its interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from chunktune.candidates import Candidates
from chunktune.results import Comparison, Criterion, Round, Trial
from chunktune.stats import as_comparison, drift, relative

Fresh = Literal["fresh processes", "re-initialised group"]

DRIFT = 1.3
"""Speed of the machine between two rounds from which on a comparison is thought to have had a slow neighbour."""


@dataclass(frozen=True)
class Rules:
    """How the search decides. `tolerance` is a share of the best throughput; rounds are counted a pair.

    Where the machine's speed moves by more than `DRIFT` between the rounds of a pair, it may have `drifting_rounds`.
    Raises ValueError when a value is out of range.
    """

    criterion: Criterion = "pipeline"
    tolerance: float = 0.01
    patience: int = 1
    min_rounds: int = 3
    max_rounds: int = 12
    drifting_rounds: int = 24
    confirm: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance is {self.tolerance}; a share is 0 to below 1")
        if self.patience < 0:
            raise ValueError(f"patience is {self.patience}; it counts values of M, 0 or more")
        if not 1 <= self.min_rounds <= self.max_rounds:
            raise ValueError(f"rounds are {self.min_rounds} to {self.max_rounds}; 1 <= min <= max")


def rounds_allowed(rounds: Sequence[Round], chunks: int, against: int, rules: Rules) -> int:
    """How many rounds a comparison may have, more of them on a machine that drifts."""
    drifts = drift(rounds, chunks, against) > DRIFT
    return max(rules.max_rounds, rules.drifting_rounds) if drifts else rules.max_rounds


@dataclass(frozen=True)
class Found:
    """What a search found out.

    `trials`: one a value of M, ascending; rungs that were not tried are "skipped" with the reason.
    `failed_confirmations`: values that ran in the sweep but not in a fresh group; their trial has that state.
    `plateau_gain`: throughput share that the next doubling can gain at most, where the climb ended by that.
    `aborted`: why the climb was given up before anything fitted.
    """

    trials: tuple[Trial, ...]
    rounds: tuple[Round, ...] = ()
    confirmation: Trial | None = None
    failed_confirmations: tuple[Trial, ...] = ()
    plateau_gain: float | None = None
    budget_spent: bool = False
    aborted: str | None = None


@dataclass(frozen=True)
class Facts:
    """What a verdict knows besides the measurements; see `verdict.decide`."""

    recompute: bool
    loss_tolerance: float
    fresh: Fresh


@dataclass(frozen=True)
class Standing:
    """The values that fit and their throughput over that of the best.

    `comparisons`: of every other fitting M that shares rounds with the best, directly or through a chain.
    `plateau`: the climb ended because nothing more can be gained, and nothing else binds.
    """

    fits: tuple[int, ...]
    best: int
    comparisons: Mapping[int, Comparison]
    plateau: bool
    tolerance: float

    @property
    def contenders(self) -> tuple[int, ...]:
        """Ascending: the best, and every fitting M that is decided "not slower"."""
        return tuple(chunks for chunks in self.fits if chunks == self.best or self._not_slower(chunks))

    @property
    def chosen(self) -> int:
        """The largest contender; the smallest on a plateau, since a larger batch is not free."""
        return self.contenders[0 if self.plateau else -1]

    @property
    def chosen_by_estimate(self) -> int:
        """The choice when an estimate within the tolerance is enough, decided or not."""
        near = [chunks for chunks in self.fits if self.ratio(chunks, default=0.0) >= 1 - self.tolerance]
        return near[0 if self.plateau else -1]

    def ratio(self, chunks: int, default: float) -> float:
        """Throughput over that of the best; `default` where M was never compared."""
        if chunks == self.best:
            return 1.0
        comparison = self.comparisons.get(chunks)
        return default if comparison is None else comparison.ratio

    def outcome(self, chunks: int) -> str:
        """Outcome of the comparison with the best; "undecided" where there is none."""
        comparison = self.comparisons.get(chunks)
        return "undecided" if comparison is None else comparison.outcome

    def _not_slower(self, chunks: int) -> bool:
        return self.outcome(chunks) == "not slower"


def tried(candidates: Candidates, trials: Sequence[Trial]) -> dict[int, Trial]:
    """The trials that say something about a legal M, by M, ascending."""
    legal = set(candidates.legal)
    known = {trial.chunks: trial for trial in trials if trial.state != "skipped" and trial.chunks in legal}
    return dict(sorted(known.items()))


def stand(candidates: Candidates, found: Found, rules: Rules, criterion: Criterion | None = None) -> Standing | None:
    """Where every fitting M stands under a criterion (default: that of the rules); None when nothing fits."""
    criterion = criterion or rules.criterion
    trials = tried(candidates, found.trials)
    fits = tuple(chunks for chunks, trial in trials.items() if trial.fits)
    if not fits:
        return None
    best = best_of([trials[chunks] for chunks in fits], found.rounds, criterion)
    binds = any(chunks > best and not trial.fits for chunks, trial in trials.items())
    return Standing(
        fits=fits,
        best=best,
        comparisons=_against(best, fits, found.rounds, criterion, rules.tolerance),
        plateau=found.plateau_gain is not None and not binds,
        tolerance=rules.tolerance,
    )


def _against(
    best: int, fits: Sequence[int], rounds: Sequence[Round], criterion: Criterion, tolerance: float
) -> dict[int, Comparison]:
    known = relative(rounds, criterion, best)
    return {
        chunks: as_comparison(known[chunks], chunks, best, criterion, tolerance)
        for chunks in fits
        if chunks != best and chunks in known
    }


def best_of(fitting: Sequence[Trial], rounds: Sequence[Round], criterion: Criterion) -> int:
    """The M of highest paired estimate among at least one fitting trial.

    Chains of rounds need not agree with one another, so the best so far is made the reference until none
    stands above it. Where no round holds any, the trials' own throughput decides, and of equals the smaller M.
    """
    met = {block.chunks for entry in rounds for block in entry.blocks}
    timed = [trial.chunks for trial in fitting if trial.chunks in met]
    if not timed:
        return max(fitting, key=lambda trial: (_trial_speed(trial, criterion), -trial.chunks)).chunks
    best, seen = timed[0], set[int]()
    while best not in seen:
        seen.add(best)
        known = relative(rounds, criterion, best)
        best = max((known[chunks].mean, -chunks, chunks) for chunks in timed if chunks in known)[2]
    return best


def _trial_speed(trial: Trial, criterion: Criterion) -> float:
    """Samples/s of a trial outside any round; 0 where it holds none."""
    if criterion == "stage":
        return min((stage.samples_per_s for stage in trial.stages), default=0.0)
    return trial.throughput_samples_per_s or 0.0


@dataclass(frozen=True)
class Case:
    """All that a verdict is drawn from. `trials`: those of legal values that were tried, by M, ascending."""

    candidates: Candidates
    found: Found
    rules: Rules
    facts: Facts
    trials: Mapping[int, Trial]
    standing: Standing | None


def case_of(candidates: Candidates, found: Found, rules: Rules, facts: Facts) -> Case:
    """The case that a search leaves."""
    trials = tried(candidates, found.trials)
    return Case(candidates, found, rules, facts, trials, stand(candidates, found, rules))
