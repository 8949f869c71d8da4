"""What one GPU can verify: clock, memory meter, enforced capacity, every stage rehearsed, and a sweep at K = 1."""

from __future__ import annotations

import on_device
import pytest
import torch
from running import sweep

from chunktune.device import CudaDevice, gpu_is_present, open_device, resolve_kind
from chunktune.schedules import SCHEDULES

# --- in this process


def test_a_usable_gpu_is_taken_by_itself() -> None:
    assert resolve_kind("auto") == "cuda"
    assert resolve_kind("cuda") == "cuda"
    assert isinstance(open_device("auto", 0, 1), CudaDevice)


def test_events_agree_with_the_wall_clock(device: CudaDevice) -> None:
    on_device.check_marks_agree_with_the_wall_clock(device)


def test_operations_fill_no_more_than_the_step(device: CudaDevice) -> None:
    on_device.check_operations_fill_no_more_than_the_step(device)


def test_layers_are_timed(device: CudaDevice) -> None:
    on_device.check_layers_are_timed(device)


def test_allocated_and_reserved_peaks_are_read(device: CudaDevice) -> None:
    on_device.check_peaks_are_read(device)


def test_reserved_bytes_hold_what_was_freed(device: CudaDevice) -> None:
    with device.watch() as watch:
        before = watch.current_bytes
        torch.ones(on_device.CHUNK_BYTES // 4, device=device.torch_device)
        device.synchronise()
        assert watch.current_bytes == before
        watch.restart()
        assert watch.peak_bytes == before
        reserved = watch.reserved_bytes
    assert reserved is not None and reserved >= before + on_device.CHUNK_BYTES


def test_the_capacity_is_what_the_device_has(device: CudaDevice) -> None:
    total = torch.cuda.mem_get_info(device.torch_device)[1]
    assert device.capacity_bytes() == total
    assert 0 < device.overhead_bytes() < total
    # What the allocator holds is no overhead: the same bytes would be taken off twice.
    before = device.overhead_bytes()
    held = torch.empty(on_device.CHUNK_BYTES, dtype=torch.uint8, device=device.torch_device)
    assert device.overhead_bytes() < before + held.numel() // 2


def test_out_of_memory_at_an_enforced_capacity(device: CudaDevice) -> None:
    on_device.check_capacity_is_enforced_and_lifted(device)


def test_blocks_given_back_at_the_limit_are_counted(device: CudaDevice) -> None:
    """Memory cached in one size is of no use for a larger one: the allocator retries, which is a sign of the limit."""
    budget = torch.cuda.memory_reserved(device.torch_device) + 4 * on_device.CHUNK_BYTES
    with device.enforce(budget), device.watch() as watch:
        for chunks in (2, 3):
            torch.empty(chunks * on_device.CHUNK_BYTES, dtype=torch.uint8, device=device.torch_device)
        assert watch.retries >= 1


def test_a_rehearsal_runs_out_and_recovers(device: CudaDevice) -> None:
    on_device.check_a_rehearsal_runs_out_and_recovers(device)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_of_four_rehearses(device: CudaDevice, schedule: str) -> None:
    on_device.check_every_rank_of_four_rehearses(device, schedule)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_every_rank_of_four_keeps_what_its_schedule_says(device: CudaDevice, schedule: str) -> None:
    on_device.check_every_rank_of_four_keeps_what_its_schedule_says(device, schedule)


def test_precision_and_recomputation(device: CudaDevice) -> None:
    on_device.check_precision_and_recomputation(device)


# --- through the command line


def test_one_stage_for_real_and_confirmed_in_fresh_processes(device: CudaDevice) -> None:
    case = on_device.one_stage("cuda")
    record = sweep(case.spec).chosen()
    case.check(record)
    assert record.verdict is not None
    assert record.verdict.confirmed == "fresh processes"
    assert record.confirmation is not None and record.confirmation.fits


def test_auto_takes_the_gpu(device: CudaDevice) -> None:
    case = on_device.one_stage("cuda")
    record = sweep(case.spec, "--quick", "--device", "auto", "--chunks", "1,2").chosen()
    on_device.check_devices(record, "cuda")


def test_a_memory_floor_at_the_real_capacity(total_bytes: int) -> None:
    case = on_device.memory_floor("cuda", total_bytes, stages=1)
    case.check(sweep(case.spec, "--quick").chosen())


def test_four_stages_rehearse_in_turn_on_one_gpu(device: CudaDevice) -> None:
    finished = sweep(on_device.two_stages("cuda", "1f1b").spec, "--stages", "4", "--rehearse", "--chunks", "4,8")
    record = finished.chosen()
    assert record.mode == "rehearsed"
    assert {place["kind"] for place in record.environment["devices"]} == {"cuda"}
    for trial in record.trials:
        assert trial.fits and len(trial.stages) == 4
        assert all(stage.peak_bytes > 0 and stage.busy_s > 0 for stage in trial.stages)


def test_more_stages_than_gpus_are_refused() -> None:
    stages = torch.cuda.device_count() + 1
    done = sweep(on_device.one_stage("cuda").spec, "--stages", str(stages))
    assert done.returncode == 2, done
    assert f"pipeline.stages = {stages}" in done.stderr, done
    assert "--rehearse" in done.stderr, done
    assert done.record is None


@pytest.mark.skipif(not gpu_is_present(), reason="no /dev/nvidia device node shows the GPU to chunktune")
@pytest.mark.parametrize("kind", ["auto", "cuda"])
def test_a_gpu_that_cannot_be_used_is_an_error_and_not_a_cpu_run(kind: str) -> None:
    spec = on_device.one_stage("cuda").spec
    done = sweep(spec, "--device", kind, env={"CUDA_VISIBLE_DEVICES": "99"})
    assert done.returncode == 2, done
    assert "a GPU is present but torch cannot use it" in done.stderr, done
    assert done.record is None


def test_a_gpu_that_is_asked_for_and_hidden_is_an_error() -> None:
    done = sweep(on_device.one_stage("cuda").spec, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2, done
    assert 'device.kind = "cpu"' in done.stderr, done
    assert done.record is None
