"""The closed forms, each with its source. Pure arithmetic; K is `stages`, V `virtual_stages`, M `chunks`.

They hold for equal stages and free communication. What is measured is always printed beside them.
"""

from __future__ import annotations

import math


def bubble(stages: int, chunks: int) -> float:
    """Share of a GPipe or 1F1B step that a rank stands idle: (K-1)/(M+K-1).

    Source: Huang et al. 2018, GPipe, arXiv 1811.06965, section 2.3. 1F1B reorders the same operations and
    leaves the same bubble (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    """
    return (stages - 1) / (chunks + stages - 1)


def interleaved_bubble(stages: int, chunks: int, virtual_stages: int) -> float:
    """Share of an interleaved 1F1B step that a rank stands idle: (K-1)/(V M+K-1) for M >= K.

    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2: the idle time is (K-1)/(V M) of the ideal
    computation time; here it is taken as a share of the whole step. The paper has M a multiple of K. For
    M < K a rank also waits in each of its V turns: a pass takes V K + M - 1 part times, V M of them busy. The
    two agree at M = K, and both are checked against a play of torch's own lists in tests/pipeline.
    """
    if chunks < stages:
        return 1 - virtual_stages * chunks / (virtual_stages * stages + chunks - 1)
    return (stages - 1) / (virtual_stages * chunks + stages - 1)


def sleep_step_s(
    stages: int, chunks: int, mini_batch: int, seconds_per_chunk: float, seconds_per_sample: float
) -> float:
    """Seconds of one GPipe or 1F1B step of the `sleep` model: T = 3 (M+K-1)(a + c N/M).

    a and c are the sums over one stage's layers: a forward sleeps a + c b once and a backward twice. Equal
    stages, no communication. Source: the bubble of Huang et al. 2018 (arXiv 1811.06965) with 3 (a + c b) as
    the time of one micro-batch in one stage.
    """
    return 3 * (chunks + stages - 1) * (seconds_per_chunk + seconds_per_sample * mini_batch / chunks)


def best_sleep_chunks(stages: int, mini_batch: int, seconds_per_chunk: float, seconds_per_sample: float) -> float:
    """The M at which `sleep_step_s` is smallest: M* = sqrt((K-1) c N / a), not rounded.

    Source: dT/dM = 0 of T = 3 (M+K-1)(a + c N/M). Infinite for a = 0 (a chunk costs nothing by itself); below
    1 where even M = 1 is past the best, as for K = 1.
    """
    if seconds_per_chunk == 0:
        return math.inf
    return math.sqrt((stages - 1) * seconds_per_sample * mini_batch / seconds_per_chunk)
