"""A watch for workers that leave without a word."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from chunktune.journal import followed
from chunktune.pipeline.group import outcome_of
from chunktune.pipeline.rendezvous import LoopbackRendezvous


class Warden:
    """Watches for a worker that is gone while the sweep goes on, and ends the launch: the agent does not notice.

    torch's agent waits for the result of every worker; one that left with exit status 0 never brings it.
    """

    # One gone of several; all gone, as those of the last group are until this one has journaled its own.
    _GRACE_S, _START_S = 15.0, 90.0

    def __init__(self, journal: Path, handler: LoopbackRendezvous) -> None:
        self.alarmed = False
        self._journal = journal
        self._handler = handler
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Warden:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        pids: list[int] = []
        with followed(self._journal, lambda event: pids.__setitem__(slice(None), event.get("pids", pids))):
            missing_s = 0.0
            while not self._stop.wait(1.0):
                alive = sum(Path("/proc", str(pid)).exists() for pid in pids)
                missing_s = missing_s + 1.0 if alive < len(pids) and not outcome_of(self._handler.store) else 0.0
                if missing_s > (self._GRACE_S if alive else self._START_S):
                    self.alarmed = True
                    os.kill(os.getpid(), signal.SIGHUP)  # the agent obeys it; nobody takes it for the user's word
                    return
