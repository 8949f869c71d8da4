"""Progress of a sweep on a terminal and off one. A journal of events is replayed; the terminal is a pty."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import chunktune
from chunktune.cli.app import main
from chunktune.cli.counting import counted
from chunktune.cli.progress import How, Progress, decide
from chunktune.errors import UsageError

ROOT = Path(chunktune.__file__).parents[1]
Event = dict[str, Any]
MIB = 2**20


def stage(rank: int) -> Event:
    seconds = {"forward_s": 0.001, "backward_s": 0.002, "busy_s": 0.05, "idle_share": 0.5, "samples_per_s": 320.0}
    sizes = {"peak_bytes": (600 + rank) * MIB, "reserved_bytes": None}
    return {"rank": rank, "parts": [rank], **seconds, **sizes, "capacity_bytes": 1024 * MIB, "budget_bytes": 1000 * MIB}


def trial(chunks: int, rate: float, elapsed_s: float, ranks: int = 2) -> Event:
    fields = {"chunks": chunks, "micro_batch": 16 // chunks, "mini_batch": 16, "state": "ok", "step_median_s": 0.1}
    fields |= {"throughput_samples_per_s": rate, "stages": [stage(rank) for rank in range(ranks)]}
    return {"event": "trial", "trial": fields, "elapsed_s": elapsed_s}


def begin(task: str, values: Sequence[int], elapsed_s: float) -> Event:
    return {"event": "begin", "task": task, "values": list(values), "deadline_s": 60.0, "elapsed_s": elapsed_s}


START: Event = {
    "event": "start",
    "output_dir": "/somewhere",
    "spec": {"batch": {"mini_batch": 16, "chunks": "auto"}, "sweep": {"criterion": "pipeline"}},
    "candidates": [{"chunks": m, "micro_batch": 16 // m, "mini_batch": 16, "legal": True} for m in (1, 2, 4, 8, 16)],
    "quick": False,
    "elapsed_s": 0.0,
}
JOURNAL = [START, begin("trial", [1], 1.0), trial(1, 160.0, 8.0), begin("trial", [2], 11.0), trial(2, 250.0, 18.0)]
JOURNAL.append(begin("trial", [4], 21.0))
LINES = ["M = 1: b = 16, N = 16, step 100 ms, 160 samples/s", "M = 2: b = 8, N = 16, step 100 ms, 250 samples/s"]

# argv: the events as JSON. Ends with what a command says after its progress.
REPLAY = """
import json, sys
from chunktune.cli.progress import Progress, decide
how, _ = decide(None, quiet=False, stream=sys.stderr, environ=__import__("os").environ)
with Progress(sys.stderr, how, 600.0, clock=lambda: 0.0) as progress:
    for event in json.loads(sys.argv[1]):
        progress(event)
    MORE
print("Wrote record.json", file=sys.stderr)
print("the answer")
"""


class Ended:
    """What a process wrote to its terminal, what stood on the screen at the end, and how it ended."""

    def __init__(self, raw: str, out: str, code: int, height: int) -> None:
        self.raw, self.out, self.code = raw, out, code
        self.screen = screen_of(raw, height or 25)

    @property
    def seen(self) -> str:
        """Everything that was ever to be read, without control sequences."""
        return re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", self.raw)

    @property
    def cursor_is_shown(self) -> bool:
        switches = re.findall(r"\x1b\[\?25([hl])", self.raw)
        return not switches or switches[-1] == "h"


def screen_of(raw: str, height: int) -> list[str]:
    """The rows that a terminal is left with, those scrolled away included: of its language what the panel uses."""
    rows, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-?]*[ -/]*[@-~]|[\r\n]|[^\x1b\r\n]+", raw):
        if token == "\r":
            column = 0
        elif token == "\n":
            row, rows = row + 1, rows + [""] * (row + 2 - len(rows))
        elif token.startswith("\x1b["):
            top = max(0, len(rows) - height)
            row = max(top, row - int(token[2:-1] or 1)) if token.endswith("A") else row
            rows[row] = "" if token.endswith("K") else rows[row]
        else:
            rows[row] = rows[row][:column].ljust(column) + token + rows[row][column + len(token) :]
            column += len(token)
    while rows and not rows[-1].strip():
        rows.pop()
    return [each.rstrip() for each in rows]


def on_terminal(
    script: str,
    *arguments: str,
    size: tuple[int, int] = (100, 30),
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Ended:
    """Run a script with stderr on a terminal of `size` (columns, lines), and stdout elsewhere."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
        env=environment({"TERM": "xterm-256color", **(environ or {})}),
        cwd=cwd,
    ) as process:
        os.close(slave)
        read: list[bytes] = []
        reader = threading.Thread(target=drain, args=(master, read))
        reader.start()
        out, _ = process.communicate(timeout=60)
        reader.join(60)
    os.close(master)
    return Ended(b"".join(read).decode(), out, process.returncode, size[1])


