"""The file formats of the frameworks: settings to text. Pure.

Head lines and meanings become comments, in formats that have them. Head lines hold names out of a record, so each is
stripped to one harmless line before it is written.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from chunktune.export.settings import Expression, Form, Setting, Translation, Value
from chunktune.report import plain


def commented(head: Sequence[str]) -> str:
    """Lines as comments with #, a blank line behind them."""
    return "".join(f"# {plain(line)}".rstrip() + "\n" for line in head) + "\n"


def to_json(translation: Translation, head: Sequence[str]) -> str:
    """Nested JSON. It has no comments: the head is left out."""
    nested: dict[str, object] = {}
    for setting in translation.settings:
        *tables, key = setting.key.split(".")
        table = nested
        for name in tables:
            table = table.setdefault(name, {})  # type: ignore[assignment]
        table[key] = setting.value
    return json.dumps(nested, indent=2, allow_nan=False) + "\n"


def to_toml(translation: Translation, head: Sequence[str]) -> str:
    """TOML, a table for each prefix; null has no TOML and must not be there."""
    tables: dict[str, list[str]] = {}
    for setting in translation.settings:
        table, _, key = setting.key.rpartition(".")
        line = f"{key} = {_json(setting.value)}"
        tables.setdefault(table, []).append(_explained(line, setting))
    blocks = [f"[{table}]\n" + "\n".join(lines) for table, lines in tables.items()]
    return commented(head) + "\n\n".join(blocks) + "\n"


def to_yaml(translation: Translation, head: Sequence[str]) -> str:
    """YAML, nested by the dots of the keys; scalars as in JSON, which YAML contains."""
    lines: list[str] = []
    above: list[str] = []
    for setting in translation.settings:
        *tables, key = setting.key.split(".")
        shared = _shared(above, tables)
        lines += [f"{'  ' * depth}{tables[depth]}:" for depth in range(shared, len(tables))]
        lines.append(_explained(f"{'  ' * len(tables)}{key}: {_json(setting.value)}", setting))
        above = tables
    return commented(head) + "\n".join(lines) + "\n"


def to_flags(translation: Translation, head: Sequence[str]) -> str:
    """Command-line flags, quoted for the shell, one a line with a backslash; true is the flag alone, false is none."""
    given = [setting for setting in translation.settings if setting.value is not False and setting.value is not None]
    return commented(head) + " \\\n".join(_flag(setting) for setting in given) + "\n"


def to_function(name: str, docstring: str) -> Form:
    """A Python module with a function `apply` that sets the attributes of its argument `name` and returns it."""

    def write(translation: Translation, head: Sequence[str]) -> str:
        body = [f'"""{docstring}"""', *_assignments(translation, f"{name}."), f"return {name}"]
        text = f"def apply({name}):\n" + "".join(f"    {line}\n" for line in body)
        imports = "".join(f"{line}\n" for line in translation.imports)
        return commented(head) + (f"{imports}\n\n{text}" if imports else f"\n{text}")

    return write


def to_module(translation: Translation, head: Sequence[str]) -> str:
    """A Python module with a constant for each setting, and below them the translation's code."""
    imports, constants = "\n".join(translation.imports), "\n".join(_assignments(translation))
    return commented(head) + f"{imports}\n\n{constants}\n\n\n{translation.code}"


def _assignments(translation: Translation, prefix: str = "") -> list[str]:
    given = translation.settings
    return [_explained(f"{prefix}{setting.key} = {_python(setting.value)}", setting) for setting in given]


def _explained(line: str, setting: Setting) -> str:
    return f"{line}  # {setting.meaning}" if setting.meaning else line


def _shared(above: Sequence[str], tables: Sequence[str]) -> int:
    """How many tables two keys have in common."""
    count = 0
    while count < min(len(above), len(tables)) and above[count] == tables[count]:
        count += 1
    return count


def _flag(setting: Setting) -> str:
    if setting.value is True:
        return f"--{setting.key}"
    return f"--{setting.key} {shlex.quote(str(setting.value))}"


def _json(value: Value) -> str:
    return json.dumps(value, allow_nan=False)


def _python(value: Value) -> str:
    if isinstance(value, Expression):
        return value.source
    if isinstance(value, tuple):
        return f"[{', '.join(_python(item) for item in value)}]"
    return json.dumps(value) if isinstance(value, str) else repr(value)
