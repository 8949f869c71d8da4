"""The CPU does what every device has to do; tests/gpu asks the same of a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import on_device
import pytest
import torch

from chunktune.device import CpuDevice


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    # One thread: on a busy machine threads of small operations wait for each other longer than they work.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield CpuDevice(ranks_here=1)
    torch.set_num_threads(before)


def test_marks_agree_with_the_wall_clock(device: CpuDevice) -> None:
    on_device.check_marks_agree_with_the_wall_clock(device)


def test_operations_fill_no_more_than_the_step(device: CpuDevice) -> None:
    on_device.check_operations_fill_no_more_than_the_step(device)


def test_layers_are_timed(device: CpuDevice) -> None:
    on_device.check_layers_are_timed(device)


def test_peaks_are_read(device: CpuDevice) -> None:
    on_device.check_peaks_are_read(device)


def test_capacity_is_enforced_and_lifted(device: CpuDevice) -> None:
    on_device.check_capacity_is_enforced_and_lifted(device)


def test_a_rehearsal_runs_out_and_recovers(device: CpuDevice) -> None:
    on_device.check_a_rehearsal_runs_out_and_recovers(device)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zbv-zero-bubble"])
def test_every_rank_of_four_rehearses(device: CpuDevice, schedule: str) -> None:
    on_device.check_every_rank_of_four_rehearses(device, schedule)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_every_rank_of_four_keeps_what_its_schedule_says(device: CpuDevice, schedule: str) -> None:
    on_device.check_every_rank_of_four_keeps_what_its_schedule_says(device, schedule)


def test_precision_and_recomputation(device: CpuDevice) -> None:
    on_device.check_precision_and_recomputation(device)
