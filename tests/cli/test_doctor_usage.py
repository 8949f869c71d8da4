from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import chunktune
from chunktune.cli.app import main
from chunktune.doctor import examination
from chunktune.doctor.examination import Examination
from chunktune.doctor.facts import Fact
from chunktune.doctor.noise import Noise

Capture = pytest.CaptureFixture[str]
NOISE = Noise(processes=1, rounds=1, window=1, unit_s=1.0, ratio=1.0, interval=None, resolution=None, drift=1.0)
FOUND = Examination(
    tool={"name": "chunktune", "version": "1"},
    facts={"torch": {"version": Fact(value="2.13.0"), "nccl": Fact(why="no GPU")}},
    warnings=("mind the gap",),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The seconds of noise that were asked for; the answer is always the same."""
    seconds: list[float | None] = []

    def examine(noise_s: float | None, say: Callable[[str], None]) -> Examination:
        seconds.append(noise_s)
        say("Looking ...")
        return FOUND

    monkeypatch.setattr(examination, "examine", examine)
    return seconds


def test_facts_go_to_stdout_and_progress_to_stderr(asked: list[float | None], capsys: Capture) -> None:
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("torch\n  version")
    assert out.endswith("warnings\n  - mind the gap\n")
    assert err == "Looking ...\n"
    assert asked == [10.0]


def test_json_alone_goes_to_stdout(asked: list[float | None], capsys: Capture) -> None:
    assert main(["doctor", "--json", "-", "--no-noise", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["facts"] == {"torch": {"version": "2.13.0", "nccl": None}}
    assert err == ""
    assert asked == [None]


def test_json_to_a_file(asked: list[float | None], tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(path), "--seconds", "2.5"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(path.read_text())["not_available"] == {"torch.nccl": "no GPU"}
    assert "mind the gap" in out
    assert f"Wrote {path}" in err
    assert asked == [2.5]


@pytest.mark.parametrize(
    "arguments", [["--seconds", "0"], ["--seconds", "1e9"], ["--seconds", "nan"], ["--seconds", "ten"], ["--jsn", "-"]]
)
def test_a_wrong_command_line_is_told_before_anything_is_asked(
    asked: list[float | None], arguments: list[str], capsys: Capture
) -> None:
    assert main(["doctor", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert asked == []


def test_a_file_that_cannot_be_written_is_told_at_once(
    asked: list[float | None], tmp_path: Path, capsys: Capture
) -> None:
    assert main(["doctor", "--json", str(tmp_path / "nowhere" / "x.json")]) == 2
    assert "there is no directory" in capsys.readouterr().err
    assert asked == []


def test_noise_is_measured_alone_and_on_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[float, int]] = []

    def measure(seconds: float, processes: int) -> Noise | str:
        measured.append((seconds, processes))
        return NOISE if processes == 1 else "no time"

    monkeypatch.setattr(examination, "measure", measure)
    monkeypatch.setattr(examination, "cores_usable", lambda facts: 3.5)
    monkeypatch.setattr(examination, "torch_facts", dict)
    found = examination.examine(10.0, lambda text: None)
    assert measured == [(5.0, 1), (5.0, 3)]
    assert (found.noise, found.no_noise) == ((NOISE,), "no time")
    assert set(found.facts) >= {"software", "processor", "memory", "limits", "network", "nvidia", "torch"}


def test_a_machine_without_anything_still_gives_a_report(tmp_path: Path) -> None:
    """No nvidia-smi, no torch, traps in the working directory: facts, exit code 0, nothing heavy in the parent."""
    for name in ("torch", "json", "hashlib", "statistics"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')\n")
    script = (
        "import sys\n"
        "from chunktune.cli.app import main\n"
        "code = main(['doctor', '--no-noise', '--json', '-'])\n"
        "print(code, sorted(set(sys.modules) & {'torch', 'pandas', 'rich.table'}), file=sys.stderr)\n"
    )
    hidden = tmp_path / "hidden"
    (hidden / "torch").mkdir(parents=True)
    (hidden / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13 is missing')\n")
    environment = {
        **os.environ,
        "PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(hidden), str(Path(chunktune.__file__).parents[1])]),
        "PYTHONSAFEPATH": "1",
    }
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert ended.stderr.endswith("0 []\n")
    data = json.loads(ended.stdout)
    assert data["not_available"]["torch.version"] == "ImportError: libcudart.so.13 is missing"
    assert data["not_available"]["nvidia.driver"] == "nvidia-smi is not installed, or not in PATH"
    assert data["facts"]["network"]["loopback"] == "works"
    assert data["no_noise"] == "not asked for"
    assert data["warnings"][0].startswith("torch cannot be used (ImportError: libcudart.so.13 is missing)")
