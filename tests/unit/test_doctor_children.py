from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunktune.doctor import nvidia
from chunktune.doctor.child import Ended, run, run_several
from chunktune.doctor.facts import Fact, value_of
from chunktune.doctor.torch_facts import NAMES, parsed, torch_facts

MIB = 2**20

# --- children that misbehave


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code)


@pytest.mark.parametrize(
    ("code", "trouble"),
    [
        ("print('x')", None),
        ("print('x', flush=True); import os; os.abort()", "it was killed by SIGABRT"),
        ("print('x', flush=True); import os; os.kill(os.getpid(), 11)", "it was killed by SIGSEGV"),
        ("print('x', flush=True); raise SystemExit('no\\n\\nlibcuda\\n\\n')", "it exited with 1: libcuda"),
        ("print('x', flush=True); raise SystemExit(9)", "it exited with 9"),
    ],
)
def test_what_a_child_wrote_is_kept_however_it_ends(code: str, trouble: str | None) -> None:
    assert run(python(code), 60) == Ended("x\n", trouble)


def test_a_child_that_hangs_is_ended_with_all_it_started() -> None:
    code = (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\nif child: print(child, flush=True)\ntime.sleep(600)\n"
    )
    ended = run(python(code), 0.5)
    assert ended.trouble == "no answer within 0.5 s"
    assert _is_gone(int(ended.stdout))


def _is_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_command_that_is_not_there() -> None:
    assert run(("no-such-command-at-all",), 1).trouble == "no-such-command-at-all is not installed, or not in PATH"
    assert "cannot be started" in str(run(("/",), 1).trouble)


def test_several_run_at_once(tmp_path: Path) -> None:
    # Each waits for the other's file: one after the other would never end.
    code = (
        "import os, sys, time\nopen(sys.argv[1], 'w').close()\n"
        "while not os.path.exists(sys.argv[2]): time.sleep(0.01)\n"
    )
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    ended = run_several([(*python(code), a, b), (*python(code), b, a)], 60)
    assert [one.trouble for one in ended] == [None, None]


def test_signals_have_names() -> None:
    assert run(python(f"import os; os.kill(os.getpid(), {signal.SIGRTMIN + 3})"), 60).trouble is not None


# --- torch, in whatever state it is


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, timeout_s: float = 60.0) -> dict[str, Fact]:
    tree(tmp_path, {"torch/__init__.py": code})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return torch_facts(timeout_s)


WORKING = """
import types
__version__ = "9.8.7"
version = types.SimpleNamespace(cuda="12.9", hip=None)
get_num_threads = lambda: 3
distributed = types.SimpleNamespace(
    is_available=lambda: True, is_gloo_available=lambda: True, is_nccl_available=lambda: True
)
def _init(): raise RuntimeError("the driver is too old\\nmore")
cuda = types.SimpleNamespace(
    get_arch_list=lambda: ["sm_90"], nccl=types.SimpleNamespace(version=lambda: (2, 29, 7)),
    is_available=lambda: False, init=_init, device_count=lambda: 0,
)
"""


def test_torch_answers_in_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = fake_torch(tmp_path, monkeypatch, WORKING)
    assert set(facts) == set(NAMES)
    values = {name: fact.value for name, fact in facts.items()}
    assert values["version"] == "9.8.7"
    assert values["nccl"] == "2.29.7"
    assert values["backends"] == ["gloo", "nccl"]
    assert facts["cuda_available"].why == "RuntimeError: the driver is too old"


@pytest.mark.parametrize(
    ("code", "name", "why"),
    [
        ("import os; os.abort()", "version", "it was killed by SIGABRT, when torch was imported"),
        ("raise OSError('libcudart.so.13: no such file')", "version", "OSError: libcudart.so.13: no such file"),
        ("raise OSError('libcudart.so.13')", "nccl", "torch cannot be imported: OSError: libcudart.so.13"),
        (
            WORKING + "def _die(): import os; os.kill(os.getpid(), 11)\ncuda.device_count = _die\n",
            "gpu_count",
            "SIGSEGV",
        ),
        ("print('{\"noise\": 1}'); print('[]'); print('\\xff')\n" + WORKING, "hip_build", None),
    ],
)
def test_a_torch_that_is_broken_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, name: str, why: str | None
) -> None:
    fact = fake_torch(tmp_path, monkeypatch, code)[name]
    assert (fact.why is None) if why is None else why in str(fact.why)


