"""What every device has to do: the bodies of tests that run on the CPU everywhere, and in tests/gpu on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from chunktune.device import MIB, Device, asked_bytes, is_out_of_memory
from chunktune.pipeline.plan import make_plan
from chunktune.pipeline.rehearsal import RankReport, rehearse
from chunktune.pipeline.work import RankWork, Trainer, TrainingStep
from chunktune.results import Record
from chunktune.spec import Spec

SLACK_BYTES = 8 * MIB
"""On the CPU whatever is no tensor counts against the enforced limit too."""
CHUNK_BYTES = 64 * MIB
SMALL_BYTES = 16 * MIB
"""Room for weights, gradients and boundary tensors, well below one chunk."""


# --- the clock ---------------------------------------------------------------------------------------------


def check_marks_agree_with_the_wall_clock(device: Device) -> None:
    """A stretch of products between two marks, timed by the device and by the host around synchronisation."""
    side = 4096 if device.kind == "cuda" else 512
    block = torch.rand(side, side, device=device.torch_device) / side
    _products(device, block, 3)
    count = 4
    while (pair := _products(device, block, count))[1] < 0.1:
        count *= 2
    # The best of a few: a host that is held up between its clock and the mark is no fault of the device.
    pairs = [pair, *(_products(device, block, count) for _ in range(4))]
    ratios = [on_device / on_wall for on_device, on_wall in pairs]
    assert min(abs(ratio - 1) for ratio in ratios) < 0.2, ratios


def _products(device: Device, block: torch.Tensor, count: int) -> tuple[float, float]:
    """Seconds of `count` matrix products on the device's time line and on the wall clock."""
    device.synchronise()
    before = time.perf_counter()
    start = device.mark()
    value = block
    for _ in range(count):
        value = value @ block
    end = device.mark()
    device.synchronise()
    return device.elapsed_s(start, end), time.perf_counter() - before


def check_operations_fill_no_more_than_the_step(device: Device) -> None:
    """The timed operations of one rank alone: all kinds, each longer than nothing, together within the step."""
    work = rank_work(device, transformer("gpipe"), rank=0, ranks=1)
    with fake_group(0, 1):
        step = TrainingStep(Trainer(work), chunks=4, micro_batch=2, rehearsal=True)
        step.run()
        device.synchronise()
        step.operations.take()
        start = time.perf_counter()
        step.run()
        device.synchronise()
        wall_s = time.perf_counter() - start
    operations = step.operations.take()
    kinds = [one.kind for one in operations]
    assert {kind: kinds.count(kind) for kind in kinds} == {"forward": 4, "loss": 4, "backward": 4, "optimizer": 1}
    assert all(one.seconds > 0 for one in operations)
    assert sum(one.seconds for one in operations) <= wall_s * 1.02


def check_layers_are_timed(device: Device) -> None:
    """The cost of single layers, which `partition = "time"` rests on."""
    work = rank_work(device, transformer("gpipe"), rank=0, ranks=1)
    assert all(work.layer_seconds(layer, 2, 2) > 0 for layer in range(work.layer_count()))


# --- the memory meter --------------------------------------------------------------------------------------


