from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import chunktune
from chunktune.keys import meaning
from chunktune.spec_schema import allowed, key_schema, shipped_spec_schema, spec_schema
from chunktune.tables import FAMILIES, SECTIONS

CONFIGS = sorted((Path(chunktune.__file__).parents[1] / "configs").glob("*.toml"))
VALIDATOR = jsonschema.Draft202012Validator(shipped_spec_schema())

REQUIRED: dict[str, dict[str, Any]] = {
    "transformer": {"layers": 4, "hidden": 8, "heads": 2, "vocab": 8, "sequence": 4},
    "mlp": {"layers": 4, "hidden": 8},
    "sleep": {"layers": 4, "seconds_per_chunk": 0.1, "seconds_per_sample": 0.1},
    "costs": {"micro_batch": 1, "forward_s": 0.1, "backward_s": 0.1},
    "python": {"factory": "a:b"},
}
VALUES: tuple[Any, ...] = (
    *(0, 1, 4, -1, 4096, 4097, 2**31 - 1, 2**31, 2**63 - 1, 2**63, True, 0.0, 0.25, 0.5, 0.75, 1.5, -0.5, 1e301),
    *("auto", "", "12GiB", "12 GiB", "12", "12giB", "80 G iB", "1.5MB", "5%", "0.5 %", "150%", "100%", "10m", "1.5 h"),
    *("1:64", "4:", ":", "1 : 2", "gpipe", "GPipe", "full", "none", "uniform", "sgd", "bfloat16", "cuda", "stage"),
    *("a.b:c", "a.b", "a:b:c", "1a:b", "h100-80gb", "a name of my own", "x" * 61),
    *([], [1], [1, 2, 4], [0], [0.5, 1], ["1GiB", 3], ["a"], [[1]], {}, {"a": 1}),
)


def keys() -> Iterator[tuple[str, str, str | None]]:
    yield from (("model", key, family) for family, table in FAMILIES.items() for key in table.model_fields)
    yield from ((section, key, None) for section, table in SECTIONS.items() for key in table.model_fields)


def reads(section: str, key: str, family: str | None, value: Any) -> bool:
    """Whether the class of the table takes this value for this key."""
    table = FAMILIES[family] if family else SECTIONS[section]
    given = {"family": family, **REQUIRED[family]} if family else {}
    try:
        table.model_validate({**given, key: value})
    except ValidationError as error:
        return not any(detail["loc"][:1] == (key,) for detail in error.errors())
    return True


def mistakes(text: str) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(tomllib.loads(text))]


SPEC = '[model]\nfamily = "mlp"\nlayers = 4\nhidden = 8\n\n[batch]\nmini_batch = 8\n'


def test_the_shipped_schema_is_the_generated_one() -> None:
    jsonschema.Draft202012Validator.check_schema(shipped_spec_schema())
    assert shipped_spec_schema() == spec_schema(), "run python -m chunktune.spec_schema"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_spec_of_the_repository_validates(path: Path) -> None:
    assert mistakes(path.read_text()) == []


def test_a_small_spec_validates() -> None:
    assert mistakes(SPEC) == []


@pytest.mark.parametrize(
    "text",
    [
        SPEC + "micro_batch = 2\n",
        SPEC.replace("mini_batch = 8", ""),
        SPEC.replace("[batch]\nmini_batch = 8", ""),
        SPEC + "size = 4\n",
        SPEC + "\n[pipelines]\n",
        SPEC + '\n[pipeline]\nstages = "2"\n',
        SPEC + '\n[pipeline]\nschedule = "zigzag"\n',
        SPEC.replace("layers = 4", "layers = 4.5"),
        SPEC.replace("layers = 4", ""),
        SPEC.replace('"mlp"', '"transformer"'),
        SPEC.replace('"mlp"', '"perceptron"'),
        SPEC.replace('family = "mlp"', ""),
        SPEC + '\n[device]\nmemory = "12 gigabytes"\n',
        SPEC + "\n[sweep]\ntolerance = 0.5\n",
        'model = "mlp"\n[batch]\nmini_batch = 8\n',
    ],
)
def test_what_is_no_spec_does_not_validate(text: str) -> None:
    assert mistakes(text) != []


@pytest.mark.parametrize(("section", "key", "family"), list(keys()))
def test_the_schema_admits_what_the_reader_reads(section: str, key: str, family: str | None) -> None:
    validator = jsonschema.Draft202012Validator(key_schema(section, key, family))
    different = [repr(value) for value in VALUES if validator.is_valid(value) != reads(section, key, family, value)]
    # JSON Schema calls 0.0 an integer.
    assert set(different) <= {"0.0"}


WORDS = st.text("0123456789.: %", min_size=1, max_size=6).flatmap(
    lambda number: st.sampled_from(["", "%", "GiB", " MB", "B", "s", "ms", "h", " m"]).map(lambda unit: number + unit)
)
NUMBERS = st.integers(-2, 2**64) | st.floats(allow_nan=False, allow_infinity=False)


@given(key=st.sampled_from(list(keys())), value=st.one_of(WORDS, NUMBERS, st.lists(WORDS | NUMBERS, max_size=3)))
@settings(max_examples=200, deadline=None)
def test_an_editor_marks_nothing_that_can_be_read(key: tuple[str, str, str | None], value: Any) -> None:
    if reads(*key, value):
        assert jsonschema.Draft202012Validator(key_schema(*key)).is_valid(value)


def test_every_key_has_a_meaning_that_the_schema_shows() -> None:
    for section, key, family in keys():
        assert meaning(section, key, family)
        assert key_schema(section, key, family)["description"] == meaning(section, key, family)


def test_null_and_titles_of_pydantics_own_are_left_out() -> None:
    text = str(shipped_spec_schema()["$defs"])
    assert "None" not in text
    assert "'title'" not in text


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("model.family", ("transformer", "mlp", "sleep", "costs", "python")),
        ("pipeline.recompute", ("none", "full")),
        ("pipeline.partition", ("uniform", "parameters", "time")),
        ("device.memory", ("auto",)),
        ("model.layers", ()),
        ("pipeline.nothing", ()),
        ("nothing", ()),
        ("", ()),
    ],
)
def test_what_a_key_takes_can_be_listed(key: str, names: tuple[str, ...]) -> None:
    assert allowed(key) == names


def test_a_key_that_no_table_has() -> None:
    with pytest.raises(KeyError):
        key_schema("pipeline", "layers")
