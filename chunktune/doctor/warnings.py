"""What the facts mean for a sweep: a sentence each, with what to do. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from chunktune.doctor.facts import UNLIMITED, Facts, value_of
from chunktune.doctor.host import cores_usable
from chunktune.doctor.noise import Noise
from chunktune.tables import SweepSpec
from chunktune.units import format_bytes, format_share

MIB = 2**20
USED_BYTES = 256 * MIB
"""An idle GPU shows less than this in use."""
CONTEXT_BYTES = 1024 * MIB
"""More than what torch itself takes of a GPU before it has done anything."""
SHARED_MEMORY_BYTES = 512 * MIB
OPEN_FILES = 1024
OLDEST_TORCH = (2, 10)
BUSY = 0.5
"""Load a usable core before anything was measured."""
DRIFT = 1.25


def warnings_of(facts: Facts, noise: Sequence[Noise]) -> tuple[str, ...]:
    """Every warning that the facts give rise to, the most serious first."""
    checks: tuple[Callable[[Facts], Iterator[str]], ...] = (
        *(_torch, _unusable_gpus, _used_gpus, _peers, _network, _cores, _load, _shared_memory, _limits, _variables),
    )
    return (*(text for check in checks for text in check(facts)), *_resolution(noise), *_drift(noise))


def _torch(facts: Facts) -> Iterator[str]:
    version = value_of(facts, "torch", "version")
    if version is None:
        why = facts.get("torch", {}).get("version")
        reason = f" ({why.why})" if why is not None and why.why else ""
        yield f"torch cannot be used{reason}: sweep needs it; whatif, report, check and export work without"
        return
    numbers = [int(part) if part.isdecimal() else 0 for part in str(version).split(".")[:2]]
    if tuple(numbers) < OLDEST_TORCH:
        yield f"torch is {version}: chunktune needs {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer"


def _unusable_gpus(facts: Facts) -> Iterator[str]:
    if value_of(facts, "torch", "version") is None:
        return
    present = value_of(facts, "nvidia", "gpus") or []
    available = facts.get("torch", {}).get("cuda_available")
    if present and available is not None and available.value is not True:
        yield f"{_count(len(present), 'GPU')} present, but torch cannot use {_them(present)}: {_why_unusable(facts)}"
    for name, fact in facts.get("torch", {}).items():
        if name.startswith("gpu ") and not (isinstance(fact.value, dict) and fact.value.get("works")):
            why = fact.why or "it computes something else"
            index = name.removeprefix("gpu ")
            yield f"GPU {index} is visible, but an operation on it failed ({why}): leave it out by CUDA_VISIBLE_DEVICES"


def _why_unusable(facts: Facts) -> str:
    if value_of(facts, "torch", "cuda_build") == "none" and value_of(facts, "torch", "hip_build") in (None, "none"):
        return "this torch is built for the CPU alone; install a CUDA build"
    visible = value_of(facts, "environment", "CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES is {visible!r}; unset it, or name GPUs that exist"
    why = facts["torch"]["cuda_available"].why or "it does not say why"
    return f"{why}; install a driver that fits CUDA {value_of(facts, 'torch', 'cuda_build')}"


def _used_gpus(facts: Facts) -> Iterator[str]:
    if value_of(facts, "nvidia", "gpus") is None:
        yield from _used_by_torchs_account(facts)
    processes = value_of(facts, "nvidia", "processes") or []
    for gpu in value_of(facts, "nvidia", "gpus") or []:
        used = gpu.get("used_bytes")
        if isinstance(used, int) and used >= USED_BYTES and _is_visible(facts, gpu):
            owners = ", ".join(f"{one['name']} ({one['pid']})" for one in processes if one.get("gpu") == gpu["index"])
            whose = f" by {owners}" if owners else " by others"
            yield (
                f"GPU {gpu['index']}: {format_bytes(used)} of its memory are in use{whose}: a sweep would find less "
                "memory and disturbed times; end them, or leave the GPU out by CUDA_VISIBLE_DEVICES"
            )


def _used_by_torchs_account(facts: Facts) -> Iterator[str]:
    """Without nvidia-smi only the sum is known, this examination's own share in it."""
    for index, gpu in _torch_gpus(facts):
        used = int(gpu.get("memory_bytes", 0)) - int(gpu.get("free_bytes", 0))
        if used >= CONTEXT_BYTES:
            yield (
                f"GPU {index}: {format_bytes(used)} of its memory are in use, more than torch alone takes: a sweep "
                "would find less memory and disturbed times; end what runs there, or leave the GPU out by "
                "CUDA_VISIBLE_DEVICES"
            )


def _is_visible(facts: Facts, gpu: dict[str, Any]) -> bool:
    """Whether torch sees this GPU of nvidia-smi's list; yes where that cannot be told."""
    seen = {str(one.get("uuid")).removeprefix("GPU-") for _, one in _torch_gpus(facts) if one.get("uuid")}
    return not seen or str(gpu.get("uuid")).removeprefix("GPU-") in seen


def _torch_gpus(facts: Facts) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, fact in facts.get("torch", {}).items():
        if name.startswith("gpu ") and isinstance(fact.value, dict):
            yield name.removeprefix("gpu "), fact.value