@pytest.fixture(autouse=True)
def of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a terminal of 100 columns."""
    for name, value in environment({"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}).items():
        monkeypatch.setenv(name, value)
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TORCHELASTIC_RUN_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    unset = ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TORCHELASTIC_RUN_ID", "RANK")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return {**kept, "PYTHONPATH": str(ROOT), **changes}


def drain(master: int, read: list[bytes]) -> None:
    try:
        while data := os.read(master, 65536):
            read.append(data)
    except OSError as error:
        assert error.errno == errno.EIO  # nobody has the terminal open any more


def replay(*events: Event, more: str = "pass", **how: Any) -> Ended:
    """Replay the events in a process of its own."""
    return on_terminal(REPLAY.replace("MORE", more), json.dumps(events), **how)


def replay_here(*events: Event, then: Callable[[Progress], None] = lambda _: None) -> Ended:
    """Replay the events in this process, on a terminal."""
    master, slave = pty.openpty()
    read: list[bytes] = []
    reader = threading.Thread(target=drain, args=(master, read))
    reader.start()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        how, _ = decide(None, quiet=False, stream=stream, environ=os.environ)
        with Progress(stream, how, 600.0, clock=lambda: 0.0) as progress:
            for event in events:
                progress(event)
            then(progress)
        print("Wrote record.json", file=stream)
    reader.join(60)
    os.close(master)
    return Ended(b"".join(read).decode(), "", 0, 30)


# --- on a terminal


def test_a_terminal_shows_a_panel_that_goes_away() -> None:
    ended = replay(*JOURNAL, more="print('a warning', file=sys.stderr)")
    assert (ended.code, ended.out) == (0, "the answer\n")
    assert "trying M = 4, 0 s" in ended.seen
    assert "elapsed 21 s, about 47 s left" in ended.seen
    assert "best so far: M = 2, 250 samples/s" in ended.seen
    assert "memory at M = 2, peak of what a rank may use" in ended.seen
    assert re.search(r"rank 1 [━╺╸]+ 60\.1% of 0\.98 GiB", ended.seen)
    first, second, warning, last = ended.screen
    assert first.startswith(LINES[0]) and second.startswith(LINES[1])
    assert (warning, last) == ("a warning", "Wrote record.json")
    assert ended.cursor_is_shown


def test_the_cursor_is_never_left_hidden() -> None:
    ended = replay(*JOURNAL, more="import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert ended.code == -9
    assert "trying M = 4" in ended.seen
    assert ended.cursor_is_shown


@pytest.mark.parametrize("size", [(20, 4), (0, 0)])
def test_a_small_terminal(size: tuple[int, int]) -> None:
    ended = replay(*JOURNAL, size=size)
    assert (ended.code, ended.out) == (0, "the answer\n")
    assert "note:" not in ended.seen
    first, second, last = ended.screen
    assert first.startswith(LINES[0]) and second.startswith(LINES[1])
    assert last == "Wrote record.json"


def test_a_terminal_of_one_character() -> None:
    ended = replay(*JOURNAL, size=(1, 1))
    assert (ended.code, ended.out) == (0, "the answer\n")
    assert "note:" not in ended.seen
    assert ended.screen[-1] == "Wrote record.json"
    assert ended.cursor_is_shown


def test_a_terminal_that_changes_its_size() -> None:
    resize = (
        "import fcntl, struct, termios\n"
        "    for size in ((5, 20), (2, 3), (50, 200)):\n"
        "        fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack('HHHH', *size, 0, 0))\n"
        "        progress({'event': 'warning', 'text': f'size {size}'})"
    )
    ended = replay(*JOURNAL, trial(4, 300.0, 30.0, ranks=16), more=resize)
    assert (ended.code, ended.out) == (0, "the answer\n")
    assert "note:" not in ended.seen
    assert "8 more ranks: at most 60.7%" in ended.seen
    assert ended.cursor_is_shown


def test_no_color_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9][;m]")
    assert colour.search(replay_here(*JOURNAL).raw)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    plain = replay_here(*JOURNAL)
    assert not colour.search(plain.raw)
    assert "trying M = 4" in plain.seen


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")
    ended = replay_here(*JOURNAL)
    assert "\x1b" not in ended.raw
    assert len(ended.screen) == len(LINES) + 1


BROKEN: list[tuple[str, Event]] = [
    ("of another form", {"event": "trial", "trial": {"chunks": "many"}, "elapsed_s": 30.0}),
    ("without what it needs", {"event": "begin", "elapsed_s": 30.0}),
    ("not even an event", {}),
]


@pytest.mark.parametrize(("name", "event"), BROKEN, ids=[name for name, _ in BROKEN])
def test_an_odd_event_ends_the_panel_and_not_the_sweep(name: str, event: Event) -> None:
    ended = replay_here(*JOURNAL, event, event, trial(4, 300.0, 31.0))
    assert "Traceback" not in ended.seen
    assert ended.seen.count("note: the live progress ended") == 1
    assert ended.screen[-2].startswith("M = 4: b = 4")
    assert ended.screen[-1] == "Wrote record.json"
    assert not any("trying" in row for row in ended.screen)


def test_what_fails_in_the_drawing_thread_is_no_traceback_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunktune.cli.progress._REDRAWN_EVERY_S", 0.01)
    over = threading.Event()

    def fail(progress: Progress) -> None:
        monkeypatch.setattr(progress, "_say", lambda _: over.set())
        monkeypatch.setattr("chunktune.report.panel.panel", None)
        assert over.wait(30)

    ended = replay_here(*JOURNAL, then=fail)
    assert "Traceback" not in ended.seen
    assert ended.screen[-1] == "Wrote record.json"
    assert not any("trying" in row for row in ended.screen)


def test_what_fails_in_the_drawing_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(progress: Progress) -> None:
        monkeypatch.setattr("chunktune.report.panel.panel", None)
        progress(JOURNAL[-1])

    ended = replay_here(*JOURNAL, then=fail)
    assert "note: the live progress ended (TypeError" in ended.seen
    assert "Traceback" not in ended.seen
    assert ended.cursor_is_shown


SWEEP = """
import json, os, signal, sys, time, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background of a shell ignores it
import chunktune.pipeline, chunktune.pipeline.server as server
server.start_server = server.stop_server = lambda: None
from chunktune.errors import InterruptedSweepError
def run(request, on_event):
    for event in json.loads(sys.argv[1]):
        on_event(event)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        raise InterruptedSweepError("interrupted; kept")
