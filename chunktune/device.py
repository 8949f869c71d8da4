"""The device under a rank: its time line, its memory meter, and a capacity that is really enforced.

One protocol, two small implementations. Everything else in chunktune is the same code on CPU and CUDA.
Nothing of `CudaDevice` counts as verified before `tests/gpu` has passed on a machine that has one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from chunktune.errors import EnvironmentFailedError, UsageError
from chunktune.pipeline.runtime import Mark, StorageMeter

MIB = 2**20


class MemoryWatch(Protocol):
    """Peak memory of a stretch of work on one device."""

    def restart(self) -> None:
        """Read the peaks from here on."""

    @property
    def current_bytes(self) -> int:
        """Bytes allocated now."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes allocated at once since the last restart."""

    @property
    def reserved_bytes(self) -> int | None:
        """Most bytes the caching allocator held; None where there is none."""

    @property
    def retries(self) -> int:
        """How often the allocator had to give cached blocks back before it could allocate."""


class Device(Protocol):
    """What a rank needs from its device."""

    kind: Literal["cpu", "cuda"]
    torch_device: torch.device
    backend: str

    def mark(self) -> Mark:
        """Now, on the device's time line."""

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        """Seconds between two marks, after `synchronise`."""

    def synchronise(self) -> None:
        """Wait until the device has done all it was given."""

    def capacity_bytes(self) -> int:
        """What the device has for this rank when the spec says "auto"."""

    def overhead_bytes(self) -> int:
        """Bytes taken on the device outside the allocator: context, communicators, other processes."""

    def enforce(self, budget_bytes: int, slack_bytes: int = 0) -> contextlib.AbstractContextManager[None]:
        """Inside, allocating past the budget raises torch's out-of-memory error."""

    def cap(self, budget_bytes: int | None) -> None:
        """Hold timed steps to the budget too, or to none, where that does not slow them; else do nothing."""

    def watch(self) -> contextlib.AbstractContextManager[MemoryWatch]:
        """Inside, memory is counted exactly. May slow the work down: never around timed steps."""

    def release(self) -> None:
        """Give back what is no longer referenced."""

    def describe(self) -> str:
        """The device's name."""


class CpuDevice:
    """A CPU as a device: bytes of tensors are counted one by one, and RLIMIT_DATA enforces the capacity."""

    kind: Literal["cpu", "cuda"] = "cpu"
    backend = "gloo"

    def __init__(self, ranks_here: int) -> None:
        self.torch_device = torch.device("cpu")
        self._ranks_here = max(1, ranks_here)
        self._allocator = _GlibcAllocator()

    def mark(self) -> Mark:
        """Seconds of the process's own clock."""
        return time.perf_counter()

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        """Seconds between two marks."""
        return float(end - start)

    def synchronise(self) -> None:
        """Nothing to wait for: operations on the CPU are done when they return."""

    def capacity_bytes(self) -> int:
        """What the machine or its cgroup has, divided by the ranks on it."""
        return host_memory_bytes() // self._ranks_here

    def overhead_bytes(self) -> int:
        """Zero: only tensor bytes are counted against the capacity of a CPU rank."""
        return 0

    @contextlib.contextmanager
    def enforce(self, budget_bytes: int, slack_bytes: int = 0) -> Iterator[None]:
        """Set RLIMIT_DATA to the bytes the process has now plus the budget, and lift it at the end.

        RLIMIT_DATA counts private writable mappings, so blocks must come from mappings of their own while it
        holds: otherwise holes in the heap fake an out-of-memory. `slack_bytes` is for what is no tensor.
        """
        warm_thread_pools()
        self.release()
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = _private_data_bytes() + budget_bytes + slack_bytes
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        with self._allocator.one_mapping_a_block():
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def cap(self, budget_bytes: int | None) -> None:
        """Nothing: a limit by RLIMIT_DATA slows the allocator down."""

    @contextlib.contextmanager
    def watch(self) -> Iterator[MemoryWatch]:
        """Count every storage that an operation returns."""
        with StorageMeter() as meter:
            yield _CpuWatch(meter)

    def release(self) -> None:
        """Collect garbage and give free heap back to the kernel."""
        gc.collect()
        self._allocator.trim()

    def describe(self) -> str:
        """The processor's model name."""
        with contextlib.suppress(OSError):
            found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
            if found:
                return found.group(1).strip()
        return "CPU"


