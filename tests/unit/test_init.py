from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunktune.candidates import enumerate_candidates
from chunktune.errors import SpecError, UsageError
from chunktune.init import WIDTH, start, toml
from chunktune.keys import meaning
from chunktune.schedules import SCHEDULES
from chunktune.spec import Spec, resolve
from chunktune.spec_schema import allowed, shipped_spec_schema
from chunktune.tables import FAMILIES, SECTIONS

PATH = Path("spec.toml")
VALIDATOR = jsonschema.Draft202012Validator(shipped_spec_schema())
FLAGS = {
    "family": "model.family",
    "stages": "pipeline.stages",
    "schedule": "pipeline.schedule",
    "mini-batch": "batch.mini_batch",
    "micro-batch": "batch.micro_batch",
}


def written(*sets: str, **flags: str) -> str:
    given = {FLAGS[name.replace("_", "-")]: (f"--{name}", value) for name, value in flags.items()}
    return start(sets, given, PATH).text


def loaded(text: str) -> Spec:
    """The spec that a text is, with nothing over it."""
    return resolve(tomllib.loads(text), PATH, environ={}).spec


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_schedule_is_valid_as_written(family: str, schedule: str) -> None:
    text = written(family=family, schedule=schedule)
    spec = loaded(text)
    assert (spec.model.family, spec.pipeline.schedule) == (family, schedule)
    assert len(enumerate_candidates(spec, spec.pipeline.stages or 1).legal) > 1
    VALIDATOR.validate(tomllib.loads(text))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_the_default(family: str) -> None:
    bare = {"model": tomllib.loads(written(family=family))["model"], "batch": {"mini_batch": 32}}
    assert loaded(written(family=family)) == loaded(toml_of({**bare, "pipeline": {"stages": 2}}))


