import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from chunktune.errors import Mistake, SpecError
from chunktune.request import SweepRequest
from chunktune.settings import MAX_FILE_BYTES, leaves
from chunktune.spec import Resolved, Spec, load

TRANSFORMER: dict[str, Any] = {
    "family": "transformer",
    "layers": 8,
    "hidden": 256,
    "heads": 4,
    "vocab": 4096,
    "sequence": 128,
}
MLP: dict[str, Any] = {"family": "mlp", "layers": 4, "hidden": 8}
SLEEP: dict[str, Any] = {
    "family": "sleep",
    "layers": 4,
    "seconds_per_chunk": 0.008,
    "seconds_per_sample": 0.002,
}
PYTHON: dict[str, Any] = {"family": "python", "factory": "package.module:function"}
COSTS: dict[str, Any] = {"family": "costs", "micro_batch": 6, "forward_s": 0.02, "backward_s": 0.04}

SLEEP_TOML = """
[model]
family = "sleep"
layers = 4
seconds_per_chunk = 0.008
seconds_per_sample = 0.002
[batch]
mini_batch = 64
"""
FOUNDING_TOML = """
[model]
family = "transformer"      # transformer mlp sleep costs huggingface python
layers = 8
hidden = 256
heads = 4
vocab = 4096
sequence = 128

[pipeline]
stages = 2
schedule = "1f1b"
recompute = "none"
partition = "parameters"

[batch]
mini_batch = 32
chunks = "auto"

[training]
optimizer = "adamw"
precision = "float32"

[device]
kind = "auto"
memory = "auto"
headroom = 0.05
reserve = "0GiB"

[sweep]
criterion = "pipeline"
tolerance = 0.01
patience = 1
budget = "10m"
"""


def write(directory: Path, text: str) -> Path:
    path = directory / "spec.toml"
    path.write_text(text, encoding="utf-8")
    return path


def resolve(
    directory: Path,
    text: str = SLEEP_TOML,
    *,
    environ: Mapping[str, str] | None = None,
    sets: Sequence[str] = (),
    flags: Mapping[str, tuple[str, Any]] | None = None,
) -> Resolved:
    return load(write(directory, text), environ=environ or {}, sets=sets, flags=flags)


def mistakes(directory: Path, text: str = SLEEP_TOML, **levels: Any) -> tuple[Mistake, ...]:
    with pytest.raises(SpecError) as caught:
        resolve(directory, text, **levels)
    return caught.value.mistakes


def only(directory: Path, text: str = SLEEP_TOML, **levels: Any) -> Mistake:
    (mistake,) = mistakes(directory, text, **levels)
    return mistake


def spec_of(model: dict[str, Any], **sections: Any) -> Spec:
    return Spec.model_validate({"model": model, "batch": {"mini_batch": 8}, **sections})


# What a spec holds


def test_the_founding_example(tmp_path: Path) -> None:
    spec = resolve(tmp_path, FOUNDING_TOML).spec
    assert (spec.model.family, spec.pipeline.stages, spec.batch.mini_batch) == ("transformer", 2, 32)
    assert (spec.device.reserve, spec.sweep.budget, spec.batch.micro_batch) == (0, 600.0, None)


