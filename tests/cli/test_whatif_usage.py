import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import chunktune
from chunktune.cli.app import main
from chunktune.cli.whatif import OVERRIDES, whatif
from chunktune.record import read_record

ROOT = Path(chunktune.__file__).parents[1]

SLEEP = """
[model]
family = "sleep"
layers = 8
seconds_per_chunk = 0.004
seconds_per_sample = 0.002

[pipeline]
schedule = "gpipe"

[batch]
mini_batch = 32
"""

COSTS = """
[model]
family = "costs"
micro_batch = 4
forward_s = 0.010
backward_s = 0.020
static_bytes = 2147483648
kept_bytes = 1073741824

[pipeline]
stages = 4
schedule = "gpipe"

[batch]
micro_batch = 4

[device]
memory = "16GiB"
headroom = 0.1
"""


@pytest.fixture
def sleep(tmp_path: Path) -> str:
    path = tmp_path / "sleep.toml"
    path.write_text(SLEEP)
    return str(path)


@pytest.fixture
def costs(tmp_path: Path) -> str:
    path = tmp_path / "costs.toml"
    path.write_text(COSTS)
    return str(path)


@pytest.fixture
def record(tmp_path: Path, sleep: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The record of a sweep that took exactly what was predicted."""
    assert main(["whatif", sleep, "--stages", "4", "--chunks", "1,4,16", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    ran = [trial for trial in data["trials"] if trial["state"] == "ok"]
    for trial in ran:
        trial["predicted"] |= {
            "parts": [
                {"part": stage["rank"], "forward_s": stage["forward_s"], "backward_s": stage["backward_s"]}
                for stage in trial["stages"]
            ],
            "update_s": [0.0] * 4,
            "boundary_bytes": [0] * 3,
            "basis": None,
        }
    path = tmp_path / "record.json"
    path.write_text(json.dumps(data | {"mode": "measured", "trials": ran, "environment": {}}))
    return str(path)


def answered(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    assert main(["whatif", *arguments]) == code
    said = capsys.readouterr()
    return said.out, said.err


# --- one setting


def test_the_answer_of_a_spec(sleep: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = answered(capsys, sleep, "--stages", "4")
    assert "gpipe, K = 4, predicted from the spec's own seconds (family sleep), nothing was run" in out
    assert "FITS" not in out and "no capacity is known" in out
    assert "chosen         M = 8 (b = 4, N = 32)" in out
    assert "given: the costs stand in the spec" in out
    assert "Predicted from the spec's own seconds" in err


def test_given_costs_fit_until_memory_ends(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = answered(capsys, costs)
    assert "limit          memory: M = 13 does not fit" in out and "TIGHT" in out
    assert "FITS, chosen" in out and "With pipeline.recompute" in out


def test_the_record_of_a_prediction_is_a_record(sleep: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "predicted.json"
    answered(capsys, sleep, "--stages", "4", "--json", str(file), "--quiet")
    made = read_record(file)
    assert made.mode == "predicted" and made.sources["pipeline.stages"] == "flag --stages"
    assert made.verdict is not None and made.verdict.alternatives
    assert {one.settings.get("pipeline.schedule") for one in made.verdict.alternatives} >= {"1f1b", "zbv-zero-bubble"}


def test_only_m_is_printed(sleep: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answered(capsys, sleep, "--stages", "4", "--print", "chunks")[0] == "8\n"


def test_csv_and_markdown_of_a_setting(sleep: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = answered(capsys, sleep, "--stages", "4", "--csv", "-", "--markdown", str(tmp_path / "a.md"))
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["chunks"] for row in rows][:4] == ["1", "2", "4", "8"]
    assert rows[3]["chosen"] == "True" and rows[3]["predicted_step_s"] == rows[3]["step_median_s"]
    assert "ok, chosen" in (tmp_path / "a.md").read_text()


def test_flags_stand_over_the_spec(sleep: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--stages", "2", "--schedule", "1f1b", "--micro-batch", "4", "--chunks", "2,4", "--criterion", "stage"]
    out, _ = answered(capsys, sleep, *flags, "--set", "sweep.tolerance=2%", "--json", "-")
    spec = json.loads(out)["spec"]
    assert (spec["pipeline"]["stages"], spec["batch"]["micro_batch"], spec["batch"]["mini_batch"]) == (2, 4, None)
    assert (spec["sweep"]["criterion"], spec["sweep"]["tolerance"]) == ("stage", 0.02)


# --- calibrated by a record


def test_a_record_says_how_far_its_prediction_is(record: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = answered(capsys, "--from", record)
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["M = 1 (b = 32)", "M = 4 (b = 8)", "M = 16 (b = 2)"]
    assert lines[3].startswith("error of a step predicted without its own trial: mean ")
    assert "measured step" in out and "K = 4, predicted from record of " in out


def test_the_calibration_leaves_stdout_to_the_machine(record: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = answered(capsys, "--from", record, "--json", "-")
    assert json.loads(out)["mode"] == "predicted" and "mean " in err


def test_a_record_s_spec_can_be_changed(record: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = answered(capsys, "--from", record, "--stages", "2", "--schedule", "zbv-zero-bubble", "--json", "-")
    made = json.loads(out)
    assert made["spec"]["pipeline"]["virtual_stages"] == 2 and made["layers_per_part"] == [2, 2, 2, 2]
    assert made["sources"]["batch.mini_batch"] == "record"
    assert all(trial["measured_step_s"] is None for trial in made["trials"])


def test_a_spec_beside_a_record_says_the_setting(sleep: str, record: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = answered(capsys, sleep, "--from", record, "--json", "-")
    made = json.loads(out)
    assert made["spec"]["pipeline"]["stages"] == 4 and len(made["candidates"]) == 6
    assert made["sources"]["batch.mini_batch"] == "file"


def test_extrapolated_costs_are_inconclusive_under_strict(record: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--mini-batch", "4096", "--chunks", "8"]
    answered(capsys, "--from", record, *flags)
    _, err = answered(capsys, "--from", record, *flags, "--strict", code=5)
    assert "extrapolated" in err
    _, err = answered(capsys, "--from", record, "--vary", "N=4096", "--chunks", "8", "--strict", code=5)
    assert "extrapolated" in err


def test_a_directory_is_its_record(record: str, capsys: pytest.CaptureFixture[str]) -> None:
    answered(capsys, "--from", str(Path(record).parent), "--print", "chunks")


def test_another_model_than_the_record_s_is_refused(record: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = answered(capsys, "--from", record, "--set", "model.seconds_per_chunk=0.5", code=2)
    assert "model.seconds_per_chunk" in err and "--from" in err


# --- many settings


def test_a_grid_is_ranked_and_keeps_the_unfit(sleep: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = answered(capsys, sleep, "--vary", "K=2,4,16", "--vary", "schedule=gpipe,1f1b")
    assert "best           K = 2" in out and "Predicted 6 combinations" in err
    assert "K = 16, schedule = gpipe: " in out and "each part needs one layer" in out


def test_a_grid_as_json_has_stable_keys(sleep: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads(answered(capsys, sleep, "--vary", "K=2,16", "--vary", "N=32,64", "--json", "-")[0])
    assert list(made) == ["mode", "costs", "varied", "rows", "warnings"]
    assert made["varied"] == ["pipeline.stages", "batch.mini_batch"] and len(made["rows"]) == 4
    assert made["rows"][0]["settings"].keys() == {"pipeline.stages", "batch.mini_batch"}
    assert made["rows"][-1]["chunks"] is None and made["rows"][-1]["reason"]


def test_a_grid_as_csv_and_markdown(sleep: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = answered(capsys, sleep, "--vary", "K=2,4", "--csv", "-", "--markdown", str(tmp_path / "a.md"))
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["pipeline.stages"] for row in rows] == ["2", "4"] and float(rows[0]["samples_per_s_a_device"]) > 0
    assert (tmp_path / "a.md").read_text().startswith("**Predicted from")


def test_where_no_combination_fits_the_code_is_three(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = answered(capsys, costs, "--memory", "1GiB", "--vary", "schedule=gpipe,1f1b", code=3)
    assert "no M can be chosen in any of 2 combinations" in err
    _, err = answered(capsys, costs, "--memory", "1GiB", code=3)
    assert "no M can be chosen" in err


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "neither SPEC nor --from RECORD"),
        (["SPEC"], "--stages"),
        (["SPEC", "--print", "all"], "--print chunks"),
        (["SPEC", "--vary", "K=2,4", "--print", "chunks"], "--vary asks for many"),
        (["SPEC", "--vary", "K=2", "--stages", "2"], "--stages and --vary both set pipeline.stages"),
        (["SPEC", "--vary", "layer=2"], "did you mean layers?"),
        (["SPEC", "--vary", "schedule=gpip", "--stages", "2"], "--vary: pipeline.schedule"),
        (["SPEC", "--stages", "0", "--schedule", "gpip"], "2 mistakes in the spec"),
        (["SPEC", "--stages", "2", "--json", "-", "--csv", "-"], "would share stdout"),
        (["--from", "nothing.json"], "there is no such file"),
        (["SPEC", "--device", "h100", "--stages", "2", "--budget", "3s"], "No such option: --budget"),
    ],
)
def test_usage(sleep: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = answered(capsys, *[sleep if word == "SPEC" else word for word in arguments], code=2)
    assert words in err


def test_a_value_that_is_wrong_in_some_rows_ends_none(sleep: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = answered(capsys, sleep, "--vary", "K=0,2,x")
    assert "best           K = 2" in out and "K = x: --vary: pipeline.stages" in out


def test_a_prediction_is_no_source(sleep: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "predicted.json")
    answered(capsys, sleep, "--stages", "2", "--json", file)
    _, err = answered(capsys, "--from", file, code=2)
    assert "is itself predicted" in err


def test_an_unknown_device_names_the_nearest(sleep: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = answered(capsys, sleep, "--stages", "2", "--device", "h100-80", code=2)
    assert "hardware.name" in err and "h100-80gb" in err


# --- how it starts


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.mark.parametrize("extra", [[], ["--vary", "K=2,4", "--csv", "-"], ["--json", "-"]])
def test_a_record_is_enough_and_torch_stays_out(record: str, extra: list[str]) -> None:
    script = (
        "import sys\n"
        "from chunktune.cli.app import main\n"
        f"code = main({['whatif', '--from', record, *extra]!r})\n"
        "print('loaded', code, sorted(set(sys.modules) & {'torch', 'pandas'}), file=sys.stderr)\n"
    )
    ended = run("-c", script)
    assert ended.stderr.splitlines()[-1] == "loaded 0 []", ended.stderr


def test_the_help_groups_its_options_and_gives_examples() -> None:
    text = run("-m", "chunktune", "whatif", "--help").stdout
    places = [text.index(title) for title in ("─ Prediction", "─ Settings", "─ Output", "─ Running", "Examples:")]
    assert places == sorted(places)
    assert places[0] < text.index("--vary") < places[1] < text.index("--stages") < places[2]
    assert "chunktune whatif --from runs/a-sweep/record.json" in text


FLAGS = """
--chunks --criterion --csv --debug --device --from --github --headroom --help --html --json --markdown --memory
--micro-batch --mini-batch --no-github --optimizer --partition --patience --precision --print --quiet --recompute
--schedule --set --stages --strict --tolerance --vary --virtual-stages
"""


def test_the_flags_of_whatif_are_these() -> None:
    text = run("-m", "chunktune", "whatif", "--help").stdout.partition("Examples:")[0]
    words: set[Any] = {word.strip("().,;") for word in text.split() if word.startswith("--")}
    assert sorted(words) == FLAGS.split()


def test_every_override_is_a_parameter() -> None:
    assert set(OVERRIDES) <= set(whatif.__annotations__)
