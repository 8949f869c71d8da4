"""Hand-made trials, verdicts, records and journals for the tests of record, replay and report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from chunktune.journal import Event
from chunktune.results import (
    SCHEMA_VERSION,
    Block,
    Bubble,
    ByRule,
    Candidate,
    Comparison,
    Floor,
    FloorLimit,
    Limit,
    LimitDetail,
    Predicted,
    Record,
    Round,
    Shortage,
    StageFigures,
    Trial,
    Verdict,
)

MIB = 2**20
SAMPLES = 32  # N, held fixed in mini_batch mode
SAMPLES_A_CHUNK = 4  # b, held fixed in micro_batch mode
# Seconds a step with N fixed: 4 is the best, 8 is 4 % slower.
STEP_S = {1: 0.16, 2: 0.1, 4: 0.08, 8: 0.0833, 16: 0.09, 32: 0.12}
MODES = ("mini_batch", "micro_batch")
ABOVE: tuple[Limit, ...] = get_args(Limit)
BELOW: tuple[FloorLimit, ...] = get_args(FloorLimit)
NASTY = "\x1b[31mred\x1b[0m a|b\nnext\x07 `code` \u202etxt"


def batch_of(chunks: int, mode: str = "mini_batch") -> tuple[int, int]:
    if mode == "mini_batch":
        return SAMPLES // chunks, SAMPLES
    return SAMPLES_A_CHUNK, SAMPLES_A_CHUNK * chunks


def stage(rank: int, chunks: int, mode: str = "mini_batch") -> StageFigures:
    busy_s = 0.06 + 0.001 * chunks + 0.002 * rank
    return StageFigures(
        rank=rank,
        parts=(rank,),
        forward_s=busy_s / 3 / chunks,
        backward_s=busy_s / 1.5 / chunks,
        busy_s=busy_s,
        idle_share=1 - busy_s / STEP_S.get(chunks, 0.2),
        samples_per_s=batch_of(chunks, mode)[1] / busy_s,
        peak_bytes=(900 - 100 * rank) * MIB,
        reserved_bytes=None if rank else 1000 * MIB,
        capacity_bytes=1100 * MIB,
        budget_bytes=1045 * MIB,
    )


def ok_trial(chunks: int, mode: str = "mini_batch") -> Trial:
    micro_batch, mini_batch = batch_of(chunks, mode)
    step_s = STEP_S.get(chunks, 0.2)
    return Trial(
        chunks=chunks,
        micro_batch=micro_batch,
        mini_batch=mini_batch,
        state="ok",
        step_s=(step_s * 1.01, step_s, step_s * 0.99),
        step_median_s=step_s,
        step_interval_s=(step_s * 0.99, step_s * 1.01),
        throughput_samples_per_s=mini_batch / step_s,
        loss=8.3178,
        bubble=Bubble(measured=0.25, ideal=1 / (chunks + 1)),
        predicted=Predicted(step_s=None, peak_bytes=(900 * MIB, 800 * MIB)),
        stages=(stage(0, chunks, mode), stage(1, chunks, mode)),
    )


def shortage(**changes: Any) -> Shortage:
    return Shortage(
        **{
            "rank": 1,
            "needed_bytes": 1200 * MIB,
            "budget_bytes": 1045 * MIB,
            "asked_bytes": 64 * MIB,
            "where": "rehearsal",
            **changes,
        }
    )


def failed_trial(chunks: int, state: str, mode: str = "mini_batch", reason: str | None = None) -> Trial:
    micro_batch, mini_batch = batch_of(chunks, mode)
    return Trial(
        chunks=chunks,
        micro_batch=micro_batch,
        mini_batch=mini_batch,
        state=state,
        reason=reason or f"what happened at {chunks}",
        rank=1,
        shortage=shortage() if state == "oom" else None,
    )


def comparison(chunks: int, against: int, ratio: float = 0.96, **changes: Any) -> Comparison:
    return Comparison(
        **{
            "chunks": chunks,
            "against": against,
            "criterion": "pipeline",
            "rounds": 6,
            "ratio": ratio,
            "interval": (ratio - 0.01, ratio + 0.01),
            "tolerance": 0.01,
            "outcome": "slower" if ratio < 0.98 else "not slower",
            **changes,
        }
    )


def detail(limit: str) -> LimitDetail:
    if limit == "memory":
        return LimitDetail(shortage=shortage())
    if limit == "throughput":
        return LimitDetail(comparison=comparison(8, 4))
    if limit == "plateau":
        return LimitDetail(reason="the next doubling of M can gain 0.2 % at most", comparison=comparison(8, 4, 1.004))
    return LimitDetail(reason=f"reason for {limit}")


def verdict(limit: Limit, side: str = "above", mode: str = "mini_batch", **changes: Any) -> Verdict:
    micro_batch, mini_batch = batch_of(4, mode)
    below = side == "below"
    fields: dict[str, Any] = {
        "chunks": 4,
        "micro_batch": micro_batch,
        "mini_batch": mini_batch,
        "limit": limit,
        "limit_side": side,
        "limit_stage": 1 if limit in ("memory", "throughput") else None,
        "limit_detail": detail(limit),
        "next_chunks": None if limit in ("batch", "schedule", "range") and not below else 8,
        "floor": Floor(chunks=4, limit=limit, stage=1, reason=f"floor of {limit}") if below else None,
        "confidence": "clear",
        "by_rule": ByRule(pipeline=4, stage=4),
        "smallest_within_tolerance": 4,
        "confirmed": "fresh processes",
        "advice": ("use fewer stages",),
        "findings": ("the loss agrees",),
    }
    return Verdict(**{**fields, **changes})


def trials(limit: str, side: str = "above", mode: str = "mini_batch") -> tuple[Trial, ...]:
    states = {2: "ok", 4: "ok", 8: "ok"}
    failed = {"memory": "oom", "failed": "killed"}.get(limit, "ok")
    states[2 if side == "below" else 8] = failed
    return tuple(
        ok_trial(chunks, mode) if state == "ok" else failed_trial(chunks, state, mode)
        for chunks, state in states.items()
    )


def candidates(values: Sequence[int] = (1, 2, 4, 8, 16, 32), mode: str = "mini_batch") -> tuple[Candidate, ...]:
    return tuple(
        Candidate(
            chunks=chunks,
            micro_batch=batch_of(chunks, mode)[0],
            mini_batch=batch_of(chunks, mode)[1],
            legal=chunks > 1,
            reason=None if chunks > 1 else "1f1b needs M >= K = 2",
        )
        for chunks in values
    )


def spec(mode: str = "mini_batch", **model: Any) -> dict[str, Any]:
    size = SAMPLES if mode == "mini_batch" else SAMPLES_A_CHUNK
    other = "micro_batch" if mode == "mini_batch" else "mini_batch"
    return {
        "model": {"family": "transformer", "layers": 8, "sequence": 128, **model},
        "pipeline": {"stages": 2, "schedule": "1f1b"},
        "batch": {mode: size, other: None, "chunks": "auto"},
        "sweep": {"criterion": "pipeline", "tolerance": 0.01, "budget": 600.0},
    }


def record(limit: Limit = "throughput", side: str = "above", mode: str = "mini_batch", **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "chunktune", "version": "0.1.0"},
        "mode": "measured",
        "status": "complete",
        "quick": False,
        "spec": spec(mode),
        "sources": {"batch.mini_batch": "file"},
        "environment": {"torch": "2.13.0", "cores": 2},
        "layers_per_part": (5, 6),
        "candidates": candidates(mode=mode),
        "trials": trials(limit, side, mode),
        "comparisons": (comparison(8, 4), comparison(2, 4, 0.8)),
        "confirmation": ok_trial(4, mode),
        "warnings": ("4 stages on 2 cores",),
        "verdict": verdict(limit, side, mode),
        "started_at": "2026-01-02T03:04:05.000006+00:00",
        "elapsed_s": 61.5,
    }
    return Record(**{**fields, **changes})


def infeasible_record() -> Record:
    failed = (failed_trial(2, "oom"), failed_trial(4, "killed"), failed_trial(8, "timeout"))
    answer = verdict(
        "memory",
        chunks=None,
        micro_batch=None,
        mini_batch=None,
        next_chunks=None,
        by_rule=ByRule(pipeline=None, stage=None),
        smallest_within_tolerance=None,
        confirmed="no",
    )
    return record(trials=failed, verdict=answer, confirmation=None)


def every_record() -> list[Record]:
    """Each limit on each side that it can stand on, in both modes, and the two records without a choice."""
    sides = [(limit, "above") for limit in ABOVE] + [(limit, "below") for limit in BELOW]
    made = [record(limit, side, mode) for limit, side in sides for mode in MODES]
    return [*made, infeasible_record(), record(verdict=None, status="interrupted", trials=())]


def a_round(values: Sequence[int], factor: float = 1.0) -> Round:
    blocks = [
        Block(chunks=chunks, mini_batch=SAMPLES, step_s=STEP_S[chunks] * factor, busy_s=(0.06, 0.05))
        for chunks in (*values, *reversed(values))
    ]
    return Round(blocks=tuple(blocks))


def start_event(mode: str = "mini_batch", **changes: Any) -> dict[str, Any]:
    return {
        "event": "start",
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "chunktune", "version": "0.1.0"},
        "spec": spec(mode),
        "sources": {"batch.mini_batch": "file"},
        "environment": {"torch": "2.13.0", "cores": 2},
        "candidates": [candidate.model_dump(mode="json") for candidate in candidates(mode=mode)],
        "quick": False,
        "warnings": ["4 stages on 2 cores"],
        "layers_per_part": [5, 6],
        "started_at": "2026-01-02T03:04:05.000006+00:00",
        **changes,
    }


def begin_event(task: str, values: Sequence[int], elapsed_s: float) -> dict[str, Any]:
    return {"event": "begin", "task": task, "values": list(values), "deadline_s": 60.0, "elapsed_s": elapsed_s}


def lost_event(task: str, values: Sequence[int], state: str, elapsed_s: float, **changes: Any) -> dict[str, Any]:
    return {
        "event": "lost",
        "task": task,
        "values": list(values),
        "chunks": values[0],
        "state": state,
        "reason": "signal 6",
        "rank": 1,
        "shortage": None,
        "elapsed_s": elapsed_s,
        **changes,
    }


def trial_event(trial, elapsed_s=1.0) -> Event:
    return {"event": "trial", "trial": trial.model_dump(mode="json"), "elapsed_s": elapsed_s}


def full_journal() -> list[Event]:
    return [
        start_event(),
        {"event": "group", "generation": 0, "kind": "processes", "elapsed_s": 8.0},
        begin_event("trial", [2], 8.0),
        trial_event(ok_trial(2), 10.0),
        begin_event("trial", [4], 10.0),
        trial_event(ok_trial(4), 12.0),
        {"event": "warning", "text": "the clock drifts"},
        begin_event("trial", [8], 12.0),
        lost_event("trial", [8], "killed", 20.0),
        begin_event("trial", [8], 28.0),
        lost_event("trial", [8], "killed", 30.0),
        begin_event("rounds", [2, 4], 38.0),
        {
            "event": "rounds",
            "values": [2, 4],
            "rounds": [a_round([2, 4]).model_dump(mode="json")],
            "elapsed_s": 40.0,
        },
        begin_event("confirm", [4], 50.0),
        {
            "event": "confirm",
            "trial": ok_trial(4).model_dump(mode="json"),
            "fresh": "fresh processes",
            "elapsed_s": 55.0,
        },
        {
            "event": "end",
            "status": "complete",
            "verdict": verdict("failed").model_dump(mode="json"),
            "comparisons": [comparison(2, 4, 0.8).model_dump(mode="json")],
            "elapsed_s": 56.0,
        },
    ]