def test_defaults(tmp_path: Path) -> None:
    dumped = resolve(tmp_path).spec.model_dump(mode="json")
    assert dumped["pipeline"] == {
        "stages": None,
        "schedule": "1f1b",
        "virtual_stages": None,
        "recompute": "none",
        "partition": "parameters",
    }
    assert dumped["batch"] == {"mini_batch": 64, "micro_batch": None, "chunks": "auto"}
    assert dumped["training"] == {"optimizer": "adamw", "precision": "float32", "seed": 0}
    assert dumped["device"] == {"kind": "auto", "memory": "auto", "headroom": 0.05, "reserve": 0}
    assert dumped["hardware"] == {
        "name": None,
        "memory": None,
        "flops": None,
        "flops_float32": None,
        "bandwidth": None,
        "link_bandwidth": None,
        "link_latency": None,
        "launch_s": None,
        "efficiency": 1.0,
    }
    assert dumped["sweep"] == {
        "criterion": "pipeline",
        "tolerance": 0.01,
        "patience": 1,
        "budget": 600.0,
        "trial_timeout": "auto",
    }


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(TRANSFORMER, pipeline={"stages": 2, "partition": [4, 7]}),
        spec_of({**MLP, "features": 3}, batch={"micro_batch": 2, "chunks": "1:64"}),
        spec_of({**SLEEP, "bytes_per_sample": "4MiB", "slowdown": [1, 1, 2.5, 1]}, sweep={"trial_timeout": "90s"}),
        spec_of({**PYTHON, "arguments": {"a": [1, {"b": None}], "c": {"d": 0.5}, "e": True}}),
        spec_of(MLP, device={"memory": "1.5GiB", "headroom": "5%"}, batch={"mini_batch": 8, "chunks": [4, 1, 4]}),
        spec_of({**COSTS, "weight_s": [0.01, 0.02], "kept_bytes": ["1MiB", 5], "static_bytes": 7}),
        spec_of(MLP, hardware={"name": "h100-80gb", "memory": "70GiB", "efficiency": "45%", "flops": 900e12}),
    ],
    ids=["transformer", "mlp", "sleep", "python", "device", "costs", "hardware"],
)
def test_round_trip(spec: Spec) -> None:
    dumped = json.loads(json.dumps(spec.model_dump(mode="json"), allow_nan=False))
    assert Spec.model_validate(dumped) == spec


def test_units_and_lists_are_resolved() -> None:
    spec = spec_of(
        {**SLEEP, "bytes_per_sample": "4MiB"},
        batch={"micro_batch": 1, "chunks": [4, 1, 4]},
        device={"memory": "1.5GiB", "headroom": "5%"},
        sweep={"budget": "90s", "tolerance": "2%"},
    )
    assert spec.batch.chunks == (1, 4)
    assert (spec.device.memory, spec.device.headroom) == (3 * 2**29, 0.05)
    assert (spec.sweep.budget, spec.sweep.tolerance) == (90.0, 0.02)
    assert spec.model_dump()["model"]["bytes_per_sample"] == 2**22


def test_a_spec_is_frozen() -> None:
    with pytest.raises(ValidationError):
        spec_of(MLP).batch.mini_batch = 3  # type: ignore[misc]


def test_what_lies_between_keys_is_checked_without_a_file_too() -> None:
    with pytest.raises(ValidationError, match="neither mini_batch nor micro_batch"):
        Spec.model_validate({"model": MLP})


def test_a_request_survives_its_json(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, FOUNDING_TOML)
    request = SweepRequest(resolved.spec, resolved.sources, resolved.name, str(tmp_path), True, "")
    assert SweepRequest.from_json(request.to_json()) == request


# Where values come from


def test_flag_over_set_over_environment_over_file_over_default(tmp_path: Path) -> None:
    text = SLEEP_TOML + "[pipeline]\nstages = 1\n"
    levels: dict[str, Any] = {
        "environ": {"CHUNKTUNE_PIPELINE__STAGES": "2", "HOME": "/"},
        "sets": ["pipeline.stages=3"],
        "flags": {"pipeline.stages": ("--stages", "4")},
    }
    expected = ["file", "environment CHUNKTUNE_PIPELINE__STAGES", "--set", "flag --stages"]
    seen = [resolve(tmp_path)]
    for count in range(4):
        seen.append(resolve(tmp_path, text, **dict(list(levels.items())[:count])))
    assert [each.spec.pipeline.stages for each in seen] == [None, 1, 2, 3, 4]
    assert [each.sources["pipeline.stages"] for each in seen] == ["default", *expected]


