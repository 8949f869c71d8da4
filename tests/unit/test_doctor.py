from __future__ import annotations

import json
import math
from typing import Any

import pytest

from chunktune.doctor.child import Ended
from chunktune.doctor.examination import Examination
from chunktune.doctor.facts import Fact, known, unknown
from chunktune.doctor.noise import Noise, analyse, measure, of_children
from chunktune.doctor.warnings import warnings_of
from chunktune.report.doctor import to_json, to_text

MIB = 2**20

# --- noise


def test_equal_rounds_have_no_noise() -> None:
    noise = analyse([[(0.025, 0.025)] * 24], 0.025)
    assert (noise.rounds, noise.window, noise.ratio, noise.resolution, noise.drift) == (24, 12, 1.0, 0.0, 1.0)


def test_the_resolution_is_half_the_interval_of_twelve_rounds() -> None:
    rounds = [(1.0, 1.0 + 0.02 * (-1) ** index) for index in range(12)]
    noise = analyse([rounds], 1.0)
    assert noise.interval is not None and noise.resolution is not None
    half = math.log(noise.interval[1] / noise.interval[0]) / 2
    assert noise.resolution == pytest.approx(1 - math.exp(-half))
    assert noise.interval[0] < 1 < noise.interval[1]


def test_a_drift_cancels_within_rounds() -> None:
    noise = analyse([[(1.0 + index, 1.0 + index) for index in range(12)]], 1.0)
    assert noise.resolution == 0.0
    assert noise.drift == 12.0


def test_more_rounds_than_a_window_do_not_make_it_finer() -> None:
    rounds = [(1.0, 1.0 + 0.02 * (-1) ** index) for index in range(12)]
    assert analyse([rounds * 5], 1.0).resolution == pytest.approx(analyse([rounds], 1.0).resolution)


def test_several_processes_count_by_the_slowest() -> None:
    noise = analyse([[(1.0, 2.0), (1.0, 1.0)], [(3.0, 1.0), (1.0, 1.0), (1.0, 9.0)]], 1.0)
    assert (noise.processes, noise.rounds, noise.drift) == (2, 2, 3.0)


def test_one_round_has_no_interval() -> None:
    noise = analyse([[(1.0, 1.0)]], 1.0)
    assert (noise.interval, noise.resolution) == (None, None)


@pytest.mark.parametrize(
    "text", ["", "{}", "null", '{"unit_s": 1, "rounds": []}', '{"unit_s": NaN, "rounds": [[1, 1]]}']
)
def test_a_workload_that_says_nothing_useful(text: str) -> None:
    assert "nothing that makes sense" in str(of_children([Ended(text)]))


def test_a_workload_that_ends_early() -> None:
    assert of_children([Ended("{}"), Ended("", "it was killed by SIGKILL")]) == (
        "the workload did not finish: it was killed by SIGKILL"
    )


def test_noise_is_really_measured() -> None:
    noise = measure(0.3, 2)
    assert isinstance(noise, Noise)
    assert noise.processes == 2
    assert noise.rounds >= 1
    assert noise.unit_s > 0
    assert noise.drift >= 1


# --- warnings


def machine(**groups: dict[str, Any]) -> dict[str, dict[str, Fact]]:
    """A machine without anything to warn of, but for these facts."""
    usual: dict[str, dict[str, Any]] = {
        "torch": {"version": "2.13.0", "cuda_build": "13.0", "cuda_available": True, "gpu_count": 1},
        "processor": {"cores_usable": 8, "cgroup_cores": "unlimited", "load_average": [0.1, 0.1, 0.1]},
        "network": {"loopback": "works", "interfaces": ["lo", "eth0"]},
    }
    return {
        group: {
            name: value if isinstance(value, Fact) else known(value)
            for name, value in {**usual.get(group, {}), **groups.get(group, {})}.items()
        }
        for group in {**usual, **groups}
    }


def test_nothing_to_warn_of() -> None:
    assert warnings_of(machine(), []) == ()


