"""The console script and `python -m chunktune`, which is also what torchrun starts."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn

from chunktune.cli import interrupts


def entry() -> NoReturn:
    """Run the command line, then leave at once: Python takes seconds to tear torch down for nothing.

    Interrupting is answered from the first import on.
    """
    interrupts.remember()
    try:
        from chunktune.cli.app import main

        code = main()
    except BaseException:
        if not interrupts.seen():
            raise
        print("error: interrupted", file=sys.stderr)
        code = 130
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads any more: `main` has said so
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    entry()
