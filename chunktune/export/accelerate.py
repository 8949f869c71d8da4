"""Accelerate: the YAML config of `accelerate launch` for its Megatron-LM plugin, or the flags of that command.

Keys: src/accelerate/commands/config/config_args.py (ClusterConfig), commands/launch.py (--megatron_lm_...) and
utils/dataclasses.py (MegatronLMPlugin), read at every tag from v0.34.0 (2024-09-03) to v1.14.0 (2026-06-11).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from chunktune.export.formats import to_flags, to_yaml
from chunktune.export.megatron_lm import cut, even, ran
from chunktune.export.settings import Framework, Plain, Setting, Translation, Version, autocast_weights
from chunktune.export.values import Values, require_integer

TITLE = "Accelerate"
_PREFIX = "megatron_lm_config.megatron_lm_"
_PLUGIN = "MegatronLMPlugin(other_megatron_args={{{}}})"


def _translate(values: Values, *, granular: bool) -> Translation:
    """`granular`: the version can say how much is recomputed, and by itself recomputes everything."""
    # Accelerate hands Megatron no size of a group, so that only whole multiples of K interleave.
    how = ran(values, TITLE, groups=False)
    _, untranslated, remarks = cut(values, how, TITLE, layouts=False)
    ranks = values.replicas * values.stages
    require_integer(ranks, "the number of ranks")
    recompute, recompute_remarks = _recompute(values, granular)
    settings = (
        Setting("distributed_type", "MEGATRON_LM"),
        Setting("mixed_precision", "bf16" if values.precision == "bfloat16" else "no"),
        Setting("num_processes", ranks, f"D K, D = {values.replicas}"),
        Setting(f"{_PREFIX}tp_degree", 1),
        Setting(f"{_PREFIX}pp_degree", values.stages, "K"),
        Setting(f"{_PREFIX}num_micro_batches", values.chunks, "M"),
        *recompute,
    )
    # accelerator.py, _prepare_megatron_lm: b is the data loader's batch size, the global batch D M b.
    batch = f"b: give your DataLoader batch_size={values.micro_batch}; the global batch is {values.global_batch}"
    virtual = _virtual(values) if how.virtual_stages > 1 else ()
    return Translation(
        settings,
        (*how.untranslated, *untranslated),
        (batch, *virtual, *recompute_remarks, *remarks, *autocast_weights(values, TITLE)),
    )


def _recompute(values: Values, granular: bool) -> tuple[tuple[Setting, ...], tuple[str, ...]]:
    # recompute_activations is Megatron's selective one.
    selective = Setting(f"{_PREFIX}recompute_activations", False)
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    full: tuple[Plain, ...] = ("full", "uniform", 1)
    if granular:
        # MegatronLMPlugin.__post_init__ since v1.13.0: the granularity is "full" where nothing is said, and the size
        # of context parallelism 2.
        context = Setting(f"{_PREFIX}context_parallel_size", 1)
        if values.recompute:
            given = (Setting(f"{_PREFIX}{name}", value) for name, value in zip(names, full, strict=True))
            return (selective, *given, context), ()
        nothing = _PLUGIN.format(", ".join(f'"{name}": None' for name in names))
        return (selective, context), (f"recompute: {TITLE} recomputes everything unless your code passes {nothing}",)
    if not values.recompute:
        return (selective,), ()
    everything = _PLUGIN.format(", ".join(f'"{name}": {value!r}' for name, value in zip(names, full, strict=True)))
    return (selective,), (f"recompute: the file can only ask for selective; pass {everything} in your code",)


def _virtual(values: Values) -> tuple[str, ...]:
    count = str(values.blocks_per_part[0]) if values.blocks_per_part and even(values) else "..."
    given = f"MegatronLMPlugin(num_layers_per_virtual_pipeline_stage={count})"
    return (f"virtual stages: V = {values.virtual_stages}; the file has no key, pass {given} in your code",)


def _flags(translation: Translation, head: Sequence[str]) -> str:
    """Flags of `accelerate launch`, which are the keys without the name of their table; yes and no are words."""
    flags = [Setting("use_megatron_lm", True)]
    for setting in translation.settings:
        name = setting.key.rpartition(".")[2]
        if name != "distributed_type":
            value = setting.value
            flags.append(Setting(name, str(value).lower() if isinstance(value, bool) else value))
    return to_flags(Translation(tuple(flags)), head)


def _version(name: str, *, granular: bool) -> Version:
    return Version(name, partial(_translate, granular=granular), {"yaml": to_yaml, "flags": _flags})


FRAMEWORK = Framework(
    "accelerate",
    TITLE,
    (
        _version("0.34", granular=False),
        *(_version(f"1.{minor}", granular=False) for minor in range(13)),
        *(_version(f"1.{minor}", granular=True) for minor in (13, 14)),
    ),
)
