"""The model families: layers, losses, gradients, what sleeping costs (sleeps are counted, never timed)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils.checkpoint import checkpoint
from torch_orders import FakeTensorMode, LocalStage, stage_backward_input, stage_backward_weight

from chunktune import estimate
from chunktune.errors import ChunktuneError, SpecError, UsageError, UserCodeError
from chunktune.models import FAMILIES, ModelDefinition, build_model
from chunktune.models import python as python_family
from chunktune.models import sleep as sleep_family
from chunktune.schedules import SCHEDULES, parts_of_rank
from chunktune.spec import FAMILIES as SPEC_FAMILIES
from chunktune.spec import Spec

TRANSFORMER = {"family": "transformer", "layers": 2, "hidden": 16, "heads": 2, "vocab": 11, "sequence": 6}
MLP = {"family": "mlp", "layers": 3, "hidden": 8}
SLEEP = {"family": "sleep", "layers": 2, "seconds_per_chunk": 1.0, "seconds_per_sample": 0.5, "width": 4}
CONFIGS = Path(__file__).parents[2] / "configs"


def spec_of(model: dict[str, Any], **pipeline: Any) -> Spec:
    return Spec.model_validate({"model": model, "pipeline": pipeline, "batch": {"mini_batch": 8}})


def definition_of(model: dict[str, Any]) -> ModelDefinition:
    return build_model(spec_of(model).model)


def built(definition: ModelDefinition) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[builder() for builder in definition.layers])


def loss_of(definition: ModelDefinition, model: nn.Module, samples: int = 4) -> Tensor:
    inputs, targets = definition.sample_batch(samples, torch.Generator().manual_seed(1))
    return definition.loss(model(inputs), targets)


@pytest.fixture
def python_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves sys.path and the imported modules as they were."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("python_model", "users_")):
            del sys.modules[name]


def test_every_family_of_the_spec_can_be_built() -> None:
    assert set(FAMILIES) == set(SPEC_FAMILIES) - {"costs"}, "costs has no layers: it is for whatif alone"


@pytest.mark.parametrize(
    ("model", "layers", "tokens"),
    [
        (TRANSFORMER, 5, 6),
        (MLP, 3, None),
        ({**MLP, "layers": 1, "features": 3}, 1, None),
        ({**MLP, "features": 5, "classes": 7}, 3, None),
        ({**SLEEP, "seconds_per_chunk": 0, "seconds_per_sample": 0, "bytes_per_sample": 8}, 2, None),
    ],
)
def test_a_family_gives_layers_a_finite_loss_and_all_gradients(
    model: dict[str, Any], layers: int, tokens: int | None
) -> None:
    definition = definition_of(model)
    assert len(definition.layers) == layers
    assert definition.tokens_per_sample == tokens
    whole = built(definition)
    loss = loss_of(definition, whole)
    loss.backward()
    assert loss.dim() == 0 and loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in whole.parameters())


@pytest.mark.parametrize("model", [TRANSFORMER, MLP, {**MLP, "classes": 5}, {**SLEEP, "seconds_per_chunk": 0}])
def test_the_loss_is_a_mean_so_cutting_a_batch_does_not_change_it(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleep_family.time, "sleep", lambda seconds: None)
    definition = definition_of(model)
    whole = built(definition)
    inputs, targets = definition.sample_batch(6, torch.Generator().manual_seed(1))
    parts = [definition.loss(whole(i), t) for i, t in zip(inputs.chunk(3), targets.chunk(3), strict=True)]
    assert torch.stack(parts).mean().item() == pytest.approx(definition.loss(whole(inputs), targets).item())


def test_batches_follow_their_generator() -> None:
    definition = definition_of(TRANSFORMER)
    first, again = (definition.sample_batch(3, torch.Generator().manual_seed(5)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert first[0].shape == first[1].shape == (3, 6)
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])


def test_an_untrained_language_model_knows_nothing() -> None:
    definition = definition_of({**TRANSFORMER, "vocab": 1000})
    assert loss_of(definition, built(definition)).item() == pytest.approx(6.9, abs=0.7)


def test_attention_is_causal() -> None:
    definition = definition_of(TRANSFORMER)
    whole = built(definition)
    tokens, _ = definition.sample_batch(1, torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 11
    before, after = whole(tokens), whole(changed)
    assert torch.allclose(before[0, :-1], after[0, :-1], atol=1e-6)
    assert not torch.allclose(before[0, -1], after[0, -1], atol=1e-6)


# What sleeping costs


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every sleep asked for, in order, none of them slept."""
    found: list[float] = []
    monkeypatch.setattr(sleep_family.time, "sleep", found.append)
    return found


