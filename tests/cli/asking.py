"""The command line in this process, as a stranger would meet it: what it answers, and what it leaves behind."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from typer.main import get_command

import chunktune
from chunktune.cli.app import app, main

ROOT = Path(chunktune.__file__).parents[1]
DATA = Path(__file__).parents[1] / "data"
GOLDEN = DATA / "record_v3.json"
JOURNAL = DATA / "journal.jsonl"
LONGEST_S = 60
"""Against what hangs; an answer takes a second."""
_STEERING = ("CHUNKTUNE_", "GITHUB_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "FORCE_COLOR")
_SCRIPT = """
import contextlib, io, json, os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (16 * 2**30, 16 * 2**30))
from chunktune.cli.app import main
answers = []
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    answers.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(answers))
os._exit(0)
"""


@dataclass(frozen=True)
class Answer:
    """What a command ended with."""

    code: int
    out: str
    err: str

    @property
    def both(self) -> str:
        return self.out + self.err


class Stdout(io.TextIOWrapper):
    """A pipe in UTF-8 that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def text(self) -> str:
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode()


@functools.cache
def command_line() -> Any:
    return get_command(app)


def imported(*commands: Sequence[str]) -> tuple[list[int], set[str]]:
    """The exit codes of commands that one new process runs, and every module that it has imported by then."""
    script = (
        "import json, sys\n"
        "from chunktune.cli.app import main\n"
        "codes = [main(arguments) for arguments in json.loads(sys.argv[1])]\n"
        "print(json.dumps([codes, sorted(sys.modules)]), file=sys.stderr)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, json.dumps(commands)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
        check=False,
    )
    codes, modules = json.loads(ended.stderr.splitlines()[-1])
    return codes, set(modules)


def ask(*arguments: str) -> Answer:
    """Run a command here; one that does not come back is interrupted."""
    out, err = Stdout(), Stdout()
    # Making the parser takes most of the time of an answer, and it is always the same.
    parser = patch("chunktune.cli.app.get_command", return_value=command_line())
    with parser, deadline(arguments), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return Answer(code, out.text(), err.text())


def ask_elsewhere(commands: Sequence[Sequence[str]], cwd: Path) -> list[Answer]:
    """Run commands one after the other in a process of its own, which ends with the time or with 16 GiB of memory."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _SCRIPT, json.dumps(commands)]
    ended = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=2 * LONGEST_S, check=True
    )
    return [Answer(*each) for each in json.loads(ended.stdout)]


@contextlib.contextmanager
def deadline(arguments: Sequence[str]) -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise AssertionError(f"no answer after {LONGEST_S} s: {' '.join(arguments)[:300]}")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def assert_refused(answer: Answer, says: str, code: int = 2) -> None:
    """One clear message on stderr and nothing on stdout; `says`: a part of it."""
    assert (answer.code, answer.out) == (code, ""), answer
    assert says in answer.err, answer
    assert answer.err.startswith(("error: ", "left out: ", "note: ")), answer
    assert answer.err.count("error: ") == 1, answer
    assert "internal error" not in answer.err, answer
    assert "Traceback" not in answer.err, answer
    assert len(answer.err) < 10_000, len(answer.err)
    assert not controls(answer.err), answer


def controls(text: str) -> set[str]:
    """What a terminal would take for a command, or for another order of the text."""
    return {character for character in text if not character.isprintable() and character != "\n"}


def listing(folder: Path) -> dict[str, Any]:
    """Everything below a directory: size, and the bytes of what is small."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        seen = path.lstat()
        small = path.is_file() and not path.is_symlink() and seen.st_size < 2**20 and os.access(path, os.R_OK)
        found[str(path.relative_to(folder))] = (
            oct(seen.st_mode),
            seen.st_size,
            path.read_bytes() if small else seen.st_mtime_ns,
        )
    return found


def steering_variables() -> list[str]:
    """The variables of this process that would steer a command."""
    return [name for name in os.environ if name.startswith(_STEERING)]
