"""The chosen M in the words of a training framework. Pure: no torch, and no framework either.

values.py     what a framework has to be told, out of a record
settings.py   a framework's settings as data, and its versions
formats.py    settings to TOML, YAML, JSON, flags, Python
and a file a framework, which cites where each name stands in its source.
"""

from __future__ import annotations

from collections.abc import Sequence

from chunktune.errors import UsageError
from chunktune.export import accelerate, deepspeed, megatron_lm, nemo, pytorch, torchtitan
from chunktune.export.settings import Form, Framework, Translation, Version
from chunktune.export.values import Values, values_of
from chunktune.fields import closest
from chunktune.units import shorten

__all__ = [
    "FRAMEWORKS",
    "Framework",
    "Translation",
    "Values",
    "Version",
    "form_named",
    "framework_named",
    "values_of",
    "version_named",
]

FRAMEWORKS: dict[str, Framework] = {
    "torch": pytorch.FRAMEWORK,
    "torchtitan": torchtitan.FRAMEWORK,
    "megatron-lm": megatron_lm.FRAMEWORK,
    "deepspeed": deepspeed.FRAMEWORK,
    "nemo": nemo.FRAMEWORK,
    "accelerate": accelerate.FRAMEWORK,
}


def framework_named(name: str) -> Framework:
    """A framework. Raises UsageError, with those there are and the nearest, for an unknown one."""
    if name in FRAMEWORKS:
        return FRAMEWORKS[name]
    raise UsageError(_unknown(f"--to {shorten(name)}", list(FRAMEWORKS), name))


def version_named(framework: Framework, given: str | None) -> Version:
    """The version that a user means: 0.2, v0.2.1, core_v0.19.0, a commit. The newest known where none is given.

    Raises UsageError, with those that are known and the nearest, for any other.
    """
    if given is None:
        return framework.versions[-1]
    bare = given.lower().removeprefix("core_").removeprefix("v")
    for version in framework.versions:
        if version.covers(bare):
            return version
    names = [version.name for version in framework.versions]
    known = [str(version) for version in framework.versions]
    raise UsageError(_unknown(f"--framework-version {shorten(given)} of {framework.name}", known, bare, names))


def form_named(framework: Framework, version: Version, given: str | None) -> Form:
    """How to write the file; the usual form where none is given. Raises UsageError for one that there is not."""
    if given is None:
        return next(iter(version.forms.values()))
    if given in version.forms:
        return version.forms[given]
    where = f"--format {shorten(given)} of {framework.name} {version.name}"
    raise UsageError(_unknown(where, list(version.forms), given))


def _unknown(what: str, known: Sequence[str], given: str, names: Sequence[str] | None = None) -> str:
    nearest = closest(given, names or known)
    return f"{what} is unknown; known: {', '.join(known)}" + (f" (did you mean {nearest}?)" if nearest else "")
