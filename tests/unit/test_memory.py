"""Layers to parts to ranks: what follows from the figures of single layers, without torch."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from chunktune import schedules
from chunktune.memory import Pipeline, beyond_profile, breakdowns, memory_curve, peak_bytes
from chunktune.results import LayerBytes, LayerFigures, LayerProfile, OperationBytes

WEIGHTS, GRADIENTS, STATE, KEPT, BOUNDARY, WORK = 1000, 500, 2000, 70, 16, 9


def operation(*peaks: tuple[int, str], **more: Any) -> OperationBytes:
    return OperationBytes(peaks=peaks, **more)


def layer_bytes(kept: int, boundary: int, work: int) -> LayerBytes:
    """A layer that keeps its input and `kept` bytes, and takes `work` bytes and its input's gradient in a backward."""
    backward = operation((kept + work + boundary, "gx"))
    weight = operation((kept + work, "cgx"), left_bytes=0)
    return LayerBytes(
        forward=operation((kept + boundary, ""), left_bytes=kept, holds="x"),
        backward=backward,
        first_backward=operation((kept + GRADIENTS + boundary, "gx"), left_bytes=GRADIENTS),
        input=operation((kept + boundary, "gx"), left_bytes=kept, holds="gx"),
        weight=weight,
        first_weight=operation((kept + GRADIENTS, "cgx"), left_bytes=GRADIENTS),
        ending_weight=weight,
        first_ending_weight=operation((kept + GRADIENTS, "cgx"), left_bytes=GRADIENTS),
    )


def figures(b: int, *, first: bool = False) -> LayerFigures:
    own = layer_bytes(KEPT * b, BOUNDARY * b, WORK * b)
    return LayerFigures(
        micro_batch=b,
        input_bytes=BOUNDARY * b,
        output_bytes=BOUNDARY * b,
        gradient_bytes=0 if first else BOUNDARY * b,
        batch_bytes=BOUNDARY * b if first else 0,
        forward_flops=0,
        backward_flops=0,
        plain=own,
        recomputed=own,
    )


def loss(sizes: tuple[int, ...]) -> LayerProfile:
    nothing = operation()
    own = LayerBytes(
        forward=operation((4, ""), left_bytes=0),
        backward=operation((0, "x")),
        first_backward=operation((0, "x")),
        input=nothing,
        weight=nothing,
        first_weight=nothing,
        ending_weight=nothing,
        first_ending_weight=nothing,
    )
    rows = tuple(
        LayerFigures(
            micro_batch=b,
            input_bytes=BOUNDARY * b,
            output_bytes=4,
            gradient_bytes=BOUNDARY * b,
            batch_bytes=8 * b,
            forward_flops=0,
            backward_flops=0,
            plain=own,
            recomputed=None,
        )
        for b in sizes
    )
    return LayerProfile(
        count=1, loss=True, parameters=0, weight_bytes=0, gradient_bytes=0, optimizer_bytes=0, figures=rows
    )


def profile(layers: int, sizes: tuple[int, ...] = (1, 2, 4)) -> tuple[LayerProfile, ...]:
    one = LayerProfile(
        count=1,
        parameters=250,
        weight_bytes=WEIGHTS,
        gradient_bytes=GRADIENTS,
        optimizer_bytes=STATE,
        update_peak_bytes=30,
        update_first_bytes=20,
        update_left_bytes=5,
        figures=tuple(figures(b, first=True) for b in sizes),
    )
    rest = one.model_copy(update={"count": layers - 1, "figures": tuple(figures(b) for b in sizes)})
    return (one, rest, loss(sizes))


def pipeline(schedule: str, stages: int, chunks: int, micro_batch: int = 2, layers: int | None = None) -> Pipeline:
    virtual = schedules.default_virtual_stages(schedule)
    parts = stages * virtual
    share = (layers or parts) // parts
    return Pipeline(schedule, stages, chunks, virtual, micro_batch, (share,) * parts)


def test_gpipe_by_hand() -> None:
    """The middle rank of three, one layer each, at its last forward: M chunks kept, and their outputs."""
    b, chunks = 2, 5
    found = breakdowns(profile(3), pipeline("gpipe", 3, chunks, b))[1]
    assert (found.weights, found.optimizer, found.batch) == (WEIGHTS, STATE, 0)
    assert found.receive_buffers == chunks * 2 * BOUNDARY * b
    # The first backward: every chunk's bytes and output, the input's gradient, and the weights' for the first time.
    assert found.activations == chunks * (KEPT + BOUNDARY) * b
    assert found.workspace == GRADIENTS + BOUNDARY * b
    assert found.held_sends == found.gradients == 0


def test_1f1b_keeps_as_many_chunks_as_there_are_ranks_from_here_to_the_end() -> None:
    b, stages, chunks = 4, 4, 9
    for rank, found in enumerate(breakdowns(profile(stages), pipeline("1f1b", stages, chunks, b))):
        in_flight = found.activations // (KEPT * b)
        assert in_flight in (stages - rank, stages - rank + 1), found
    moments = memory_curve(profile(stages), pipeline("1f1b", stages, chunks, b), 0)
    held = [moment.after_bytes for moment in moments if moment.kind == "F"]
    growth = (KEPT + BOUNDARY) * b
    assert [after - before for before, after in pairwise(held[:4])] == [growth] * 3
    assert len(set(held[5:])) == 1, "the steady state repeats"