GPU = {"index": 0, "name": "H200", "memory_bytes": 100 * 1024 * MIB, "used_bytes": 2048 * MIB}


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"torch": {"version": unknown("no module")}}, "torch cannot be used (no module)"),
        ({"torch": {"version": "2.9.1+cpu"}}, "torch is 2.9.1+cpu: chunktune needs 2.10 or newer"),
        (
            {"torch": {"cuda_build": "none", "cuda_available": False}, "nvidia": {"gpus": [GPU | {"used_bytes": 0}]}},
            "1 GPU is present, but torch cannot use it: this torch is built for the CPU alone",
        ),
        (
            {
                "torch": {"cuda_available": False},
                "nvidia": {"gpus": [GPU | {"used_bytes": None}]},
                "environment": {"CUDA_VISIBLE_DEVICES": "7"},
            },
            "CUDA_VISIBLE_DEVICES is '7'; unset it",
        ),
        (
            {"torch": {"cuda_available": unknown("the driver is too old")}, "nvidia": {"gpus": [GPU, GPU]}},
            "2 GPUs are present, but torch cannot use them: the driver is too old; install a driver that",
        ),
        ({"torch": {"gpu 1": unknown("no kernel image")}}, "GPU 1 is visible, but an operation on it failed"),
        (
            {"nvidia": {"gpus": [GPU], "processes": [{"gpu": 0, "pid": 9, "name": "python"}]}},
            "GPU 0: 2.00 GiB of its memory are in use by python (9)",
        ),
        ({"nvidia": {"gpus": [GPU], "processes": unknown("no")}}, "in use by others"),
        (
            {
                "nvidia": {"gpus": unknown("nvidia-smi is not installed")},
                "torch": {"gpu 0": {"works": True, "memory_bytes": 9000 * MIB, "free_bytes": 4904 * MIB}},
            },
            "GPU 0: 4.00 GiB of its memory are in use, more than torch alone takes",
        ),
        (
            {
                "nvidia": {"gpus": [GPU | {"uuid": "GPU-aaa"}]},
                "torch": {"gpu 0": {"works": True, "uuid": "aaa"}},
            },
            "GPU 0: 2.00 GiB",
        ),
        (
            {"torch": {"peer_access": [{"a": 0, "b": 1, "access": False}]}},
            "GPUs 0 and 1 cannot read each other's",
        ),
        (
            {"environment": {"GLOO_SOCKET_IFNAME": "eth7"}},
            "GLOO_SOCKET_IFNAME is 'eth7', and there is no",
        ),
        ({"processor": {"cgroup_cores": 1.5}}, "8 cores are visible, but the cgroup allows 1.5"),
        ({"torch": {"gpu_count": 0}}, "without a GPU the stages share 8 cores"),
        ({"processor": {"load_average": [6.0, 1.0, 1.0]}}, "load is 6 on 8 cores"),
        ({"torch": {"gpu_count": 4}, "memory": {"shared_memory_bytes": 64 * MIB}}, "/dev/shm holds 64.0 MiB"),
        ({"limits": {"open_files": 256}}, "256 files may be open"),
        ({"limits": {"data_bytes": 1024 * MIB}}, "RLIMIT_DATA is 1.00 GiB"),
        ({"environment": {"NCCL_P2P_DISABLE": "1"}}, "NCCL_P2P_DISABLE is 1"),
        ({"environment": {"CHUNKTUNE_SWEEP__BUDGET": "1m"}}, "CHUNKTUNE_SWEEP__BUDGET stand over every spec"),
    ],
)
def test_what_stands_in_the_way_is_told_with_what_to_do(groups: dict[str, dict[str, Any]], words: str) -> None:
    assert words in "\n".join(warnings_of(machine(**groups), []))


