"""The CPU as a device: capacity that is enforced, bytes that are counted, errors that are recognised."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from chunktune import device as device_module
from chunktune.device import (
    MIB,
    CpuDevice,
    asked_bytes,
    gpu_is_present,
    is_out_of_memory,
    is_peer_failure,
    open_device,
    resolve_kind,
)
from chunktune.errors import UsageError


def fill(size_mib: int, most: int = 10_000) -> list[torch.Tensor]:
    kept = []
    for _ in range(most):
        kept.append(torch.zeros(size_mib * MIB // 4))
    return kept


def test_past_the_budget_torch_itself_raises_and_the_bytes_are_known() -> None:
    device = CpuDevice(1)
    with pytest.raises(RuntimeError) as caught, device.enforce(256 * MIB), device.watch() as watch:
        fill(16)
    assert is_out_of_memory(caught.value)
    assert asked_bytes(caught.value) == 16 * MIB
    assert 256 - 16 - 16 <= watch.current_bytes // MIB <= 256


def test_what_fits_the_budget_is_allowed_and_the_limit_is_lifted_afterwards() -> None:
    device = CpuDevice(1)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with device.enforce(256 * MIB):
        kept = fill(16, most=14)
    assert len(kept) == 14
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    kept += fill(16, most=14)
    del kept


def test_the_limit_is_lifted_after_an_error_too() -> None:
    device = CpuDevice(1)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(ValueError), device.enforce(64 * MIB):
        raise ValueError
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_churn_within_the_budget_fakes_no_shortage() -> None:
    """Blocks of many sizes leave holes in a heap; while memory is limited each has a mapping of its own."""
    device = CpuDevice(1)
    sizes = torch.Generator().manual_seed(0)
    with device.enforce(128 * MIB, 8 * MIB):
        kept: list[torch.Tensor] = []
        held = 0
        for _ in range(600):
            count = int(torch.randint(MIB // 16, 2 * MIB, (1,), generator=sizes))
            while held + 4 * count > 120 * MIB:
                held -= 4 * kept.pop(0).numel()
            kept.append(torch.zeros(count))
            held += 4 * count
    del kept
    gc.collect()


def test_capacity_is_shared_by_the_ranks_of_a_machine() -> None:
    assert CpuDevice(4).capacity_bytes() == CpuDevice(1).capacity_bytes() // 4


def test_a_cgroup_limit_below_the_machine_is_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_cgroup_limits", lambda: iter([3 * 2**30, 2**63]))
    assert CpuDevice(1).capacity_bytes() == 3 * 2**30


def wrapped(error: BaseException) -> RuntimeError:
    outer = RuntimeError("stage 1 failed to run forward")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (wrapped(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")), True),
        (wrapped(wrapped(MemoryError())), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), True),
        (RuntimeError("NCCL error: unhandled cuda error, out of memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("shape mismatch"), False),
        (wrapped(ValueError("not out of anything")), False),
    ],
)
def test_out_of_memory_is_recognised_through_what_wraps_it(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_a_cycle_of_causes_ends() -> None:
    one, two = RuntimeError("a"), RuntimeError("b")
    one.__cause__, two.__cause__ = two, one
    assert not is_out_of_memory(one)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has", int(2.5 * 2**30)),
        ("can't allocate memory: you tried to allocate 4194304 bytes. Error code 12", 4194304),
        ("out of memory", None),
    ],
)
def test_the_bytes_asked_are_read_from_the_message(text: str, expected: int | None) -> None:
    assert asked_bytes(wrapped(RuntimeError(text))) == expected


def test_the_end_of_a_peer_is_no_error_of_this_rank() -> None:
    assert is_peer_failure(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"))
    assert is_peer_failure(wrapped(dist.DistNetworkError("reset")))
    assert not is_peer_failure(wrapped(ValueError("bad shape")))


@pytest.mark.parametrize(("visible", "hidden"), [("", True), ("-1", True), ("NoDevFiles", True), ("1,0", False)])
def test_gpus_may_be_hidden_on_purpose(visible: str, hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter([folder / "nvidia0"]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_is_present() is not hidden


def test_a_gpu_that_cannot_be_used_is_an_error_and_not_a_cpu_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device_module, "gpu_is_present", lambda: True)
    with pytest.raises(UsageError, match="a GPU is present but torch cannot use it"):
        resolve_kind("auto")
    assert resolve_kind("cpu") == "cpu"
    monkeypatch.setattr(device_module, "gpu_is_present", lambda: False)
    assert resolve_kind("auto") == "cpu"
    with pytest.raises(UsageError, match="torch sees no CUDA device"):
        open_device("cuda", 0, 1)
