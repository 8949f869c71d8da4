from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from typing import Any

import pytest
import sample_record as sample
import yaml
from export_reading import READERS, applied, flags_of, parsed_flags, run_python
from hypothesis import given, settings
from hypothesis import strategies as st

from chunktune import schedules
from chunktune.errors import UsageError
from chunktune.export import FRAMEWORKS, Values, form_named, framework_named, values_of, version_named
from chunktune.export.provenance import caveats, head_lines, noted
from chunktune.results import Record
from chunktune.schedules import SCHEDULES

EVERY = [
    pytest.param(framework.name, version.name, form, id=f"{framework.name}-{version.name}-{form}")
    for framework in FRAMEWORKS.values()
    for version in framework.versions
    for form in version.forms
]
NEWEST = [(framework.name, framework.versions[-1].name) for framework in FRAMEWORKS.values()]
PLAIN = Values(
    chunks=8,
    micro_batch=4,
    mini_batch=32,
    stages=4,
    virtual_stages=1,
    schedule="1f1b",
    recompute=False,
    precision="float32",
    optimizer="adamw",
)


def written(values: Values, framework: str, version: str | None = None, form: str | None = None) -> str:
    found = FRAMEWORKS[framework]
    chosen = version_named(found, version)
    translation = chosen.translate(values)
    return form_named(found, chosen, form)(translation, noted((), translation))


def untranslated(values: Values, framework: str, version: str | None = None) -> tuple[str, ...]:
    return version_named(FRAMEWORKS[framework], version).translate(values).untranslated


def remarks(values: Values, framework: str, version: str | None = None) -> tuple[str, ...]:
    return version_named(FRAMEWORKS[framework], version).translate(values).remarks


def transformer(counts: tuple[int, ...], **changes: Any) -> Values:
    """The values of a record of a transformer whose embedding, blocks, norm and head are cut so."""
    blocks = sum(counts) - 3
    pipeline = {"stages": len(counts), "schedule": "1f1b", **changes}
    spec = {**sample.spec(), "model": {"family": "transformer", "layers": blocks, "sequence": 7}, "pipeline": pipeline}
    return values_from(sample.record(spec=spec, layers_per_part=counts))


def values_from(record: Record, replicas: int = 1) -> Values:
    assert record.verdict is not None
    return values_of(record, record.verdict, replicas)


@st.composite
def any_values(draw: st.DrawFn) -> Values:
    schedule = draw(st.sampled_from(list(SCHEDULES)))
    stages = draw(st.integers(1, 64))
    loop = SCHEDULES[schedule].placement == "loop"
    virtual = draw(st.integers(1, 4)) if loop else SCHEDULES[schedule].default_virtual_stages
    at_least = draw(st.integers(1, 4 * stages))
    chunks = schedules.next_legal(schedule, stages, virtual, at_least, 16 * stages) or 1
    micro_batch = draw(st.integers(1, 10**6))
    pattern = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    counts = tuple(pattern[index % len(pattern)] for index in range(stages * virtual))
    known = draw(st.booleans()) and sum(counts) > 3 and len(counts) > 1
    values = replace(
        PLAIN,
        chunks=chunks,
        micro_batch=micro_batch,
        mini_batch=chunks * micro_batch,
        stages=stages,
        virtual_stages=virtual,
        schedule=schedule,
        recompute=draw(st.booleans()),
        precision=draw(st.sampled_from(["float32", "bfloat16"])),
        replicas=draw(st.integers(1, 10**4)),
        layers_per_part=counts if draw(st.booleans()) or known else (),
        sequence=draw(st.sampled_from([None, 7])),
    )
    return replace(values, blocks_per_part=blocks_of(counts)) if known else values


