"""The private names of torch that chunktune stands on, and what is built on them."""

from __future__ import annotations

import inspect
import time

import pytest
import torch
import torch.distributed.pipelining.schedules as torch_schedules
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from chunktune.pipeline.runtime import BoundaryReader, OperationLog, StorageMeter, rehearsing
from chunktune.pipeline.work import Part
from chunktune.schedules import SCHEDULES

CHANGED = "torch {version} has changed: {what}; chunktune/pipeline/runtime.py is the place to follow it"


def changed(what: str) -> str:
    return CHANGED.format(version=torch.__version__, what=what)


@pytest.mark.parametrize(
    ("owner", "name", "why"),
    [
        (torch_schedules, "_batch_p2p", "every transfer of every schedule goes through it; a rehearsal replaces it"),
        (PipelineStage, "forward_one_chunk", "it is timed"),
        (PipelineStage, "backward_one_chunk", "it is timed"),
        (PipelineStage, "backward_weight_one_chunk", "it is timed"),
        (PipelineStage, "_create_grad_recv_info", "a rehearsal fills the buffers it makes"),
        (PipelineStage, "_setup_forward_recv_info", "a rehearsal fills the buffers it makes"),
        (PipelineStage, "_get_init_p2p_neighbors_ops", "a rank must not greet itself over gloo"),
    ],
)
def test_a_private_name_is_still_there(owner: object, name: str, why: str) -> None:
    if name == "_setup_forward_recv_info" and torch.__version__ < "2.13":
        name = "_prepare_forward_infra"
    assert hasattr(owner, name), changed(f"{name} is gone ({why})")


def test_backward_keeps_the_arguments_that_the_timer_passes_on() -> None:
    names = set(inspect.signature(PipelineStage.backward_one_chunk).parameters)
    assert {"bwd_chunk_id", "loss", "full_backward", "last_backward"} <= names, changed("backward_one_chunk")


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_knows_every_schedule_and_its_step_can_drop_the_outputs(name: str) -> None:
    schedule = get_schedule_class(SCHEDULES[name].torch_name)
    assert "return_outputs" in inspect.signature(schedule.step).parameters, changed("step(return_outputs=)")
    assert "scale_grads" in inspect.signature(schedule).parameters, changed("scale_grads")


def test_rehearsing_puts_torch_back_as_it_was() -> None:
    before = torch_schedules._batch_p2p
    with pytest.raises(RuntimeError), rehearsing():
        assert torch_schedules._batch_p2p is not before
        raise RuntimeError
    assert torch_schedules._batch_p2p is before


def test_the_meter_counts_exact_bytes_and_forgets_what_dies() -> None:
    with StorageMeter() as meter:
        first = torch.zeros(1000)
        view = first[10:]
        second = first * 2
        assert meter.current_bytes == 8000
        del first
        assert meter.current_bytes == 8000, "a view keeps its storage alive"
        del view, second
        assert (meter.current_bytes, meter.peak_bytes) == (0, 8000)
        meter.restart_peak()
        assert meter.peak_bytes == 0


def test_the_meter_does_not_count_tensors_without_memory() -> None:
    with StorageMeter() as meter:
        torch.zeros(1000, device="meta") + 1
        assert meter.peak_bytes == 0


def test_the_meter_sees_what_autograd_keeps() -> None:
    with StorageMeter() as meter:
        layer = nn.Linear(256, 256)
        value = torch.zeros(64, 256)
        held = meter.current_bytes
        output = layer(value).sigmoid()
        assert meter.current_bytes == held + 64 * 256 * 4, "sigmoid keeps its result, and its input dies"
        del output
        assert meter.current_bytes == held


def test_boundaries_have_the_type_that_a_part_returns() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids)

    def parts(autocast: torch.dtype | None) -> list[nn.Module]:
        return [
            Part([Tokens()], recompute=False, autocast=autocast),
            Part([nn.Linear(8, 4)], recompute=False, autocast=autocast),
        ]

    ids = torch.zeros(3, 5, dtype=torch.long)
    plain = BoundaryReader(lambda: parts(None), torch.device("cpu")).read(ids.shape, ids.dtype)
    assert (plain[0].inputs.dtype, plain[0].inputs.requires_grad) == (torch.long, False)
    assert (plain[1].inputs.shape, plain[1].inputs.dtype) == ((3, 5, 8), torch.float32)
    assert plain[1].inputs.requires_grad and plain[1].outputs.device.type == "meta"
    cast = BoundaryReader(lambda: parts(torch.bfloat16), torch.device("cpu")).read(ids.shape, ids.dtype)
    assert cast[0].outputs.dtype == torch.float32, "an embedding is not autocast"
    assert cast[1].outputs.dtype == torch.bfloat16, "a linear layer is"


def test_a_part_that_returns_no_tensor_is_named() -> None:
    class Pair(nn.Module):
        def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return value, value

    reader = BoundaryReader(lambda: [nn.Identity(), Pair()], torch.device("cpu"))
    with pytest.raises(TypeError, match=r"part 1 returned tuple; a part returns one tensor"):
        reader.read((2, 2), torch.float32)


def test_operations_are_logged_in_order_with_their_parts() -> None:
    class Ticks:
        now = 0.0

        def mark(self) -> float:
            self.now += 1
            return self.now

        def elapsed_s(self, start: float, end: float) -> float:
            return end - start

    log = OperationLog(Ticks())
    assert log.timed("forward", 3, lambda: "x") == "x"
    log.timed("optimizer", -1, time.perf_counter)
    assert [(one.kind, one.part, one.seconds) for one in log.take()] == [("forward", 3, 1.0), ("optimizer", -1, 1.0)]
    assert log.take() == []