def sleep_layer(**changes: Any) -> nn.Module:
    return definition_of({**SLEEP, "layers": 1, **changes}).layers[0]()


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_a_forward_sleeps_once_and_a_whole_backward_twice(slept: list[float], needs_gradient: bool) -> None:
    out = sleep_layer()(torch.randn(4, 4, requires_grad=needs_gradient))
    assert slept == [3.0]
    out.sum().backward()
    assert slept == [3.0] * 3


def test_slowdown_is_a_factor_a_layer(slept: list[float]) -> None:
    definition = definition_of({**SLEEP, "slowdown": [1, 2.5]})
    loss_of(definition, built(definition)).backward()
    assert sorted(slept) == [3.0] * 3 + [7.5] * 3


def test_a_split_backward_pays_each_gradient_once(slept: list[float]) -> None:
    layers = nn.Sequential(sleep_layer(), sleep_layer())
    x = torch.randn(4, 4, requires_grad=True)
    out = layers(x)
    slept.clear()
    gradient = torch.randn_like(out)
    (into_x,), groups = stage_backward_input([out], [gradient], [x], layers.parameters())
    assert slept == [3.0] * 2
    assert torch.equal(into_x, gradient)
    assert all(p.grad is None for p in layers.parameters())
    stage_backward_weight(layers.parameters(), groups)
    assert slept == [3.0] * 4
    assert all(torch.allclose(p.grad, gradient.sum(0)) for p in layers.parameters())


@pytest.mark.parametrize("kept", [0, 8])
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_recomputation_sleeps_the_forward_again(slept: list[float], needs_gradient: bool, kept: int) -> None:
    layer = sleep_layer(bytes_per_sample=kept)
    x = torch.randn(4, 4, requires_grad=needs_gradient)
    out = checkpoint(layer, x, use_reentrant=False)
    out.sum().backward()
    assert slept == [3.0] * 4


def test_recomputation_works_under_a_split_backward_and_runs_twice(slept: list[float]) -> None:
    layer = sleep_layer(bytes_per_sample=8)
    x = torch.randn(4, 4, requires_grad=True)
    out = checkpoint(layer, x, use_reentrant=False)
    _, groups = stage_backward_input([out], [torch.ones(4, 4)], [x], layer.parameters())
    assert slept == [3.0] * 3
    stage_backward_weight(layer.parameters(), groups)
    assert slept == [3.0] * 5


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of this process only: with K = 1 all parts lie on it and nothing is sent."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def run_alone(name: str, layers: Sequence[nn.Module], chunks: int) -> None:
    """One step at K = 1 of torch's own schedule over single-layer parts, b = 2."""
    held = parts_of_rank(name, 1, len(layers), 0)
    meta = torch.empty(2, 4, device="meta", requires_grad=True)
    stages = [
        LocalStage(
            layers[part],
            part,
            len(layers),
            torch.device("cpu"),
            input_args=meta if part else meta.detach(),
            output_args=meta,
        )
        for part in held
    ]
    schedule_class: Any = get_schedule_class(SCHEDULES[name].torch_name)
    single = SCHEDULES[name].placement == "single"
    schedule = schedule_class(stages[0] if single else stages, chunks, loss_fn=nn.functional.mse_loss)
    batch = torch.randn(2 * chunks, 4)
    schedule.step(batch, target=batch, losses=[], return_outputs=False)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_step_under_every_schedule_sleeps_three_times_a_chunk(alone: None, slept: list[float], name: str) -> None:
    parts = SCHEDULES[name].default_virtual_stages
    layers = [sleep_layer() for _ in range(parts)]
    run_alone(name, layers, 4)
    assert slept == [2.0] * (3 * parts * 4)
    assert all(layer.bias.grad is not None for layer in layers)


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if row.splits_backward])
def test_recomputation_under_every_splitting_schedule(alone: None, slept: list[float], name: str) -> None:
    layers = [sleep_layer(bytes_per_sample=8) for _ in range(2)]
    run_alone(name, [Recomputed(layer) for layer in layers], 4)
    assert 4 * 2 * 4 <= len(slept) <= 5 * 2 * 4
    assert all(layer.bias.grad is not None for layer in layers)


class Recomputed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return out


def test_nothing_sleeps_without_memory(slept: list[float]) -> None:
    with torch.device("meta"):
        meta = sleep_layer()
    meta(torch.empty(4, 4, device="meta", requires_grad=True)).sum().backward()
    with FakeTensorMode():
        fake = sleep_layer()
        fake(torch.empty(4, 4, requires_grad=True)).sum().backward()
    assert slept == []


def kept_bytes(layers: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, dict[int, Any]]:
    """The storages saved for the backward, by address: their references, weak ones."""
    saved: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for layer in layers:
            x = layer(x)
    return x, saved


@pytest.mark.parametrize("samples", [1, 5])
def test_exactly_the_bytes_asked_for_are_kept(slept: list[float], samples: int) -> None:
    layers = [sleep_layer(bytes_per_sample=4096) for _ in range(3)]
    _out, saved = kept_bytes(layers, torch.randn(samples, 4, requires_grad=True))
    assert sum(saved.values()) == 3 * samples * 4096


