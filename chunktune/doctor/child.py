"""A command that may hang, abort or say nonsense: run with a deadline, its output kept whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MOST_OUTPUT_BYTES = 2**20
_GRACE_S = 1.0
_STEP_S = 0.05


@dataclass(frozen=True)
class Ended:
    """What a command wrote, and what was wrong with its end (null where it exited with 0)."""

    stdout: str
    trouble: str | None = None


def module_command(name: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module of this package with this Python."""
    return (sys.executable, "-m", name, *arguments)


def module_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Under which a module finds this package, and no module of its name in the working directory."""
    path = [*filter(None, [environ.get("PYTHONPATH")]), str(Path(__file__).parents[2])]
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONSAFEPATH": "1",
    }


def run(command: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None) -> Ended:
    """Run a command without input. Never raises; a child that a driver holds is left behind after the deadline."""
    return run_several([command], timeout_s, environ)[0]


def run_several(
    commands: Sequence[Sequence[str]], timeout_s: float, environ: Mapping[str, str] | None = None
) -> list[Ended]:
    """`run`, of several commands at once under one deadline."""
    children: list[_Child | str] = []
    try:
        children = [_started(command, environ) for command in commands]
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s and any(_is_running(child) for child in children):
            time.sleep(_STEP_S)
        return [Ended("", child) if isinstance(child, str) else child.ended(timeout_s) for child in children]
    finally:
        for child in children:
            if not isinstance(child, str):
                child.close()


class _Child:
    """A process in a session of its own, writing into files: a full pipe would hold it up."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None) -> None:
        self._stdout: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=self._stdout,
                stderr=self._stderr,
                env=None if environ is None else dict(environ),
                start_new_session=True,
            )
        except OSError:
            self._close_files()
            raise

    def ended(self, timeout_s: float) -> Ended:
        """Its output; what runs still is killed."""
        code = self.process.poll()
        if code is None:
            self._kill()
            return Ended(_text(self._stdout), f"no answer within {timeout_s:g} s")
        return Ended(_text(self._stdout), _trouble(code, _text(self._stderr)))

    def close(self) -> None:
        """Make sure that it has ended, as far as the kernel can, and close its files."""
        if self.process.poll() is None:
            self._kill()
        self._close_files()

    def _kill(self) -> None:
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # One that waits for a driver cannot be killed; nobody else has to wait for it.
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE_S)

    def _close_files(self) -> None:
        self._stdout.close()
        self._stderr.close()


def _started(command: Sequence[str], environ: Mapping[str, str] | None) -> _Child | str:
    try:
        return _Child(command, environ)
    except FileNotFoundError:
        return f"{command[0]} is not installed, or not in PATH"
    except OSError as error:
        return f"{command[0]} cannot be started: {error.strerror or error}"


def _is_running(child: _Child | str) -> bool:
    return not isinstance(child, str) and child.process.poll() is None


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MOST_OUTPUT_BYTES).decode("utf-8", "replace")


def last_line(text: str) -> str:
    """The last line that is not empty, or ""."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _trouble(code: int, stderr: str) -> str | None:
    if code == 0:
        return None
    last = last_line(stderr)
    if code > 0:
        return f"it exited with {code}: {last}" if last else f"it exited with {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"it was killed by {name}: {last}" if last else f"it was killed by {name}"
