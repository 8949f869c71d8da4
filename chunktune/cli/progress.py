"""Progress on stderr: a live panel on a terminal, plain lines elsewhere, or nothing. It may fail, and no sweep by it.

What may be shown is decided in `decide` alone: rich by itself would take FORCE_COLOR for a terminal.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO

from chunktune.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from chunktune.report.live import Seen

How = Literal["live", "plain", "none"]
ASKED = ("auto", "live", "plain", "none")

# Once a second and at every event: the drawing takes milliseconds of the cores that are measured.
_REDRAWN_EVERY_S = 1.0


def decide(
    asked: str | None, *, quiet: bool, stream: TextIO | None, environ: Mapping[str, str], alone: bool = True
) -> tuple[How, str | None]:
    """How progress is shown on `stream`, and a note where that is not as asked.

    `asked`: of --progress, null where it is not given. `alone`: no other process writes to the terminal, as the
    ranks of a user's torchrun do. A live panel needs a terminal that moves its cursor, whatever FORCE_COLOR says.
    Raises UsageError for what --progress does not know, and where --quiet contradicts it.
    """
    if asked is not None and asked not in ASKED:
        raise UsageError(f"--progress {asked} is unknown; it is one of {', '.join(ASKED)}")
    if quiet and asked in ("live", "plain"):
        raise UsageError(f"--quiet and --progress {asked} contradict each other; --quiet means --progress none")
    if quiet or asked == "none" or stream is None:
        return "none", None
    obstacle = _obstacle(stream, environ, alone=alone)
    if asked == "plain" or (obstacle and asked != "live"):
        return "plain", None
    return ("live", None) if obstacle is None else ("plain", f"--progress live: {obstacle}; plain lines instead")


def _obstacle(stream: TextIO, environ: Mapping[str, str], *, alone: bool) -> str | None:
    if not stream.isatty():
        return "stderr is no terminal"
    if environ.get("TERM", "").lower() in ("dumb", "unknown"):
        return f"TERM = {environ['TERM']} is a terminal that cannot move its cursor"
    return None if alone else "the processes of torchrun share one terminal"


class Progress:
    """Journal events as lines on a stream; on a terminal with a panel below them that goes away at the end.

    A context manager: inside, the panel is shown, and what is written to sys.stderr appears above it.
    `budget_s`: of the sweep. `clock`: seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        how: How,
        budget_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.output_dir: Path | None = None
        self._stream, self._how, self._clock = stream, how, clock
        self._budget_s = budget_s
        self._seen: Seen | None = None
        self._stamped_at = clock()
        self._panel: _Panel | None = None
        self._lock = threading.Lock()
        self._complained = False

    def __enter__(self) -> Self:
        if self._how == "live":
            try:
                self._open()
            except Exception as error:
                self._mishap(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show one event; raises nothing."""
        try:
            if isinstance(event.get("output_dir"), str):
                self.output_dir = Path(event["output_dir"])
            self._show(event)
        except Exception as error:  # whatever it is: a measurement is never lost to its display
            self._mishap(error)

    def _show(self, event: Mapping[str, Any]) -> None:
        if self._how == "none":
            return
        from chunktune.report.progress import progress_line

        line = progress_line(event)
        if line is not None:
            self._say(line)
        if self._panel is not None and self._seen is not None:
            self._seen = self._seen.add(event)
            self._stamped_at = self._clock() if "elapsed_s" in event else self._stamped_at
            self._panel.draw()

    def _say(self, text: str) -> None:
        panel = self._panel
        if panel is not None:
            panel.say(text)
        else:
            with suppress(OSError, ValueError):  # nobody reads it any more
                print(text, file=self._stream, flush=True)

    def _open(self) -> None:
        from chunktune.report.live import Seen

        self._seen = Seen(budget_s=self._budget_s)
        self._panel = _Panel(self._stream, self._render, self._mishap)
        self._panel.open()

    def _render(self, columns: int) -> RenderableType:
        from chunktune.report.panel import panel

        seen = self._seen
        assert seen is not None
        return panel(seen, seen.elapsed_s + self._clock() - self._stamped_at, columns)

    def _mishap(self, error: Exception) -> None:
        """Go on in plain lines after the panel failed; after that say once that an event could not be shown."""
        if self._close():
            self._say(f"note: the live progress ended ({_named(error)}); plain lines from here on")
        elif self._how != "none" and not self._complained:
            self._complained = True
            self._say(f"note: an event could not be shown ({_named(error)})")

    def _close(self) -> bool:
        """Take the panel away; whether there was one."""
        with self._lock:
            panel, self._panel = self._panel, None
        if panel is not None:
            panel.close()
        return panel is not None


def _named(error: Exception) -> str:
    from chunktune.units import shorten

    return shorten(f"{type(error).__name__}: {error}".partition("\n")[0], 120)


class _Panel:
    """What `render` gives for a number of columns, at the bottom of a terminal, drawn anew by a thread of its own.

    `failed` is told what ended the drawing.
    """

    def __init__(
        self, stream: TextIO, render: Callable[[int], RenderableType], failed: Callable[[Exception], None]
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        self._render, self._failed = render, failed
        self._over = threading.Event()
        self._console = Console(
            file=stream, force_terminal=True, force_interactive=True, markup=False, emoji=False, highlight=False
        )
        self._live = Live(
            console=self._console,
            auto_refresh=False,  # a thread of rich's own would end with a traceback
            transient=True,
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
            get_renderable=self._renderable,
        )
        self._thread = threading.Thread(target=self._redraw, daemon=True)

    def open(self) -> None:
        """Show it. The cursor stays visible: no way of dying, a kill included, then leaves a terminal without one."""
        self._live.start(refresh=True)
        self._console.show_cursor(True)
        self._thread.start()

    def say(self, text: str) -> None:
        """A line above it."""
        self._console.print(text, soft_wrap=True)

    def draw(self) -> None:
        """Draw it anew."""
        self._live.refresh()

    def close(self) -> None:
        """Take it away. Raises nothing."""
        self._over.set()
        with suppress(Exception):
            self._live.stop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _renderable(self) -> RenderableType:
        # What is taller than the terminal could not be taken away at the end.
        return "" if self._over.is_set() else self._render(self._console.width)

    def _redraw(self) -> None:
        try:
            while not self._over.wait(_REDRAWN_EVERY_S):
                self._live.refresh()
        except Exception as error:
            self._failed(error)