@pytest.mark.parametrize("split", [True, False])
def test_the_bytes_are_released_by_the_backward(slept: list[float], split: bool) -> None:
    from chunktune.pipeline.runtime import StorageMeter

    layer = sleep_layer(bytes_per_sample=4096)
    x = torch.randn(5, 4, requires_grad=True)
    with StorageMeter() as meter:
        before = meter.current_bytes
        out = layer(x)
        held = meter.current_bytes - before
        if split:
            _, groups = stage_backward_input([out], [torch.ones(5, 4)], [x], layer.parameters())
            assert meter.current_bytes - before >= 5 * 4096
            stage_backward_weight(layer.parameters(), groups)
            del groups
        else:
            out.backward(torch.ones(5, 4))
        assert held - 5 * 4096 < 4096
        assert meter.current_bytes - before < 4096


# The user's own model


def test_the_example_in_configs_works(python_path: None) -> None:
    spec = spec_of({"family": "python", "factory": "python_model:build", "arguments": {"blocks": 2}})
    definition = python_family.build(spec.model, CONFIGS)
    whole = built(definition)
    assert len(definition.layers) == 4
    loss = loss_of(definition, whole)
    loss.backward()
    assert loss.isfinite() and all(p.grad is not None for p in whole.parameters())


USERS = """
from torch import nn
from torch.nn import functional as F
import torch
from chunktune.models.base import ModelDefinition

def batch(samples, generator):
    return torch.randn(samples, 2), torch.randn(samples, 2)

layers = [lambda: nn.Linear(2, 2), lambda: nn.Linear(2, 2)]
shared = nn.Linear(2, 2)

def mapping(): return {"layers": layers, "sample_batch": batch, "loss": F.mse_loss, "tokens_per_sample": 7}
def three(): return layers, batch, F.mse_loss
def definition(): return ModelDefinition(tuple(layers), batch, F.mse_loss)
def raises():
    raise ValueError("width 3\\nis odd")
def leaves(): raise SystemExit(3)
def nothing(): pass
def two(): return layers, batch
def empty(): return [], batch, F.mse_loss
def modules(): return [nn.Linear(2, 2)], batch, F.mse_loss
def sequential(): return nn.Sequential(nn.Linear(2, 2)), batch, F.mse_loss
def numbers(): return [1, 2], batch, F.mse_loss
def no_list(): return 3, batch, F.mse_loss
def no_loss(): return layers, batch, None
def unknown(): return {"layers": layers, "sample_batch": batch, "los": F.mse_loss}
def tokens(): return {"layers": layers, "sample_batch": batch, "loss": F.mse_loss, "tokens_per_sample": 0}
def layer_raises(): return [lambda: nn.Linear(-1)], batch, F.mse_loss
def layer_is_none(): return [lambda: None], batch, F.mse_loss
def layer_is_shared(): return [lambda: shared], batch, F.mse_loss
def batch_raises(): return layers, lambda samples, generator: 1 / 0, F.mse_loss
def batch_is_one(): return layers, lambda samples, generator: torch.randn(samples), F.mse_loss
def batch_is_short(): return layers, lambda samples, generator: batch(1, generator), F.mse_loss
def loss_is_a_vector(): return layers, batch, lambda o, t: (o - t).mean(1)
constant = 3
"""


@pytest.fixture
def users(tmp_path: Path, python_path: None) -> Path:
    (tmp_path / "users_model.py").write_text(USERS)
    (tmp_path / "users_broken.py").write_text("x = 1\nx.nothing\n")
    (tmp_path / "users_syntax.py").write_text("x = 1\ndef (:\n")
    (tmp_path / "users_needs.py").write_text("import no_such_dependency\n")
    return tmp_path


def users_model(users: Path, factory: str, **arguments: Any) -> ModelDefinition:
    model = {"family": "python", "factory": factory, "arguments": arguments}
    return python_family.build(spec_of(model).model, users)


@pytest.mark.parametrize(("name", "tokens"), [("mapping", 7), ("three", None), ("definition", None)])
def test_a_factory_returns_one_of_three_shapes(users: Path, name: str, tokens: int | None) -> None:
    definition = users_model(users, f"users_model:{name}")
    assert loss_of(definition, built(definition)).isfinite()
    assert definition.tokens_per_sample == tokens


