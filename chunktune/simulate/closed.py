"""GPipe and 1F1B without a node for every operation: the same ends as the graph's, from their structure.

Both follow torch's hand-written loops, `ScheduleGPipe._step_microbatches` and `Schedule1F1B._step_microbatches` of
torch.distributed.pipelining.schedules (2.13). Symbols: r a rank, K of them; i, j chunks, M of them; f_r, b_r the
operations with their overhead; c_r the hop between r and r + 1 (0 after the last rank). A transfer comes through
c after both ends have posted it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

_CHECKED_EVERY = 64


def gpipe_ends(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hop_s: Sequence[float],
    starts_s: Sequence[float],
    chunks: int,
) -> list[float]:
    """The end of each of K ranks that start at `starts_s`; `hop_s` has K - 1 values. O(K), whatever M is."""
    turned = _flow(forward_s, hop_s, starts_s, chunks)
    return _flow(backward_s[::-1], hop_s[::-1], turned[::-1], chunks)[::-1]


def _flow(operation_s: Sequence[float], hop_s: Sequence[float], starts_s: Sequence[float], chunks: int) -> list[float]:
    """All chunks once through all ranks in this order; when each rank is through, its sends waited for.

    A rank receives a chunk when it is through with the one before: with g = c + operation,
    E_r(i) = max(E_{r-1}(i), E_r(i-1)) + g. As a function of i, E_r is a maximum of lines p + q i: the rank turns
    each line into p + g + max(q, g) i and adds the line of its own start, start + g + g i. So those with q <= g
    become one, and the rest form a stack with the smallest slope on top; `shift_s` is what all have gained.
    """
    lines: list[tuple[float, float]] = []
    shift_s = 0.0
    last_s, before_s = [], []
    for rank, start_s in enumerate(starts_s):
        cost_s = operation_s[rank] + (hop_s[rank - 1] if rank else 0.0)
        level_s = start_s - shift_s
        while lines and lines[-1][1] <= cost_s:
            level_s = max(level_s, lines.pop()[0])
        lines.append((level_s, cost_s))
        shift_s += cost_s
        last_s.append(shift_s + max(level + slope * (chunks - 1) for level, slope in lines))
        before_s.append(
            shift_s + max(level + slope * (chunks - 2) for level, slope in lines) if chunks > 1 else start_s
        )
    # The last send comes through last: both its ends are posted after those of the earlier ones.
    through = [max(mine, other) + hop for mine, other, hop in zip(last_s, before_s[1:], hop_s, strict=False)]
    return [*through, last_s[-1]]


def _highest(lines: Sequence[tuple[float, float]], at: int) -> float:
    return max(level + slope * at for level, slope in lines)


def one_f_one_b_ends(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hop_s: Sequence[float],
    starts_s: Sequence[float],
    chunks: int,
) -> list[float]:
    """The end of each of K <= M ranks that start at `starts_s`; `hop_s` has K - 1 values.

    M + K turns of a few operations on vectors over the ranks, fewer where the steady state repeats itself.
    Memory O(K).
    """
    import numpy as np

    hop = np.array([*hop_s, 0.0])
    loop = _Loop(np.array(forward_s), np.array(backward_s), hop, np.concatenate(([0.0], hop[:-1])))
    ready = _warm_up(loop, np.array(starts_s, dtype=np.float64))
    received = _steady(loop, ready, chunks - len(forward_s) + 1)
    ends: list[float] = _cool_down(loop, received + loop.backward).tolist()
    return ends


class _Loop:
    """Vectors over the ranks: f, b, the hop behind each rank (c_r) and the one before it (c_{r-1})."""

    def __init__(self, forward: Vector, backward: Vector, hop: Vector, hop_before: Vector) -> None:
        self.forward, self.backward, self.hop, self.hop_before = forward, backward, hop, hop_before
        self.ranks = len(forward)


def _warm_up(loop: _Loop, starts: Vector) -> Vector:
    """When each rank posts its first exchange, after K - r forwards.

    Within one chunk i, S_r(i) is when rank r is through with F of i and with the send of i - 1, and T_r(i) when
    its send of i is through:
        S_r(i) = max(max(S_{r-1}(i), S_r(i-1)) + c_{r-1} + f_r, T_r(i-1)),  T_r(i) = max(S_r(i), S_{r+1}(i-1)) + c_r
    which is a running maximum over r of what does not come from rank r - 1, each less the cost of the way to it.
    """
    import numpy as np

    cost = loop.hop_before + loop.forward
    way = np.cumsum(cost)
    ready, through, sent = np.empty(loop.ranks), starts, np.full(loop.ranks, -np.inf)
    for ranks in range(loop.ranks, 0, -1):
        alone = np.maximum(through[:ranks] + cost[:ranks], sent[:ranks])
        now = np.maximum.accumulate(alone - way[:ranks]) + way[:ranks]
        sent = np.maximum(now[:-1], through[1:ranks]) + loop.hop[: ranks - 1]
        ready[ranks - 1] = now[-1]
        through = now
    return ready


def _steady(loop: _Loop, ready: Vector, turns: int) -> Vector:
    """When each rank has received the gradient of chunk `turns` - 1, all ranks being in 1B1F till then.

    Turn j of rank r is: [send F, receive B] with rank r + 1, B, [send B, receive F] with rank r - 1, F. The two
    exchanges of a pair meet, so X_r(j), the end of the first, is
        X_r(j) = max(A_r(j), X_{r+1}(j) + b_{r+1}) + c_r,    A_r(j+1) = X_{r-1}(j) + f_r  (A_0: X_0(j) + b_0 + f_0).
    Measured from where the way W_r = sum over q < r of (b_{q+1} + c_q) begins, y_r = X_r + W_r, this is
        z_r(j+1) = y_{r-1}(j) + (f_r + b_r + c_{r-1} + c_r),    y_r(j) = max over r' >= r of z_r'(j)
    with y_0 in place of y_{-1}. Arrays run from the last rank to the first, and y holds y_0 twice. It is a
    max-plus linear map: once every rank has gained the same in one turn, it gains that for ever.
    """
    import numpy as np

    gain = (loop.forward + loop.backward + loop.hop_before + loop.hop)[::-1].copy()
    way = np.concatenate(([0.0], np.cumsum(loop.backward[1:] + loop.hop[:-1])))
    alone = (ready + loop.hop + way)[::-1].copy()
    levels = np.empty(loop.ranks + 1)
    for turn in range(turns):
        np.maximum.accumulate(alone, out=levels[:-1])
        levels[-1] = levels[-2]
        left = turns - 1 - turn
        if turn % _CHECKED_EVERY == 0 and left and _repeats(levels, gain):
            levels += left * gain.max()
            break
        np.add(levels[1:], gain, out=alone)
    received: Vector = levels[-2::-1] - way
    return received


def _repeats(levels: Vector, gain: Vector) -> bool:
    """Whether every rank gains the largest gain in the next turn, but for rounding; no other gain can last."""
    import numpy as np

    following = np.maximum.accumulate(levels[1:] + gain)
    slack = 4 * np.finfo(np.float64).eps * float(np.abs(following).max())
    return bool(np.all(np.abs(following - levels[:-1] - gain.max()) <= slack))


def _cool_down(loop: _Loop, through: Vector) -> Vector:
    """The end of each rank. `through`: when each is through with B of chunk M - K, the last for rank 0 in 1B1F.

    In turn q, of chunk M - K + q, ranks r >= q are still in 1B1F and the others only receive, compute and send
    gradients. S_r(q) is when rank r is through with B and with the send before, Y_r(q) when the gradient from
    r + 1 has come to it:
        S_r(q) = max(S_{r+1}(q) + c_r + b_r, what rank r waits for besides)
        besides, r >= q: S_{r-1}(q-1) - b_{r-1} + f_r + c_r + b_r
        besides, r <  q: max(S_r(q-1) + c_r + b_r, Y_{r-1}(q-1)),    Y_r(q) = max(S_{r+1}(q), S_r(q-1)) + c_r
    again a running maximum, from the last rank to the first.
    """
    import numpy as np

    cost = loop.hop + loop.backward
    way = np.concatenate(([0.0], np.cumsum(cost[:-1])))
    following = loop.forward[1:] + cost[1:] - loop.backward[:-1]
    arrived = np.empty(0)
    alone = np.empty(loop.ranks)
    for turn in range(1, loop.ranks):
        alone[turn:] = through[turn - 1 : -1] + following[turn - 1 :]
        alone[:turn] = through[:turn] + cost[:turn]
        alone[1:turn] = np.maximum(alone[1:turn], arrived)
        now = np.maximum.accumulate((alone + way)[::-1])[::-1] - way
        arrived = np.maximum(now[1 : turn + 1], through[:turn]) + loop.hop[:turn]
        through = now
    return np.concatenate((through[:1], np.maximum(through[1:], arrived)))
