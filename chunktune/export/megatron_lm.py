"""Megatron-LM: command-line flags of its training scripts. What NeMo and Accelerate say of Megatron is here too.

Every flag was looked up at each tag from core_v0.11.0 (2025-03-14) to core_v0.19.0 (2026-08-19).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from chunktune.export.formats import to_flags
from chunktune.export.settings import (
    Framework,
    Setting,
    Translation,
    Version,
    autocast_weights,
    own_layers,
    spelled,
    under_another_schedule,
)
from chunktune.export.values import Values

TITLE = "Megatron-LM"


@dataclass(frozen=True)
class Ran:
    """How a record runs under Megatron's two schedules, 1F1B and interleaved 1F1B.

    (megatron/core/pipeline_parallel/schedules.py has these two and one without a pipeline.) `virtual_stages`: 1 for
    the plain one. `group`: consecutive micro-batches of a part, null where the usual, K. `same_parts`: whether the
    parts are those of the record.
    """

    virtual_stages: int
    group: int | None
    same_parts: bool
    untranslated: tuple[str, ...] = ()


def ran(values: Values, title: str, *, groups: bool = True) -> Ran:
    """The nearest that Megatron runs. `groups`: whether the size of a group of micro-batches can be set."""
    if values.placement == "single" or values.parts == values.stages:
        missing = values.schedule not in ("1f1b", "interleaved-1f1b")
        return Ran(1, None, True, (under_another_schedule(values, title, "1F1B"),) if missing else ())
    if values.placement == "v":
        return Ran(1, None, False, (under_another_schedule(values, title, "1F1B with V = 1"),))
    if refusal := _no_interleaving(values, groups):
        chosen = f"it will run 1F1B with V = 1; M was chosen under {values.schedule} with V = {values.virtual_stages}"
        return Ran(1, None, False, (f"virtual stages: {title} {refusal}; {chosen}",))
    group = _group(values)
    missing = values.schedule != "interleaved-1f1b"
    notes = (under_another_schedule(values, title, "interleaved 1F1B"),) if missing else ()
    return Ran(values.virtual_stages, group if group != values.stages else None, True, notes)


def _group(values: Values) -> int:
    """Micro-batches a round as torch's ScheduleInterleaved1F1B takes them; all where they do not fill whole rounds."""
    rounds = max(1, values.chunks // values.stages)
    return values.chunks // rounds if values.chunks % rounds == 0 else values.chunks


def _no_interleaving(values: Values, groups: bool) -> str | None:
    """Why Megatron refuses to interleave, null where it does.

    `forward_backward_pipelining_with_interleaving`: K <= group <= M, and what is left over a whole group is nothing or
    at least K; megatron/training/arguments.py: K > 1.
    """
    if values.stages == 1:
        return "interleaves from K = 2 on"
    if values.chunks < values.stages:
        return f"interleaves from M = K on, and M = {values.chunks}, K = {values.stages}"
    if not groups and values.chunks % values.stages:
        return f"interleaves where M is a multiple of K, and M = {values.chunks}, K = {values.stages}"
    return None


def even(values: Values) -> bool:
    """Whether every part has as many transformer blocks, which is how Megatron cuts by itself."""
    return values.blocks_per_part is not None and len(set(values.blocks_per_part)) == 1


def layout(values: Values) -> tuple[tuple[str, ...], ...]:
    """The layers of each part by the names of megatron/core/transformer/enums.py, LayerType; K V > 1 parts."""
    blocks = values.blocks_per_part or ()
    inner = [("decoder",) * count for count in blocks]
    inner[0] = ("embedding", *inner[0])
    return (*inner[:-1], (*inner[-1], "loss"))


def cut(values: Values, how: Ran, title: str, *, layouts: bool) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
    """(whether a layout has to be written, what is not translated, remarks). `layouts`: the version has layouts."""
    if not how.same_parts or even(values):
        return False, (), ()
    if values.blocks_per_part is None:
        return False, (), own_layers(values, title)
    if layouts and values.parts > 1:
        return True, (), ()
    counts = spelled(values.blocks_per_part)
    return False, (f"partition: {counts} blocks a part in the record; {title} cuts into equal ones",), ()


def _flat_layout(values: Values) -> str:
    """The layout as megatron/core/transformer/pipeline_parallel_layer_layout.py, `parse_str_to_list`, reads it."""
    letters = {"embedding": "E", "loss": "L"}
    ends = ("embedding", "loss")
    return "|".join(
        "".join([*(letters[name] for name in part if name == "embedding"), _blocks(sum(n not in ends for n in part))])
        + ("L" if "loss" in part else "")
        for part in layout(values)
    )


def _blocks(count: int) -> str:
    return "t" * count if count < 2 else f"t*{count}"


def _translate(values: Values, *, layouts: bool) -> Translation:
    how = ran(values, TITLE)
    written, untranslated, remarks = cut(values, how, TITLE, layouts=layouts)
    settings = (
        # megatron/training/config/training_config.py (0.16: megatron/training/training_config.py), TrainingConfig;
        # up to 0.15 megatron/training/arguments.py
        Setting("micro-batch-size", values.micro_batch),
        Setting("global-batch-size", values.global_batch),
        # megatron/core/model_parallel_config.py, ModelParallelConfig; up to 0.15 megatron/training/arguments.py
        Setting("pipeline-model-parallel-size", values.stages),
        *_virtual(values, how, written),
        *_recompute(values),
        Setting("bf16", values.precision == "bfloat16"),
    )
    counted = f"M = {values.chunks} follows: the global batch over D b"
    return Translation(
        settings, (*how.untranslated, *untranslated), (counted, *remarks, *autocast_weights(values, TITLE))
    )


def _virtual(values: Values, how: Ran, written: bool) -> tuple[Setting, ...]:
    # megatron/training/arguments.py: no more than one of layout and number; from 0.16 on the group is a field of
    # megatron/core/model_parallel_config.py with this flag in its metadata.
    if written:
        parts: tuple[Setting, ...] = (Setting("pipeline-model-parallel-layout", _flat_layout(values)),)
    elif how.virtual_stages > 1:
        parts = (Setting("num-virtual-stages-per-pipeline-rank", how.virtual_stages),)
    else:
        parts = ()
    group = Setting("microbatch-group-size-per-virtual-pipeline-stage", how.group)
    return (*parts, *((group,) if how.group is not None else ()))


def _recompute(values: Values) -> tuple[Setting, ...]:
    # megatron/core/transformer/transformer_config.py, TransformerConfig; up to 0.15 megatron/training/arguments.py.
    # "uniform" with 1 recomputes every block by itself, as the record did.
    if not values.recompute:
        return ()
    return (
        Setting("recompute-granularity", "full"),
        Setting("recompute-method", "uniform"),
        Setting("recompute-num-layers", 1),
    )


def _version(name: str, translate: Callable[[Values], Translation]) -> Version:
    return Version(name, translate, {"flags": to_flags})


# --pipeline-model-parallel-layout came with core_v0.13.0 (2025-07-25).
_BEFORE_LAYOUTS = partial(_translate, layouts=False)
_WITH_LAYOUTS = partial(_translate, layouts=True)
FRAMEWORK = Framework(
    "megatron-lm",
    TITLE,
    (
        *(_version(f"0.{minor}", _BEFORE_LAYOUTS) for minor in (11, 12)),
        *(_version(f"0.{minor}", _WITH_LAYOUTS) for minor in range(13, 20)),
    ),
)
