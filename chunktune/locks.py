"""One sweep at a time on a device: two would measure each other. Pure but for the lock files.

A lock is a file that this process holds with flock(2), so that the kernel lets go of it however the process ends; what
stands in the file says who holds it. Locks are those of one user on one machine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from chunktune.errors import EnvironmentFailedError
from chunktune.units import shorten

_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""What network file systems answer that lock no directories."""


def lock_directory() -> Path:
    """Where the locks of this user lie: $XDG_RUNTIME_DIR, or the directory for temporary files."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"chunktune-{os.getuid()}"


@contextlib.contextmanager
def holding(devices: Sequence[str], output_dir: str) -> Iterator[None]:
    """Hold these devices, named by any text, until the block ends.

    Raises EnvironmentFailedError where another sweep holds one of them: its pid, since when, its output directory;
    and where a lock file cannot be made.
    """
    with contextlib.ExitStack() as held:
        for device in sorted(set(devices)):
            held.enter_context(_one(device, output_dir))
        yield


@contextlib.contextmanager
def _one(device: str, output_dir: str) -> Iterator[None]:
    path = lock_directory() / (re.sub(r"[^A-Za-z0-9.-]", "_", device) + ".lock")
    try:
        _make_own(path.parent)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.fdopen(os.open(path, flags, 0o600), "a+", encoding="utf-8")
    except OSError as error:
        raise EnvironmentFailedError(
            f"{path}: the lock of {device} cannot be made ({error.strerror or error}); "
            "give a writable XDG_RUNTIME_DIR, or --share to go without"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EnvironmentFailedError(_in_use(device, file)) from None
        _sign(file, output_dir)
        yield
        file.truncate(0)


@contextlib.contextmanager
def holding_directory(directory: Path) -> Iterator[None]:
    """Hold an output directory until the block ends: two sweeps in one would write one journal together.

    Raises EnvironmentFailedError where another sweep holds it. Where the file system locks no directories, nothing
    is held.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EnvironmentFailedError(
                f"{directory}: another sweep is running there; wait for it, end it, or give another --output-dir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(descriptor)


def _make_own(directory: Path) -> None:
    """Raises OSError where the directory cannot be made, or is another user's: anyone may write beside it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.lstat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "its directory is another user's")


def _sign(file: IO[str], output_dir: str) -> None:
    holder = {"pid": os.getpid(), "since": datetime.now(UTC).isoformat(timespec="seconds"), "output_dir": output_dir}
    file.truncate(0)
    file.write(json.dumps(holder))
    file.flush()


def _in_use(device: str, file: IO[str]) -> str:
    rule = "a sweep wants its devices to itself: wait for it, or --share to measure beside it"
    try:
        file.seek(0)
        holder = json.loads(file.read())
        who = f"pid {int(holder['pid'])}, since {holder['since']}, output directory {holder['output_dir']}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "which did not say who it is"
    return f"{device} is in use by another sweep ({shorten(who, 300)}); {rule}"
