from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

from chunktune.cli.app import main
from chunktune.record import shipped_schema
from chunktune.schedules import SCHEDULES
from chunktune.spec_schema import shipped_spec_schema
from chunktune.tables import FAMILIES

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_spec_is_written_and_the_next_command_named(capsys: Capture) -> None:
    assert main(["init"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "Wrote spec.toml\nNext: chunktune sweep spec.toml --dry-run\n"
    assert tomllib.loads(Path("spec.toml").read_text())["model"]["family"] == "transformer"


def test_stdout_takes_the_spec_alone(capsys: Capture) -> None:
    assert main(["init", "--family", "mlp", "--stages", "4", "--output", "-"]) == 0
    out, err = capsys.readouterr()
    assert tomllib.loads(out)["pipeline"]["stages"] == 4
    assert err == ""
    assert list(Path().iterdir()) == []


def test_a_file_is_not_overwritten_without_force(capsys: Capture) -> None:
    Path("spec.toml").write_text("mine\n")
    assert main(["init"]) == 2
    assert capsys.readouterr().err == (
        "error: spec.toml already exists; give another --output, or --force to overwrite it\n"
    )
    assert Path("spec.toml").read_text() == "mine\n"
    assert main(["init", "--force"]) == 0
    assert Path("spec.toml").read_text() != "mine\n"


def test_the_next_command_is_ready_to_paste(capsys: Capture) -> None:
    assert main(["init", "--family", "costs", "--output", "my spec.toml"]) == 0
    assert "Next: chunktune whatif 'my spec.toml'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schedule", "gpipe", "--set", "pipeline.virtual_stages=2"], "gpipe holds one part a rank"),
        (["--stages", "4", "--mini-batch", "3"], "no divisor of N = 3 is legal"),
        (["--mini-batch", "8", "--micro-batch", "2"], "gives both mini_batch = 8 and micro_batch = 2"),
        (["--family", "transfomer"], "did you mean transformer?"),
        (["--output", "nowhere/spec.toml"], "there is no directory nowhere"),
        (["--output", "."], "is a directory"),
    ],
)
def test_a_mistake_is_told_and_nothing_written(arguments: list[str], words: str, capsys: Capture) -> None:
    assert main(["init", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err
    assert list(Path().iterdir()) == []


def dry_run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a dry run of what `init` writes with these arguments."""
    assert main(["init", "--force", *arguments]) == 0
    capsys.readouterr()
    code = main(["sweep", "spec.toml", "--dry-run", "--json", "-"])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_dry_run_accepts_every_schedule(schedule: str, capsys: Capture) -> None:
    code, out, err = dry_run(capsys, "--family", "sleep", "--schedule", schedule)
    assert (code, err) == (0, "")
    assert json.loads(out)["warnings"] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dry_run_accepts_every_family_or_says_what_is_missing(family: str, capsys: Capture) -> None:
    code, out, err = dry_run(capsys, "--family", family, "--stages", "3")
    missing = {
        "costs": (2, "names times and no layers: there is nothing to measure; use chunktune whatif spec.toml"),
        "python": (2, "python_model"),
    }
    expected, words = missing.get(family, (0, ""))
    assert (code, words in err) == (expected, True)
    assert code or json.loads(out)["stages"] == 3


def test_whatif_predicts_what_init_writes(capsys: Capture) -> None:
    assert main(["init", "--family", "costs"]) == 0
    assert main(["whatif", "spec.toml", "--print", "chunks", "--quiet"]) == 0
    assert capsys.readouterr().out.strip().isdecimal()


def test_schemas_are_printed(capsys: Capture) -> None:
    for kind, shipped in (("spec", shipped_spec_schema()), ("record", shipped_schema())):
        assert main(["schema", kind]) == 0
        out, err = capsys.readouterr()
        assert (json.loads(out), err) == (shipped, "")
        jsonschema.Draft202012Validator.check_schema(json.loads(out))


def test_a_schema_is_written_to_a_file(capsys: Capture) -> None:
    assert main(["schema", "spec", "--output", "spec.schema.json"]) == 0
    assert capsys.readouterr() == ("", "Wrote spec.schema.json\n")
    assert json.loads(Path("spec.schema.json").read_text()) == shipped_spec_schema()


def test_an_unknown_schema_is_told(capsys: Capture) -> None:
    assert main(["schema", "trial"]) == 2
    assert capsys.readouterr().err == "error: schema trial is unknown; it is one of spec, record\n"
