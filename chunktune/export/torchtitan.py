"""torchtitan: TOML up to 0.2.x, since then a Python function that changes a `Trainer.Config`.

What its setting of the chunks was called (parallelism.):

    pipeline_parallel_microbatches     a count of micro-batches   to 8b737fe (2025-04-07)
    pipeline_parallel_microbatch_size  samples of one             5e2033c (2025-04-07): 0.1, 0.2 and after
    num_pp_microbatches                a count again              73aed7f (2026-08-20), with batches in tokens

Names: torchtitan/config_manager.py at 8b737fe and v0.1.0, torchtitan/config/job_config.py at v0.2.0, v0.2.1 and
v0.2.2, torchtitan/config/configs.py at the commits after.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from chunktune.export.formats import to_function, to_toml
from chunktune.export.settings import (
    Expression,
    Framework,
    Setting,
    Translation,
    Value,
    Version,
    own_layers,
    spelled,
    torch_schedule,
    under_another_schedule,
)
from chunktune.export.values import Values, require_integer
from chunktune.schedules import SCHEDULES

TITLE = "torchtitan"
_PARALLELISM = "parallelism.pipeline_parallel"


@dataclass(frozen=True)
class Names:
    """What changed between versions.

    `batch`: samples ("local_batch_size", or "batch_size" where there is no global one) or "tokens". `counts`: the
    chunks are given as their number. `head`: the module behind the final norm; null where parts are cut at split
    points. `policies`: activation checkpointing is a class rather than a mode. `v_placement`: schedules whose parts
    go down the ranks and up again.
    """

    batch: str
    counts: bool
    head: str | None
    policies: bool = False
    v_placement: tuple[str, ...] = ("zbv-zero-bubble", "dualpipe-v")


def _translate(values: Values, *, names: Names) -> Translation:
    schedule, untranslated = _schedule(values, names)
    parts, uncut, remarks = _parts(values, names)
    policy, imports = _checkpointing(values, names)
    settings = (
        *(_in_tokens(values) if names.batch == "tokens" else _in_samples(values, names)),
        Setting("training.mixed_precision_param", values.precision, "through FSDP or autocast"),
        Setting(f"{_PARALLELISM}_degree", values.stages, "K"),
        *schedule,
        _chunks(values, names),
        *parts,
        *policy,
    )
    return Translation(settings, (*untranslated, *uncut), (*remarks, *_replicas(values, names)), imports)


def _in_samples(values: Values, names: Names) -> tuple[Setting, ...]:
    local = Setting(f"training.{names.batch}", values.mini_batch, "N = M b")
    if names.batch == "batch_size":
        return (local,)
    return local, Setting("training.global_batch_size", values.global_batch, f"D N, D = {values.replicas}")


def _in_tokens(values: Values) -> tuple[Setting, ...]:
    # torchtitan/config/configs.py at 73aed7f, TrainingConfig; the trainer derives the gradient accumulation, 1 here.
    def tokens(samples: int) -> Value:
        if values.sequence is None:
            return Expression(f"{samples} * config.training.max_context_length")
        require_integer(samples * values.sequence, "the batch in tokens")
        return samples * values.sequence

    sequence = (Setting("training.max_context_length", values.sequence, "tokens a sample"),)
    return (
        *(sequence if values.sequence is not None else ()),
        Setting("training.num_tokens_per_microbatch_per_dp_rank", tokens(values.micro_batch), "b samples"),
        Setting("training.num_tokens_per_train_step", tokens(values.global_batch), f"D N, D = {values.replicas}"),
    )


def _chunks(values: Values, names: Names) -> Setting:
    if names.batch == "tokens":
        return Setting("parallelism.num_pp_microbatches", values.chunks, "M")
    if names.counts:
        return Setting(f"{_PARALLELISM}_microbatches", values.chunks, "M")
    return Setting(f"{_PARALLELISM}_microbatch_size", values.micro_batch, f"b, so that M = {values.chunks}")


def _schedule(values: Values, names: Names) -> tuple[tuple[Setting, ...], tuple[str, ...]]:
    # The string goes to torch's get_schedule_class: torchtitan/distributed/pipeline_parallel.py, up to 0.1 pipeline.py.
    if SCHEDULES[values.schedule].placement == "v" and values.schedule not in names.v_placement:
        return (), (under_another_schedule(values, f"{TITLE} of this version", "1F1B, its default"),)
    return (Setting(f"{_PARALLELISM}_schedule", torch_schedule(values)),), ()


def _parts(values: Values, names: Names) -> tuple[tuple[Setting, ...], tuple[str, ...], tuple[str, ...]]:
    """(settings, what is not translated, remarks) of how the model is cut."""
    if values.blocks_per_part is None:
        usual = SCHEDULES[values.schedule].default_virtual_stages
        count = f"virtual stages: V = {values.virtual_stages} in the record, and {TITLE} takes {usual} by itself"
        return (), ((count,) if values.virtual_stages != usual else ()), own_layers(values, TITLE)
    if names.head is not None:
        modules = _modules(values, names.head)
        return (Setting("parallelism.module_fqns_per_model_part", modules),), (), ()
    points = _split_points(values)
    if points is None:
        counts = spelled(values.layers_per_part)
        return (), (f"partition: {counts} layers a part in the record; {TITLE} cannot cut behind the last block",), ()
    return (Setting(f"{_PARALLELISM}_split_points", points),), (), ()


def _modules(values: Values, head: str) -> tuple[tuple[str, ...], ...]:
    """Modules of each part, by the names in `generate_llm_fqn_per_model_part` of distributed/pipeline_parallel.py."""
    blocks = sum(values.blocks_per_part or ())
    modules = ["tok_embeddings", *(f"layers.{index}" for index in range(blocks)), "norm", head]
    remaining = iter(modules)
    return tuple(tuple(next(remaining) for _ in range(count)) for count in values.layers_per_part)


def _split_points(values: Values) -> tuple[str, ...] | None:
    """The first block of every part but the first (models/llama3/infra/pipeline.py at v0.1.0); null without one."""
    firsts = [first for first, *_ in _modules(values, "output")[1:]]
    return tuple(firsts) if all(first.startswith("layers.") for first in firsts) else None


def _checkpointing(values: Values, names: Names) -> tuple[tuple[Setting, ...], tuple[str, ...]]:
    if not names.policies:
        return (Setting("activation_checkpoint.mode", "full" if values.recompute else "none"),), ()
    # torchtitan/distributed/activation_checkpoint.py since c5d93d1: a policy's Config, or None.
    if not values.recompute:
        return (Setting("activation_checkpoint", None),), ()
    line = f"from {TITLE}.distributed.activation_checkpoint import FullAC"
    return (Setting("activation_checkpoint", Expression("FullAC.Config()")),), (line,)


def _replicas(values: Values, names: Names) -> tuple[str, ...]:
    ranks = values.replicas * values.stages
    if names.batch == "batch_size" and values.replicas > 1:
        given = f"replicas: {ranks} ranks make D = {values.replicas} and a global batch of {values.global_batch}"
        return (f"{given}; this version has no setting for either",)
    return ()


_SAMPLES = Names("local_batch_size", counts=False, head="output")
_LM_HEAD = Names("local_batch_size", counts=False, head="lm_head")
_POLICIES = Names("local_batch_size", counts=False, head="lm_head", policies=True)
_TOKENS = Names("tokens", counts=True, head="lm_head", policies=True)
# Before 0.2 only ZBV went down and up (models/llama3/infra/pipeline.py at v0.1.0, pipeline_llama.py at 8b737fe).
_SPLIT_POINTS = Names("local_batch_size", counts=False, head=None, v_placement=("zbv-zero-bubble",))
_COUNTS = Names("batch_size", counts=True, head=None, v_placement=("zbv-zero-bubble",))


def _toml(name: str, names: Names, since: str = "") -> Version:
    return Version(name, partial(_translate, names=names), {"toml": to_toml}, since)


def _python(name: str, names: Names, since: str) -> Version:
    docstring = "Set what chunktune found on a full configuration, as in `apply(llama3_8b())`."
    write = to_function("config", docstring)
    return Version(name, partial(_translate, names=names), {"python": write}, since)


FRAMEWORK = Framework(
    "torchtitan",
    TITLE,
    (
        _toml("8b737fe", _COUNTS, "2025-04-07"),
        _toml("0.1", _SPLIT_POINTS),
        _toml("0.2", _SAMPLES),
        _python("9810191", _SAMPLES, "2026-02-23"),
        _python("786e26f", _LM_HEAD, "2026-04-27"),
        _python("c5d93d1", _POLICIES, "2026-06-15"),
        _python("73aed7f", _TOKENS, "2026-08-20"),
    ),
)
