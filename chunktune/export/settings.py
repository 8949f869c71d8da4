"""A framework's settings as data: what an exporter says, before it is put into a file format. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from chunktune.export.values import Values
from chunktune.schedules import SCHEDULES


@dataclass(frozen=True)
class Expression:
    """Python that stands in a setting as it is; for the Python formats alone."""

    source: str


Plain: TypeAlias = bool | int | str | None
Value: TypeAlias = Plain | Expression | tuple[Plain, ...] | tuple[tuple[Plain, ...], ...]


@dataclass(frozen=True)
class Setting:
    """One setting: its name in the framework, dotted where it stands in a table, and what it is here."""

    key: str
    value: Value
    meaning: str = ""


@dataclass(frozen=True)
class Translation:
    """A record in a framework's own words.

    `untranslated`: what the framework has no counterpart for, a sentence each. `remarks`: what the file cannot say
    and the user has to do or know. `imports`, `code`: lines that the Python formats need, and what a module holds
    below its settings.
    """

    settings: tuple[Setting, ...]
    untranslated: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    code: str = ""


Form: TypeAlias = Callable[[Translation, Sequence[str]], str]
"""A file format: a translation and the lines of the head comment, to the text of the file."""


@dataclass(frozen=True)
class Version:
    """Names that a framework uses from one version on.

    `name`: a release ("0.2" stands for all of 0.2.x) or the first seven digits of a commit, which `since` dates.
    `forms`: format -> how to write it, the usual one first.
    """

    name: str
    translate: Callable[[Values], Translation]
    forms: Mapping[str, Form]
    since: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.since})" if self.since else self.name

    def covers(self, given: str) -> bool:
        """Whether a version as the user wrote it is this one, or a patch of it."""
        return given == self.name or given.startswith(f"{self.name}{'' if self.since else '.'}")


@dataclass(frozen=True)
class Framework:
    """A framework: its name on the command line and for people, and the versions whose names are known, in order."""

    name: str
    title: str
    versions: tuple[Version, ...]


def under_another_schedule(values: Values, framework: str, runs: str) -> str:
    """That M was chosen under a schedule which the framework does not have. `runs`: what it does instead."""
    chosen = f"M = {values.chunks} was chosen under it"
    return f"schedule {values.schedule}: {framework} has none such and will run {runs}; {chosen}"


def own_layers(values: Values, framework: str) -> tuple[str, ...]:
    """How the record's parts were cut, where the layers are the user's own and the framework cannot know them."""
    if not values.layers_per_part:
        return ()
    counts = spelled(values.layers_per_part)
    return (f"partition: {counts} layers a part in the record; cut the model so in {framework} too",)


def spelled(counts: Sequence[int], most: int = 16) -> str:
    """Numbers for a sentence; what is beyond `most` is only counted."""
    more = f", and {len(counts) - most} more" if len(counts) > most else ""
    return ", ".join(map(str, counts[:most])) + more


def autocast_weights(values: Values, framework: str) -> tuple[str, ...]:
    """What bfloat16 meant when the record was made, for frameworks that mean something else by it."""
    if values.precision != "bfloat16":
        return ()
    return (f"precision: the record is of float32 weights under bfloat16 autocast; {framework} keeps bfloat16 weights",)


def torch_schedule(values: Values) -> str:
    """The schedule's name for `torch.distributed.pipelining.schedules.get_schedule_class`."""
    return SCHEDULES[values.schedule].torch_name
