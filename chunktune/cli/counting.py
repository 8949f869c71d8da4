"""A plain count of what is done, in a line on a terminal that goes away."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO, TypeVar

from chunktune.cli.progress import How

_COUNTED_EVERY_S = 0.1
_COUNTED_AFTER_S = 0.5
_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


@contextmanager
def counted(
    act: Callable[[_Argument], _Result], total: int, noun: str, stream: TextIO | None, how: How
) -> Iterator[Callable[[_Argument], _Result]]:
    """`act`, its calls counted in a passing line, "k of `total` `noun`", where `how` is live and they take long."""
    if how != "live" or stream is None:
        yield act
        return
    count, due_at = 0, time.monotonic() + _COUNTED_AFTER_S

    def counting(argument: _Argument) -> _Result:
        nonlocal count, due_at
        if time.monotonic() >= due_at:
            due_at = time.monotonic() + _COUNTED_EVERY_S
            _pass(stream, f"{count} of {total} {noun}")
        count += 1
        return act(argument)

    try:
        yield counting
    finally:
        _pass(stream, "")


def _pass(stream: TextIO, text: str) -> None:
    """A line that the next one overwrites, cut to what a narrow terminal holds; it fails in silence."""
    with suppress(OSError, ValueError):
        columns = os.get_terminal_size(stream.fileno()).columns or 80
        stream.write(f"\r\x1b[K{text[: columns - 1]}")
        stream.flush()
