"""Commands run in the process of the tests: what they import of a user's own must not be found by the next test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def forget_user_modules() -> Iterator[None]:
    """Directories that a command put on sys.path go again, and so do the modules that came from there."""
    before = list(sys.path)
    yield
    added = {Path(entry).resolve() for entry in sys.path if entry not in before}
    sys.path[:] = before
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve().parent in added:
            del sys.modules[name]
