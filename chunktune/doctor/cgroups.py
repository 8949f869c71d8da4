"""What the cgroup of this process may use, of version 1 or 2. Reads files below `root` alone; raises OSError."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

_T = TypeVar("_T")
# Version 1 writes "no limit" as the largest number of pages.
_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True)
class Cgroups:
    """The cgroups of this process below `root`, which is / but in tests."""

    root: Path = Path("/")

    @property
    def version(self) -> Literal[1, 2]:
        """Raises OSError where no cgroup is mounted."""
        if (self._mount / "cgroup.controllers").exists():
            return 2
        if (self._mount / "memory").is_dir() or (self._mount / "cpu").is_dir():
            return 1
        raise FileNotFoundError(2, "no cgroup is mounted", str(self._mount))

    def memory_limit_bytes(self) -> int | None:
        """The tightest limit on memory, of this cgroup and those above it; null where there is none."""
        files = ("memory", "memory.limit_in_bytes"), ("", "memory.max")
        return min((limit for limit in self._values(*files, int) if limit < _NO_LIMIT_BYTES), default=None)

    def memory_used_bytes(self) -> int | None:
        """What this cgroup uses now, page cache included."""
        files = ("memory", "memory.usage_in_bytes"), ("", "memory.current")
        return next(self._values(*files, int), None)

    def cpu_limit_cores(self) -> float | None:
        """The tightest share of processor time, in cores; null where there is none."""
        if self.version == 2:
            return min(self._values(("", ""), ("", "cpu.max"), _quota), default=None)
        return min(self._quotas_of_version_1(), default=None)

    def cpus(self) -> str | None:
        """The processors that may be used, such as "0-3,8"."""
        files = ("cpuset", "cpuset.effective_cpus"), ("", "cpuset.cpus.effective")
        return next((text for text in self._values(*files, str) if text), None)

    def processes_limit(self) -> int | None:
        """The tightest limit on processes and threads; null where there is none."""
        return min(self._values(("pids", "pids.max"), ("", "pids.max"), int), default=None)

    @property
    def _mount(self) -> Path:
        return self.root / "sys/fs/cgroup"

    def _values(
        self, of_version_1: tuple[str, str], of_version_2: tuple[str, str], parse: Callable[[str], _T]
    ) -> Iterator[_T]:
        """What a file says, in this cgroup first; levels without it, and those without a limit, are left out."""
        controller, name = of_version_1 if self.version == 1 else of_version_2
        for folder in self._folders(controller):
            with suppress(OSError, ValueError):  # "max" is no number, and no limit
                yield parse((folder / name).read_text().strip())

    def _quotas_of_version_1(self) -> Iterator[float]:
        for folder in self._folders("cpu"):
            with suppress(OSError, ValueError):
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
                if quota > 0 and period > 0:
                    yield quota / period

    def _folders(self, controller: str) -> Iterator[Path]:
        """The directory of this cgroup and those above it; in a container often only the top is there."""
        top = self._mount / controller
        own = top / self._own_path(controller).lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(top):
                yield folder

    def _own_path(self, controller: str) -> str:
        """The path of this process in the hierarchy of a controller of version 1, or in that of version 2 ("")."""
        with suppress(OSError):
            for line in (self.root / "proc/self/cgroup").read_text().splitlines():
                _, names, path = line.split(":", 2)
                if controller in names.split(","):
                    return path
        return ""


def _quota(text: str) -> float:
    """cpu.max: "quota period" in microseconds; "max" is no number."""
    quota, period = text.split()
    return int(quota) / int(period)