def test_a_torch_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = WORKING + "import time\ncuda.is_available = lambda: time.sleep(600)\n"
    fact = fake_torch(tmp_path, monkeypatch, code, timeout_s=1.0)["gpu_count"]
    assert str(fact.why).startswith("no answer within 1 s, when torch was")


def test_facts_said_before_the_end_are_kept() -> None:
    lines = [{"asked": "version"}, {"name": "version", "value": "2.13.0"}, {"asked": "gpu 0"}]
    facts = parsed(Ended("\n".join(map(json.dumps, lines)), "no answer within 90 s"))
    assert facts["version"] == Fact(value="2.13.0")
    assert facts["gpu 0"].why == "no answer within 90 s, when torch was asked for gpu 0"


@given(st.text())
def test_any_output_makes_facts(text: str) -> None:
    assert set(NAMES) <= set(parsed(Ended(text, None)))


# --- nvidia-smi

GPUS = """\
0, GPU-aaa, NVIDIA H200, 580.95.05, 143771, 1024, 9.0
1, GPU-bbb, NVIDIA H200, 580.95.05, 143771, [N/A], 9.0
"""
PROCESSES = "GPU-aaa, 4242, python3, 900\nGPU-zzz, 7, [Not Found], [N/A]\n"
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-23\t0\nGPU1\tNV18\t X \tSYS\t24-47\t1\nNIC0\tPIX\tSYS\t X \n\nLegend:\n  X = Self\n"
)


def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A command nvidia-smi that does this, and nothing else in PATH but sh and cat."""
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_gpus_with_their_memory_processes_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, {"gpus": GPUS, "processes": PROCESSES, "topology": TOPOLOGY})
    script = 'case "$1" in --query-gpu*) f=gpus;; --query-compute*) f=processes;; *) f=topology;; esac'
    smi(tmp_path, monkeypatch, f'{script}\ncat "{tmp_path}/$f"')
    facts = {"nvidia": nvidia.nvidia_facts()}
    assert value_of(facts, "nvidia", "driver") == "580.95.05"
    gpus = value_of(facts, "nvidia", "gpus")
    assert [(gpu["index"], gpu["memory_bytes"], gpu["used_bytes"]) for gpu in gpus] == [
        (0, 143771 * MIB, 1024 * MIB),
        (1, 143771 * MIB, None),
    ]
    assert value_of(facts, "nvidia", "processes")[0] == {
        "gpu": 0,
        "pid": 4242,
        "name": "python3",
        "used_bytes": 900 * MIB,
    }
    assert value_of(facts, "nvidia", "links") == [{"a": 0, "b": 1, "link": "NV18"}]


def test_a_driver_that_knows_no_compute_capability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        'case "$1" in *compute_cap*) echo "Field \\"compute_cap\\" is not a valid field to query."; exit 2;; esac\n'
        'case "$1" in --query-gpu*) echo "0, GPU-a, Tesla, 440.33, 16160, 0";; esac'
    )
    smi(tmp_path, monkeypatch, script)
    facts = {"nvidia": nvidia.nvidia_facts()}
    assert value_of(facts, "nvidia", "gpus")[0]["compute_capability"] is None
    assert value_of(facts, "nvidia", "driver") == "440.33"
    assert facts["nvidia"]["links"].why == "there is one GPU"


def test_a_driver_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, "sleep 600")
    facts = nvidia.nvidia_facts(timeout_s=0.3)
    assert {fact.why for fact in facts.values()} == {"no answer within 0.3 s"}


def test_a_driver_that_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed because of the driver.'; exit 9")
    assert nvidia.nvidia_facts()["gpus"].why == "it exited with 9: NVIDIA-SMI has failed because of the driver."


@given(st.text())
def test_any_answer_of_nvidia_smi_is_read(text: str) -> None:
    gpus = nvidia.parse_gpus(text)
    nvidia.parse_processes(text, gpus)
    nvidia.parse_links(text)
