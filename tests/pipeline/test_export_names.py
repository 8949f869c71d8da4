"""The names in an export for torch against the torch that is installed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.distributed.pipelining as pipelining
from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class

from chunktune.export import FRAMEWORKS, Values
from chunktune.schedules import SCHEDULES

BY_NAME = pytest.mark.parametrize("schedule", SCHEDULES)


def exported(schedule: str, *, recompute: bool = False) -> dict[str, Any]:
    """What the module written for this schedule defines, run with the real torch."""
    values = Values(
        chunks=8,
        micro_batch=2,
        mini_batch=16,
        stages=2,
        virtual_stages=SCHEDULES[schedule].default_virtual_stages,
        schedule=schedule,
        recompute=recompute,
        precision="float32",
        optimizer="adamw",
    )
    version = FRAMEWORKS["torch"].versions[-1]
    text = version.forms["python"](version.translate(values), ("a head",))
    space: dict[str, Any] = {}
    exec(compile(text, "<export>", "exec"), space)
    return space


@BY_NAME
def test_the_class_is_the_one_that_the_sweep_ran(schedule: str) -> None:
    name = f"Schedule{SCHEDULES[schedule].torch_name}"
    assert exported(schedule)[name] is get_schedule_class(SCHEDULES[schedule].torch_name) is getattr(pipelining, name)


@BY_NAME
def test_the_class_takes_what_it_is_given(schedule: str) -> None:
    space = exported(schedule)
    parameters = inspect.signature(space[f"Schedule{SCHEDULES[schedule].torch_name}"]).parameters
    (first, *_) = inspect.signature(space["build_schedule"]).parameters
    assert next(iter(parameters)) == first
    assert {"n_microbatches", "loss_fn"} <= set(parameters)


def test_recomputing_changes_no_result() -> None:
    import torch

    layer, value = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    assert torch.equal(exported("gpipe", recompute=True)["recomputed"](layer, value), layer(value))
