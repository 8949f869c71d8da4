"""What the command does with Ctrl-C and SIGTERM while torch's elastic agent runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LEAVING = (signal.SIGINT, signal.SIGTERM)
_SIGNALS = (*_LEAVING, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """torch's agent leaves handlers behind that raise an exception of its own."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def leaving_at_the_second_signal(go_on: Callable[[], str], end: Callable[[], object]) -> Iterator[None]:
    """A second Ctrl-C, or SIGTERM, does not wait: neither for workers that do not end, as torch's agent would do
    half a minute at a time, nor for the partial record. The journal holds all of it; `go_on` says how to go on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    before = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    thread = threading.Thread(target=_leave_at_the_second, args=(readable, go_on, end), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writable)
        thread.join()
        os.close(readable)


def _leave_at_the_second(readable: int, go_on: Callable[[], str], end: Callable[[], object]) -> None:
    """Read the numbers of the signals that this process gets, and end it at the second of _LEAVING."""
    left = 2
    while number := os.read(readable, 1):
        left -= number[0] in _LEAVING
        if left == 0:
            end()
            os.write(2, f"error: told to end a second time, and ended at once{go_on()}\n".encode())
            os._exit(128 + number[0])
