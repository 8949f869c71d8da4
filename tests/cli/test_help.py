import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import chunktune
from chunktune.cli.app import main
from chunktune.cli.options import OVERRIDES
from chunktune.cli.sweep import sweep

ROOT = Path(chunktune.__file__).parents[1]
HEAVY = ("torch", "pandas", "numpy")


def run(*arguments: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`python arguments` with the package importable, no colour asked for, and output captured."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")}
    environment = {**inherited, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **(environ or {})}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["sweep", "--help"], ["--version"], []])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from chunktune.cli.app import main\n"
        f"code = main({arguments!r})\n"
        f"print(code, sorted(set(sys.modules) & {set(HEAVY)!r}), file=sys.stderr)\n"
    )
    ended = run("-c", script)
    assert (ended.returncode, ended.stderr.strip()) == (0, "0 []")
    assert "chunktune" in ended.stdout


def test_a_spec_is_read_without_anything_heavy(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text("[model]\n")
    script = (
        "import sys\n"
        "from chunktune.cli.app import main\n"
        f"code = main(['sweep', {str(tmp_path / 'spec.toml')!r}])\n"
        f"print(code, sorted(set(sys.modules) & {set(HEAVY)!r}))\n"
    )
    ended = run("-c", script)
    assert ended.stdout.strip() == "2 []"
    assert "model.family: is missing" in ended.stderr


def test_the_module_runs() -> None:
    ended = run("-m", "chunktune", "--version")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"chunktune {chunktune.__version__}\n", "")


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage: chunktune" in capsys.readouterr().out


def test_the_help_groups_its_options() -> None:
    text = run("-m", "chunktune", "sweep", "--help").stdout
    places = [text.index(title) for title in ("─ Options", "─ Settings", "─ Output", "─ Running")]
    assert places == sorted(places)
    assert places[1] < text.index("--stages") < places[2] < text.index("--json") < places[3]


FLAGS = """
--budget --chunks --criterion --csv --debug --device --dry-run --force --github --headroom --help --html
--json --markdown --memory --micro-batch --mini-batch --no-github --optimizer --output-dir --partition
--patience --precision --print --progress --quick --quiet --recompute --rehearse --resume --schedule --set
--share --stages --strict --tolerance --virtual-stages
"""


def test_the_flags_of_sweep_are_these() -> None:
    words = run("-m", "chunktune", "sweep", "--help").stdout.split()
    assert sorted({word for word in words if word.startswith("--")}) == FLAGS.split()


def test_every_override_is_a_parameter() -> None:
    assert set(OVERRIDES) <= set(sweep.__annotations__)


@pytest.mark.parametrize(
    ("environ", "coloured"),
    [
        ({}, False),
        ({"GITHUB_ACTIONS": "true"}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"GITHUB_ACTIONS": "true", "FORCE_COLOR": "1"}, True),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ({"NO_COLOR": "1", "GITHUB_ACTIONS": "true"}, False),
    ],
)
def test_colour_only_where_it_is_asked_for(environ: dict[str, str], coloured: bool) -> None:
    assert ("\x1b[" in run("-m", "chunktune", "--help", environ=environ).stdout) is coloured
