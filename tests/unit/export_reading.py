"""Reads an export back as its framework would: by the format's own reader, then by the framework's arithmetic."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import yaml


@dataclass(frozen=True)
class Read:
    """M, b, the global batch and K as a framework understands a file; null where the file cannot say it."""

    chunks: int
    micro_batch: int | None
    global_batch: int | None
    stages: int


class Config(SimpleNamespace):
    """Attributes that come into being as they are looked at, as deep as one likes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Config()
        setattr(self, name, made)
        return made


def run_python(text: str) -> dict[str, Any]:
    """What a Python export defines; what it imports is a stand-in."""
    tree = ast.parse(text)
    space: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            space.update({alias.name: stand_in(alias.name) for alias in node.names})
    tree.body = [node for node in tree.body if not isinstance(node, ast.ImportFrom)]
    exec(compile(tree, "<export>", "exec"), space)
    return space


def stand_in(name: str) -> Any:
    def call(*values: Any, **options: Any) -> Any:
        return (name, values, options)

    call.Config = lambda: name  # type: ignore[attr-defined]
    return call


def applied(text: str, tokens: int = 7) -> Config:
    """The configuration that `apply` makes of one with `tokens` tokens a sample."""
    config = Config()
    config.training.max_context_length = tokens
    made = run_python(text)["apply"](config)
    assert made is config
    return config


def flags_of(text: str) -> list[str]:
    """The words that a shell makes of flags: comments dropped, lines joined."""
    return shlex.split(text.replace("\\\n", " "), comments=True)


def parsed_flags(text: str) -> argparse.Namespace:
    """Flags as Megatron-LM's argparse reads them; an unknown one is an error."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    for name in ("micro-batch-size", "global-batch-size", "pipeline-model-parallel-size", "recompute-num-layers"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--num-virtual-stages-per-pipeline-rank", type=int)
    parser.add_argument("--microbatch-group-size-per-virtual-pipeline-stage", type=int)
    parser.add_argument("--pipeline-model-parallel-layout")
    parser.add_argument("--recompute-granularity", choices=["full", "selective"])
    parser.add_argument("--recompute-method", choices=["uniform", "block"])
    parser.add_argument("--bf16", action="store_true")
    return parser.parse_args(flags_of(text))


def _torch(text: str, replicas: int) -> Read:
    space = run_python(text)
    _, _, options = space["build_schedule"]("stage", None)
    assert space["MINI_BATCH_SIZE"] == space["N_MICROBATCHES"] * space["MICRO_BATCH_SIZE"]
    return Read(
        options["n_microbatches"], space["MICRO_BATCH_SIZE"], space["GLOBAL_BATCH_SIZE"], space["PIPELINE_STAGES"]
    )


def _titan_toml(text: str, replicas: int) -> Read:
    data = tomllib.loads(text)
    training, parallelism = data["training"], data["parallelism"]
    local = training.get("local_batch_size", training.get("batch_size"))
    if "pipeline_parallel_microbatches" in parallelism:
        chunks = parallelism["pipeline_parallel_microbatches"]
    else:
        chunks = local // parallelism["pipeline_parallel_microbatch_size"]
    assert local % chunks == 0
    return Read(chunks, local // chunks, training.get("global_batch_size"), parallelism["pipeline_parallel_degree"])


def _titan_python(text: str, replicas: int) -> Read:
    config = applied(text, tokens=7)
    training, parallelism = vars(config.training), vars(config.parallelism)
    if "num_pp_microbatches" in parallelism:
        chunks, tokens = parallelism["num_pp_microbatches"], training["max_context_length"]
        micro_batch, rest = divmod(training["num_tokens_per_microbatch_per_dp_rank"], tokens)
        global_batch, more = divmod(training["num_tokens_per_train_step"], tokens)
        assert rest == more == 0
    else:
        micro_batch, global_batch = parallelism["pipeline_parallel_microbatch_size"], training["global_batch_size"]
        chunks = training["local_batch_size"] // micro_batch
    return Read(chunks, micro_batch, global_batch, parallelism["pipeline_parallel_degree"])


def _megatron(text: str, replicas: int) -> Read:
    given = parsed_flags(text)
    return _derived(
        given.micro_batch_size, given.global_batch_size, given.pipeline_model_parallel_size, replicas=replicas
    )


def _deepspeed(text: str, replicas: int) -> Read:
    data = json.loads(text)
    chunks, micro_batch = data["gradient_accumulation_steps"], data["train_micro_batch_size_per_gpu"]
    assert data["train_batch_size"] == micro_batch * chunks * replicas  # deepspeed/runtime/config.py asserts it
    return Read(chunks, micro_batch, data["train_batch_size"], data["pipeline"]["stages"])


def _nemo_yaml(text: str, replicas: int) -> Read:
    model = yaml.safe_load(text)["model"]
    return _derived(
        model["micro_batch_size"], model["global_batch_size"], model["pipeline_model_parallel_size"], replicas=replicas
    )


def _nemo_python(text: str, replicas: int) -> Read:
    recipe = applied(text)
    stages = recipe.trainer.strategy.pipeline_model_parallel_size
    return _derived(recipe.data.micro_batch_size, recipe.data.global_batch_size, stages, replicas=replicas)


def _derived(micro_batch: int, global_batch: int, stages: int, *, replicas: int) -> Read:
    """Megatron's own: megatron/core/num_microbatches_calculator.py."""
    chunks, rest = divmod(global_batch, micro_batch * replicas)
    assert rest == 0
    return Read(chunks, micro_batch, global_batch, stages)


def _accelerate_yaml(text: str, replicas: int) -> Read:
    data = yaml.safe_load(text)
    assert data["distributed_type"] == "MEGATRON_LM"
    return _accelerated({**data, **data["megatron_lm_config"]}, text)


def _accelerate_flags(text: str, replicas: int) -> Read:
    words = flags_of(text)
    assert words[0] == "--use_megatron_lm"
    data = {name.removeprefix("--"): value for name, value in zip(words[1::2], words[2::2], strict=True)}
    return _accelerated({name: int(value) if value.isdecimal() else value for name, value in data.items()}, text)


def _accelerated(data: Mapping[str, Any], text: str) -> Read:
    chunks, stages = data["megatron_lm_num_micro_batches"], data["megatron_lm_pp_degree"]
    micro_batch = int(re.search(r"batch_size=(\d+)", text)[1])  # type: ignore[index]
    replicas = data["num_processes"] // (stages * data["megatron_lm_tp_degree"])
    return Read(chunks, micro_batch, replicas * micro_batch * chunks, stages)


READERS: Mapping[tuple[str, str], Callable[[str, int], Read]] = {
    ("torch", "python"): _torch,
    ("torchtitan", "toml"): _titan_toml,
    ("torchtitan", "python"): _titan_python,
    ("megatron-lm", "flags"): _megatron,
    ("deepspeed", "json"): _deepspeed,
    ("nemo", "yaml"): _nemo_yaml,
    ("nemo", "python"): _nemo_python,
    ("accelerate", "yaml"): _accelerate_yaml,
    ("accelerate", "flags"): _accelerate_flags,
}
