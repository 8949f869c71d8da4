"""The search: climb the ladder, compare in rounds, refine, confirm. Pure: it knows a Runner and no torch.

    climb     every rung against the best so far, until memory ends, throughput falls for longer than
              `patience`, nothing more can be gained, or the ladder ends
    settle    between the rungs: the floor, the neighbours of the best, and the edge between the largest
              contender and the next larger M, memory boundary included; then joint rounds over all that may
              be chosen
    confirm   the choice in a fresh group; where that fails, settle again without it

What it does next depends on the runner's answers alone, so that a search may be replayed from a journal.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Protocol

from chunktune.candidates import Candidates
from chunktune.results import Comparison, Round, Trial
from chunktune.standing import Found, Rules, Standing, best_of, rounds_allowed, stand
from chunktune.stats import compare, shared_rounds

__all__ = ["Found", "Rules", "Runner", "TrialLost", "next_doubling_gain", "search"]

NEIGHBOUR_TRIALS = 4


class TrialLost(Exception):  # noqa: N818 - an answer of the runner rather than a mistake
    """An M that had run died in a later round. `trial` replaces the earlier one; it cannot be "ok"."""

    def __init__(self, trial: Trial) -> None:
        if trial.fits:
            raise ValueError(f"the trial of M = {trial.chunks} is ok: only a failed one can be lost")
        super().__init__(f"M = {trial.chunks}: {trial.state}")
        self.trial = trial


class Runner(Protocol):
    """What the search needs of the machine; measuring, predicting and replaying differ only here."""

    def trial(self, chunks: int) -> Trial:
        """Try one M: its state is ok, oom, killed, timeout or error, or skipped where the budget ended in it."""

    def rounds(self, values: Sequence[int], count: int) -> Sequence[Round]:
        """`count` more interleaved rounds, each over all these values. May raise TrialLost."""

    def confirm(self, chunks: int) -> Trial:
        """Try one M in a fresh group."""

    def remaining_s(self) -> float:
        """Seconds left of the budget."""


def search(candidates: Candidates, runner: Runner, rules: Rules) -> Found:
    """Find out all that the verdict on these candidates needs; `verdict.decide` then draws it."""
    return _Search(candidates, runner, rules).run()


def next_doubling_gain(chunks: int, against: int, ratio: float) -> float:
    """Share of throughput that 2 M gains over M, from thr(M) / thr(M') = `ratio`, M = chunks > M' = against.

    With b fixed a step takes T(M) = c + d M, the model behind the bubble (K-1)/(M+K-1) of Huang et al. 2018
    (arXiv 1811.06965). With k = M / M': c / (d M) = x = (ratio - 1) / (k - ratio), and 2 M gains x / (x + 2).
    Infinite where the ratio is k or more, 0 where nothing was gained.
    """
    growth = chunks / against
    if ratio >= growth:
        return float("inf")
    share = max(0.0, (ratio - 1) / (growth - ratio))
    return share / (share + 2)


class _Search:
    """One search under way."""

    def __init__(self, candidates: Candidates, runner: Runner, rules: Rules) -> None:
        self.candidates = candidates
        self.runner = runner
        self.rules = rules
        self.trials: dict[int, Trial] = {}
        self.rounds: list[Round] = []
        self.failed_confirmations: list[Trial] = []
        self.misses = 0
        self.neighbours_left = NEIGHBOUR_TRIALS
        self.joint = False
        self.probed: dict[int, Trial] = {}
        self.ended = "the search ended before it"
        self.plateau_gain: float | None = None
        self.budget_spent = False
        self.aborted: str | None = None

    def run(self) -> Found:
        self._climb()
        confirmation = None
        while confirmation is None and self._settle() and self.rules.confirm and self._has_time():
            confirmation = self._confirm()
        return self._found(confirmation)

    # --- what is asked of the runner

    def _has_time(self) -> bool:
        self.budget_spent = self.budget_spent or self.runner.remaining_s() <= 0
        return not self.budget_spent

    def _try(self, chunks: int) -> Trial | None:
        """Try M, or None when the budget is spent, be it in the middle of the trial."""
        if not self._has_time():
            return None
        trial = self.probed[chunks] if chunks in self.probed else self.runner.trial(chunks)
        if trial.state == "skipped":
            self.budget_spent = True
            return None
        self.trials[chunks] = trial
        return trial

    def _measure(self, values: Sequence[int], count: int) -> bool:
        """Add rounds, or note which M died in them; False when the budget is spent."""
        if not self._has_time():
            return False
        try:
            answer = self.runner.rounds(tuple(values), count)
        except TrialLost as lost:
            if lost.trial.chunks not in values:
                raise
            self.trials[lost.trial.chunks] = lost.trial
            return True
        whole = [entry for entry in answer if set(values) <= {block.chunks for block in entry.blocks}]
        self.rounds.extend(whole)
        # A runner that measures nothing more has no time left; asking again would never end.
        self.budget_spent = not whole
        return bool(whole)

    def _confirm(self) -> Trial | None:
        """Confirm the choice; where it fails its trial takes that state, and there is no confirmation."""
        standing = self._standing()
        assert standing is not None
        trial = self.runner.confirm(standing.chosen)
        if trial.fits:
            return trial
        if trial.state == "skipped":
            self.budget_spent = True
            return None
        self.trials[standing.chosen] = trial
        self.failed_confirmations.append(trial)
        return None

    # --- climb

    def _climb(self) -> None:
        previous: Trial | None = None
        for chunks in self.candidates.ladder:
            trial = self._try(chunks)
            reason = "sweep.budget was spent before it was measured" if trial is None else self._after(trial, previous)
            if reason is not None:
                self.ended = reason
                return
            previous = self.trials[chunks]

    def _after(self, trial: Trial, previous: Trial | None) -> str | None:
        """What a rung that was just tried means for the climb: a reason to end it, or None."""
        if trial.fits:
            return self._after_fit(trial.chunks, previous)
        return self._after_oom(trial) if trial.state == "oom" else self._after_failure(trial, previous)

    def _after_fit(self, chunks: int, previous: Trial | None) -> str | None:
        comparison = self._duel(chunks)
        trial = self.trials[chunks]
        if not trial.fits:
            return self._after(trial, previous)
        if comparison is None:  # the first that fits
            self.misses = 0
            return None
        gain = self._gain_left(self._sharpened(comparison))
        if gain is not None and gain < self.rules.tolerance:
            self.plateau_gain = gain
            return f"from M = {chunks} on the next doubling can gain {100 * gain:.2g} % at most"
        return self._missed(comparison.outcome != "not slower")

    def _after_oom(self, trial: Trial) -> str | None:
        if self._fitting():
            return f"M = {trial.chunks} does not fit"
        if self.candidates.mode == "micro_batch":
            return f"M = {trial.chunks} does not fit, and with b fixed more chunks need more memory"
        return None  # with N fixed small M is what does not fit: a larger one may

    def _after_failure(self, trial: Trial, previous: Trial | None) -> str | None:
        nothing_fits = not self._fitting()
        if nothing_fits and _same_error(trial, previous) and self._largest_fails_too(trial):
            self.aborted = f"the same error at two values of M in a row: {trial.reason}"
            return self.aborted
        if nothing_fits and self.candidates.mode == "mini_batch":
            return None
        return self._missed(True)

    def _largest_fails_too(self, trial: Trial) -> bool:
        """Whether the largest rung ends as these did: with N fixed a large b may be what is wrong, and only that."""
        largest = self.candidates.ladder[-1]
        if self.candidates.mode == "micro_batch" or largest in self.trials or not self._has_time():
            return True
        if largest not in self.probed:
            self.probed[largest] = self.runner.trial(largest)
        if self.probed[largest].state == "skipped":
            self.budget_spent = True
            return True
        same = _same_error(self.probed[largest], trial)
        if same:
            self.trials[largest] = self.probed[largest]
        return same

    def _missed(self, missed: bool) -> str | None:
        self.misses = self.misses + 1 if missed else 0
        if self.misses <= self.rules.patience:
            return None
        allowed = f"sweep.patience = {self.rules.patience} lets the climb go on past {self.rules.patience}"
        return f"{self.misses} values of M in a row were no improvement, and {allowed}"

    def _sharpened(self, comparison: Comparison) -> Comparison:
        """The same pair in more rounds, while only the width of its interval hides a plateau."""
        chunks, against = comparison.chunks, comparison.against
        while (gain := self._gain_left(comparison)) is not None and gain >= self.rules.tolerance:
            left = self._rounds_left(chunks, against)
            likely = next_doubling_gain(chunks, against, comparison.ratio) < self.rules.tolerance
            if not likely or left <= 0 or not self._measure((chunks, against), min(left, self.rules.min_rounds)):
                break
            if not (self.trials[chunks].fits and self.trials[against].fits):
                break
            comparison = self._compare(chunks, against) or comparison
        return comparison

    def _gain_left(self, comparison: Comparison) -> float | None:
        """What the next doubling gains at most, where that question is asked (b fixed, no fall)."""
        asked = self.candidates.mode == "micro_batch" and comparison.outcome != "slower"
        if not asked or comparison.interval is None or comparison.against > comparison.chunks:
            return None
        return next_doubling_gain(comparison.chunks, comparison.against, comparison.interval[1])

    def _duel(self, chunks: int) -> Comparison | None:
        """Rounds of M against the best of the others until it is decided; None when there is no other."""
        while self.trials[chunks].fits:
            others = [trial for trial in self._fitting() if trial.chunks != chunks]
            if not others:
                return None
            best = best_of(others, self.rounds, self.rules.criterion)
            comparison = self._compare(chunks, best)
            left = self._rounds_left(chunks, best)
            # The challenger comes first: it is the likelier culprit of a death that nobody can explain.
            if (comparison and comparison.decided) or left <= 0:
                return comparison
            if not self._measure((chunks, best), min(left, self.rules.min_rounds)):
                return comparison
        return None

    def _compare(self, chunks: int, against: int) -> Comparison | None:
        if not shared_rounds(self.rounds, chunks, against):
            return None
        return compare(self.rounds, chunks, against, self.rules.criterion, self.rules.tolerance)

    # --- settle

    def _settle(self) -> bool:
        """Refine and compare until nothing is open or the budget is spent; False when nothing fits."""
        while not self.budget_spent and (standing := self._standing()) is not None:
            chunks = self._next_trial(standing)
            if chunks is not None:
                if self._try(chunks) is not None:
                    self._duel(chunks)
            elif not self._measure_finalists(standing):
                break
        return self._standing() is not None

    def _next_trial(self, standing: Standing) -> int | None:
        for propose in (self._inside_floor, self._beside_best, self._at_edge):
            chunks = propose(standing)
            if chunks is not None:
                return chunks
        return None

    def _inside_floor(self, standing: Standing) -> int | None:
        """Bisects to the exact smallest M that fits, where a smaller one was tried and does not."""
        below = self._tried_below(standing.fits[0])
        return None if below is None else self._middle(below, standing.fits[0])

    def _beside_best(self, standing: Standing) -> int | None:
        """The middle of the wider gap beside the best, a few times."""
        if standing.plateau or not self.neighbours_left:
            return None
        best, below, above = standing.best, self._tried_below(standing.best), self._tried_above(standing.best)
        if self.candidates.mode == "micro_batch" and (above is None or not self.trials[above].fits):
            return None  # with b fixed throughput rises up to a boundary: no peak hides below the last that fits
        gaps = [(low, high) for low, high in ((best, above), (below, best)) if low is not None and high is not None]
        low, high = max(gaps, key=lambda gap: self._untried_between(*gap), default=(best, best))
        chunks = self._middle(low, high)
        self.neighbours_left -= chunks is not None
        return chunks

    def _at_edge(self, standing: Standing) -> int | None:
        """Bisects until the next larger legal M than the choice was tried: it decides the limit.

        Where that does not fit, this ends at the exact last M that does. Where nothing above was tried (what had
        ended the climb is gone), the climb goes on.
        """
        if standing.plateau:
            return None
        above = self._tried_above(standing.chosen)
        return self._rung_above(standing.chosen) if above is None else self._middle(standing.chosen, above)

    def _measure_finalists(self, standing: Standing) -> bool:
        """A batch of rounds over all that may be chosen and the next larger M; False when none is needed."""
        finalists = self._finalists(standing)
        if not finalists:
            timed = any(block.chunks == standing.best for entry in self.rounds for block in entry.blocks)
            return not timed and self._measure((standing.best,), self.rules.min_rounds)
        # Contenders meet once all together; a best without rivals, decided against its neighbours, needs no more.
        rivals = not self.joint and any(standing.outcome(chunks) != "slower" for chunks in finalists)
        if not rivals and not any(self._is_open(chunks, standing) for chunks in finalists):
            return False
        self.joint = True
        left = min(self._rounds_left(chunks, standing.best) for chunks in finalists)
        return self._measure(sorted([standing.best, *finalists]), min(left, self.rules.min_rounds))

    def _finalists(self, standing: Standing) -> list[int]:
        """What is compared with the best at last, as far as `max_rounds` allows."""
        following = self._next_fitting(standing)
        return [
            chunks
            for chunks in standing.fits
            if chunks != standing.best
            and self._rounds_left(chunks, standing.best) > 0
            and (standing.outcome(chunks) != "slower" or chunks in following)
        ]

    def _is_open(self, chunks: int, standing: Standing) -> bool:
        """Whether a finalist needs more rounds with the best."""
        # Where a chain of other values decided, what the choice rests on is still compared directly.
        undecided = standing.outcome(chunks) == "undecided"
        return undecided or self._shared(chunks, standing) < self.rules.min_rounds

    def _rounds_left(self, chunks: int, against: int) -> int:
        """Rounds that a comparison may still have; an undecided one gets more where the machine drifts."""
        allowed = rounds_allowed(self.rounds, chunks, against, self.rules)
        return allowed - shared_rounds(self.rounds, chunks, against)

    def _shared(self, chunks: int, standing: Standing) -> int:
        return shared_rounds(self.rounds, chunks, standing.best)

    def _next_fitting(self, standing: Standing) -> tuple[int, ...]:
        """The next larger M that was tried, where it fits."""
        above = self._tried_above(standing.chosen)
        return (above,) if above is not None and self.trials[above].fits else ()

    # --- what is known

    def _fitting(self) -> list[Trial]:
        return [trial for _, trial in sorted(self.trials.items()) if trial.fits]

    def _standing(self) -> Standing | None:
        return stand(self.candidates, self._found(None), self.rules)

    def _tried_below(self, chunks: int) -> int | None:
        return max((value for value in self.trials if value < chunks), default=None)

    def _tried_above(self, chunks: int) -> int | None:
        return min((value for value in self.trials if value > chunks), default=None)

    def _rung_above(self, chunks: int) -> int | None:
        return min((value for value in self.candidates.ladder if value > chunks), default=None)

    def _untried_between(self, low: int, high: int) -> int:
        legal = self.candidates.legal
        return max(0, bisect_left(legal, high) - bisect_right(legal, low))

    def _middle(self, low: int, high: int) -> int | None:
        """The middle legal M strictly between two neighbouring tried ones, None where there is none."""
        count = self._untried_between(low, high)
        if count == 0:
            return None
        return self.candidates.legal[bisect_right(self.candidates.legal, low) + (count - 1) // 2]

    def _found(self, confirmation: Trial | None) -> Found:
        trials = {chunks: self._skipped(chunks) for chunks in self.candidates.ladder} | self.trials
        return Found(
            trials=tuple(trial for _, trial in sorted(trials.items())),
            rounds=tuple(self.rounds),
            confirmation=confirmation,
            failed_confirmations=tuple(self.failed_confirmations),
            plateau_gain=self.plateau_gain,
            budget_spent=self.budget_spent,
            aborted=self.aborted,
        )

    def _skipped(self, chunks: int) -> Trial:
        micro_batch, mini_batch = self.candidates.batch_of(chunks)
        return Trial(chunks=chunks, micro_batch=micro_batch, mini_batch=mini_batch, state="skipped", reason=self.ended)


def _same_error(trial: Trial, previous: Trial | None) -> bool:
    return previous is not None and trial.state == previous.state and trial.reason == previous.reason
