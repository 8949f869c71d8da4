"""Where settings come from: the spec file, CHUNKTUNE_ variables, --set and flags, merged with their sources.

A setting is a path of keys with a value. An assignment replaces what lower sources said about that path,
about everything below it and about a value above it. All is pure but `read_file`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chunktune.checks import Keys
from chunktune.errors import Mistake, SpecError
from chunktune.fields import MAX_DEPTH, closest
from chunktune.units import format_bytes, shorten, shown

MAX_FILE_BYTES = 2**20
MAX_SETTINGS = 1000
"""Keys of a file: a spec has some forty, and a factory may have arguments of its own."""
PREFIX = "CHUNKTUNE_"
SET = "--set"

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
# tomllib takes a dotted key apart in quadratic time. What begins within a word is not looked at once more.
_DEEP_KEY = re.compile(rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}""", re.ASCII)


@dataclass(frozen=True)
class Assignment:
    """One setting as it was given; `value` may be a table."""

    keys: Keys
    value: Any
    source: str


@dataclass
class Settings:
    """The merged settings: leaf values by path, where each comes from, and the mistakes made on the way."""

    values: dict[Keys, Any] = field(default_factory=dict)
    sources: dict[Keys, str] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def assign(self, assignment: Assignment) -> None:
        """Put one assignment over what is there."""
        for keys in [keys for keys in self.values if _related(keys, assignment.keys)]:
            self.drop(keys)
        for keys, value in leaves(assignment.value, assignment.keys):
            self.values[keys], self.sources[keys] = value, assignment.source

    def drop(self, keys: Keys) -> None:
        """Forget one leaf."""
        self.values.pop(keys, None)
        self.sources.pop(keys, None)

    def nested(self) -> dict[str, Any]:
        """The settings as tables in tables, as the file would have them."""
        root: dict[str, Any] = {}
        for keys, value in self.values.items():
            table = root
            for key in keys[:-1]:
                table = table.setdefault(key, {})
            table[keys[-1]] = value
        return root

    def sources_of(self, keys: Keys) -> list[str]:
        """The distinct sources of this path and of everything below it, in order of appearance."""
        below = (source for path, source in self.sources.items() if path[: len(keys)] == keys)
        return list(dict.fromkeys(below))


