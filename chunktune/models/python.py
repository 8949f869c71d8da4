"""A model of the user's own: `factory = "package.module:function"`, called with `[model.arguments]`.

The factory returns a `ModelDefinition`, a mapping with layers, sample_batch and loss (tokens_per_sample if it
likes), or the three as a tuple. Whatever is wrong with it comes out as one clear line.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from chunktune.blame import place_of
from chunktune.errors import Mistake, SpecError, UserCodeError
from chunktune.models.base import LayerBuilder, Loss, ModelDefinition, SampleBatch
from chunktune.spec import PythonModel

CONTRACT = "a factory returns layers, sample_batch and loss: a ModelDefinition, a mapping, or a tuple of the three"


def build(spec: PythonModel, spec_dir: str | Path | None = None) -> ModelDefinition:
    """Import the factory, call it, check what it returns. Layers are checked when they are built.

    The module is looked for in `spec_dir`, the working directory and Python's own path. Raises SpecError where
    there is no such module or function, UserCodeError where the user's code raises or returns something else.
    """
    _extend_path(spec_dir)
    returned = _called(_found(spec.factory), spec)
    definition = _read(returned, spec.factory)
    layers = tuple(_checked_layer(builder, i, spec.factory) for i, builder in enumerate(definition.layers))
    return replace(
        definition,
        layers=layers,
        sample_batch=_checked_batch(definition.sample_batch, spec.factory),
        loss=_checked_loss(definition.loss, spec.factory),
    )


def code_digest(spec: PythonModel) -> str | None:
    """A digest of the file that the factory's module was imported from; None where it has none, or it is gone.

    What that module imports is not part of it.
    """
    path = getattr(sys.modules.get(spec.factory.partition(":")[0]), "__file__", None)
    try:
        return None if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    except OSError:
        return None


def _extend_path(spec_dir: str | Path | None) -> None:
    """Put the spec's directory first and the working directory after it, each once."""
    for directory in (Path.cwd(), Path(spec_dir).resolve() if spec_dir else None):
        if directory is not None and str(directory) not in sys.path:
            sys.path.insert(0, str(directory))


def _wrong_spec(factory: str, fact: str, rule: str, nearest: str = "") -> SpecError:
    return SpecError([Mistake("spec", "model.factory", f'"{factory}" {fact}', rule, nearest)])


def _found(factory: str) -> Callable[..., Any]:
    module_name, _, name = factory.partition(":")
    module = _imported(module_name, factory)
    function = getattr(module, name, None)
    if function is None:
        own = [n for n, f in vars(module).items() if getattr(f, "__module__", None) == module_name]
        near = difflib.get_close_matches(name, own, 1) or own[:1]
        nearest = f"{module_name}:{near[0]}" if near else ""
        raise _wrong_spec(factory, f"names no function: {module_name} has no {name}", CONTRACT, nearest)
    if not callable(function):
        raise _wrong_spec(factory, f"is {type(function).__name__}, not a function", CONTRACT)
    return function  # type: ignore[no-any-return]


