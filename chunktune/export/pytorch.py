"""torch.distributed.pipelining: the schedule's class built with `n_microbatches`, as a Python module.

Class names and their first parameters (`stage` or `stages`, then `n_microbatches`, `loss_fn`) stand in
torch/distributed/pipelining/schedules.py, exported by torch/distributed/pipelining/__init__.py; read in the
installed torch 2.11.0, 2.13.0 and 2.14.1. The step takes a whole mini-batch and cuts it along dimension 0.
"""

from __future__ import annotations

from chunktune.export.formats import to_module
from chunktune.export.settings import Framework, Setting, Translation, Version, spelled
from chunktune.export.values import Values
from chunktune.schedules import SCHEDULES

# `checkpoint(function, *args, use_reentrant)`: torch/utils/checkpoint.py, read in the same versions.
_RECOMPUTED = '''

def recomputed(layer, *values):
    """A layer whose activations are computed again in its backward; call every layer of a part through this."""
    return checkpoint(layer, *values, use_reentrant=False)
'''
_PARTS = {
    "single": ("one part a rank, in order", "[rank]"),
    "loop": (
        "every K-th part, from the rank's own on",
        "list(range(rank, PIPELINE_STAGES * VIRTUAL_STAGES, PIPELINE_STAGES))",
    ),
    "v": ("down the ranks and up again", "[rank, 2 * PIPELINE_STAGES - 1 - rank]"),
}


def _class(values: Values) -> str:
    return f"Schedule{SCHEDULES[values.schedule].torch_name}"


def _translate(values: Values) -> Translation:
    imports = [f"from torch.distributed.pipelining import {_class(values)}"]
    if values.recompute:
        imports.append("from torch.utils.checkpoint import checkpoint")
    return Translation(_constants(values), remarks=_remarks(values), imports=tuple(imports), code=_code(values))


def _constants(values: Values) -> tuple[Setting, ...]:
    layers = (Setting("LAYERS_PER_PART", values.layers_per_part, "of the record's model, first part first"),)
    return (
        Setting("N_MICROBATCHES", values.chunks, "M"),
        Setting("MICRO_BATCH_SIZE", values.micro_batch, "b, samples"),
        Setting("MINI_BATCH_SIZE", values.mini_batch, "N = M b, samples that `step` takes on one pipeline"),
        Setting("GLOBAL_BATCH_SIZE", values.global_batch, f"D N, D = {values.replicas}"),
        Setting("PIPELINE_STAGES", values.stages, "K, ranks"),
        Setting("VIRTUAL_STAGES", values.virtual_stages, "V, parts a rank"),
        *(layers if values.layers_per_part else ()),
    )


def _remarks(values: Values) -> tuple[str, ...]:
    counts = spelled(values.layers_per_part)
    cut = (f"partition: {counts} layers a part in the record; cut your model so",) if counts else ()
    bfloat16 = ("precision: run the layers and the loss under torch.autocast(dtype=torch.bfloat16)",)
    recompute = ("recompute: call every layer through recomputed()",)
    outputs = ("the record was made with schedule.step(..., return_outputs=False)",)
    precise = bfloat16 if values.precision == "bfloat16" else ()
    return (*cut, *(recompute if values.recompute else ()), *precise, *outputs)


def _code(values: Values) -> str:
    words, parts = _PARTS[values.placement]
    # All but PipelineScheduleSingle, which GPipe and 1F1B are, take the rank's stages as a list.
    argument = "stage" if values.placement == "single" else "stages"
    what = "the rank's `PipelineStage`" + ("" if values.placement == "single" else "s, a list")
    text = f'''def parts_of_rank(rank):
    """The parts that a rank holds: {words}."""
    return {parts}


def build_schedule({argument}, loss_fn):
    """The schedule that M was chosen under. `{argument}`: {what}."""
    return {_class(values)}({argument}, n_microbatches=N_MICROBATCHES, loss_fn=loss_fn)
'''
    return text + (_RECOMPUTED if values.recompute else "")


def _version(name: str) -> Version:
    return Version(name, _translate, {"python": to_module})


FRAMEWORK = Framework(
    "torch", "torch.distributed.pipelining", tuple(_version(name) for name in ("2.11", "2.13", "2.14"))
)
