"""The exceptions of chunktune; each class carries the exit code that the command line ends with.

ChunktuneError                      1  a bug when it is raised bare
├── UsageError                      2  the command line or the environment asks for something impossible
│   └── SpecError                   2  the spec, all its mistakes at once
├── InfeasibleError                 3  no value of M is feasible
├── CheckFailedError                4  a gate did not hold
├── InconclusiveError               5  unclear, under --strict
├── EnvironmentFailedError          6  no worker came up, disk full, budget spent before any trial
│   └── UserCodeError               6  the user's factory or model raised
└── InterruptedSweepError     130/143  Ctrl-C or SIGTERM; the partial record is kept

A message reads: fact with numbers, then the rule, then the nearest valid value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_SHOWN = 50
"""Mistakes in one message; a spec that has more is not one."""


class ChunktuneError(Exception):
    """Base of every error that chunktune raises on purpose."""

    exit_code = 1


class UsageError(ChunktuneError):
    """The command line or the environment asks for something that cannot be done."""

    exit_code = 2


@dataclass(frozen=True)
class Mistake:
    """One mistake in a spec: where it stands, what is wrong, what is allowed, and the nearest valid value."""

    source: str
    key: str
    fact: str
    rule: str = ""
    nearest: str = ""

    def __str__(self) -> str:
        text = f"{self.source}: {self.key}: {self.fact}" if self.key else f"{self.source}: {self.fact}"
        if self.rule:
            text += f"; {self.rule}"
        if self.nearest:
            text += f" (did you mean {self.nearest}?)"
        return text


class SpecError(UsageError):
    """The spec is not valid. `mistakes` holds every one that was found, not only the first."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        count = len(self.mistakes)
        head = "1 mistake in the spec" if count == 1 else f"{count} mistakes in the spec"
        more = [f"  and {count - MOST_SHOWN} more"] if count > MOST_SHOWN else []
        super().__init__("\n".join([f"{head}:", *(f"  {mistake}" for mistake in self.mistakes[:MOST_SHOWN]), *more]))


class InfeasibleError(ChunktuneError):
    """No value of M is feasible."""

    exit_code = 3


class CheckFailedError(ChunktuneError):
    """A gate did not hold."""

    exit_code = 4


class InconclusiveError(ChunktuneError):
    """The data do not support the verdict, and --strict was given."""

    exit_code = 5


class EnvironmentFailedError(ChunktuneError):
    """The machine or the user's code failed: no worker came up, the disk is full, the budget was too small."""

    exit_code = 6


class UserCodeError(EnvironmentFailedError):
    """The user's factory or model raised; the message names where, the log file has the traceback."""


class InterruptedSweepError(ChunktuneError):
    """The sweep was interrupted (130) or terminated (143); what was measured is kept."""

    def __init__(self, message: str, exit_code: int = 130) -> None:
        super().__init__(message)
        self.exit_code = exit_code