def test_batch_and_losses_lie_where_they_are_used() -> None:
    first, middle, last = breakdowns(profile(3), pipeline("gpipe", 3, 6, 2))
    assert (first.batch, middle.batch, last.batch) == (6 * 2 * BOUNDARY, 0, 6 * 2 * 8)


def test_the_update_is_the_last_operation_and_takes_the_gradients_away() -> None:
    moments = memory_curve(profile(6), pipeline("gpipe", 2, 3, layers=6), 0)
    update = moments[-1]
    assert (update.kind, update.part, update.chunk) == ("U", -1, -1)
    assert update.peak_bytes - update.after_bytes == 3 * GRADIENTS + max(30, 5 + 20)
    assert moments[-2].after_bytes == update.after_bytes + 3 * GRADIENTS


def test_updates_together_add_up() -> None:
    layers = tuple(one.model_copy(update={"updates_together": True}) for one in profile(6))
    update = memory_curve(layers, pipeline("gpipe", 2, 3, layers=6), 0)[-1]
    assert update.peak_bytes - update.after_bytes == 3 * GRADIENTS + 3 * 30


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_the_peak_is_the_highest_point_of_the_curve_and_the_sum_of_its_breakdown(schedule: str) -> None:
    asked = pipeline(schedule, 2, 8, layers=8)
    found = breakdowns(profile(8), asked)
    assert peak_bytes(profile(8), asked) == tuple(one.total for one in found)
    for rank in range(2):
        curve = memory_curve(profile(8), asked, rank)
        assert found[rank].total == max(moment.peak_bytes for moment in curve)
        kinds = {moment.kind for moment in curve} - {"L", "U"}
        assert kinds <= {"F", "B"} or schedules.SCHEDULES[schedule].splits_backward


def scrambled(seed: int) -> tuple[LayerProfile, ...]:
    """Layers whose figures follow no rule."""
    chance = random.Random(seed)
    layers = []
    for one in profile(4, (2,)):
        row = one.figures[0]
        own = {
            name: value.model_copy(
                update={
                    "peaks": tuple((chance.randrange(400), letters) for _, letters in value.peaks),
                    "left_bytes": chance.randrange(200),
                }
            )
            for name, value in row.plain
        }
        changed = {"plain": LayerBytes(**own), "output_bytes": chance.randrange(1, 300)}
        layers.append(one.model_copy(update={"figures": (row.model_copy(update=changed),)}))
    return tuple(layers)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_shortened_step_has_the_peak_of_the_whole_one(schedule: str, stages: int) -> None:
    for seed in range(15):
        layers = scrambled(seed)
        for chunks in (stages, 2 * stages + 5, 2 * stages + 6, 40, 97):
            asked = pipeline(schedule, stages, chunks, layers=4)
            whole = [max(m.peak_bytes for m in memory_curve(layers, asked, rank)) for rank in range(stages)]
            assert list(peak_bytes(layers, asked)) == whole, (seed, chunks)


def test_between_and_beyond_profiled_sizes_levels_are_affine() -> None:
    layers = profile(4, (1, 2, 4))
    asked = pipeline("1f1b", 4, 8)
    at = {b: peak_bytes(layers, replace(asked, micro_batch=b))[1] for b in (1, 2, 3, 4, 8)}
    assert at[3] == (at[2] + at[4]) // 2
    assert at[8] == at[4] + 2 * (at[4] - at[2])
    exact = profile(4, (1, 2, 3, 4, 8))
    assert {b: peak_bytes(exact, replace(asked, micro_batch=b))[1] for b in at} == at
    assert [beyond_profile(layers, b) for b in (1, 3, 4, 8)] == [False, False, False, True]


def test_from_one_profiled_size_activations_are_in_proportion() -> None:
    layers, asked = profile(4, (2,)), pipeline("gpipe", 4, 8, 6)
    found, same = breakdowns(layers, asked)[1], breakdowns(layers, replace(asked, micro_batch=2))[1]
    assert beyond_profile(layers, 6)
    assert (found.weights, found.optimizer) == (same.weights, same.optimizer)
    assert (found.activations, found.receive_buffers) == (3 * same.activations, 3 * same.receive_buffers)


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match="nearest legal M: 4"):
        peak_bytes(profile(4), pipeline("1f1b", 4, 3))
    wrong = replace(pipeline("gpipe", 4, 3), counts=(1, 1, 1))
    with pytest.raises(ValueError, match=r"counts = \[1, 1, 1\] place 3 layers in 3 parts; the profile has 4 layers"):
        peak_bytes(profile(4), wrong)


def test_a_profile_survives_json() -> None:
    for one in profile(4):
        assert LayerProfile.model_validate_json(one.model_dump_json()) == one
