"""Ctrl-C while the command still imports: it must not be lost.

Python raises KeyboardInterrupt wherever it happens to be, and what is being imported then may swallow it (an
extension module that clears errors does) or make another exception of it. So it is remembered as well.
"""

from __future__ import annotations

import signal
from types import FrameType

_seen: list[int] = []


def remember() -> None:
    """From here on a Ctrl-C is remembered; one that is ignored, as in the background of a shell, stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def seen() -> bool:
    """Whether there was one."""
    return bool(_seen)


def check() -> None:
    """Raises KeyboardInterrupt where there was one, and nobody has heard of it."""
    if _seen:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    _seen.append(number)
    signal.default_int_handler(number, frame)