def _peers(facts: Facts) -> Iterator[str]:
    pairs: list[dict[str, Any]] = value_of(facts, "torch", "peer_access") or []
    without = [f"{pair['a']} and {pair['b']}" for pair in pairs if not pair["access"]]
    if without:
        more = f" and {len(without) - 4} more pairs" if len(without) > 4 else ""
        yield (
            f"GPUs {'; '.join(without[:4])}{more} cannot read each other's memory: what stages send goes through the "
            "host; put neighbouring stages on linked GPUs by the order in CUDA_VISIBLE_DEVICES"
        )


def _network(facts: Facts) -> Iterator[str]:
    loopback = facts.get("network", {}).get("loopback")
    if loopback is not None and loopback.value is None:
        yield f"loopback does not work ({loopback.why}): the processes of a sweep talk over 127.0.0.1; bring lo up"
    interfaces = value_of(facts, "network", "interfaces")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = value_of(facts, "environment", name)
        # NCCL takes prefixes, lists, and ^ and = before them; only a plain name can be held against what there is.
        plain = isinstance(wanted, str) and wanted.isalnum() and interfaces is not None
        if plain and not any(str(one).startswith(wanted) for one in interfaces):
            yield f"{name} is {wanted!r}, and there is no such interface: use one of {', '.join(interfaces)}"


def _cores(facts: Facts) -> Iterator[str]:
    affinity, quota = value_of(facts, "processor", "cores_usable"), value_of(facts, "processor", "cgroup_cores")
    if isinstance(affinity, int) and isinstance(quota, (int, float)) and quota < affinity:
        yield (
            f"{affinity} cores are visible, but the cgroup allows {quota:g}: threads are halted in the middle of a "
            "step; raise the quota, or bind the processes to as many cores"
        )
    usable = cores_usable(facts)
    if usable is not None and not value_of(facts, "torch", "gpu_count"):
        yield (
            f"without a GPU the stages share {usable:g} cores: more CPU stages than that wait for cores, not for each "
            "other; use fewer stages, sweep --rehearse, or the family sleep, which does not compute"
        )


def _load(facts: Facts) -> Iterator[str]:
    load, usable = value_of(facts, "processor", "load_average"), cores_usable(facts)
    if load and usable and load[0] > BUSY * usable:
        yield f"load is {load[0]:g} on {usable:g} cores: other programs run, and times will be disturbed; wait for them"


def _shared_memory(facts: Facts) -> Iterator[str]:
    size, gpus = value_of(facts, "memory", "shared_memory_bytes"), value_of(facts, "torch", "gpu_count") or 0
    if isinstance(size, int) and size < SHARED_MEMORY_BYTES and gpus > 1:
        yield (
            f"/dev/shm holds {format_bytes(size)}: NCCL needs more between {gpus} GPUs; start the container with "
            "--shm-size=1g or --ipc=host"
        )


def _limits(facts: Facts) -> Iterator[str]:
    files, data = value_of(facts, "limits", "open_files"), value_of(facts, "limits", "data_bytes")
    if isinstance(files, int) and files < OPEN_FILES:
        yield f"{files} files may be open: a process of a sweep needs a socket for every other; ulimit -n 4096"
    if data not in (None, UNLIMITED):
        yield (
            f"RLIMIT_DATA is {format_bytes(data)}: a CPU stage cannot have more, whatever device.memory says; "
            "ulimit -d unlimited"
        )


def _variables(facts: Facts) -> Iterator[str]:
    own = facts.get("environment", {})
    if value_of(facts, "environment", "NCCL_P2P_DISABLE") == "1":
        yield "NCCL_P2P_DISABLE is 1: GPUs send through the host; unset it unless you train so"
    settings = [name for name in own if name.startswith("CHUNKTUNE_")]
    if settings:
        yield f"{', '.join(settings)} stand over every spec; unset what is not meant"


def _resolution(noise: Sequence[Noise]) -> Iterator[str]:
    """Of several the coarsest."""
    share, worst = max(((one.resolution or 0.0, one) for one in noise), key=_first, default=(0.0, None))
    tolerance = SweepSpec().tolerance
    if worst is not None and share > tolerance:
        yield (
            f"{worst.where}: {worst.window} rounds resolve {format_share(share)} of throughput, and sweep.tolerance is "
            f"{format_share(tolerance)} where a spec does not say otherwise: close verdicts will be unclear; end other "
            f"programs, or use --tolerance {_next_percent(share)}"
        )


def _drift(noise: Sequence[Noise]) -> Iterator[str]:
    """Of several the worst."""
    drift, worst = max(((one.drift, one) for one in noise), key=_first, default=(1.0, None))
    if worst is not None and drift > DRIFT:
        yield (
            f"{worst.where}: the slowest block took {drift:.2f} times the fastest; paired rounds withstand a drift, "
            "single figures do not: compare values of M by their intervals"
        )


def _first(pair: tuple[float, object]) -> float:
    return pair[0]


def _next_percent(share: float) -> str:
    return f"{min(49, int(100 * share) + 1)}%"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun} is" if number == 1 else f"{number} {noun}s are"


def _them(items: Sequence[object]) -> str:
    return "it" if len(items) == 1 else "them"
