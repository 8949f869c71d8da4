"""The time line that the real pipeline records of its confirmation: real processes over gloo, known costs."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from on_device import fake_group, rank_work
from running import despite_noise, sweep

from chunktune.device import CpuDevice
from chunktune.orders import computes
from chunktune.pipeline.live import timeline_of
from chunktune.pipeline.work import Trainer, TrainingStep
from chunktune.record import read_record, record_json
from chunktune.report.trace import to_trace
from chunktune.results import Record, Timeline
from chunktune.schedules import SCHEDULES
from chunktune.spec import Spec
from chunktune.timelines import timeline

STAGES, CHUNKS = 2, 4
A, C = 0.004, 0.001
SPEC = f"""
[model]
family = "sleep"
layers = {STAGES}
seconds_per_chunk = {A}
seconds_per_sample = {C}
[pipeline]
stages = {STAGES}
schedule = "1f1b"
[batch]
mini_batch = 8
chunks = [{CHUNKS}]
"""
CLOCKS_S = 2e-3
"""How far apart two ranks on one machine may leave the barrier from which each counts."""


@cache
def measured() -> Record:
    """One sweep for all of these tests, and another where a busy machine spoilt it."""
    return sweep(SPEC).chosen()


def recorded() -> Timeline:
    confirmed = measured().confirmation
    assert confirmed is not None
    assert confirmed.timeline is not None, "a confirmation keeps its time line"
    return confirmed.timeline


def test_every_operation_of_the_schedule_is_there_once_and_in_its_order() -> None:
    orders = computes("1f1b", stages=STAGES, chunks=CHUNKS, virtual_stages=1)
    for rank, (found, steps) in enumerate(zip(recorded().ranks, orders, strict=True)):
        assert found.rank == rank
        ran = list(zip(found.kinds, found.parts, found.chunks, strict=True))
        assert [one for one in ran if one[0] in "FB"] == [(step.kind, step.part, step.chunk) for step in steps]
        losses = [("L", rank, chunk) for chunk in range(CHUNKS)] if rank == STAGES - 1 else []
        assert [one for one in ran if one[0] == "L"] == losses
        assert [one for one in ran if one[0] == "U"] == [("U", -1, -1)]
        assert ran[-1] == ("U", -1, -1)


def test_a_rank_does_one_thing_at_a_time() -> None:
    for rank in recorded().ranks:
        spans = list(zip(rank.start_s, rank.end_s, strict=True))
        assert all(start_s <= end_s for start_s, end_s in spans)
        assert all(end_s <= start_s for (_, end_s), (start_s, _) in pairwise(spans))


def test_an_operation_takes_what_it_sleeps() -> None:
    for rank in recorded().ranks:
        for kind, start_s, end_s in zip(rank.kinds, rank.start_s, rank.end_s, strict=True):
            least_s = {"F": A + 2 * C, "B": 2 * (A + 2 * C)}.get(kind, 0.0)
            assert end_s - start_s >= least_s


@despite_noise(measured.cache_clear)
def test_no_chunk_is_on_a_rank_before_it_left_the_other() -> None:
    starts: dict[tuple[str, int, int], float] = {}
    ends: dict[tuple[str, int, int], float] = {}
    for rank in recorded().ranks:
        names = list(zip(rank.kinds, rank.parts, rank.chunks, strict=True))
        starts |= dict(zip(names, rank.start_s, strict=True))
        ends |= dict(zip(names, rank.end_s, strict=True))
    for chunk in range(CHUNKS):
        assert starts["F", 1, chunk] >= ends["F", 0, chunk] - CLOCKS_S
        assert starts["B", 0, chunk] >= ends["B", 1, chunk] - CLOCKS_S
        assert starts["B", 1, chunk] >= ends["L", 1, chunk], "one rank, one clock"


@despite_noise(measured.cache_clear)
def test_the_time_line_is_that_of_one_step() -> None:
    ranks, confirmed = recorded().ranks, measured().confirmation
    assert min(rank.start_s[0] for rank in ranks) == 0.0, "the step starts with its first operation"
    assert confirmed is not None
    assert max(rank.end_s[-1] for rank in ranks) <= confirmed.step_s[-1] + CLOCKS_S


def test_it_comes_back_from_the_disk_and_is_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(record_json(measured()))
    again = read_record(tmp_path / "record.json")
    shown = timeline(again)
    assert (shown.source, shown.chunks) == ("measured", CHUNKS)
    kinds = Counter((span.rank, span.kind) for span in shown.spans)
    assert kinds == Counter((rank.rank, kind) for rank in recorded().ranks for kind in rank.kinds)
    assert '"source": "measured"' in to_trace(again)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_time_line_names_the_chunks_of_every_schedule(name: str) -> None:
    """Every rank rehearsed alone: looped-bfs takes the backwards in falling order, dualpipe-v mixes whole and split."""
    virtual = SCHEDULES[name].default_virtual_stages
    model = {"family": "mlp", "layers": STAGES * virtual, "hidden": 8}
    spec = Spec.model_validate({"model": model, "pipeline": {"schedule": name}, "batch": {"mini_batch": CHUNKS}})
    orders = computes(name, stages=STAGES, chunks=CHUNKS, virtual_stages=virtual)
    ranks = []
    for rank in range(STAGES):
        with fake_group(rank, STAGES):
            work = rank_work(CpuDevice(1), spec, rank=rank, ranks=STAGES)
            step = TrainingStep(Trainer(work), chunks=CHUNKS, micro_batch=1, rehearsal=True)
            step.run()
            ranks.append(step.operations.take())
    made = timeline_of(ranks)
    assert made is not None
    for found, steps in zip(made.ranks, orders, strict=True):
        ran = list(zip(found.kinds, found.parts, found.chunks, strict=True))
        assert [one for one in ran if one[0] in "FBIW"] == [(step.kind, step.part, step.chunk) for step in steps]
        forwards = [("L", part, chunk) for kind, part, chunk in ran if kind == "F" and part == STAGES * virtual - 1]
        assert [one for one in ran if one[0] == "L"] == forwards
        assert ran[-1] == ("U", -1, -1)
