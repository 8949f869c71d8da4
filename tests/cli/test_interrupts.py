"""Ctrl-C while the command imports: remembered where what is imported swallows it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

import chunktune
from chunktune.cli import app, interrupts

ROOT = Path(chunktune.__file__).parents[1]


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )


def test_one_that_is_swallowed_is_heard_at_the_next_check() -> None:
    script = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from chunktune.cli import interrupts
interrupts.remember()
interrupts.check()
try:
    os.kill(os.getpid(), signal.SIGINT)
    print("not interrupted")
except KeyboardInterrupt:
    pass
try:
    interrupts.check()
except KeyboardInterrupt:
    print("heard", interrupts.seen())
"""
    assert run(script).stdout.split() == ["heard", "True"]


def test_one_that_is_ignored_stays_ignored() -> None:
    script = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from chunktune.cli import interrupts
interrupts.remember()
os.kill(os.getpid(), signal.SIGINT)
print(interrupts.seen())
"""
    assert run(script).stdout.split() == ["False"]


def test_what_an_interrupt_turned_into_is_told_as_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> NoReturn:
        raise RecursionError

    monkeypatch.setattr(app, "get_command", broken)
    assert app.main(["report", "x"]) == 1
    assert "internal error" in capsys.readouterr().err
    monkeypatch.setattr(interrupts, "_seen", [signal.SIGINT])
    assert app.main(["report", "x"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"
