"""The process that workers are forked from. No torch here: it is to be imported there, while we import it too."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import forkserver

START_METHOD = "forkserver"
PRELOADED = ["chunktune.cli.app", "chunktune.pipeline.worker"]


def start_server() -> None:
    """Start the server, once; it imports torch meanwhile and ends with this process.

    Every group of workers, restarts and the confirmation included, then starts without importing torch again.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    with _warnings_ignored("ignore::UserWarning:multiprocessing.resource_tracker"):
        forkserver.ensure_running()


def outlive_no_server() -> None:
    """In a worker: let go of the pipe by which the server knows that somebody needs it, a copy of which it gave us.

    It then ends with the launcher, whatever we are doing, and the kernel ends us with it: we may be stopped, or hold
    the interpreter's lock for ever, and could not end by ourselves.
    """
    descriptor = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_alive_fd", None)
    if descriptor is not None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)


@contextlib.contextmanager
def _warnings_ignored(rule: str) -> Iterator[None]:
    """Processes that start inside ignore these warnings: Python's tracker of semaphores tells of a forced end."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = f"{before},{rule}" if before else rule
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


def stop_server() -> None:
    """End the server now, also while it still imports: it would hold our stdout and stderr open until it is done."""
    pid = getattr(getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None), "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
