"""Where in the user's own code an exception came from. Pure."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import FrameType

_OUTSIDE = (str(Path(__file__).parent), sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"])


def place_of(error: BaseException) -> str | None:
    """file:line of the innermost frame outside this project, Python and installed packages; None without one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    return _innermost(traceback.extract_tb(error.__traceback__))


def place_in(frame: FrameType | None) -> str | None:
    """file:line of the innermost frame of the user's own code on a stack that runs; None without one."""
    return None if frame is None else _innermost(traceback.extract_stack(frame))


def _innermost(stack: traceback.StackSummary) -> str | None:
    own = [frame for frame in stack if _is_users(frame.filename)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else None


def _is_users(filename: str) -> bool:
    installed = any(word in filename for word in ("site-packages", "dist-packages", "importlib", "<frozen"))
    return not installed and not filename.startswith(_OUTSIDE)