def test_every_leaf_has_a_source(tmp_path: Path) -> None:
    text = '[model]\nfamily = "python"\nfactory = "a:b"\narguments = {x = {y = 1}, z = [1]}\n[batch]\nmicro_batch = 1\n'
    resolved = resolve(tmp_path, text, sets=["model.arguments.x.w=2"])
    dumped = resolved.spec.model_dump(mode="json")
    assert set(resolved.sources) == {".".join(keys) for keys, _ in leaves(dumped)}
    assert resolved.sources["model.arguments.x.y"] == "file"
    assert resolved.sources["model.arguments.x.w"] == "--set"
    assert resolved.sources["sweep.budget"] == "default"
    assert (resolved.name, resolved.path.name) == ("spec", "spec.toml")


OTHER_VALUES: dict[str, str] = {
    "model.layers": "5",
    "model.hidden": "512",
    "model.heads": "8",
    "model.vocab": "99",
    "model.sequence": "7",
    "model.features": "3",
    "model.classes": "3",
    "model.seconds_per_chunk": "0.5",
    "model.seconds_per_sample": "0.5",
    "model.bytes_per_sample": "4MiB",
    "model.slowdown": "[1, 1, 2, 1]",
    "model.width": "8",
    "model.micro_batch": "7",
    "model.forward_s": "[0.5, 0.25]",
    "model.backward_s": "0.5",
    "model.weight_s": "[0.5, 0.25]",
    "model.communication_s": "0.5",
    "model.update_s": "0.5",
    "model.step_constant_s": "0.5",
    "model.static_bytes": "4MiB",
    "model.kept_bytes": "[1, 2]",
    "model.boundary_bytes": "5KB",
    "model.workspace_bytes": "7",
    "model.factory": "other.place:name",
    "model.arguments.depth": "3",
    "pipeline.stages": "3",
    "pipeline.schedule": "gpipe",
    "pipeline.virtual_stages": "1",
    "pipeline.recompute": "full",
    "pipeline.partition": "time",
    "batch.mini_batch": "9",
    "batch.micro_batch": "9",
    "batch.chunks": "[1,2]",
    "training.optimizer": "sgd",
    "training.precision": "bfloat16",
    "training.seed": "7",
    "device.kind": "cpu",
    "device.memory": "1.5GiB",
    "device.headroom": "6%",
    "device.reserve": "1MB",
    "hardware.name": "a100-80gb",
    "hardware.memory": "40GiB",
    "hardware.flops": "1e15",
    "hardware.flops_float32": "2e13",
    "hardware.bandwidth": "2e12",
    "hardware.link_bandwidth": "3e11",
    "hardware.link_latency": "1e-5",
    "hardware.launch_s": "0",
    "hardware.efficiency": "50%",
    "sweep.criterion": "stage",
    "sweep.tolerance": "2%",
    "sweep.patience": "0",
    "sweep.budget": "90s",
    "sweep.trial_timeout": "5m",
}


@pytest.mark.parametrize("model", [TRANSFORMER, MLP, SLEEP, COSTS, PYTHON], ids=lambda model: str(model["family"]))
def test_every_key_is_reached_by_set_and_by_environment(tmp_path: Path, model: dict[str, Any]) -> None:
    lines = [f"{key} = {json.dumps(value)}" for key, value in model.items()]
    text = "[model]\n" + "\n".join(lines) + "\n[batch]\nmini_batch = 8\n"
    base = resolve(tmp_path, text)
    keys = set(base.sources) - {"model.family", "model.arguments"}
    keys |= {"model.arguments.depth"} if model is PYTHON else set()
    keys -= {"pipeline.partition"} if model is COSTS else set()
    for key in sorted(keys):
        variable = f"CHUNKTUNE_{key.upper().replace('.', '__')}"
        by_set = resolve(tmp_path, text, sets=[f"{key}={OTHER_VALUES[key]}"])
        by_environ = resolve(tmp_path, text, environ={variable: OTHER_VALUES[key]})
        assert by_set.spec == by_environ.spec != base.spec, key
        assert by_set.sources[key] == "--set"
        assert by_environ.sources[key] == f"environment {variable}"