def check_peaks_are_read(device: Device) -> None:
    """Current and peak bytes around one tensor, exactly, and the peak from a restart on."""
    device.release()
    with device.watch() as watch:
        before = watch.current_bytes
        tensor = torch.ones(CHUNK_BYTES // 4, device=device.torch_device)
        assert watch.current_bytes == before + CHUNK_BYTES
        del tensor
        device.synchronise()
        assert watch.current_bytes == before
        assert watch.peak_bytes == before + CHUNK_BYTES
        watch.restart()
        assert watch.peak_bytes == before
        assert watch.retries == 0
        if device.kind == "cuda":
            assert watch.reserved_bytes is not None and watch.reserved_bytes >= before + CHUNK_BYTES
        else:
            assert watch.reserved_bytes is None


# --- the capacity ------------------------------------------------------------------------------------------


def check_capacity_is_enforced_and_lifted(device: Device) -> None:
    """Within the budget is allowed, past it is torch's own error that names the bytes, and then it is over."""
    device.release()
    budget = _held(device) + 4 * CHUNK_BYTES
    with device.enforce(budget, SLACK_BYTES):
        _take(device, 3 * CHUNK_BYTES)
        with pytest.raises(RuntimeError) as caught:
            _take(device, 6 * CHUNK_BYTES)
    assert is_out_of_memory(caught.value)
    assert asked_bytes(caught.value) == 6 * CHUNK_BYTES
    _take(device, 6 * CHUNK_BYTES)


def _take(device: Device, size: int) -> None:
    assert torch.empty(size, dtype=torch.uint8, device=device.torch_device).numel() == size


def _held(device: Device) -> int:
    """Bytes that the caching allocator keeps for tensors of this process; the CPU's limit leaves them out."""
    return torch.cuda.memory_reserved(device.torch_device) if device.kind == "cuda" else 0


def _allocated(device: Device) -> int:
    """Bytes that earlier work left allocated, such as a matrix library's workspace; the CPU's meter starts at 0."""
    return torch.cuda.memory_allocated(device.torch_device) if device.kind == "cuda" else 0


def check_a_rehearsal_runs_out_and_recovers(device: Device) -> None:
    """A shortage in the rehearsal is a report with its numbers; what fits before and after it is "ok"."""
    spec = kept_bytes("gpipe", ranks=1, micro_batch=2)
    device.release()
    memory = device.overhead_bytes() + _held(device) + 4 * CHUNK_BYTES + SMALL_BYTES
    limited = spec.model_copy(update={"device": spec.device.model_copy(update={"memory": memory, "headroom": 0.0})})
    with fake_group(0, 1):
        work = rank_work(device, limited, rank=0, ranks=1)
        fits, fails, again = (rehearse(work, chunks, 2) for chunks in (4, 6, 4))
    assert (fits.state, fails.state, again.state) == ("ok", "oom", "ok"), (fits, fails, again)
    assert again.peak_bytes == fits.peak_bytes
    assert fails.shortage is not None
    assert fails.shortage.asked_bytes == CHUNK_BYTES
    assert (fails.shortage.rank, fails.shortage.where) == (0, "rehearsal")
    needed = fails.shortage.needed_bytes
    assert needed is None or needed > fails.shortage.budget_bytes


# --- rehearsals of a rank of four --------------------------------------------------------------------------


def check_every_rank_of_four_rehearses(device: Device, schedule: str) -> None:
    """A transformer in 4 ranks, each alone on this device: every one runs, and leaves its memory behind it."""
    device.release()
    before = _held(device)
    for rank in range(4):
        with fake_group(rank, 4):
            report = rehearse(rank_work(device, transformer(schedule), rank=rank, ranks=4), 8, 2)
        assert report.state == "ok", report.log or report.reason
        assert report.peak_bytes > 0
    device.release()
    # A matrix library keeps its workspaces of some 32 MiB from its first product on.
    assert _held(device) <= before + 2 * CHUNK_BYTES


def check_every_rank_of_four_keeps_what_its_schedule_says(device: Device, schedule: str) -> None:
    """Chunks in flight on each rank, read off the rehearsed peaks: M under GPipe, K - rank under 1F1B."""
    expected = [8] * 4 if schedule == "gpipe" else [4, 3, 2, 1]
    device.release()
    before = _allocated(device)
    reports = [_rehearsed(device, kept_bytes(schedule, ranks=4, micro_batch=2), rank, 4) for rank in range(4)]
    assert all(report.state == "ok" for report in reports), reports
    peaks = [report.peak_bytes - before for report in reports]
    assert [peak // CHUNK_BYTES for peak in peaks] == expected, peaks
    assert all(peak % CHUNK_BYTES < SMALL_BYTES for peak in peaks), peaks


def check_precision_and_recomputation(device: Device) -> None:
    """Autocast and re-materialisation, under which the tensors between parts have another type."""
    for rank in range(2):
        report = _rehearsed(device, transformer("1f1b", precision="bfloat16", recompute="full"), rank, 2)
        assert report.state == "ok", report.log or report.reason


def _rehearsed(device: Device, spec: Spec, rank: int, ranks: int) -> RankReport:
    with fake_group(rank, ranks):
        return rehearse(rank_work(device, spec, rank=rank, ranks=ranks), 8, 2)


# --- whole sweeps ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """The text of a spec, and what its record has to say."""

    spec: str
    check: Callable[[Record], None]


def one_stage(kind: str) -> Sweep:
    """K = 1, plain gradient accumulation, with everything a stage reports."""

    def check(record: Record) -> None:
        ran = [trial for trial in record.trials if trial.fits]
        assert len(ran) >= 2
        losses = [trial.loss for trial in ran]
        assert losses == pytest.approx([losses[0]] * len(losses), rel=2e-3)
        for trial in ran:
            (stage,) = trial.stages
            assert trial.predicted is not None
            assert stage.peak_bytes == pytest.approx(trial.predicted.peak_bytes[0], rel=0.1)
            assert 0 < stage.peak_bytes <= stage.budget_bytes < stage.capacity_bytes
            assert stage.busy_s > 0 and 0 <= stage.idle_share < 1
        check_devices(record, kind)

    return Sweep(_transformer_text(kind, stages=1, schedule="gpipe", mini_batch=8), check)


def two_stages(kind: str, schedule: str) -> Sweep:
    """K = 2, the real pipeline between two devices."""

    def check(record: Record) -> None:
        ran = [trial for trial in record.trials if trial.fits]
        assert len(ran) >= 2
        assert all(len(trial.stages) == 2 for trial in ran)
        losses = [trial.loss for trial in ran]
        assert losses == pytest.approx([losses[0]] * len(losses), rel=2e-3)
        assert all(stage.busy_s > 0 for trial in ran for stage in trial.stages)
        assert record.group_restarts == 0
        check_devices(record, kind)

    return Sweep(_transformer_text(kind, stages=2, schedule=schedule, mini_batch=16), check)


def memory_floor(kind: str, total_bytes: int, stages: int) -> Sweep:
    """All N samples of one chunk need the whole device, half of them half of it: memory sets a floor at M = 2 K.

    Under 1F1B rank 0 keeps min(K, M) chunks of N / M samples, so that M = K keeps all N as well.
    """
    floor = 2 * stages

    def check(record: Record) -> None:
        assert record.verdict is not None
        by_chunks = {trial.chunks: trial for trial in record.trials}
        failed = by_chunks[stages]
        assert failed.state == "oom", failed
        assert failed.shortage is not None and failed.shortage.where == "rehearsal"
        assert by_chunks[floor].fits, by_chunks[floor]
        assert record.verdict.floor is not None
        assert (record.verdict.floor.chunks, record.verdict.floor.limit) == (floor, "memory")
        assert record.verdict.chunks is not None and record.verdict.chunks >= floor
        assert record.group_restarts == 0
        check_devices(record, kind)

    samples = 4 * stages
    layers = stages
    memory = f'"{total_bytes}B"' if kind == "cpu" else '"auto"'
    text = f"""
[model]
family = "sleep"
layers = {layers}
seconds_per_chunk = 0.02
seconds_per_sample = 0.001
bytes_per_sample = {total_bytes // samples}
[pipeline]
stages = {stages}
schedule = "1f1b"
[batch]
mini_batch = {samples}
chunks = [{stages}, {floor}, {2 * floor}]
[device]
kind = "{kind}"
memory = {memory}
"""
    return Sweep(text, check)


def check_devices(record: Record, kind: str) -> None:
    """Every rank ran on this kind of device, and says what only that kind can know."""
    devices: list[dict[str, Any]] = record.environment["devices"]
    assert {device["kind"] for device in devices} == {kind}
    stages = [stage for trial in record.trials for stage in trial.stages]
    if kind == "cuda":
        assert record.environment["nccl"] is not None
        assert all(stage.reserved_bytes is not None for stage in stages)
        assert all((stage.reserved_bytes or 0) >= stage.peak_bytes for stage in stages)
        assert all(device["overhead_bytes"] > 0 for device in devices), "at least the context lies outside"
    else:
        assert all(stage.reserved_bytes is None for stage in stages)


# --- parts -------------------------------------------------------------------------------------------------


@contextmanager
def fake_group(rank: int, ranks: int) -> Iterator[None]:
    """torch's process group without peers, in which this process is one rank of several."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank_work(device: Device, spec: Spec, *, rank: int, ranks: int) -> RankWork:
    """One rank's share of a spec on this device."""
    plan = make_plan(spec, ranks, str(Path(__file__).parent))
    assert plan.counts is not None
    return RankWork(spec, plan.model, plan.counts, rank=rank, ranks=ranks, device=device)


def transformer(schedule: str, *, precision: str = "float32", recompute: str = "none") -> Spec:
    """A transformer of 8 layers and more, in steps of 16 samples."""
    model = {"family": "transformer", "layers": 8, "hidden": 64, "heads": 4, "vocab": 128, "sequence": 32}
    return Spec.model_validate(
        {
            "model": model,
            "pipeline": {"schedule": schedule, "recompute": recompute},
            "batch": {"mini_batch": 16},
            "training": {"precision": precision},
        }
    )


def kept_bytes(schedule: str, *, ranks: int, micro_batch: int) -> Spec:
    """Layers that take no time and keep CHUNK_BYTES for each chunk in flight, one a rank."""
    layers = {"layers": ranks, "seconds_per_chunk": 0, "seconds_per_sample": 0, "width": 16}
    return Spec.model_validate(
        {
            "model": {"family": "sleep", **layers, "bytes_per_sample": CHUNK_BYTES // micro_batch},
            "pipeline": {"schedule": schedule},
            "batch": {"micro_batch": micro_batch},
        }
    )


def _transformer_text(kind: str, *, stages: int, schedule: str, mini_batch: int) -> str:
    return f"""
[model]
family = "transformer"
layers = 4
hidden = 64
heads = 4
vocab = 256
sequence = 32
[pipeline]
stages = {stages}
schedule = "{schedule}"
[batch]
mini_batch = {mini_batch}
[device]
kind = "{kind}"
[sweep]
budget = "2m"
"""
