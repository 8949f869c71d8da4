"""`python -m pytest tests/gpu` on a machine with a GPU verifies what no other test can; without one all is skipped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
# The bodies of these tests run on the CPU too, and live with the tests that do so.
sys.path.insert(0, str(HERE.parent / "pipeline"))

from chunktune.device import CudaDevice, gpu_is_present  # noqa: E402


def reason_to_skip() -> str | None:
    """Why nothing here can run; null where it can."""
    if torch.cuda.is_available():
        return None
    if gpu_is_present():
        return f"a GPU is present, but torch {torch.__version__} (CUDA build: {torch.version.cuda}) cannot use it"
    return f"no CUDA device; torch {torch.__version__} (CUDA build: {torch.version.cuda})"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder, and nothing else, where there is no usable GPU."""
    reason = reason_to_skip()
    if reason is not None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    """The first GPU, in this process; afterwards its memory is free for the processes of the next test."""
    first = CudaDevice(0)
    first.release()
    yield first
    first.release()


@pytest.fixture
def total_bytes(device: CudaDevice) -> int:
    """Memory of the first GPU; skips where others hold much of it."""
    free, total = torch.cuda.mem_get_info(device.torch_device)
    if free < 0.8 * total:
        pytest.skip(f"{free} of {total} bytes of the GPU are free; this test needs 80 % of them")
    return total
