"""What two GPUs can verify: the real pipeline over NCCL."""

from __future__ import annotations

import on_device
import pytest
import torch
from running import sweep

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"{torch.cuda.device_count()} GPUs; the pipeline over NCCL needs 2"
)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zbv-zero-bubble"])
def test_the_pipeline_over_nccl(schedule: str) -> None:
    case = on_device.two_stages("cuda", schedule)
    case.check(sweep(case.spec, "--quick").chosen())


def test_the_choice_is_confirmed_in_fresh_processes() -> None:
    case = on_device.two_stages("cuda", "1f1b")
    record = sweep(case.spec).chosen()
    case.check(record)
    assert record.verdict is not None
    assert record.verdict.confirmed == "fresh processes"


def test_the_cut_does_not_change_the_training() -> None:
    """The first loss of one stage and of two, from the same weights and samples."""
    case = on_device.two_stages("cuda", "gpipe")
    whole = sweep(case.spec, "--quick", "--chunks", "2,4", "--stages", "1")
    halves = sweep(case.spec, "--quick", "--chunks", "2,4")
    assert whole.chosen() and halves.chosen()
    assert halves.trial(2).loss == pytest.approx(whole.trial(2).loss, rel=2e-3)


def test_a_shortage_on_one_rank_hangs_nobody() -> None:
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    case = on_device.memory_floor("cuda", total_bytes, stages=2)
    case.check(sweep(case.spec, "--quick").chosen())
