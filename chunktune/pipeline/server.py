"""The process that workers are forked from. No torch here: it is to be imported there, while we import it too."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver

START_METHOD = "forkserver"
PRELOADED = ["chunktune.cli.app", "chunktune.pipeline.worker"]


def start_server() -> None:
    """Start the server, once; it imports torch meanwhile and ends with this process.

    Every group of workers, restarts and the confirmation included, then starts without importing torch again.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