class _CpuWatch:
    """A `MemoryWatch` over a storage meter."""

    reserved_bytes = None
    retries = 0

    def __init__(self, meter: StorageMeter) -> None:
        self._meter = meter

    def restart(self) -> None:
        self._meter.restart_peak()

    @property
    def current_bytes(self) -> int:
        return self._meter.current_bytes

    @property
    def peak_bytes(self) -> int:
        return self._meter.peak_bytes


class CudaDevice:
    """A CUDA device: the caching allocator counts, and its per-process fraction enforces the capacity."""

    kind: Literal["cpu", "cuda"] = "cuda"
    backend = "cpu:gloo,cuda:nccl"

    def __init__(self, local_rank: int) -> None:
        self.torch_device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self.torch_device)

    def mark(self) -> Mark:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        """Seconds between two events."""
        return float(start.elapsed_time(end)) / 1e3

    def synchronise(self) -> None:
        """Wait for every stream of the device."""
        torch.cuda.synchronize(self.torch_device)

    def capacity_bytes(self) -> int:
        """The device's whole memory."""
        return int(torch.cuda.mem_get_info(self.torch_device)[1])

    def overhead_bytes(self) -> int:
        """What is taken on the device but not by this process's allocator."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return max(0, total - free - torch.cuda.memory_reserved(self.torch_device))

    @contextlib.contextmanager
    def enforce(self, budget_bytes: int, slack_bytes: int = 0) -> Iterator[None]:
        """Let this process's allocator have the budget and no more; no slack is needed, the cap is exact."""
        self.release()
        self.cap(budget_bytes)
        try:
            yield
        finally:
            self.cap(None)

    def cap(self, budget_bytes: int | None) -> None:
        """The allocator's share of the device; it costs nothing, so timed steps run under it too."""
        total = torch.cuda.mem_get_info(self.torch_device)[1]
        share = 1.0 if budget_bytes is None else min(1.0, max(0, budget_bytes) / total)
        torch.cuda.set_per_process_memory_fraction(share, self.torch_device)

    @contextlib.contextmanager
    def watch(self) -> Iterator[MemoryWatch]:
        """The allocator's own peaks, from here on."""
        watch = _CudaWatch(self.torch_device)
        watch.restart()
        yield watch

    def release(self) -> None:
        """Collect garbage and empty the allocator's cache."""
        gc.collect()
        torch.cuda.empty_cache()

    def describe(self) -> str:
        """The device's name."""
        return str(torch.cuda.get_device_name(self.torch_device))


class _CudaWatch:
    """A `MemoryWatch` over the caching allocator's statistics."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retries_before = self._retries_so_far()

    def _retries_so_far(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._retries_before = self._retries_so_far()

    @property
    def current_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    @property
    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    @property
    def reserved_bytes(self) -> int | None:
        return int(torch.cuda.max_memory_reserved(self._device))

    @property
    def retries(self) -> int:
        return self._retries_so_far() - self._retries_before


def open_device(kind: str, local_rank: int, ranks_here: int, sharing: int | None = None) -> Device:
    """The device of one rank; `sharing`: ranks that share the CPU's memory, where other than those here.

    Raises UsageError when a GPU was asked for, or is there, and cannot be used.
    """
    if resolve_kind(kind) == "cpu":
        return CpuDevice(sharing or ranks_here)
    visible = torch.cuda.device_count()
    if local_rank >= visible:
        raise EnvironmentFailedError(
            f"{ranks_here} ranks were started on a machine where {visible} GPUs are visible; "
            f"a rank needs a GPU of its own: start {visible} at most"
        )
    return CudaDevice(local_rank)


def resolve_kind(kind: str) -> Literal["cpu", "cuda"]:
    """What "auto" means here: CUDA where there is a GPU, the CPU where there is none.

    Raises UsageError for a GPU that is there but cannot be used: never a silent run on the CPU.
    """
    if kind == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if kind == "cuda" or gpu_is_present():
        build = f"torch {torch.__version__} (CUDA build: {torch.version.cuda or 'none'})"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = f", CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else ""
        found = "a GPU is present but torch cannot use it" if gpu_is_present() else "torch sees no CUDA device"
        raise UsageError(
            f"device.kind = {kind!r}: {found}: {build}{hint}; "
            'install a CUDA build of torch and a matching driver, or say device.kind = "cpu"'
        )
    return "cpu"


def gpu_is_present() -> bool:
    """Whether the kernel shows an NVIDIA device that was not hidden on purpose.

    CUDA shows the devices before the first entry of CUDA_VISIBLE_DEVICES that names none: "", "-1", or SLURM's
    "NoDevFiles" hide all.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    hidden = not (first.isdecimal() or first.startswith(("GPU-", "MIG-")))
    return not hidden and any(Path("/dev").glob("nvidia[0-9]*"))