def _imported(module_name: str, factory: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            rule = "modules are looked for beside the spec, in the working directory and in Python's path"
            raise _wrong_spec(factory, f"names no module: {error.name} was not found", rule) from error
        raise _user_error(f"importing {module_name}", error) from error
    except (Exception, SystemExit) as error:
        raise _user_error(f"importing {module_name}", error) from error


def _called(function: Callable[..., Any], spec: PythonModel) -> Any:
    try:
        return function(**spec.arguments)
    except (Exception, SystemExit) as error:
        raise _user_error(f"model.factory {spec.factory}", error) from error


def _user_error(what: str, error: BaseException) -> UserCodeError:
    """One line: what ran, the user's exception, and the line of the user's code that it came from."""
    said = " ".join(str(error).split())
    return UserCodeError(f"{what} raised {type(error).__name__}: {said} ({place_of(error) or 'no line known'})")


def _wrong(factory: str, fact: str, rule: str = CONTRACT) -> UserCodeError:
    return UserCodeError(f"model.factory {factory} {fact}; {rule}")


def _read(returned: Any, factory: str) -> ModelDefinition:
    if isinstance(returned, ModelDefinition):
        fields: Mapping[str, Any] = vars(returned)
    elif isinstance(returned, Mapping):
        fields = returned
    elif isinstance(returned, tuple) and len(returned) == 3:
        fields = dict(zip(("layers", "sample_batch", "loss"), returned, strict=True))
    else:
        raise _wrong(factory, f"returned {_described(returned)}")
    return _from_fields(fields, factory)


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _from_fields(fields: Mapping[str, Any], factory: str) -> ModelDefinition:
    _check_keys({str(key) for key in fields}, factory)
    for name in ("sample_batch", "loss"):
        if not callable(fields[name]):
            raise _wrong(factory, f"returned {_described(fields[name])} as {name}", f"{name} is a function")
    return ModelDefinition(
        _layers(fields["layers"], factory),
        fields["sample_batch"],
        fields["loss"],
        _tokens(fields.get("tokens_per_sample"), factory),
    )


def _check_keys(given: set[str], factory: str) -> None:
    known = set(ModelDefinition.__dataclass_fields__)
    missing, unknown = sorted(known - {"tokens_per_sample"} - given), sorted(given - known)
    parts = [f"without {', '.join(missing)}"] if missing else []
    parts += [f"with the unknown {', '.join(unknown)}"] if unknown else []
    if parts:
        rule = f"its keys are {', '.join(sorted(known))}"
        raise _wrong(factory, f"returned a mapping {' and '.join(parts)}", rule)


def _layers(given: Any, factory: str) -> tuple[LayerBuilder, ...]:
    if isinstance(given, nn.Module):
        raise _wrong(factory, f"returned a built {type(given).__name__} as layers", _BUILDERS)
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise _wrong(factory, f"returned {_described(given)} as layers", "layers is a list of builders")
    layers = tuple(given)
    if not layers:
        raise _wrong(factory, "returned no layers", "a model has one layer or more")
    for index, layer in enumerate(layers):
        _check_builder(layer, index, factory)
    return layers


_BUILDERS = (
    "layers are functions without arguments, so that each rank makes only its own part, anew from the seed: "
    "write `lambda: nn.Linear(8, 8)` for `nn.Linear(8, 8)`"
)


def _check_builder(layer: Any, index: int, factory: str) -> None:
    if isinstance(layer, nn.Module):
        raise _wrong(factory, f"returned a built {type(layer).__name__} as layer {index}", _BUILDERS)
    if not callable(layer):
        raise _wrong(factory, f"returned {_described(layer)} as layer {index}", _BUILDERS)


def _tokens(given: Any, factory: str) -> int | None:
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given >= 1):
        return given
    rule = "it is a whole number from 1 on, or None"
    raise _wrong(factory, f"returned tokens_per_sample = {given!r}", rule)


def _checked_layer(builder: LayerBuilder, index: int, factory: str) -> LayerBuilder:
    """The builder, with its errors in one line, and sure to make a fresh module each time."""
    last: weakref.ref[nn.Module] | None = None

    def build_layer() -> nn.Module:
        nonlocal last
        try:
            module: Any = builder()
        except (Exception, SystemExit) as error:
            raise _user_error(f"model.factory {factory}: layer {index}", error) from error
        if not isinstance(module, nn.Module):
            raise _wrong(factory, f"has a layer {index} that built {_described(module)}", "it builds an nn.Module")
        if last is not None and last() is module:
            raise _wrong(factory, f"has a layer {index} that built the same module twice", _BUILDERS)
        last = weakref.ref(module)
        return module

    return build_layer


def _checked_batch(sample_batch: SampleBatch, factory: str) -> SampleBatch:
    """The user's batch function, with its errors in one line and its shapes checked."""

    def batch(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        try:
            made: Any = sample_batch(samples, generator)
        except (Exception, SystemExit) as error:
            raise _user_error(f"model.factory {factory}: sample_batch(samples={samples}, generator)", error) from error
        rule = f"it returns (inputs, targets), two tensors of {samples} rows"
        if not (isinstance(made, (tuple, list)) and len(made) == 2 and all(isinstance(t, Tensor) for t in made)):
            raise _wrong(factory, f"has a sample_batch that returned {_described(made)}", rule)
        rows = [len(t) if t.dim() else 0 for t in made]
        if rows != [samples, samples]:
            raise _wrong(factory, f"has a sample_batch that returned {rows[0]} and {rows[1]} rows", rule)
        return made[0], made[1]

    return batch


def _checked_loss(loss: Loss, factory: str) -> Loss:
    """The user's loss, checked to be one number. Its exceptions pass: they may be out of memory."""

    def checked(outputs: Tensor, targets: Tensor) -> Tensor:
        value: Any = loss(outputs, targets)
        if not isinstance(value, Tensor) or value.dim() != 0:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            rule = "it returns one number, the mean over the samples"
            raise _wrong(factory, f"has a loss that returned {_described(value)}{shape}", rule)
        return value

    return checked