launch = types.ModuleType("chunktune.pipeline.launch")
launch.run = run
sys.modules["chunktune.pipeline.launch"] = chunktune.pipeline.launch = launch
from chunktune.cli.app import main
sys.exit(main(["sweep", "spec.toml", "--output-dir", "out", *sys.argv[2:]]))
"""
SPEC = """
[model]
family = "sleep"
layers = 2
seconds_per_chunk = 0.001
seconds_per_sample = 0.001
[batch]
mini_batch = 16
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path


def test_an_interrupt_leaves_the_terminal_clean(place: Path) -> None:
    ended = on_terminal(SWEEP, json.dumps(JOURNAL), cwd=place)
    assert (ended.code, ended.out) == (130, "")
    assert "best so far: M = 2" in ended.seen
    assert [row[:6] for row in ended.screen] == ["M = 1:", "M = 2:", "error:"]
    assert ended.screen[-1] == "error: interrupted; kept"
    assert ended.cursor_is_shown


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        (["--progress", "plain"], ["M = 1:", "M = 2:", "error:"]),
        (["-q"], ["error:"]),
    ],
)
def test_a_terminal_without_a_panel(place: Path, flags: list[str], rows: list[str]) -> None:
    ended = on_terminal(SWEEP, json.dumps(JOURNAL), *flags, cwd=place)
    assert "\x1b" not in ended.raw
    assert [row[:6] for row in ended.screen] == rows


# --- off a terminal


@pytest.mark.parametrize("environ", [{}, {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}])
def test_off_a_terminal_one_plain_line_a_trial(environ: dict[str, str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", REPLAY.replace("MORE", "pass"), json.dumps(JOURNAL)],
        capture_output=True,
        text=True,
        env=environment(environ),
        timeout=60,
        check=True,
    )
    assert "\x1b" not in ended.stderr
    first, second, last = ended.stderr.splitlines()
    assert first.startswith(LINES[0]) and second.startswith(LINES[1])
    assert last == "Wrote record.json"


def test_live_off_a_terminal_is_plain_and_said(place: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SWEEP, json.dumps(JOURNAL), "--progress", "live"],
        capture_output=True,
        text=True,
        env=environment({"FORCE_COLOR": "1"}),
        cwd=place,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 130
    assert ended.stderr.startswith("note: --progress live: stderr is no terminal; plain lines instead\nM = 1:")
    assert "\x1b" not in ended.stderr


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--progress", "fancy"], "--progress fancy is unknown; it is one of auto, live, plain, none"),
        (["--progress", "plain", "-q"], "--quiet and --progress plain contradict each other"),
    ],
)
def test_usage(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], part: str
) -> None:
    monkeypatch.chdir(place)
    assert main(["sweep", "spec.toml", *flags]) == 2
    assert part in capsys.readouterr().err
    assert not (place / "runs").exists()


