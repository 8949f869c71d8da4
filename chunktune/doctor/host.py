"""Facts about this machine and this process: processors, memory, limits, environment, loopback."""

from __future__ import annotations

import os
import platform
import re
import resource
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from chunktune import __version__
from chunktune.doctor.cgroups import Cgroups
from chunktune.doctor.facts import UNLIMITED, Fact, Facts, known, read

VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "MASTER_ADDR", "MASTER_PORT"),
)
PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "CHUNKTUNE_")
LOOPBACK = "127.0.0.1"

_LIMITS = {
    "open_files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked_memory_bytes": resource.RLIMIT_MEMLOCK,
    "data_bytes": resource.RLIMIT_DATA,
}


def host_facts(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> dict[str, dict[str, Fact]]:
    """Everything but the GPUs and torch; files are read below `root`, which is / but in tests."""
    return {
        "software": software(),
        "processor": processor(root),
        "memory": memory(root),
        "limits": {name: read(partial(_limit, kind)) for name, kind in _LIMITS.items()},
        "network": network(),
        "environment": environment(environ),
    }


def software() -> dict[str, Fact]:
    """chunktune, Python, and the system."""
    return {
        "chunktune": read(lambda: __version__),
        "python": read(platform.python_version),
        "platform": read(platform.platform),
    }


def processor(root: Path) -> dict[str, Fact]:
    """Cores: those of the machine, those this process may use, and what its cgroup allows."""
    cgroups = Cgroups(root)
    return {
        "name": read(lambda: _found(root / "proc/cpuinfo", r"^model name\s*:\s*(.+)$")),
        "cores_present": read(os.cpu_count),
        "cores_usable": read(lambda: len(os.sched_getaffinity(0))),
        "cgroup_cores": read(lambda: _or_unlimited(cgroups.cpu_limit_cores())),
        "cgroup_cpus": read(cgroups.cpus),
        "load_average": read(lambda: [round(load, 2) for load in os.getloadavg()]),
    }


def memory(root: Path) -> dict[str, Fact]:
    """Memory of the machine and of the cgroup, and shared memory."""
    cgroups = Cgroups(root)
    return {
        "total_bytes": read(lambda: _meminfo_bytes(root, "MemTotal")),
        "available_bytes": read(lambda: _meminfo_bytes(root, "MemAvailable")),
        "cgroup_version": read(lambda: cgroups.version),
        "cgroup_limit_bytes": read(lambda: _or_unlimited(cgroups.memory_limit_bytes())),
        "cgroup_used_bytes": read(cgroups.memory_used_bytes),
        "cgroup_processes": read(lambda: _or_unlimited(cgroups.processes_limit())),
        "shared_memory_bytes": read(lambda: _shared_memory_bytes(root, "f_blocks")),
        "shared_memory_free_bytes": read(lambda: _shared_memory_bytes(root, "f_bavail")),
    }


def network() -> dict[str, Fact]:
    """Whether processes of this machine reach each other, as gloo needs, and the interfaces."""
    return {
        "loopback": read(_loopback),
        "interfaces": read(lambda: [name for _, name in socket.if_nameindex()]),
    }


def environment(environ: Mapping[str, str]) -> dict[str, Fact]:
    """The variables that change what torch, NCCL, gloo or chunktune do, as far as they are set."""
    names = sorted(name for name in environ if name in VARIABLES or name.startswith(PREFIXES))
    return {name: known(environ[name]) for name in names}


def cores_usable(facts: Facts) -> float | None:
    """Cores that this process can really use: the least of affinity and cgroup; null where neither is known."""
    own = facts.get("processor", {})
    values = [fact.value for fact in (own.get("cores_usable"), own.get("cgroup_cores")) if fact is not None]
    return min((float(value) for value in values if isinstance(value, (int, float))), default=None)


def _found(path: Path, pattern: str) -> str:
    match = re.search(pattern, path.read_text(errors="replace"), re.MULTILINE)
    if match is None:
        raise ValueError(f"{path.name} does not say it")
    return match[1].strip()


def _meminfo_bytes(root: Path, name: str) -> int:
    return int(_found(root / "proc/meminfo", rf"^{name}:\s*(\d+) kB$")) * 1024


def _shared_memory_bytes(root: Path, figure: str) -> int:
    """`f_blocks`, all, or `f_bavail`, free, of /dev/shm."""
    found = os.statvfs(root / "dev/shm")
    return int(getattr(found, figure)) * found.f_frsize


def _limit(kind: int) -> int | str:
    """The soft limit of this process."""
    soft, _ = resource.getrlimit(kind)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _or_unlimited(value: Any) -> Any:
    return UNLIMITED if value is None else value


def _loopback() -> str:
    """Send a byte over the loopback interface. Raises OSError."""
    with socket.create_server((LOOPBACK, 0)) as server:
        server.settimeout(2)
        with socket.create_connection(server.getsockname(), timeout=2) as client:
            peer, _ = server.accept()
            with peer:
                client.sendall(b"x")
                peer.settimeout(2)
                if peer.recv(1) != b"x":
                    raise OSError(f"a byte sent to {LOOPBACK} did not arrive")
    return "works"
