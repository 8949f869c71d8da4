"""Running the command line for real: in a session of its own, under a time limit, with nothing left behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ParamSpec

import pytest

from chunktune.journal import read_events
from chunktune.record import read_record
from chunktune.results import Record, Trial

P = ParamSpec("P")
MARK = "TEST_RUN_MARK"
"""Inherited by every process of a run: torch's agent puts each worker into a session of its own."""
_SETTLE_S = 5.0
_FOREIGN = (
    "XDG_RUNTIME_DIR",
    "CHUNKTUNE_",
    "TORCHELASTIC_",
    "GITHUB_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "FORCE_COLOR",
)


@dataclass(frozen=True)
class Finished:
    """A command that ended. `record` and `events` are what stands in its output directory."""

    returncode: int
    stdout: str
    stderr: str
    record: Record | None = None
    events: tuple[dict[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"exit code {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"

    def chosen(self) -> Record:
        """The record of a sweep that ended with exit code 0, whole."""
        assert self.returncode == 0, self
        assert self.record is not None, self
        assert self.record.verdict is not None, self
        return self.record

    def trial(self, chunks: int) -> Trial:
        """The trial of one M."""
        assert self.record is not None, self
        return next(trial for trial in self.record.trials if trial.chunks == chunks)


def sweep(spec: str | Path, *args: str, env: Mapping[str, str] | None = None, timeout_s: float = 300) -> Finished:
    """`chunktune sweep` on a spec file, or on the text of one; fails the test when a process is left behind."""
    with tempfile.TemporaryDirectory(prefix="chunktune-test-") as folder:
        path = spec if isinstance(spec, Path) else Path(folder, "spec.toml")
        if isinstance(spec, str):
            path.write_text(spec)
        output = _output_of(args) or Path(folder, "out")
        extra = () if _output_of(args) else ("--output-dir", str(output))
        command = [sys.executable, "-m", "chunktune", "sweep", str(path), *args, *extra]
        return run(command, output=output, env=env, timeout_s=timeout_s)


def _output_of(args: Sequence[str]) -> Path | None:
    return Path(args[args.index("--output-dir") + 1]) if "--output-dir" in args else None


def run(
    command: Sequence[str],
    *,
    output: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 300,
    interrupt: tuple[Path, str, int] | None = None,
) -> Finished:
    """Run a command to its end. `interrupt`: a file, a text, and the signal to send once the file holds it."""
    with started(command, env=env) as process:
        try:
            if interrupt is not None:
                file, text, number = interrupt
                wait_for(file, text, process.popen, timeout_s)
                process.popen.send_signal(number)
            process.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not done after {timeout_s} s: {' '.join(command)}\n{process.texts()}\n{_logs(output)}")
        stdout, stderr = process.texts()
    return Finished(process.popen.returncode, stdout, stderr, *_read(output))


@dataclass(frozen=True)
class Running:
    """A command under way. Its output goes to files: a process left behind would hold a pipe open."""

    popen: subprocess.Popen[bytes]
    files: tuple[IO[bytes], IO[bytes]]

    def texts(self) -> tuple[str, str]:
        """What stands on stdout and stderr so far."""
        out, err = (os.pread(file.fileno(), 2**24, 0).decode(errors="replace") for file in self.files)
        return out, err


def despite_noise(forget: Callable[[], object] = lambda: None) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """A test of a choice among known costs, tried three times: a shared machine can be slow just where it matters.

    What is wrong and not noisy fails each time. `forget`: drops what the attempt before measured.
    """

    def decorate(test: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(test)
        def attempts(*args: P.args, **kwargs: P.kwargs) -> None:
            for _ in range(2):
                with suppress(AssertionError):
                    return test(*args, **kwargs)
                forget()
            return test(*args, **kwargs)

        return attempts

    return decorate


@contextmanager
def started(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> Iterator[Running]:
    """A command that runs meanwhile. What lives of it at the end is killed; that fails the test if it had ended.

    The locks of devices are its own, unless `env` says where they lie: other tests may run on this machine.
    """
    mark = uuid.uuid4().hex
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        tempfile.TemporaryDirectory(prefix="chunktune-test-") as locks,
    ):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={"XDG_RUNTIME_DIR": locks} | environment(env) | {MARK: mark},
            start_new_session=True,
        )
        try:
            yield Running(process, (out, err))
            left = living(mark, process.pid, _SETTLE_S) if process.poll() is not None else {}
            assert not left, f"left behind by {' '.join(command)}: {left}"
        finally:
            for pid in living(mark, process.pid, 0.0):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what would steer chunktune, and with gloo on the loopback."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return kept | {"GLOO_SOCKET_IFNAME": "lo"} | dict(extra or {})


def wait_for(file: Path, text: str, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait until a file holds a text; fails when the process ends, or time runs out, before."""
    end = time.monotonic() + timeout_s
    while not (file.exists() and text in file.read_text()):
        if process.poll() is not None or time.monotonic() > end:
            pytest.fail(f"{file.name} never held {text!r}; exit code {process.returncode}")
        time.sleep(0.05)


def living(mark: str, session: int, settle_s: float) -> dict[int, str]:
    """Processes of a run that live after `settle_s` at most: pid -> command line."""
    end = time.monotonic() + settle_s
    while (found := _processes(mark, session)) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def _processes(mark: str, session: int) -> dict[int, str]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return {pid: _command_line(pid) for pid in pids if _belongs(pid, mark, session)}


def _belongs(pid: int, mark: str, session: int) -> bool:
    """Whether a process that is no zombie is of this session, or inherited this mark."""
    folder = Path("/proc", str(pid))
    try:
        state, _, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        if state in "ZX":
            return False
        return int(its_session) == session or f"{MARK}={mark}".encode() in (folder / "environ").read_bytes()
    except OSError:
        return False


def _command_line(pid: int) -> str:
    with suppress(OSError):
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return "?"


def _read(output: Path | None) -> tuple[Record | None, tuple[dict[str, Any], ...]]:
    if output is None:
        return None, ()
    record, journal = output / "record.json", output / "journal.jsonl"
    return (
        read_record(record) if record.exists() else None,
        tuple(read_events(journal)) if journal.exists() else (),
    )


def _logs(output: Path | None) -> str:
    """The journal and the end of every worker's log, for the message of a run that hung."""
    if output is None:
        return ""
    files = [output / "journal.jsonl", *sorted(output.glob("logs/**/std*.log"))]
    return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files if file.exists())