# --- in this process


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("asked", "stream", "environ", "alone", "how"),
    [
        (None, Terminal(), {}, True, "live"),
        ("auto", Terminal(), {"TERM": "xterm"}, True, "live"),
        ("auto", Terminal(), {"TERM": "dumb"}, True, "plain"),
        ("auto", Terminal(), {}, False, "plain"),
        ("auto", io.StringIO(), {"FORCE_COLOR": "1"}, True, "plain"),
        ("auto", None, {}, True, "none"),
        ("live", Terminal(), {"NO_COLOR": "1"}, True, "live"),
        ("plain", Terminal(), {}, True, "plain"),
        ("none", Terminal(), {}, True, "none"),
    ],
)
def test_what_is_shown(
    asked: str | None, stream: io.StringIO | None, environ: dict[str, str], alone: bool, how: str
) -> None:
    assert decide(asked, quiet=False, stream=stream, environ=environ, alone=alone) == (how, None)


@pytest.mark.parametrize(
    ("stream", "environ", "alone", "part"),
    [
        (io.StringIO(), {}, True, "no terminal"),
        (Terminal(), {"TERM": "dumb"}, True, "TERM = dumb"),
        (Terminal(), {}, False, "torchrun"),
    ],
)
def test_a_panel_that_cannot_be_had(stream: io.StringIO, environ: dict[str, str], alone: bool, part: str) -> None:
    how, note = decide("live", quiet=False, stream=stream, environ=environ, alone=alone)
    assert how == "plain"
    assert note is not None and part in note


def test_quiet_is_none() -> None:
    assert decide(None, quiet=True, stream=Terminal(), environ={}) == ("none", None)
    assert decide("auto", quiet=True, stream=Terminal(), environ={}) == ("none", None)
    assert decide("none", quiet=True, stream=Terminal(), environ={}) == ("none", None)
    with pytest.raises(UsageError):
        decide("live", quiet=True, stream=Terminal(), environ={})


@pytest.mark.parametrize("how", ["live", "plain", "none"])
def test_the_output_directory_is_noted_however_progress_is_shown(how: How) -> None:
    with Progress(Terminal(), how) as progress:
        progress(START)
    assert progress.output_dir == Path("/somewhere")


@pytest.mark.parametrize("event", [None, 3, {"event": "lost"}, {"event": "trial", "trial": None}])
def test_plain_lines_say_once_what_could_not_be_shown(event: Any) -> None:
    stream = io.StringIO()
    with Progress(stream, "plain") as progress:
        progress(event)
        progress(event)
        progress(JOURNAL[2])
    note, line = stream.getvalue().splitlines()
    assert note.startswith("note: an event could not be shown")
    assert line.startswith(LINES[0])


@pytest.mark.parametrize("how", ["live", "plain", "none"])
def test_a_stream_that_is_gone_ends_nothing(how: How) -> None:
    stream = Terminal()
    with Progress(stream, how) as progress:
        stream.close()
        for event in JOURNAL:
            progress(event)


def test_none_writes_nothing() -> None:
    stream = Terminal()
    with Progress(stream, "none") as progress:
        for event in [*JOURNAL, {"event": "lost"}, None]:
            progress(event)  # type: ignore[arg-type]
    assert stream.getvalue() == ""


def test_standard_error_is_as_it_was() -> None:
    before = sys.stderr, sys.stdout
    with Progress(Terminal(), "live") as progress:
        progress(START)
        progress({})
    assert (sys.stderr, sys.stdout) == before


# --- counting


def test_calls_are_counted_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunktune.cli.counting._COUNTED_AFTER_S", 0.0)
    monkeypatch.setattr("chunktune.cli.counting._COUNTED_EVERY_S", 0.0)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((19, 5)))
    stream = Terminal()
    stream.fileno = lambda: 2  # type: ignore[method-assign]
    with counted(str, 3, "combinations", stream, "live") as act:
        assert [act(number) for number in range(3)] == ["0", "1", "2"]
    shown = ["0 of 3 combination", "1 of 3 combination", "2 of 3 combination", ""]
    assert stream.getvalue().split("\r\x1b[K")[1:] == shown


@pytest.mark.parametrize("how", ["plain", "none"])
def test_nothing_is_counted_elsewhere(how: How) -> None:
    stream = Terminal()
    with counted(str, 3, "combinations", stream, how) as act:
        assert act(1) == "1"
    assert stream.getvalue() == ""


def test_a_count_that_nobody_reads_ends_nothing() -> None:
    stream = Terminal()
    with counted(str, 1, "combinations", stream, "live") as act:
        stream.close()
        assert act(1) == "1"