def test_a_text_needs_no_quotes(tmp_path: Path) -> None:
    for text in ("gpipe", '"gpipe"', " gpipe "):
        assert resolve(tmp_path, sets=[f"pipeline.schedule={text}"]).spec.pipeline.schedule == "gpipe"


def test_auto_takes_back_a_count_of_the_file(tmp_path: Path) -> None:
    text = SLEEP_TOML + "[pipeline]\nstages = 2\n"
    assert resolve(tmp_path, text, sets=["pipeline.stages=auto"]).spec.pipeline.stages is None


def test_the_last_set_wins(tmp_path: Path) -> None:
    sets = ["pipeline.stages=2", "pipeline.stages=3"]
    assert resolve(tmp_path, sets=sets).spec.pipeline.stages == 3


def test_a_table_is_replaced_as_a_whole(tmp_path: Path) -> None:
    spec = resolve(tmp_path, sets=['model={family = "mlp", layers = 2, hidden = 4}']).spec
    assert spec.model.family == "mlp"


@pytest.mark.parametrize(
    "levels",
    [
        {"environ": {"CHUNKTUNE_BATCH__MICRO_BATCH": "4"}},
        {"sets": ["batch.micro_batch=4"]},
        {"flags": {"batch.micro_batch": ("--micro-batch", 4)}},
    ],
    ids=["environment", "set", "flag"],
)
def test_a_higher_source_replaces_the_other_batch(tmp_path: Path, levels: dict[str, Any]) -> None:
    resolved = resolve(tmp_path, **levels)
    assert (resolved.spec.batch.mini_batch, resolved.spec.batch.micro_batch) == (None, 4)
    assert resolved.sources["batch.mini_batch"] == "default"


def test_both_batches_at_one_source_are_a_mistake(tmp_path: Path) -> None:
    mistake = only(tmp_path, sets=["batch.micro_batch=4", "batch.mini_batch=8"])
    assert (mistake.source, mistake.key) == ("--set", "batch")
    assert mistake.fact == "gives both mini_batch = 8 and micro_batch = 4"


def test_the_family_may_change_but_not_leave_keys_behind(tmp_path: Path) -> None:
    found = mistakes(tmp_path, sets=["model.family=mlp", "model.hidden=8"])
    assert [mistake.key for mistake in found] == ["model.seconds_per_chunk", "model.seconds_per_sample"]
    assert all(mistake.source.endswith("spec.toml") for mistake in found)


# Mistakes


def test_five_mistakes_are_five_lines(tmp_path: Path) -> None:
    text = """
[model]
family = "transformer"
layers = 8
hidden = 250
heads = 4
vocab = 4096
sequence = 128
[pipeline]
stages = 0
schedule = "gpip"
[batch]
mini_batch = -32
chunk = 3
"""
    found = mistakes(tmp_path, text)
    assert [(mistake.key, mistake.nearest) for mistake in found] == [
        ("pipeline.stages", "1"),
        ("pipeline.schedule", "gpipe"),
        ("batch.mini_batch", "1"),
        ("batch.chunk", "batch.chunks"),
        ("model.heads", "5"),
    ]
    assert all(str(mistake).startswith(str(tmp_path / "spec.toml")) for mistake in found)
    assert str(SpecError(found)).startswith("5 mistakes in the spec:\n")


