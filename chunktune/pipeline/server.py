"""The process that workers are forked from. No torch here: it is to be imported there, while we import it too."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver

START_METHOD = "forkserver"
PRELOADED = ["chunktune.cli.app", "chunktune.pipeline.worker"]


def start_server() -> None:
    """Start the server, once; it imports torch meanwhile and ends with this process.

    Every group of workers, restarts and the confirmation included, then starts without importing torch again.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def stop_server() -> None:
    """End the server now, also while it still imports: it would hold our stdout and stderr open until it is done."""
    pid = getattr(getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None), "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
