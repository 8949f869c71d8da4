"""Tests that run commands in their own process: what these import of a user's own must not be found by the next."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import chunktune

TESTS = Path(__file__).resolve().parent
KEPT = (TESTS, Path(chunktune.__file__).resolve().parent, Path(sys.prefix), Path(sys.base_prefix))


@contextmanager
def user_modules_forgotten() -> Iterator[None]:
    """What is put on sys.path inside goes again, and so does every module of neither ours nor an installed package."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file and not any(Path(file).resolve().is_relative_to(kept) for kept in KEPT):
            del sys.modules[name]


@pytest.fixture(autouse=True, scope="module")
def forget_modules_of_a_file() -> Iterator[None]:
    """Those that its own fixtures imported."""
    with user_modules_forgotten():
        yield


@pytest.fixture(autouse=True)
def forget_modules_of_a_test() -> Iterator[None]:
    """Those that the test imported."""
    with user_modules_forgotten():
        yield