@pytest.mark.parametrize(
    ("factory", "kind", "said"),
    [
        ("users_nowhere:f", SpecError, ["model.factory", "users_nowhere was not found"]),
        ("users_model:nowhere", SpecError, ["users_model has no nowhere", "a factory returns"]),
        ("users_model:maping", SpecError, ["did you mean users_model:mapping"]),
        ("users_model:constant", SpecError, ["is int, not a function"]),
        ("users_broken:f", UserCodeError, ["importing users_broken", "AttributeError", "users_broken.py:2"]),
        ("users_syntax:f", UserCodeError, ["SyntaxError", "users_syntax.py:2"]),
        ("users_needs:f", UserCodeError, ["ModuleNotFoundError", "no_such_dependency", "users_needs.py:1"]),
        ("users_model:raises", UserCodeError, ["ValueError: width 3 is odd", "users_model.py:17"]),
        ("users_model:leaves", UserCodeError, ["SystemExit"]),
        ("users_model:nothing", UserCodeError, ["returned None", "layers, sample_batch and loss"]),
        ("users_model:two", UserCodeError, ["returned a tuple of 2"]),
        ("users_model:empty", UserCodeError, ["returned no layers"]),
        ("users_model:modules", UserCodeError, ["a built Linear as layer 0", "`lambda: nn.Linear(8, 8)`"]),
        ("users_model:sequential", UserCodeError, ["a built Sequential as layers", "lambda"]),
        ("users_model:numbers", UserCodeError, ["a value of type int as layer 0"]),
        ("users_model:no_list", UserCodeError, ["a value of type int as layers", "list of builders"]),
        ("users_model:no_loss", UserCodeError, ["returned None as loss", "loss is a function"]),
        ("users_model:unknown", UserCodeError, ["without loss", "the unknown los", "tokens_per_sample"]),
        ("users_model:tokens", UserCodeError, ["tokens_per_sample = 0", "from 1 on"]),
    ],
)
def test_a_wrong_factory_is_one_clear_line(
    users: Path, factory: str, kind: type[ChunktuneError], said: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        users_model(users, factory)
    message = str(caught.value)
    assert all(words in message for words in said), message
    assert kind is SpecError or "\n" not in message


def test_arguments_reach_the_factory_and_unknown_ones_are_the_users_error(users: Path) -> None:
    with pytest.raises(UserCodeError, match=r"TypeError: .* keyword argument 'width'"):
        users_model(users, "users_model:three", width=3)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("layer_raises", ["layer 0 raised TypeError", "users_model.py"]),
        ("layer_is_none", ["a layer 0 that built None", "nn.Module"]),
        ("layer_is_shared", ["a layer 0 that built the same module twice"]),
        ("batch_raises", ["sample_batch(samples=4, generator) raised ZeroDivisionError", "users_model.py"]),
        ("batch_is_one", ["two tensors of 4 rows"]),
        ("batch_is_short", ["returned 1 and 1 rows", "two tensors of 4 rows"]),
        ("loss_is_a_vector", ["of shape (4,)", "one number"]),
    ],
)
def test_what_shows_only_later_is_one_clear_line_too(users: Path, name: str, said: list[str]) -> None:
    definition = users_model(users, f"users_model:{name}")
    with pytest.raises(UserCodeError) as caught:
        loss_of(definition, built(definition))
        loss_of(definition, built(definition))
    assert all(words in str(caught.value) for words in said), str(caught.value)


# The estimate


def static(model: dict[str, Any], stages: int, optimizer: str = "adamw", **pipeline: Any) -> tuple[int, ...]:
    spec = spec_of(model, **pipeline)
    training = spec.training.model_copy(update={"optimizer": optimizer})
    return estimate.static_bytes(spec.model_copy(update={"training": training}), stages)


def test_static_bytes_are_those_of_a_real_training_step() -> None:
    definition = definition_of(TRANSFORMER)
    whole = built(definition)
    optimizer = torch.optim.AdamW(whole.parameters())
    loss_of(definition, whole).backward()
    optimizer.step()
    kept = [t for p in whole.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
    assert static(TRANSFORMER, 1) == (sum(t.nbytes for t in kept if t is not None),)


def test_static_bytes_by_optimizer_and_by_rank() -> None:
    layer = (8 * 8 + 8) * 4
    assert static({**MLP, "layers": 4}, 4, "sgd") == (2 * layer,) * 4
    assert static({**MLP, "layers": 4}, 2, "none", partition=(3, 1)) == (6 * layer, 2 * layer)
    assert static({**MLP, "layers": 4}, 2, "sgd", partition="time") == (4 * layer, 4 * layer)
    looped = static({**MLP, "layers": 4}, 2, "adamw", schedule="interleaved-1f1b")
    assert looped == (2 * (4 * layer + 2 * 4),) * 2


def test_static_bytes_build_nothing() -> None:
    huge = {**TRANSFORMER, "hidden": 65536, "vocab": 65536, "layers": 8}
    assert sum(static(huge, 2)) > 2**42


def test_static_bytes_of_more_parts_than_layers() -> None:
    with pytest.raises(UsageError, match="K x V = 4 parts but the model has 3 layers"):
        static(MLP, 4)
