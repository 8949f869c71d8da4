"""A layer's bytes between the micro-batch sizes at which it was profiled. Pure.

Tensors grow by the same bytes with every sample, so that every figure is affine in b but for peaks, which are maxima
of such, and for what an allocator rounds. Between two sizes a chord lies on or above a maximum: never too low.
"""

from __future__ import annotations

from collections.abc import Sequence

from chunktune.candidates import divisors
from chunktune.results import LayerBytes, LayerFigures, LayerProfile, OperationBytes
from chunktune.spec import Spec

_PLAIN = ("input_bytes", "output_bytes", "gradient_bytes", "batch_bytes", "forward_flops", "backward_flops")
_Peaks = Sequence[tuple[int, str]]
_MOST_SIZES = 128


def sizes_asked(spec: Spec) -> tuple[int, ...]:
    """The b that a spec can come to, ascending: its own, or the divisors of N; only 1 and N where these are many."""
    if spec.batch.micro_batch is not None:
        return (spec.batch.micro_batch,)
    most = spec.batch.mini_batch or 1
    found = divisors(most)
    return found if len(found) <= _MOST_SIZES else (1, most)


def filled(profiles: Sequence[LayerProfile], sizes: Sequence[int]) -> tuple[LayerProfile, ...]:
    """The profiles with figures at these b too, as far as they lie between the sizes that a profile knows."""
    return tuple(profile.model_copy(update={"figures": _filled(profile.figures, sizes)}) for profile in profiles)


def _filled(known: Sequence[LayerFigures], sizes: Sequence[int]) -> tuple[LayerFigures, ...]:
    every = {figures.micro_batch: figures for figures in known}
    inside = [b for b in sizes if b not in every and min(every) < b < max(every)] if every else []
    every.update((b, figures_at(known, b)) for b in inside)
    return tuple(every[b] for b in sorted(every))


def figures_at(known: Sequence[LayerFigures], micro_batch: int) -> LayerFigures:
    """The figures at b, on the line through the two known sizes around it or nearest to it.

    `known`: by b ascending, one or more; a single one, and one at b itself, is returned as it is.
    """
    for figures in known:
        if figures.micro_batch == micro_batch or len(known) == 1:
            return figures
    index = next((i for i, one in enumerate(known) if one.micro_batch > micro_batch), len(known) - 1)
    low, high = known[max(index, 1) - 1], known[max(index, 1)]
    share = (micro_batch - low.micro_batch) / (high.micro_batch - low.micro_batch)
    numbers = {name: _line(getattr(low, name), getattr(high, name), share) for name in _PLAIN}
    again = None
    if low.recompute_flops is not None and high.recompute_flops is not None:
        again = _line(low.recompute_flops, high.recompute_flops, share)
    recomputed = None
    if low.recomputed is not None and high.recomputed is not None:
        recomputed = _bytes(low.recomputed, high.recomputed, share)
    changes = {"plain": _bytes(low.plain, high.plain, share), "recomputed": recomputed, "recompute_flops": again}
    return low.model_copy(update={"micro_batch": micro_batch, **numbers, **changes})


def _line(low: int, high: int, share: float) -> int:
    return max(0, round(low + share * (high - low)))


def _bytes(low: LayerBytes, high: LayerBytes, share: float) -> LayerBytes:
    names = LayerBytes.model_fields
    return LayerBytes(**{name: _operation(getattr(low, name), getattr(high, name), share) for name in names})


def _operation(low: OperationBytes, high: OperationBytes, share: float) -> OperationBytes:
    return low.model_copy(
        update={
            "peaks": _peaks(low.peaks, high.peaks, share),
            "left_bytes": _line(low.left_bytes, high.left_bytes, share),
            "extra_bytes": _line(low.extra_bytes, high.extra_bytes, share),
            "holds": "".join(sorted({*low.holds, *high.holds})),
        }
    )


def _peaks(low: _Peaks, high: _Peaks, share: float) -> tuple[tuple[int, str], ...]:
    """For each set of boundary tensors the highest level with it or with more of them, on the line."""
    sets = sorted({letters for _, letters in (*low, *high)})
    return tuple((_line(_highest(low, letters), _highest(high, letters), share), letters) for letters in sets)


def _highest(peaks: _Peaks, letters: str) -> int:
    return max((size for size, held in peaks if set(held) >= set(letters)), default=0)
