"""The figures of a layer at any b, from those at the sizes that were profiled. Pure.

Tensors grow in proportion to b or not at all, so that every figure is affine in b but for what an allocator rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chunktune.results import LayerBytes, LayerFigures, LayerProfile, OperationBytes

_OF_BATCH = ("input_bytes", "output_bytes", "gradient_bytes", "batch_bytes")


def profiled_sizes(layers: Sequence[LayerProfile]) -> tuple[int, ...]:
    """The values of b at which layers were profiled, ascending."""
    return tuple(figures.micro_batch for figures in layers[0].figures)


def figures_at(profile: LayerProfile, micro_batch: int) -> LayerFigures:
    """Bytes and operations of one layer at b.

    Affine between the two profiled sizes around b, the outermost piece beyond them; from a single profiled size in
    proportion to b, the gradients of weights excepted.
    """
    known = [_without_samples(profile), *profile.figures] if len(profile.figures) == 1 else list(profile.figures)
    for figures in known:
        if figures.micro_batch == micro_batch:
            return figures
    above = next((at for at, figures in enumerate(known) if figures.micro_batch > micro_batch), len(known) - 1)
    low, high = known[max(1, above) - 1], known[max(1, above)]
    return _between(low, high, micro_batch)


def _between(low: LayerFigures, high: LayerFigures, micro_batch: int) -> LayerFigures:
    share = (micro_batch - low.micro_batch) / (high.micro_batch - low.micro_batch)
    numbers = {
        name: _mixed(getattr(low, name), getattr(high, name), share)
        for name in (*_OF_BATCH, "forward_flops", "backward_flops")
    }
    if low.recompute_flops is not None and high.recompute_flops is not None:
        numbers["recompute_flops"] = _mixed(low.recompute_flops, high.recompute_flops, share)
    plain = _layer_bytes(low.plain, high.plain, share)
    recomputed = high.recomputed
    if low.recomputed is not None and high.recomputed is not None:
        recomputed = _layer_bytes(low.recomputed, high.recomputed, share)
    more = {"micro_batch": micro_batch, "plain": plain, "recomputed": recomputed}
    return high.model_copy(update={**numbers, **more})


def _mixed(low: int, high: int, share: float) -> int:
    return max(0, round(low + (high - low) * share))


def _layer_bytes(low: LayerBytes, high: LayerBytes, share: float) -> LayerBytes:
    return LayerBytes(**{name: _operation(getattr(low, name), operation, share) for name, operation in high})


def _operation(low: OperationBytes, high: OperationBytes, share: float) -> OperationBytes:
    lows, highs = ({letters: size for size, letters in one.peaks} for one in (low, high))
    peaks = tuple(
        (_mixed(_level(lows, letters), _level(highs, letters), share), letters) for letters in sorted({*lows, *highs})
    )
    return OperationBytes(
        peaks=peaks,
        left_bytes=_mixed(low.left_bytes, high.left_bytes, share),
        extra_bytes=_mixed(low.extra_bytes, high.extra_bytes, share),
        holds=high.holds,
    )


def _level(peaks: Mapping[str, int], letters: str) -> int:
    """The peak with these letters; where there is none, the highest with more of them, which it does not exceed."""
    if letters in peaks:
        return peaks[letters]
    return max((size for more, size in peaks.items() if set(letters) < set(more)), default=0)


def _without_samples(profile: LayerProfile) -> LayerFigures:
    """The layer at b = 0: only the gradients of its weights come to be, in the first backward."""
    (figures,) = profile.figures
    nothing = {
        "micro_batch": 0,
        "forward_flops": 0,
        "backward_flops": 0,
        "plain": _emptied(figures.plain, profile.gradient_bytes),
        "recomputed": figures.recomputed and _emptied(figures.recomputed, profile.gradient_bytes),
        "recompute_flops": None if figures.recompute_flops is None else 0,
    }
    return figures.model_copy(update={**dict.fromkeys(_OF_BATCH, 0), **nothing})


def _emptied(own: LayerBytes, gradients: int) -> LayerBytes:
    return LayerBytes(
        **{
            name: OperationBytes(
                peaks=tuple((gradients * name.startswith("first"), letters) for _, letters in operation.peaks),
                left_bytes=gradients * (name.startswith("first") and operation.left_bytes > 0),
                holds=operation.holds,
            )
            for name, operation in own
        }
    )