def test_mistakes_of_all_sources_come_together(tmp_path: Path) -> None:
    found = mistakes(
        tmp_path,
        SLEEP_TOML + "[sweep]\npatience = -1\n",
        environ={"CHUNKTUNE_SWEEP__BUDGETS": "1", "CHUNKTUNE_STAGES": "2", "CHUNKTUNE_": "x"},
        sets=["stages=4", "pipeline.stages", "pipeline.schedule=[", "sweep.tolerance=0.9"],
        flags={"pipeline.stages": ("--stages", "none")},
    )
    assert sorted((mistake.source.rpartition("/")[2], mistake.key) for mistake in found) == [
        ("--set", ""),
        ("--set", "pipeline.schedule"),
        ("--set", "stages"),
        ("--set", "sweep.tolerance"),
        ("environment CHUNKTUNE_", ""),
        ("environment CHUNKTUNE_STAGES", ""),
        ("environment CHUNKTUNE_SWEEP__BUDGETS", "sweep.budgets"),
        ("flag --stages", "pipeline.stages"),
        ("spec.toml", "sweep.patience"),
    ]


BAD_VALUES: list[tuple[str, str, str]] = [
    ("pipeline.stages", "0", "1"),
    ("pipeline.stages", "true", "1"),
    ("pipeline.stages", "2.0", "2"),
    ("pipeline.stages", '"2"', "2"),
    ("pipeline.stages", "4294967296", "4096"),
    ("pipeline.stages", "{a = 1}", "1"),
    ("pipeline.stages", "[2]", "1"),
    ("pipeline.schedule", "1F1B", "1f1b"),
    ("pipeline.schedule", "Interleaved1F1B", "interleaved-1f1b"),
    ("pipeline.schedule", "interleaved_zero", "interleaved-zero-bubble"),
    ("pipeline.schedule", "3", ""),
    ("pipeline.recompute", "ful", "full"),
    ("pipeline.partition", "uniformly", "uniform"),
    ("pipeline.partition", "[]", ""),
    ("pipeline.partition", "[4, 0]", "1"),
    ("batch.mini_batch", "-3", "1"),
    ("batch.chunks", "0", ""),
    ("batch.chunks", "[0]", "1"),
    ("batch.chunks", "[1, true]", "1"),
    ("batch.chunks", "[]", "auto"),
    ("batch.chunks", "aut", "auto"),
    ("batch.chunks", "64:1", "1:64"),
    ("batch.chunks", "0:4", "1:4"),
    ("batch.chunks", "1:99999999999", ""),
    ("batch.chunks", "1-4", ""),
    ("training.seed", "-1", "0"),
    ("training.seed", "9223372036854775808", "9223372036854775807"),
    ("training.optimizer", "adam", "adamw"),
    ("training.precision", "bf16", "bfloat16"),
    ("device.kind", "gpu", "cpu"),
    ("device.memory", "0", "1"),
    ("device.memory", "1.5.2GB", "1.5GB"),
    ("device.memory", "80 G iB", "80GiB"),
    ("device.headroom", "1", "1%"),
    ("device.headroom", "100%", "0.05"),
    ("device.reserve", "-1", "0"),
    ("hardware.name", "h100-80g", "h100-80gb"),
    ("hardware.name", "a100_80gb", "a100-80gb"),
    ("hardware.name", "3", ""),
    ("hardware.memory", "0", "1"),
    ("hardware.memory", "80 G iB", "80GiB"),
    ("hardware.flops", "0", ""),
    ("hardware.flops", "989TFLOPS", ""),
    ("hardware.bandwidth", "inf", ""),
    ("hardware.link_latency", "-1", "0"),
    ("hardware.efficiency", "0", "1"),
    ("hardware.efficiency", "1.5", "1.5%"),
    ("hardware.efficiency", "45", "45%"),
    ("sweep.criterion", "stages", "stage"),
    ("sweep.tolerance", "0", "0.01"),
    ("sweep.tolerance", "0.5", "0.49"),
    ("sweep.tolerance", "nan", "0.05"),
    ("sweep.patience", "-1", "0"),
    ("sweep.budget", "0", "10m"),
    ("sweep.budget", "inf", "10m"),
    ("sweep.trial_timeout", "1 day", "10m"),
    ("model.layers", "1e3", "1000"),
    ("model.seconds_per_chunk", "-1", "0"),
    ("model.seconds_per_chunk", "nan", "0"),
    ("model.seconds_per_chunk", "true", "0"),
    ("model.slowdown", "[1, 2]", ""),
    ("model.slowdown", "2", ""),
]


