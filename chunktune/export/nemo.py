"""NeMo: the YAML config of 1.x, and of 2.x a function that changes a recipe.

1.x: examples/nlp/language_modeling/conf/megatron_gpt_config.yaml at v1.21.0 to v1.23.0; trainer.precision as in
nemo/collections/nlp/parts/megatron_trainer_builder.py.
2.x: nemo/lightning/pytorch/strategies/megatron_strategy.py (MegatronStrategy), nemo/collections/llm/gpt/data/mock.py
(micro_batch_size, global_batch_size), nemo/collections/llm/recipes/CONFIGURATION-HIERARCHY.md (recompute_...) and
recipes/precision/mixed_precision.py (bf16_mixed) at v2.1.0 to v2.4.0.
"""

from __future__ import annotations

from functools import partial

from chunktune.export.formats import to_function, to_yaml
from chunktune.export.megatron_lm import cut, layout, ran
from chunktune.export.settings import Expression, Framework, Setting, Translation, Value, Version, autocast_weights
from chunktune.export.values import Values

TITLE = "NeMo"
_STRATEGY = "trainer.strategy"


def _translate_1(values: Values) -> Translation:
    # The Megatron of that time has no groups: arguments.py and schedules.py of core_v0.4.0 want a multiple of K.
    how = ran(values, TITLE, groups=False)
    _, untranslated, remarks = cut(values, how, TITLE, layouts=False)
    settings = (
        Setting("trainer.precision", "bf16" if values.precision == "bfloat16" else 32),
        Setting("model.micro_batch_size", values.micro_batch, "b"),
        Setting("model.global_batch_size", values.global_batch, f"D N, D = {values.replicas}"),
        Setting("model.pipeline_model_parallel_size", values.stages, "K"),
        Setting("model.virtual_pipeline_model_parallel_size", _interleaved(how.virtual_stages), "V; null is 1"),
        Setting("model.activations_checkpoint_granularity", "full" if values.recompute else None),
        Setting("model.activations_checkpoint_method", "uniform" if values.recompute else None),
        Setting("model.activations_checkpoint_num_layers", 1 if values.recompute else None),
    )
    return Translation(settings, (*how.untranslated, *untranslated), (*remarks, *autocast_weights(values, TITLE)))


def _translate_2(values: Values, *, layouts: bool) -> Translation:
    how = ran(values, TITLE)
    written, untranslated, remarks = cut(values, how, TITLE, layouts=layouts)
    parts: Value = layout(values) if written else None
    settings = (
        Setting("data.micro_batch_size", values.micro_batch, "b"),
        Setting("data.global_batch_size", values.global_batch, f"D N, D = {values.replicas}"),
        Setting(f"{_STRATEGY}.pipeline_model_parallel_size", values.stages, "K"),
        Setting(f"{_STRATEGY}.virtual_pipeline_model_parallel_size", _interleaved(how.virtual_stages), "V; None is 1"),
        Setting(f"{_STRATEGY}.microbatch_group_size_per_vp_stage", how.group, "None is K"),
        # New in v2.4.0; the form of scripts/performance/llm/pretrain_deepseek_v3.py.
        *((Setting(f"{_STRATEGY}.pipeline_model_parallel_layout", parts),) if layouts else ()),
        Setting("model.config.recompute_granularity", "full" if values.recompute else None),
        Setting("model.config.recompute_method", "uniform" if values.recompute else None),
        Setting("model.config.recompute_num_layers", 1 if values.recompute else None),
        *_plugins(values),
    )
    notes = (*untranslated, *_float32(values))
    return Translation(
        settings, (*how.untranslated, *notes), (*remarks, *autocast_weights(values, TITLE)), _imports(values)
    )


def _interleaved(virtual_stages: int) -> int | None:
    return virtual_stages if virtual_stages > 1 else None


def _plugins(values: Values) -> tuple[Setting, ...]:
    bfloat16 = values.precision == "bfloat16"
    return (Setting("trainer.plugins", Expression("bf16_mixed()")),) if bfloat16 else ()


def _imports(values: Values) -> tuple[str, ...]:
    module = "nemo.collections.llm.recipes.precision.mixed_precision"
    return (f"from {module} import bf16_mixed",) if values.precision == "bfloat16" else ()


def _float32(values: Values) -> tuple[str, ...]:
    if values.precision != "float32":
        return ()
    return (f"precision: {TITLE}'s recipes have no plugin for float32; yours keeps its own precision",)


def _version_2(name: str, *, layouts: bool) -> Version:
    docstring = "Set what chunktune found on a recipe, as in `apply(llm.llama3_8b.pretrain_recipe(...))`."
    return Version(name, partial(_translate_2, layouts=layouts), {"python": to_function("recipe", docstring)})


FRAMEWORK = Framework(
    "nemo",
    TITLE,
    (
        *(Version(f"1.{minor}", _translate_1, {"yaml": to_yaml}) for minor in (21, 22, 23)),
        *(_version_2(f"2.{minor}", layouts=False) for minor in (1, 2, 3)),
        _version_2("2.4", layouts=True),
    ),
)