def blocks_of(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Blocks of each part: all layers but the first and the last two."""
    kinds = iter(["", *["block"] * (sum(counts) - 3), "", ""])
    return tuple(sum(next(kinds) == "block" for _ in range(count)) for count in counts)


# --- every framework, version and format


@pytest.mark.parametrize(("framework", "version", "form"), EVERY)
@settings(max_examples=6, deadline=None)
@given(values=any_values())
def test_what_is_read_back_is_the_record(framework: str, version: str, form: str, values: Values) -> None:
    text = written(values, framework, version, form)
    read = READERS[framework, form](text, values.replicas)
    assert (read.chunks, read.micro_batch, read.stages) == (values.chunks, values.micro_batch, values.stages)
    assert read.chunks * (read.micro_batch or 0) == values.mini_batch
    if read.global_batch is None:  # torchtitan's oldest has no name for it
        assert values.replicas == 1 or str(values.global_batch) in text
    else:
        assert read.global_batch == values.global_batch == values.replicas * values.mini_batch


@pytest.mark.parametrize(("framework", "version", "form"), EVERY)
def test_nothing_out_of_a_record_leaves_the_comments(framework: str, version: str, form: str) -> None:
    found = FRAMEWORKS[framework]
    chosen = version_named(found, version)
    evil = '"""\n[training]\nimport os\u2028x = 1\x1b[31m\r\n' + sample.NASTY
    record = sample.record(started_at=evil)
    assert record.verdict is not None
    values = values_from(record)
    translation = chosen.translate(values)
    head = (*head_lines(evil, record, record.verdict, values, found, chosen), evil, *noted((evil,), translation))
    text = chosen.forms[form](translation, head)
    assert READERS[framework, form](text, 1).chunks == 4
    assert "\x1b" not in text and "\u2028" not in text and "\u202e" not in text
    assert not any("import os" in line for line in text.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize(("framework", "version"), NEWEST)
def test_every_record_with_a_choice_can_be_exported(framework: str, version: str) -> None:
    chosen = [record for record in sample.every_record() if record.verdict and record.verdict.chunks]
    assert len(chosen) > 20
    for record in chosen:
        form = next(iter(version_named(FRAMEWORKS[framework], version).forms))
        read = READERS[framework, form](written(values_from(record, 3), framework, version, form), 3)
        assert record.verdict is not None
        assert (read.chunks, read.micro_batch) == (record.verdict.chunks, record.verdict.micro_batch)


# --- schedules


HAVE = {
    "torch": set(SCHEDULES),
    "torchtitan": set(SCHEDULES),
    "megatron-lm": {"1f1b", "interleaved-1f1b"},
    "deepspeed": {"1f1b"},
    "nemo": {"1f1b", "interleaved-1f1b"},
    "accelerate": {"1f1b", "interleaved-1f1b"},
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_without_counterpart_is_said(framework: str, schedule: str) -> None:
    virtual = SCHEDULES[schedule].default_virtual_stages
    values = replace(PLAIN, schedule=schedule, virtual_stages=virtual, precision="bfloat16")
    said = untranslated(values, framework)
    assert bool(said) is (schedule not in HAVE[framework])
    if said:
        assert f"schedule {schedule}: " in said[0]
        assert "M = 8 was chosen under it" in said[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torchtitan_takes_the_names_of_torch(schedule: str) -> None:
    values = replace(PLAIN, schedule=schedule, virtual_stages=SCHEDULES[schedule].default_virtual_stages)
    assert (
        applied(written(values, "torchtitan")).parallelism.pipeline_parallel_schedule == SCHEDULES[schedule].torch_name
    )


def test_old_torchtitan_places_no_dualpipe() -> None:
    values = replace(PLAIN, schedule="dualpipe-v", virtual_stages=2)
    assert "schedule dualpipe-v" in untranslated(values, "torchtitan", "0.1")[0]
    assert "schedule" not in written(values, "torchtitan", "0.1", "toml").split("[parallelism]")[1]
    assert untranslated(values, "torchtitan", "0.2") == ()


@settings(max_examples=80, deadline=None)
@given(values=any_values())
def test_megatron_interleaves_only_what_it_accepts(values: Values) -> None:
    read = parsed_flags(written(values, "megatron-lm", "0.12"))
    if read.num_virtual_stages_per_pipeline_rank is None:
        assert read.microbatch_group_size_per_virtual_pipeline_stage is None
        return
    # forward_backward_pipelining_with_interleaving refuses anything else
    group = read.microbatch_group_size_per_virtual_pipeline_stage or values.stages
    left_over = values.chunks % group
    assert values.stages > 1
    assert values.stages <= group <= values.chunks
    assert left_over == 0 or left_over >= values.stages


def test_a_round_of_torch_is_a_group_of_megatron() -> None:
    values = replace(PLAIN, schedule="interleaved-1f1b", virtual_stages=2, chunks=6, mini_batch=24)
    read = parsed_flags(written(values, "megatron-lm"))
    assert (read.num_virtual_stages_per_pipeline_rank, read.microbatch_group_size_per_virtual_pipeline_stage) == (2, 6)
    assert "a multiple of K" in untranslated(values, "accelerate")[0]


@pytest.mark.parametrize("framework", ["megatron-lm", "nemo", "accelerate"])
def test_fewer_chunks_than_ranks_do_not_interleave(framework: str) -> None:
    values = replace(PLAIN, schedule="interleaved-1f1b", virtual_stages=2, chunks=2, mini_batch=8)
    assert "interleaves from M = K on, and M = 2, K = 4" in untranslated(values, framework)[0]
    assert "virtual-stages" not in written(values, framework).split("\n\n", 1)[1]


def test_the_class_of_torch_gets_its_stages() -> None:
    space = run_python(written(PLAIN, "torch"))
    assert space["build_schedule"]("stage", "loss") == (
        "Schedule1F1B",
        ("stage",),
        {"n_microbatches": 8, "loss_fn": "loss"},
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_parts_of_a_rank_are_those_of_the_record(schedule: str) -> None:
    virtual = SCHEDULES[schedule].default_virtual_stages
    space = run_python(written(replace(PLAIN, schedule=schedule, virtual_stages=virtual), "torch"))
    for rank in range(4):
        assert tuple(space["parts_of_rank"](rank)) == schedules.parts_of_rank(schedule, 4, virtual, rank)


# --- what a part holds


def test_blocks_are_counted_without_embedding_norm_and_head() -> None:
    assert transformer((3, 4, 4)).blocks_per_part == (2, 4, 2)
    assert transformer((1, 9, 1)).blocks_per_part == (0, 8, 0)
    assert transformer((3, 4, 4)).sequence == 7


@settings(max_examples=40, deadline=None)
@given(counts=st.lists(st.integers(1, 5), min_size=2, max_size=8).filter(lambda counts: sum(counts) > 3))
def test_layouts_hold_the_parts_of_the_record(counts: list[int]) -> None:
    values = transformer(tuple(counts))
    modules = tomllib.loads(written(values, "torchtitan", "0.2"))["parallelism"]["module_fqns_per_model_part"]
    assert [len(part) for part in modules] == counts
    names = [name for part in modules for name in part]
    assert names == ["tok_embeddings", *(f"layers.{index}" for index in range(sum(counts) - 3)), "norm", "output"]
    text = parsed_flags(written(values, "megatron-lm")).pipeline_model_parallel_layout
    blocks = [sum(name.startswith("layers") for name in part) for part in modules]
    if text is None:
        assert len(set(blocks)) == 1
        return
    parts = [re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), part) for part in text.split("|")]
    assert [part.count("t") for part in parts] == blocks
    assert parts[0][0] == "E" and parts[-1][-1] == "L"
    assert "".join(parts).strip("t") == "E" + "t" * sum(blocks) + "L"
    recipe = applied(written(values, "nemo", "2.4")).trainer.strategy.pipeline_model_parallel_layout
    letters = {"embedding": "E", "decoder": "t", "loss": "L"}
    assert ["".join(letters[layer] for layer in part) for part in recipe] == parts


def test_a_cut_that_a_version_cannot_make_is_said() -> None:
    uneven, even = transformer((3, 4, 4)), transformer((3, 2, 4))
    for framework, version in (("megatron-lm", "0.12"), ("nemo", "2.3"), ("nemo", "1.23"), ("accelerate", None)):
        said = untranslated(replace(uneven, precision="bfloat16"), framework, version)
        assert said == (
            f"partition: 2, 4, 2 blocks a part in the record; {FRAMEWORKS[framework].title} cuts into equal ones",
        )
        assert untranslated(replace(even, precision="bfloat16"), framework, version) == ()


@pytest.mark.parametrize(("version", "head"), [("9810191", "output"), ("786e26f", "lm_head"), ("73aed7f", "lm_head")])
def test_the_head_has_the_name_of_the_version(version: str, head: str) -> None:
    config = applied(written(transformer((3, 4, 4)), "torchtitan", version))
    assert config.parallelism.module_fqns_per_model_part[-1] == ["layers.6", "layers.7", "norm", head]


@pytest.mark.parametrize("version", ["0.11", "0.12", "0.13", "0.19"])
def test_layouts_came_with_0_13(version: str) -> None:
    words = flags_of(written(transformer((3, 4, 4)), "megatron-lm", version))
    assert ("--pipeline-model-parallel-layout" in words) is (version in ("0.13", "0.19"))


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_nemo_interleaves(virtual_stages: int) -> None:
    values = replace(PLAIN, schedule="interleaved-1f1b", virtual_stages=virtual_stages)
    wanted = 2 if virtual_stages == 2 else None
    assert yaml.safe_load(written(values, "nemo", "1.23"))["model"]["virtual_pipeline_model_parallel_size"] == wanted
    assert applied(written(values, "nemo")).trainer.strategy.virtual_pipeline_model_parallel_size == wanted


def test_torchtitan_0_1_cuts_at_split_points() -> None:
    data = tomllib.loads(written(transformer((3, 4, 4)), "torchtitan", "0.1"))
    assert data["parallelism"]["pipeline_parallel_split_points"] == ["layers.2", "layers.6"]
    assert "cannot cut behind the last block" in untranslated(transformer((9, 1, 1)), "torchtitan", "0.1")[0]


def test_layers_of_the_users_own_are_said() -> None:
    values = replace(PLAIN, layers_per_part=(3, 3, 3, 4))
    for framework, version in NEWEST:
        assert any("3, 3, 3, 4 layers a part" in remark for remark in remarks(values, framework, version))


def test_torchtitan_cannot_know_the_parts_of_a_model_that_is_not_its_own() -> None:
    values = replace(PLAIN, schedule="interleaved-1f1b", virtual_stages=3)
    assert untranslated(values, "torchtitan") == (
        "virtual stages: V = 3 in the record, and torchtitan takes 2 by itself",
    )


# --- recomputation and precision


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputation_is_translated(recompute: bool) -> None:
    values = replace(PLAIN, recompute=recompute)
    mode = "full" if recompute else "none"
    assert tomllib.loads(written(values, "torchtitan", "0.2"))["activation_checkpoint"] == {"mode": mode}
    assert applied(written(values, "torchtitan", "786e26f")).activation_checkpoint.mode == mode
    assert applied(written(values, "torchtitan")).activation_checkpoint == ("FullAC" if recompute else None)
    flags = parsed_flags(written(values, "megatron-lm"))
    full = ("full", "uniform", 1) if recompute else (None, None, None)
    assert (flags.recompute_granularity, flags.recompute_method, flags.recompute_num_layers) == full
    assert f'"activation_checkpoint_interval": {int(recompute)}' in written(values, "deepspeed")
    model = yaml.safe_load(written(values, "nemo", "1.23"))["model"]
    names = ("granularity", "method", "num_layers")
    assert tuple(model[f"activations_checkpoint_{name}"] for name in names) == full
    config = applied(written(values, "nemo")).model.config
    assert (config.recompute_granularity, config.recompute_method, config.recompute_num_layers) == full
    assert ("recomputed" in run_python(written(values, "torch"))) is recompute


def test_accelerate_says_what_only_code_can() -> None:
    full, none = replace(PLAIN, recompute=True), PLAIN
    data = yaml.safe_load(written(full, "accelerate"))["megatron_lm_config"]
    assert data["megatron_lm_context_parallel_size"] == 1  # it would be 2
    assert (data["megatron_lm_recompute_granularity"], data["megatron_lm_recompute_num_layers"]) == ("full", 1)
    assert any('"recompute_granularity": None' in remark for remark in remarks(none, "accelerate"))
    assert any("'full'" in remark for remark in remarks(full, "accelerate", "1.12"))
    assert not any("recompute" in remark for remark in remarks(none, "accelerate", "1.12"))


def test_precision_is_translated() -> None:
    values = replace(PLAIN, precision="bfloat16")
    assert parsed_flags(written(values, "megatron-lm")).bf16 and not parsed_flags(written(PLAIN, "megatron-lm")).bf16
    assert '"enabled": true' in written(values, "deepspeed")
    assert yaml.safe_load(written(values, "nemo", "1.23"))["trainer"]["precision"] == "bf16"
    assert applied(written(values, "nemo")).trainer.plugins == ("bf16_mixed", (), {})
    assert yaml.safe_load(written(values, "accelerate"))["mixed_precision"] == "bf16"
    assert applied(written(values, "torchtitan")).training.mixed_precision_param == "bfloat16"
    for framework in ("megatron-lm", "deepspeed", "nemo", "accelerate"):
        assert any("keeps bfloat16 weights" in remark for remark in remarks(values, framework))


# --- names and versions


def test_the_registry_has_each_framework_under_its_name() -> None:
    assert all(framework.name == name for name, framework in FRAMEWORKS.items())
    for framework in FRAMEWORKS.values():
        names = [version.name for version in framework.versions]
        assert len(set(names)) == len(names)
        assert all(version_named(framework, name).name == name for name in names)
        assert version_named(framework, None) is framework.versions[-1]


@pytest.mark.parametrize(
    ("framework", "given_version", "name"),
    [
        ("torchtitan", "v0.2.1", "0.2"),
        ("torchtitan", "73aed7f6c09c04041dae2d2c185bb4c6384ebb3f", "73aed7f"),
        ("megatron-lm", "core_v0.19.0", "0.19"),
        ("accelerate", "1.1.1", "1.1"),
        ("accelerate", "1.13.0", "1.13"),
        ("torch", "2.13.0+cpu", "2.13"),
    ],
)
def test_versions_as_people_write_them(framework: str, given_version: str, name: str) -> None:
    assert version_named(FRAMEWORKS[framework], given_version).name == name


@pytest.mark.parametrize("given_version", ["0.3", "", "v", "0", "2", "73aed7", "0.20", "\x1b[31m", "latest"])
def test_an_unknown_version_lists_those_that_are_known(given_version: str) -> None:
    with pytest.raises(UsageError, match=r"known: 8b737fe \(2025-04-07\), 0.1, 0.2, 9810191") as raised:
        version_named(FRAMEWORKS["torchtitan"], given_version)
    assert "\x1b" not in str(raised.value)


def test_an_unknown_framework_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"torch, torchtitan, .* \(did you mean megatron-lm\?\)"):
        framework_named("megatron")
    with pytest.raises(UsageError, match=r"known: toml \(did you mean toml\?\)"):
        form_named(FRAMEWORKS["torchtitan"], version_named(FRAMEWORKS["torchtitan"], "0.2"), "tom")


def test_every_name_of_the_chunks_that_torchtitan_had() -> None:
    texts = {version.name: written(PLAIN, "torchtitan", version.name) for version in FRAMEWORKS["torchtitan"].versions}
    assert "pipeline_parallel_microbatches = 8" in texts["8b737fe"]
    for name in ("0.1", "0.2", "9810191", "786e26f", "c5d93d1"):
        assert "pipeline_parallel_microbatch_size = 4" in texts[name]
    assert "num_pp_microbatches = 8" in texts["73aed7f"]


def test_tokens_are_counted_where_a_sample_has_some() -> None:
    training = applied(written(replace(PLAIN, sequence=100, replicas=2), "torchtitan"), tokens=7).training
    assert training.max_context_length == 100
    assert training.num_tokens_per_microbatch_per_dp_rank == 400
    assert training.num_tokens_per_train_step == 6400


# --- what a record may hold


def with_pipeline(**changes: Any) -> Record:
    spec = sample.spec()
    return sample.record(spec={**spec, "pipeline": {**spec["pipeline"], **changes}})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": "\x1b[31mzb"}, "pipeline.schedule = "),
        ({"schedule": ["1f1b"]}, "pipeline.schedule = "),
        ({"stages": 0}, "pipeline.stages = 0; it must be a whole number, 1 to 4096"),
        ({"stages": True}, "pipeline.stages = true"),
        ({"stages": 10**30}, "1 to 4096"),
        ({"virtual_stages": 2}, "1f1b holds one part a rank"),
        ({"recompute": "some"}, "must be one of none, full"),
    ],
)
def test_a_spec_that_makes_no_sense_is_one_clear_error(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as raised:
        values_from(with_pipeline(**changes))
    assert "\x1b" not in str(raised.value) and "\n" not in str(raised.value)


def test_a_spec_without_stages_takes_those_of_the_trial() -> None:
    assert values_from(with_pipeline(stages=None)).stages == 2
    with pytest.raises(UsageError, match=r"pipeline.stages = null"):
        values_from(sample.record(spec={}, trials=()))


def test_a_record_of_nothing_but_a_verdict_has_the_defaults_of_a_spec() -> None:
    values = values_from(sample.record(spec={"pipeline": {"stages": 2}}, layers_per_part=()))
    assert (values.schedule, values.recompute, values.precision, values.optimizer) == (
        "1f1b",
        False,
        "float32",
        "adamw",
    )
    assert values.layers_per_part == () and values.blocks_per_part is None


@pytest.mark.parametrize("changes", [{"micro_batch": 3}, {"micro_batch": None}, {"mini_batch": None}, {"chunks": 0}])
def test_a_verdict_that_contradicts_itself_is_an_error(changes: dict[str, Any]) -> None:
    record = sample.record(verdict=sample.verdict("throughput", **changes))
    with pytest.raises(UsageError, match="N is M b"):
        values_from(record)


def test_a_number_that_no_format_holds_is_an_error() -> None:
    big = sample.verdict("throughput", micro_batch=2**60, mini_batch=2**62)
    with pytest.raises(UsageError, match="global batch of 4 replicas"):
        values_from(sample.record(verdict=big), 4)
    with pytest.raises(UsageError, match="batch in tokens"):
        written(values_from(sample.record(verdict=big)), "torchtitan")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "predicted"}, "nothing was measured"),
        ({"mode": "rehearsed"}, "simulated"),
        ({"quick": True}, "quick sweep"),
        ({"status": "interrupted"}, "was interrupted"),
        (
            {"verdict": sample.verdict("plateau", confidence="unclear", confidence_reasons=(sample.NASTY,))},
            "unclear: red",
        ),
        ({}, None),
    ],
)
def test_what_a_choice_rests_on_is_said(changes: dict[str, Any], words: str | None) -> None:
    record = sample.record().model_copy(update=changes)
    assert record.verdict is not None
    found = caveats(record, record.verdict)
    assert len(found) == (words is not None)
    assert all(words in text and "\x1b" not in text for text in found)


def test_flags_are_words_of_a_shell() -> None:
    words = flags_of(written(transformer((3, 4, 4)), "megatron-lm"))
    assert words[-2:] == ["--pipeline-model-parallel-layout", "Et*2|t*4|t*2L"]
    assert "--pipeline-model-parallel-layout 'Et*2|t*4|t*2L'" in written(transformer((3, 4, 4)), "megatron-lm")
