"""Shell completion: what could stand after an option, from the tables of the spec. Neither torch nor a model.

bash takes `=` for the end of a word: of `--set pipeline.schedule=gp` it hands over three words, and replaces only what
stands behind the `=`. `join_bash_words` keeps the key aside, and the answers are then values alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

import typer

Complete = Callable[..., Any]
Names = Iterable[str] | Callable[[], Iterable[str]]

_INSTRUCTION = "_CHUNKTUNE_COMPLETE"
# Set by `join_bash_words` for the callbacks of this process.
_KEY = "_CHUNKTUNE_COMPLETE_KEY"
_MOST_ENTRIES = 500
# What no shell takes apart or runs: the answers are inserted into a command line as they are.
_HARMLESS = re.compile(r"[\w./+@%,-]+")


def complete_from(names: Names) -> Callable[[str], list[str]]:
    """A callback for `typer.Option(autocompletion=...)`. `names`: what it offers, or a function that says so."""

    def complete(incomplete: str) -> list[str]:
        known = names() if callable(names) else names
        return [name for name in known if name.startswith(incomplete)]

    return complete


def complete_values(key: str) -> Callable[[str], list[str]]:
    """A callback that offers the values of a dotted key of the spec."""
    return complete_from(lambda: _values(key))


def complete_setting(context: typer.Context, incomplete: str) -> list[str]:
    """KEY=VALUE of --set: dotted keys, then the values that the key takes."""
    key, before, start = _split(incomplete)
    if key is None:
        return _assignments([name for name in _keys(_family(context)) if name.startswith(start)], _values)
    return [f"{before}{value}" for value in _values(key) if value.startswith(start)]


def complete_varied(context: typer.Context, incomplete: str) -> list[str]:
    """KEY=V1,V2 of --vary: symbols and dotted keys, then the values that the key takes and has not yet."""
    from chunktune.errors import UsageError
    from chunktune.whatif.grid import SYMBOLS, full_key

    name, before, listed = _split(incomplete)
    family = _family(context)
    if name is None:
        names = [key for key in (*SYMBOLS, *_keys(family)) if key.startswith(listed)]
        return _assignments(names, lambda key: _values(SYMBOLS.get(key, key)))
    try:
        values = _values(full_key(name, family))
    except UsageError:
        return []
    *given, start = listed.split(",")
    before += "".join(f"{value}," for value in given)
    return [f"{before}{value}" for value in values if value.startswith(start) and value not in given]


def complete_record(incomplete: str) -> list[str]:
    """Records: JSON files, and what lies as record.json in a directory, or in one below it."""
    folder, slash, start = incomplete.rpartition("/")
    try:
        found = [name for entry in _entries(folder + slash or ".", start) for name in _records(entry)]
    except OSError:
        return []
    return [f"{folder}{slash}{name}" for name in found if _HARMLESS.fullmatch(name)]


def join_bash_words(environ: MutableMapping[str, str]) -> None:
    """Undo what bash did to the word under the cursor, in the variables that typer reads."""
    if environ.get(_INSTRUCTION) != "complete_bash" or not environ.get("COMP_CWORD", "").isdecimal():
        return
    words, place = environ.get("COMP_WORDS", "").split("\n"), int(environ["COMP_CWORD"])
    # Where nothing stands behind the "=" yet, it is itself the word under the cursor.
    equals = place if words[place : place + 1] == ["="] else place - 1
    if equals < 2 or words[equals : equals + 1] != ["="]:
        return
    option = words[equals - 1].startswith("-")
    if not option:
        environ[_KEY] = words[equals - 1]
    kept = words[: equals if option else equals - 1]
    environ["COMP_WORDS"] = "\n".join([*kept, *words[equals + 1 : place + 1]])
    environ["COMP_CWORD"] = str(len(kept))


def _split(incomplete: str) -> tuple[str | None, str, str]:
    """The key (None while it is being typed), what is repeated before a value, and what is typed so far."""
    if key := os.environ.get(_KEY):
        return key, "", incomplete
    key, equals, value = incomplete.partition("=")
    return (key, f"{key}=", value) if equals else (None, "", incomplete)


def _assignments(keys: list[str], values: Callable[[str], list[str]]) -> list[str]:
    """KEY= of every key. Of a single one with its values, behind which no shell puts a space before they are chosen."""
    of_one = values(keys[0]) if len(keys) == 1 else []
    return [f"{keys[0]}={value}" for value in of_one] if len(of_one) > 1 else [f"{key}=" for key in keys]


def _values(key: str) -> list[str]:
    """The texts that a dotted key takes, of those that can be listed."""
    from chunktune.spec_schema import allowed

    return list(allowed(key))


def _keys(family: str | None) -> list[str]:
    """The dotted keys of a spec; of every family where it is not known which."""
    from chunktune.tables import FAMILIES, SECTIONS

    models = [FAMILIES[family]] if family in FAMILIES else FAMILIES.values()
    of_models = dict.fromkeys(f"model.{key}" for model in models for key in model.model_fields)
    return [*of_models, *(f"{name}.{key}" for name, table in SECTIONS.items() for key in table.model_fields)]


def _family(context: typer.Context) -> str | None:
    """The family of the spec that stands on the command line; None where there is none that can be read."""
    from chunktune.errors import SpecError
    from chunktune.settings import read_file

    # An option without its value ends typer's parsing: what came before it is then left in `args`.
    words = [str(word) for word in (context.params.get("spec"), *context.args) if word is not None]
    path = next((word for word in words if word.endswith(".toml")), None)
    if path is None:
        return None
    try:
        model = read_file(Path(path)).get("model")
    except SpecError:
        return None
    family = model.get("family") if isinstance(model, dict) else None
    return family if isinstance(family, str) else None


def _entries(folder: str, start: str = "") -> list[Path]:
    """What lies in a directory and begins so; nothing where it cannot be read."""
    try:
        return sorted(path for path in Path(folder).iterdir() if path.name.startswith(start))[:_MOST_ENTRIES]
    except OSError:
        return []


def _records(entry: Path) -> list[str]:
    """The records that an entry of a directory is or holds, by their path from that directory."""
    if entry.suffix == ".json" and entry.is_file():
        return [entry.name]
    if entry.name.startswith(".") or not entry.is_dir():
        return []
    held = [entry / "record.json", *(below / "record.json" for below in _entries(str(entry)))]
    return [str(path.relative_to(entry.parent)) for path in held if path.is_file()]