@pytest.mark.parametrize(("key", "value", "nearest"), BAD_VALUES)
def test_bad_values(tmp_path: Path, key: str, value: str, nearest: str) -> None:
    mistake = only(tmp_path, sets=[f"{key}={value}"])
    assert (mistake.source, mistake.key, mistake.rule != "") == ("--set", key, True)
    if key != "sweep.trial_timeout":
        assert mistake.nearest == nearest
    assert "pydantic" not in str(mistake)


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        (SLEEP_TOML + "[pipelin]\nstages = 2", "pipelin", "pipeline"),
        ("stages = 2\n" + SLEEP_TOML, "stages", "pipeline.stages"),
        (SLEEP_TOML + "[pipeline]\nstage = 2", "pipeline.stage", "pipeline.stages"),
        (SLEEP_TOML + "[pipeline]\nchunks = 2", "pipeline.chunks", "batch.chunks"),
        (SLEEP_TOML + "[pipeline]\nqqqq = 2", "pipeline.qqqq", ""),
        (SLEEP_TOML.replace("layers", "layer"), "model.layer", "model.layers"),
    ],
)
def test_unknown_keys(tmp_path: Path, text: str, key: str, nearest: str) -> None:
    found = {mistake.key: mistake for mistake in mistakes(tmp_path, text)}
    assert found[key].nearest == nearest
    assert found[key].fact.startswith("unknown")


@pytest.mark.parametrize(
    ("text", "key", "part"),
    [
        ("[batch]\nmini_batch = 1", "model", "is missing"),
        ("[batch]\nmini_batch = 1\n[model]\nlayers = 1", "model.family", "is missing"),
        ('[batch]\nmini_batch = 1\n[model]\nfamily = "slep"', "model.family", "did you mean sleep?"),
        ('[batch]\nmini_batch = 1\n[model]\nfamily = "huggingface"', "model.family", "no such family in this version"),
        ("[batch]\nmini_batch = 1\n[model]\nfamily = 3", "model.family", "is 3"),
        ("model = 3\n[batch]\nmini_batch = 1", "model", "must be a table"),
        ("pipeline = 3\n" + SLEEP_TOML, "pipeline", "must be a table"),
        (SLEEP_TOML.replace("[batch]\nmini_batch = 64", ""), "batch", "neither"),
        (SLEEP_TOML.replace("layers = 4", ""), "model.layers", "is missing"),
        (SLEEP_TOML + "micro_batch = 3", "batch", "gives both"),
    ],
)
def test_missing_and_misplaced(tmp_path: Path, text: str, key: str, part: str) -> None:
    mistake = only(tmp_path, text)
    assert mistake.key == key
    assert part in str(mistake)


