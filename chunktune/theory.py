"""The closed forms, each with its source. Pure arithmetic; K is `stages`, V `virtual_stages`, M `chunks`, L `layers`.

The times hold for equal stages and free communication. What is measured is always printed beside them.
"""

from __future__ import annotations

import math
from typing import Literal


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


def step_s(
    stages: int,
    chunks: float,
    mini_batch: int,
    seconds_per_chunk: float,
    seconds_per_sample: float,
    *,
    virtual_stages: int = 1,
    constant_s: float = 0.0,
) -> float:
    """Seconds of one step where a stage takes a + c b for a micro-batch: T = (M + (K-1)/V)(V a + c N/M) + constant.

    a (`seconds_per_chunk`, of each of the V parts of a rank) and c (`seconds_per_sample`, of the whole rank)
    cover forward and backward together. GPipe and 1F1B have V = 1: T = (M+K-1)(a + c N/M) + constant. V > 1 is
    interleaved 1F1B with M a multiple of K. `constant_s`: what does not change with M, such as the optimizer.
    Equal stages, no communication. Source: the bubble of Huang et al. 2018 (arXiv 1811.06965) and, for V > 1, of
    Narayanan et al. 2021 (arXiv 2104.04473, section 2.2), with (a + c b) as the time of a micro-batch.
    """
    a_s = virtual_stages * seconds_per_chunk
    passes = chunks + (stages - 1) / virtual_stages
    return passes * (a_s + seconds_per_sample * mini_batch / chunks) + constant_s


def best_chunks(
    stages: int, mini_batch: int, seconds_per_chunk: float, seconds_per_sample: float, virtual_stages: int = 1
) -> float:
    """The M at which `step_s` is smallest at fixed N: M* = sqrt((K-1) c N / a) / V, not rounded.

    Source: dT/dM = 0 of `step_s`. Only the ratio of c to a matters, so a and c may be of the forward alone.
    Infinite for a = 0 (a chunk costs nothing by itself); below 1 where even M = 1 is past the best, as for K = 1.
    """
    if seconds_per_chunk == 0:
        return math.inf
    return math.sqrt((stages - 1) * seconds_per_sample * mini_batch / seconds_per_chunk) / virtual_stages


def sleep_step_s(
    stages: int, chunks: int, mini_batch: int, seconds_per_chunk: float, seconds_per_sample: float
) -> float:
    """Seconds of one GPipe or 1F1B step of the `sleep` model: T = 3 (M+K-1)(a + c N/M).

    a and c are the sums over one stage's layers: a forward sleeps a + c b once and a backward twice. Equal
    stages, no communication. Source: `step_s` with 3 (a + c b) as the time of one micro-batch in one stage.
    """
    return step_s(stages, chunks, mini_batch, 3 * seconds_per_chunk, 3 * seconds_per_sample)


def best_sleep_chunks(stages: int, mini_batch: int, seconds_per_chunk: float, seconds_per_sample: float) -> float:
    """The M at which `sleep_step_s` is smallest: `best_chunks` at V = 1, since the factor of 3 cancels."""
    return best_chunks(stages, mini_batch, seconds_per_chunk, seconds_per_sample)


def gpipe_activations(mini_batch: int, layers: int, stages: int, chunks: int, *, rematerialized: bool = True) -> float:
    """Peak activations of a GPipe rank in units of one layer's output for one sample: the argument of the O().

    With re-materialization N + (L/K)(N/M): the boundary inputs of all N samples, and one micro-batch inside the
    rank's L/K layers. Without it (L/K) N: every layer keeps every sample. An order of growth, not bytes: a layer
    keeps several tensors the size of its output inside (`transformer_activation_bytes`). Source: Huang et al.
    2018, arXiv 1811.06965, section 2.3, which gives O(N + (L/K)(N/M)), and O(N L) for one device (K = 1).
    """
    layers_a_rank = layers / stages
    if not rematerialized:
        return layers_a_rank * mini_batch
    return mini_batch + layers_a_rank * mini_batch / chunks


Recomputation = Literal["none", "selective", "full"]


def transformer_activation_bytes(
    sequence: int,
    micro_batch: int,
    hidden: int,
    heads: int,
    *,
    recompute: Recomputation = "none",
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """Bytes that one transformer layer keeps from the forward to the backward of one micro-batch.

    s = `sequence` (tokens), b = `micro_batch` (samples), h = `hidden`, a = `heads`, t = `tensor_parallel` (ranks):

        recompute    t = 1                t ranks                          t ranks, sequence parallel
        none         s b h (34 + 5 a s/h) s b h (10 + 24/t + 5 a s/(h t))  s b h (34/t + 5 a s/(h t))
        selective    34 s b h             s b h (10 + 24/t)                34 s b h / t
        full         2 s b h              2 s b h                          2 s b h

    16-bit activations, dropout masks of one byte, feed-forward of 4 h, attention that keeps its s x s matrices
    (selective recomputation recomputes these; fused attention never keeps them). Embedding, last norm, output
    layer and loss are outside. Source: Korthikanti et al. 2022, arXiv 2205.05198, sections 4 and 5
    (table 2).
    """
    elements = sequence * micro_batch * hidden
    if recompute == "full":
        return 2.0 * elements
    split = 34 if sequence_parallel else 24
    whole = 34 - split
    attention = 5 * heads * sequence / hidden if recompute == "none" else 0.0
    return elements * (whole + (split + attention) / tensor_parallel)


def first_rank_activation_bytes(
    layer_bytes: float, layers: int, stages: int, chunks: int, *, virtual_stages: int = 1
) -> float:
    """Bytes of activations at the peak of the first rank under 1F1B: the fullest, with min(M, K) micro-batches.

    `layer_bytes` is `transformer_activation_bytes` of one layer and one micro-batch. The first rank holds L/K
    layers: L layer_bytes min(M, K)/K. Interleaved with V > 1 parts a rank: L layer_bytes (1 + (K-1)/(K V)), for
    M >= K, at most all M micro-batches of its layers. Source: Korthikanti et al. 2022, arXiv 2205.05198,
    section 4.2.3 (there p = K, m = V).
    """
    most = layer_bytes * layers * chunks / stages
    if virtual_stages == 1:
        return min(most, layer_bytes * layers)
    return min(most, layer_bytes * layers * (1 + (stages - 1) / (stages * virtual_stages)))