@pytest.mark.parametrize(
    "groups",
    [
        {"nvidia": {"gpus": [GPU | {"used_bytes": 3 * MIB}]}},
        {"nvidia": {"gpus": [GPU | {"uuid": "GPU-aaa"}]}, "torch": {"gpu 0": {"works": True, "uuid": "bbb"}}},
        {"torch": {"gpu 0": {"works": True, "memory_bytes": 9000 * MIB, "free_bytes": 8500 * MIB}}},
        {"memory": {"shared_memory_bytes": 64 * MIB}},
        {"limits": {"data_bytes": "unlimited", "open_files": "unlimited"}},
        {"environment": {"NCCL_SOCKET_IFNAME": "^docker", "GLOO_SOCKET_IFNAME": "eth0"}},
        {"processor": {"cgroup_cores": 8.0}},
        {"torch": {"peer_access": [{"a": 0, "b": 1, "access": True}], "gpu 0": {"works": True}}},
    ],
)
def test_what_is_in_order_is_not_told(groups: dict[str, dict[str, Any]]) -> None:
    assert warnings_of(machine(**groups), []) == ()


def noise(processes: int, resolution: float | None, drift: float = 1.0) -> Noise:
    return Noise(
        processes=processes,
        rounds=12,
        window=12,
        unit_s=0.025,
        ratio=1.001,
        interval=(0.99, 1.01),
        resolution=resolution,
        drift=drift,
    )


def test_the_coarsest_noise_is_told_with_a_tolerance_that_it_allows() -> None:
    told = warnings_of(machine(), [noise(1, 0.012), noise(8, 0.034, drift=1.6)])
    assert len(told) == 2
    assert told[0].startswith("8 processes at once: 12 rounds resolve 3.4% of throughput")
    assert told[0].endswith("--tolerance 4%")
    assert "1.60 times the fastest" in told[1]
    assert warnings_of(machine(), [noise(1, 0.009), noise(8, None)]) == ()


# --- renderings


def found(**groups: dict[str, Any]) -> Examination:
    facts = machine(**groups)
    return Examination(
        tool={"name": "chunktune", "version": "1"},
        facts=facts,
        noise=(noise(1, 0.005),),
        warnings=("mind the gap",),
    )


def test_json_holds_values_reasons_noise_and_warnings() -> None:
    data = json.loads(to_json(found(nvidia={"driver": unknown("no driver"), "gpus": [GPU]})))
    assert data["facts"]["nvidia"] == {"driver": None, "gpus": [GPU]}
    assert data["not_available"] == {"nvidia.driver": "no driver"}
    assert data["noise"][0]["resolution"] == 0.005
    assert data["warnings"] == ["mind the gap"]


def test_text_has_groups_and_the_warnings_last() -> None:
    text = to_text(found(nvidia={"driver": unknown("no driver"), "gpus": [GPU]}, environment={}))
    assert "\n  driver                 not available: no driver\n" in text
    assert "GPU 0                  name H200, memory 100 GiB, used 2.00 GiB" in text
    assert "12 rounds resolve: 0.5%" in text
    assert "\nenvironment\n  - none set\n" in text
    assert text.endswith("\nwarnings\n  - mind the gap\n")


def test_links_are_grouped_and_cut() -> None:
    pairs = [{"a": a, "b": b, "link": "NV18"} for a in range(8) for b in range(a + 1, 8)]
    text = to_text(found(nvidia={"links": [*pairs, {"a": 8, "b": 9, "link": "SYS"}]}))
    assert "NV18: 0-1, 0-2" in text
    assert "and 16 more; SYS: 8-9" in text


def test_what_the_machine_says_cannot_steer_the_terminal() -> None:
    evil = "\x1b]0;owned\x07\x1b[31mred\r\nfake: line"
    text = to_text(found(nvidia={"driver": evil, "gpus": [{"index": evil, "name": evil}]}, environment={evil: evil}))
    assert "\x1b" not in text and "\x07" not in text and "\r" not in text
    assert "\nfake" not in text
    assert json.loads(to_json(found(nvidia={"driver": evil})))["facts"]["nvidia"]["driver"] == evil


def test_lines_keep_to_the_width() -> None:
    text = to_text(found(torch={"compiled_for": ["sm_90"] * 40}), width=60)
    assert max(map(len, text.splitlines())) <= 60