@pytest.mark.parametrize(
    ("model", "pipeline", "parts"),
    [
        (TRANSFORMER, {"partition": [4, 4]}, ["sums to 8", "11 layers"]),
        (TRANSFORMER, {"stages": 2, "partition": [4, 7]}, []),
        (MLP, {"partition": [1, 2]}, ["sums to 3", "4 layers"]),
        (SLEEP, {"stages": 3, "partition": [2, 2]}, ["has 2 counts", "3 parts"]),
        (SLEEP, {"stages": 2, "schedule": "interleaved-1f1b", "partition": [2, 2]}, ["4 parts"]),
        (SLEEP, {"stages": 2, "schedule": "interleaved-1f1b", "partition": [1, 1, 1, 1]}, []),
        (SLEEP, {"stages": 1, "virtual_stages": 4, "schedule": "looped-bfs", "partition": [2, 2]}, ["4 parts"]),
        (PYTHON, {"partition": [9, 9]}, []),
    ],
)
def test_explicit_partitions(model: dict[str, Any], pipeline: dict[str, Any], parts: list[str]) -> None:
    if not parts:
        assert spec_of(model, pipeline=pipeline)
        return
    with pytest.raises(ValidationError) as caught:
        spec_of(model, pipeline=pipeline)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    ("model", "pipeline", "parts"),
    [
        ({}, {"stages": 3}, []),
        ({"forward_s": [0.1, 0.2]}, {}, []),
        ({"forward_s": [0.1, 0.2]}, {"stages": 2}, []),
        ({"forward_s": [0.1, 0.2]}, {"stages": 1, "schedule": "zbv-zero-bubble"}, []),
        ({"forward_s": [0.1, 0.2]}, {"stages": 4}, ["model.forward_s: has 2 values", "each of the 4 parts"]),
        (
            {"forward_s": [0.1, 0.2], "kept_bytes": [1]},
            {},
            ["model.kept_bytes: has 1 values", "2 parts that the longest"],
        ),
        ({"forward_s": []}, {}, ["empty list"]),
        ({"forward_s": -1}, {}, ["is -1"]),
        ({"kept_bytes": [1, "x"]}, {}, ["item 2", "a size is"]),
        ({}, {"stages": 2, "partition": "uniform"}, ["pipeline.partition", "one cost a part"]),
        ({}, {"stages": 2, "partition": [1, 1]}, ["pipeline.partition", "one cost a part"]),
    ],
)
def test_costs_a_part(model: dict[str, Any], pipeline: dict[str, Any], parts: list[str]) -> None:
    if not parts:
        assert spec_of({**COSTS, **model}, pipeline=pipeline)
        return
    with pytest.raises(ValidationError) as caught:
        spec_of({**COSTS, **model}, pipeline=pipeline)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_costs_and_hardware_mistakes_come_together(tmp_path: Path) -> None:
    text = """
[model]
family = "costs"
micro_batch = 0
forward_s = [0.1, 0.2]
backward_s = "fast"
[pipeline]
stages = 4
[batch]
mini_batch = 8
[hardware]
name = "my own"
memory = "80GiB"
flop = 3
"""
    found = {mistake.key: mistake for mistake in mistakes(tmp_path, text)}
    keys = ["model.micro_batch", "model.backward_s", "model.forward_s", "hardware.flop", "hardware.name"]
    assert sorted(found) == sorted(keys)
    assert "flops, flops_float32, bandwidth, link_bandwidth missing" in found["hardware.name"].rule
    assert found["hardware.flop"].nearest == "hardware.flops"


def test_a_device_of_ones_own_needs_all_figures(tmp_path: Path) -> None:
    figures = "memory = 1\nflops = 1e12\nflops_float32 = 1e12\nbandwidth = 1e9\nlink_bandwidth = 1e9\n"
    spec = resolve(tmp_path, f'{SLEEP_TOML}[hardware]\nname = "my own"\n{figures}').spec
    assert (spec.hardware.name, spec.hardware.bandwidth, spec.hardware.efficiency) == ("my own", 1e9, 1.0)
    assert resolve(tmp_path, f"{SLEEP_TOML}[hardware]\n{figures}").spec.hardware.name is None


@pytest.mark.parametrize(
    ("factory", "nearest"),
    [("package.module", "package:module"), ("", ""), ("a:b:c", ""), ("a b:c", ""), ("a.py:b", None), ("3a:b", "")],
)
def test_factories(tmp_path: Path, factory: str, nearest: str | None) -> None:
    text = f'[model]\nfamily = "python"\nfactory = "{factory}"\n[batch]\nmini_batch = 1'
    if nearest is None:
        assert resolve(tmp_path, text)
    else:
        assert only(tmp_path, text).nearest == nearest