def host_memory_bytes() -> int:
    """Memory of the machine, or of the tightest cgroup the process is in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_cgroup_limits()])


def _cgroup_limits() -> Iterator[int]:
    for path in _cgroup_limit_files():
        with contextlib.suppress(OSError, ValueError):
            yield int(path.read_text())


def _cgroup_limit_files() -> Iterator[Path]:
    root = Path("/sys/fs/cgroup")
    yield root / "memory" / "memory.limit_in_bytes"
    own = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next((line[3:] for line in lines if line.startswith("0::")), "")
    for folder in [root / own.lstrip("/"), *(root / own.lstrip("/")).parents]:
        if folder.is_relative_to(root):
            yield folder / "memory.max"


def _private_data_bytes() -> int:
    """Private writable mappings of this process: what RLIMIT_DATA counts (VmData)."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^VmData:\s+(\d+) kB", status, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def warm_thread_pools() -> None:
    """Start every thread that torch will use: their stacks count as data, and must not count as the model's."""
    block = torch.ones(512, 512)
    (block @ block).sum().item()
    torch.nn.functional.softmax(block, dim=0)
    weight = torch.ones(8, 8, requires_grad=True)
    (weight @ weight).sum().backward()


class _GlibcAllocator:
    """The two settings of glibc's malloc that matter when memory is limited by RLIMIT_DATA."""

    _TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
    # Where malloc's own adjustment ends up after a block of 32 MiB was freed once (DEFAULT_MMAP_THRESHOLD_MAX,
    # and twice that): the setting that a training process runs with from its first large tensor on.
    _SETTLED_MMAP, _SETTLED_TRIM = 32 * MIB, 64 * MIB
    _SMALL = 128 * 1024

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._mallopt = getattr(library, "mallopt", None)
        self._malloc_trim = getattr(library, "malloc_trim", None)

    def trim(self) -> None:
        if self._malloc_trim is not None:
            self._malloc_trim(0)

    @contextlib.contextmanager
    def one_mapping_a_block(self) -> Iterator[None]:
        self._set(self._SMALL, self._SMALL)
        try:
            yield
        finally:
            self._set(self._SETTLED_MMAP, self._SETTLED_TRIM)

    def _set(self, mmap_threshold: int, trim_threshold: int) -> None:
        if self._mallopt is not None:
            self._mallopt(self._MMAP_THRESHOLD, mmap_threshold)
            self._mallopt(self._TRIM_THRESHOLD, trim_threshold)


_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|B|KiB|MiB|GiB|TiB)?")
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_PEER_TEXTS = ("Connection closed by peer", "Connection reset by peer", "gloo/transport", "Broken pipe")
_OOM_TEXTS = (
    "can't allocate memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and all its causes and contexts, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop(0)
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting += [current.__cause__, current.__context__]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: by exception type first, by text only where torch has no type (its CPU allocator)."""
    errors = list(chain(error))
    if any(isinstance(one, (torch.OutOfMemoryError, MemoryError)) for one in errors):
        return True
    texts = [str(one) for one in errors]
    return any(mark in text for text in texts for mark in _OOM_TEXTS) or any(
        "NCCL" in text and "out of memory" in text for text in texts
    )


def is_peer_failure(error: BaseException) -> bool:
    """Whether another rank's end is the cause: this rank is a victim, and its word explains nothing.

    NCCL says in the same type of error that its own buffers do not fit here, which is this rank's word.
    """
    if is_out_of_memory(error):
        return False
    errors = list(chain(error))
    if any(isinstance(one, dist.DistError) for one in errors):
        return True
    return any(mark in str(one) for one in errors for mark in _PEER_TEXTS)


def asked_bytes(error: BaseException) -> int | None:
    """The bytes of the allocation that failed, where the allocator named them."""
    for one in chain(error):
        found = _ASKED.search(str(one))
        if found:
            return int(float(found.group(1)) * _UNITS[found.group(2) or "bytes"])
    return None
