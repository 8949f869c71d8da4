from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from chunktune.doctor import host as host_module
from chunktune.doctor.cgroups import Cgroups
from chunktune.doctor.facts import Fact, known, read, value_of
from chunktune.doctor.host import host_facts
from chunktune.doctor.warnings import warnings_of

MIB = 2**20

# --- facts


def test_a_reader_that_raises_gives_a_fact_that_says_why() -> None:
    def fail() -> None:
        raise FileNotFoundError(2, "No such file or directory", "/proc/nothing")

    assert read(fail) == Fact(why="/proc/nothing: No such file or directory")
    assert read(lambda: 1 / 0).why == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("value", [math.nan, math.inf, [1.0, -math.inf], {"a": math.nan}])
def test_nan_is_not_available(value: Any) -> None:
    fact = known(value)
    assert fact.value is None
    assert fact.why is not None and "no finite number" in fact.why


def test_a_value_is_what_json_can_hold() -> None:
    assert known({"a": (1, Path("x"), None)}).value == {"a": [1, "x", None]}
    assert known(None) == Fact(why="it says nothing")


# --- cgroups and host


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cgroup_2_takes_the_tightest_limit_up_the_tree(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    cgroups = Cgroups(
        tree(
            tmp_path,
            {
                "proc/self/cgroup": "0::/user/job\n",
                f"{base}/cgroup.controllers": "cpu memory\n",
                f"{base}/user/memory.max": "1000000\n",
                f"{base}/user/job/memory.max": "max\n",
                f"{base}/user/job/memory.current": "5000\n",
                f"{base}/user/job/cpu.max": "max 100000\n",
                f"{base}/user/cpu.max": "150000 100000\n",
                f"{base}/user/job/cpuset.cpus.effective": "0-3\n",
                f"{base}/user/job/pids.max": "max\n",
            },
        )
    )
    assert cgroups.version == 2
    assert cgroups.memory_limit_bytes() == 1000000
    assert cgroups.memory_used_bytes() == 5000
    assert cgroups.cpu_limit_cores() == 1.5
    assert cgroups.cpus() == "0-3"
    assert cgroups.processes_limit() is None


def test_cgroup_1_knows_no_limit_as_a_huge_one(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    cgroups = Cgroups(
        tree(
            tmp_path,
            {
                "proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box\n1:name=systemd:/\n",
                f"{base}/memory/memory.limit_in_bytes": "9223372036854771712\n",
                f"{base}/memory/box/memory.limit_in_bytes": "9223372036854771712\n",
                f"{base}/cpu/box/cpu.cfs_quota_us": "50000\n",
                f"{base}/cpu/box/cpu.cfs_period_us": "100000\n",
                f"{base}/cpu/cpu.cfs_quota_us": "-1\n",
                f"{base}/cpu/cpu.cfs_period_us": "100000\n",
            },
        )
    )
    assert cgroups.version == 1
    assert cgroups.memory_limit_bytes() is None
    assert cgroups.cpu_limit_cores() == 0.5


def test_a_path_of_the_host_is_looked_for_at_the_top_of_a_container(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../../outside\n",
        "sys/fs/cgroup/cgroup.controllers": "",
        "sys/fs/cgroup/memory.max": "4096\n",
        "memory.max": "1\n",
    }
    assert Cgroups(tree(tmp_path, files)).memory_limit_bytes() == 4096


def test_an_empty_machine_has_facts_that_say_why(tmp_path: Path) -> None:
    facts = host_facts(tmp_path, {})
    assert value_of(facts, "processor", "name") is None
    assert value_of(facts, "memory", "total_bytes") is None
    assert "no cgroup is mounted" in str(facts["memory"]["cgroup_limit_bytes"].why)
    assert facts["environment"] == {}


def test_the_memory_of_the_machine_is_in_bytes(tmp_path: Path) -> None:
    files = {"proc/meminfo": "MemTotal:       16 kB\nMemAvailable:    8 kB\n", "proc/cpuinfo": "model name\t: A CPU\n"}
    facts = host_facts(tree(tmp_path, files), {})
    assert value_of(facts, "memory", "total_bytes") == 16384
    assert value_of(facts, "memory", "available_bytes") == 8192
    assert value_of(facts, "processor", "name") == "A CPU"


def test_only_variables_that_matter_are_told() -> None:
    given = {"NCCL_DEBUG": "INFO", "SECRET_TOKEN": "x", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    environment = host_module.environment(given)
    assert sorted(environment) == ["CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG"]
    assert environment["CUDA_VISIBLE_DEVICES"] == Fact(value="")


def test_loopback_that_is_refused_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "LOOPBACK", "192.0.2.1")
    facts = {"network": host_module.network()}
    assert value_of(facts, "network", "loopback") is None
    assert "bring lo up" in warnings_of(facts, [])[1]