def leaves(value: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every leaf below `value` with its path; lists and empty tables are leaves.

    Raises RecursionError where tables are nested more than MAX_DEPTH deep.
    """
    if len(keys) > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, Mapping) and (value or not keys):
        for key, item in value.items():
            yield from leaves(item, (*keys, str(key)))
    else:
        yield keys, value


def dotted(keys: Sequence[str | int]) -> str:
    """The path as people write it, fit for a message."""
    return shorten(".".join(str(key) for key in keys), 80)


def read_file(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises SpecError with one mistake where the file is missing, no regular file, unreadable, larger than
    1 MiB, no UTF-8, no TOML, nested too deeply, without settings or with too many.
    """
    try:
        tables = _parse(_decode(_read_bytes(path)))
        count = sum(1 for _ in leaves(tables))
    except RecursionError:
        rule = f"tables and lists may be nested {MAX_DEPTH} deep"
        raise _bad_file(path, "is nested too deeply", rule) from None
    except OSError as error:
        fact = f"cannot be read: {error.strerror or error}"
        raise _bad_file(path, fact, "give a readable TOML file") from None
    except ValueError as error:
        raise _bad_file(path, *_why_not_toml(str(error))) from None
    if not tables:
        raise _bad_file(path, "holds no settings", "a spec needs at least the tables [model] and [batch]")
    if count > MAX_SETTINGS:
        raise _bad_file(path, f"holds {count} settings", f"a spec has {MAX_SETTINGS} at most")
    return tables


def _parse(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ValueError for no TOML, RecursionError for what is nested too deeply."""
    if _DEEP_KEY.search(text):
        raise RecursionError
    return tomllib.loads(text)


def from_environment(environ: Mapping[str, str]) -> tuple[list[Assignment], list[Mistake]]:
    """The assignments of the CHUNKTUNE_SECTION__KEY variables, by name, and those that have no such form."""
    names = sorted(name for name in environ if name.startswith(PREFIX))
    assignments: list[Assignment] = []
    mistakes: list[Mistake] = []
    for name in names:
        keys = tuple(name.removeprefix(PREFIX).lower().split("__"))
        source = f"environment {shorten(name, 80)}"
        if len(keys) < 2 or not all(keys) or len(keys) > MAX_DEPTH:
            mistakes.append(Mistake(source, "", "is no setting", f"variables are named {PREFIX}SECTION__KEY"))
        else:
            _collect(keys, environ[name], source, assignments, mistakes)
    return assignments, mistakes


def from_sets(sets: Sequence[str]) -> tuple[list[Assignment], list[Mistake]]:
    """The assignments of --set key=value, in order, and those that have no such form."""
    assignments: list[Assignment] = []
    mistakes: list[Mistake] = []
    for text in sets:
        key, equals, value = text.partition("=")
        keys = tuple(key.strip().split("."))
        if not equals or not _KEY.fullmatch(key.strip()) or len(keys) > MAX_DEPTH:
            rule = "must have the form section.key=value, such as pipeline.stages=4"
            mistakes.append(Mistake(SET, "", f"is {shown(text)}", rule))
        else:
            _collect(keys, value.strip(), SET, assignments, mistakes)
    return assignments, mistakes


def from_flags(flags: Mapping[str, tuple[str, Any]]) -> tuple[list[Assignment], list[Mistake]]:
    """The assignments of flags: dotted key -> (flag, value); a text is read like the value of --set."""
    assignments: list[Assignment] = []
    mistakes: list[Mistake] = []
    for key, (flag, value) in flags.items():
        keys, source = tuple(key.split(".")), f"flag {flag}"
        if isinstance(value, str):
            _collect(keys, value, source, assignments, mistakes)
        else:
            assignments.append(Assignment(keys, value, source))
    return assignments, mistakes


def merge(levels: Sequence[Sequence[Assignment]], exclusive: Sequence[Keys]) -> Settings:
    """The levels, lowest first, one over the other.

    Of the `exclusive` paths a level that sets some replaces all the others that lower levels set.
    """
    settings = Settings()
    for level in levels:
        named = {keys for assignment in level for keys, _ in leaves(assignment.value, assignment.keys)}
        if named & set(exclusive):
            for keys in exclusive:
                settings.drop(keys)
        for assignment in level:
            settings.assign(assignment)
    return settings


def parse_value(text: str) -> Any:
    """A TOML value; a text that is none stands for itself (`gpipe` for `"gpipe"`).

    Raises ValueError where it starts like a list, a table or a quoted text and is none.
    """
    try:
        parsed = _parse(f"value = {text}")
        list(leaves(parsed))
        str(parsed)  # a ValueError where a number has more digits than Python prints
    except (ValueError, RecursionError):
        if text.startswith(("[", "{", '"', "'")):
            raise ValueError("is no TOML value") from None
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _collect(keys: Keys, text: str, source: str, assignments: list[Assignment], mistakes: list[Mistake]) -> None:
    try:
        assignments.append(Assignment(keys, parse_value(text), source))
    except ValueError:
        rule = "lists, tables and quoted texts are written as in TOML"
        mistakes.append(Mistake(source, dotted(keys), f"is {shown(text)}", rule))


def _related(one: Keys, other: Keys) -> bool:
    """Whether one path is the other, or lies above or below it."""
    shared = min(len(one), len(other))
    return one[:shared] == other[:shared]


def _bad_file(path: Path, fact: str, rule: str = "", nearest: str = "") -> SpecError:
    return SpecError([Mistake(shorten(str(path), 200), "", fact, rule, nearest)])


def _read_bytes(path: Path) -> bytes:
    try:
        is_file, is_directory = path.is_file(), path.is_dir()
        if is_file:
            with path.open("rb") as file:
                return file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        is_directory = False
    if is_directory:
        raise _bad_file(path, "is a directory", "give a TOML file")
    if not path.exists():
        raise _bad_file(path, "does not exist", "give a TOML file", _neighbour(path))
    # Opening a FIFO would wait for a writer for ever.
    raise _bad_file(path, "is no regular file", "give a TOML file")


def _neighbour(path: Path) -> str:
    try:
        names = sorted(other.name for other in path.parent.iterdir() if other.suffix == ".toml")
    except OSError:
        return ""
    nearest = closest(path.name, names)
    return str(path.parent / nearest) if nearest else ""


def _decode(data: bytes) -> str:
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"is larger than {format_bytes(MAX_FILE_BYTES)}")
    if b"\0" in data:
        raise ValueError("is binary")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"is no UTF-8 text (byte {error.start})") from None


def _why_not_toml(message: str) -> tuple[str, str]:
    if message.startswith("is "):
        return message, f"a spec is a TOML file of at most {format_bytes(MAX_FILE_BYTES)}, in UTF-8"
    place = re.search(r"\((at .*)\)$", message)
    if message.startswith(("Cannot overwrite a value", "Cannot declare", "Cannot mutate", "Duplicate")):
        return f"sets a key or table twice, {place[1] if place else ''}", "each key and table stands once"
    return f"is no TOML: {shorten(message, 120)}", "texts stand in quotes, tables are headed by [name]"
