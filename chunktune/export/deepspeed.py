"""DeepSpeed: the JSON config of its pipeline engine.

Names: deepspeed/runtime/constants.py (TRAIN_BATCH_SIZE, TRAIN_MICRO_BATCH_SIZE_PER_GPU, GRADIENT_ACCUMULATION_STEPS,
BFLOAT16) and deepspeed/runtime/config.py (`get_pipeline_config`), read at every tag from v0.12.0 (2023-11-03) to
v0.19.5 (2026-08-09). The engine takes M from gradient_accumulation_steps and plays TrainSchedule, which is 1F1B
(deepspeed/runtime/pipe/engine.py, pipe/schedule.py).
"""

from __future__ import annotations

from chunktune.export.formats import to_json
from chunktune.export.settings import (
    Framework,
    Setting,
    Translation,
    Version,
    autocast_weights,
    own_layers,
    under_another_schedule,
)
from chunktune.export.values import Values

TITLE = "DeepSpeed"


def _translate(values: Values) -> Translation:
    settings = (
        Setting("train_batch_size", values.global_batch),
        Setting("train_micro_batch_size_per_gpu", values.micro_batch),
        Setting("gradient_accumulation_steps", values.chunks),
        Setting("pipeline.stages", values.stages),
        # In layers of the PipelineModule; 0 recomputes nothing.
        Setting("pipeline.activation_checkpoint_interval", 1 if values.recompute else 0),
        Setting("bf16.enabled", values.precision == "bfloat16"),
    )
    # No engine reads pipeline.stages: PipelineModule.__init__ (deepspeed/runtime/pipe/module.py) takes num_stages.
    model = f"K: pass PipelineModule(..., num_stages={values.stages}), which alone decides the number of stages"
    remarks = (model, *own_layers(values, TITLE), *autocast_weights(values, TITLE))
    return Translation(settings, _untranslated(values), remarks)


def _untranslated(values: Values) -> tuple[str, ...]:
    one_part = values.parts == values.stages
    if one_part and values.schedule in ("1f1b", "interleaved-1f1b"):
        return ()
    virtual = f"virtual stages: {TITLE} holds one part a rank, the record V = {values.virtual_stages}"
    return (under_another_schedule(values, TITLE, "1F1B"), *(() if one_part else (virtual,)))


FRAMEWORK = Framework(
    "deepspeed", TITLE, tuple(Version(f"0.{minor}", _translate, {"json": to_json}) for minor in range(12, 20))
)