@pytest.mark.parametrize("value", ["2024-01-01", "inf", "[nan]", "{a = 9223372036854775808}"])
def test_arguments_are_what_json_can_hold(tmp_path: Path, value: str) -> None:
    text = f'[model]\nfamily = "python"\nfactory = "a:b"\narguments = {{x = {value}}}\n[batch]\nmini_batch = 1'
    mistake = only(tmp_path, text)
    assert mistake.key == "model.arguments"
    assert mistake.fact.startswith('"x"')


def test_messages_are_short_and_printable(tmp_path: Path) -> None:
    long_text = "x" * 5000
    found = mistakes(
        tmp_path,
        SLEEP_TOML + f'"a\\u001b[31m{long_text}" = 1\n',
        sets=[f"pipeline.schedule={long_text}", "pipeline.recompute=\x1b[31m", f"training.seed=0x{'F' * 5000}"],
    )
    assert len(found) == 4
    assert all(len(str(mistake)) < 700 and str(mistake).isprintable() for mistake in found)


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_set_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, key: str, value: str) -> None:
    path = write(tmp_path_factory.getbasetemp(), SLEEP_TOML)
    with pytest.raises(SpecError):
        load(path, environ={}, sets=[f"q{key}={value}"])
    try:
        load(path, environ={}, sets=[f"pipeline.partition={value}"])
    except SpecError as error:
        assert all(str(mistake).isprintable() for mistake in error.mistakes)


# Files


def bad_file(path: Path) -> str:
    with pytest.raises(SpecError) as caught:
        load(path, environ={})
    (mistake,) = caught.value.mistakes
    return str(mistake)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "holds no settings"),
        (b"# nothing\n", "holds no settings"),
        (b"\xff\xfe", "no UTF-8 text (byte 0)"),
        (b"a\0b", "is binary"),
        (b"[model\n", "is no TOML"),
        (b"x = 1\ny = \n", "line 2"),
        (b"[a]\nb = 1\nb = 2\n", "twice, at line 3"),
        (b"[a]\nb = 1\n[a]\n", "twice, at line 3"),
        (b"x = 1" * 300_000, "larger than 1.00 MiB"),
        (b"x = " + b"[" * 5000, "nested too deeply"),
        (b"x = " + b"{a = " * 100 + b"1" + b"}" * 100, "nested too deeply"),
        (b".".join([b"a"] * 5000) + b" = 1", "nested too deeply"),
        (b"[" + b".".join([b"a"] * 100) + b"]", "nested too deeply"),
        (b"x = " + b"9" * 5000, "is no TOML"),
    ],
    ids=lambda value: repr(value[:12]) if isinstance(value, bytes) else "",
)
def test_bad_contents(tmp_path: Path, data: bytes, part: str) -> None:
    path = tmp_path / "spec.toml"
    path.write_bytes(data)
    message = bad_file(path)
    assert message.startswith(str(path))
    assert part in message


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_bytes(b"\xef\xbb\xbf" + SLEEP_TOML.encode())
    assert load(path, environ={}).spec.model.family == "sleep"


def test_the_largest_file_is_read(tmp_path: Path) -> None:
    padding = MAX_FILE_BYTES - len(SLEEP_TOML) - 1
    assert resolve(tmp_path, SLEEP_TOML + "#" + "x" * padding).spec.batch.mini_batch == 64


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, SLEEP_TOML)
    assert f"did you mean {tmp_path / 'spec.toml'}?" in bad_file(tmp_path / "spec.tml")
    assert "does not exist" in bad_file(tmp_path / "no" / "such" / "file.toml")
    assert "cannot be read" in bad_file(tmp_path / ("x" * 300))


def test_places_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert "is a directory" in bad_file(tmp_path)
    assert "is no regular file" in bad_file(tmp_path / "fifo")  # and it does not wait for a writer
    assert "is no regular file" in bad_file(Path(os.devnull))


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, SLEEP_TOML)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # the mode alone does not stop root
    assert "cannot be read: Permission denied" in bad_file(path)
