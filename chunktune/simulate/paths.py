"""What a play of the graph says about one step: when each operation ran, and the longest chain. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chunktune.simulate.graph import KINDS, Graph, hop_seconds, operation_seconds
from chunktune.simulate.values import Critical, Durations, Span


def spans_of(graph: Graph, durations: Durations, ends_s: Sequence[float]) -> tuple[Span, ...]:
    """The operations of a step, updates included, by rank and start. `ends_s`: the end of every node."""
    spans = [*_operations(graph, durations, ends_s), *_updates(graph, durations, ends_s)]
    # Operations of no length keep their order: the sort is stable.
    return tuple(sorted(spans, key=lambda span: (span.rank, span.start_s, span.end_s)))


def _operations(graph: Graph, durations: Durations, ends_s: Sequence[float]) -> Iterator[Span]:
    parts = len(graph.rank_of)
    seconds = operation_seconds(durations, 0.0)
    nodes = zip(graph.operation, graph.chunk, ends_s[len(graph.last) :], strict=True)
    for operation, chunk, end_s in nodes:
        if chunk >= 0:
            kind, part = divmod(operation, parts)
            yield Span(graph.rank_of[part], KINDS[kind], part, chunk, end_s - seconds[operation], end_s)


def _updates(graph: Graph, durations: Durations, ends_s: Sequence[float]) -> Iterator[Span]:
    for rank, (node, update_s) in enumerate(zip(graph.last, durations.update_s, strict=True)):
        yield Span(rank, "U", -1, -1, ends_s[node], ends_s[node] + update_s)


def critical_path(graph: Graph, durations: Durations, ends_s: Sequence[float]) -> Critical:
    """What the chain that ends last is made of, followed back to the start of a step that begins at 0.

    Where two predecessors end together, the rank's own is followed.
    """
    updated_s = [ends_s[node] + update for node, update in zip(graph.last, durations.update_s, strict=True)]
    rank = updated_s.index(max(updated_s))
    hop_s, seconds = hop_seconds(durations), operation_seconds(durations, 0.0)
    starts, node = len(graph.last), graph.last[rank]
    compute_s = overhead_s = transfer_s = 0.0
    while node >= starts:
        at = node - starts
        compute_s += seconds[graph.operation[at]]
        overhead_s += durations.overhead_s if graph.chunk[at] >= 0 else 0.0
        sent, posted, hop = graph.sent[at], graph.posted[at], hop_s[graph.hop[at]]
        other = sent if ends_s[sent] >= ends_s[posted] else posted
        node = graph.before[at]
        if ends_s[other] + hop > ends_s[node]:
            transfer_s += hop
            node = other
    return Critical(compute_s, overhead_s, transfer_s, durations.update_s[rank])