def toml_of(tables: dict[str, dict[str, Any]]) -> str:
    return "\n".join(f"{name} = {toml(table)}" for name, table in tables.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_stands_there_with_its_meaning_and_what_it_takes(family: str) -> None:
    text = written(family=family)
    flat = " ".join(text.replace("\n# ", " ").split())
    tables = {"model": FAMILIES[family], **SECTIONS}
    for section, table in tables.items():
        for key in table.model_fields:
            assert meaning(section, key, family) in flat
            if (section, key) != ("model", "arguments"):
                assert f"\n{key} = " in text or f"\n# {key} = " in text
            names = allowed(f"{section}.{key}")
            assert " | ".join(names) in flat or len(names) < 2


def test_the_head_names_what_can_be_done_with_it() -> None:
    assert "chunktune sweep" in written(family="mlp")
    assert "chunktune sweep" not in written(family="costs")


def test_lines_are_short() -> None:
    for family in FAMILIES:
        assert max(map(len, written(family=family).split("\n"))) <= WIDTH


def test_commented_keys_are_valid_too() -> None:
    text = written(family="costs").replace("# micro_batch", "#- micro_batch")
    uncommented = "\n".join(
        line.removeprefix("# ") if line.startswith("# ") and " = " in line[:24] else line for line in text.split("\n")
    )
    spec = loaded(uncommented)
    assert spec.hardware.name == "h100-80gb"
    assert spec.hardware.memory == 80 * 2**30
    assert spec.model.family == "costs"


@given(
    family=st.sampled_from(list(FAMILIES)),
    schedule=st.sampled_from(list(SCHEDULES)),
    stages=st.integers(1, 70).map(str) | st.just("auto"),
    batch=st.tuples(st.sampled_from(["mini_batch", "micro_batch"]), st.integers(1, 300)) | st.none(),
)
@settings(max_examples=100, deadline=None)
def test_what_is_written_says_what_was_asked_for(
    family: str, schedule: str, stages: str, batch: tuple[str, int] | None
) -> None:
    flags = {"family": family, "schedule": schedule, "stages": stages}
    flags |= {} if batch is None else {batch[0]: str(batch[1])}
    try:
        text = written(**flags)
    except UsageError as error:
        # Without an N of the user's own there is always one that fits.
        assert batch is not None and batch[0] == "mini_batch" and f"N = {batch[1]}" in str(error)
        return
    spec = loaded(text)
    assert spec.pipeline.stages == (None if stages == "auto" else int(stages))
    if batch is not None:
        assert getattr(spec.batch, batch[0]) == batch[1]
    if spec.pipeline.stages is not None:
        enumerate_candidates(spec, spec.pipeline.stages)


PLAIN = st.recursive(
    st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    # A surrogate cannot stand in a UTF-8 file.
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(PLAIN)
@settings(max_examples=150, deadline=None)
def test_every_value_is_read_back(value: Any) -> None:
    assert tomllib.loads(f"value = {toml(value)}")["value"] == value


KEYS = [f"{section}.{key}" for section, table in SECTIONS.items() for key in table.model_fields]
ANY_VALUE = st.text(max_size=12) | st.integers(-5, 5000).map(str) | st.sampled_from(["auto", "[1]", "5%", "1GiB", "{}"])


@given(st.lists(st.tuples(st.sampled_from([*KEYS, "model.layers", "model.a.b"]), ANY_VALUE), max_size=3))
@settings(max_examples=150, deadline=None)
def test_any_setting_is_written_or_refused(pairs: list[tuple[str, str]]) -> None:
    try:
        text = written(*(f"{key}={value}" for key, value in pairs))
    except UsageError:
        return
    loaded(text.encode().decode())


def test_settings_are_written_as_they_were_given() -> None:
    text = written("device.memory=12GiB", "sweep.tolerance=2%", "pipeline.partition=[5,6]", "batch.chunks=1:8")
    for line in ('memory = "12GiB"', 'tolerance = "2%"', "partition = [5, 6]", 'chunks = "1:8"'):
        assert f"\n{line} " in text or f"\n{line}\n" in text


def test_arguments_of_a_factory() -> None:
    text = written('model.arguments={a = 1, b = {c = "x"}}', "model.arguments.d=[1,2]", family="python")
    assert tomllib.loads(text)["model"]["arguments"] == {"a": 1, "b": {"c": "x"}, "d": [1, 2]}
    assert "# python_model.py stands beside this file" in text


def test_a_family_may_come_from_a_setting() -> None:
    assert loaded(written("model.family=mlp")).model.family == "mlp"


@pytest.mark.parametrize(
    ("sets", "flags", "words"),
    [
        ((), {"family": "perceptron"}, 'flag --family: model.family: is "perceptron"'),
        ((), {"schedule": "gpip"}, "did you mean gpipe?"),
        ((), {"stages": "0"}, "flag --stages: pipeline.stages: is 0"),
        ((), {"stages": "2.5"}, "must be a whole number"),
        ((), {"mini_batch": "8", "micro_batch": "2"}, "gives both mini_batch = 8 and micro_batch = 2"),
        ((), {"mini_batch": "many"}, 'is "many"'),
        (("pipeline.stages",), {}, "must have the form section.key=value"),
        (("pipeline.sages=2",), {}, "did you mean pipeline.stages?"),
        (("model.heads=3",), {}, "must divide model.hidden = 256"),
        (("pipeline.virtual_stages=2",), {"schedule": "gpipe"}, "gpipe holds one part a rank; use virtual_stages = 1"),
        ((), {"stages": "4", "mini_batch": "3"}, "no divisor of N = 3 is legal"),
        (("model.layers=2",), {"family": "mlp", "stages": "4"}, "K x V = 4 parts but the model has 2 layers"),
        (("model.arguments.a=2020-01-01",), {"family": "python"}, "write a date as text"),
    ],
)
def test_what_cannot_be_swept_fails_as_it_would_there(sets: tuple[str, ...], flags: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        written(*sets, **flags)
    assert words in str(caught.value)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        written("sweep.patience=-1", schedule="gpip", stages="0")
    assert len(caught.value.mistakes) == 3


def test_the_environment_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKTUNE_PIPELINE__STAGES", "5")
    assert loaded(written()).pipeline.stages == 2
