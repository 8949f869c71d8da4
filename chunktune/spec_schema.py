"""The JSON Schema of a spec file, made from the classes that read it; no torch.

`python -m chunktune.spec_schema` rewrites the one that is shipped as chunktune/schema/spec.schema.json.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from chunktune.checks import EXCLUSIVE
from chunktune.keys import FAMILY_TEXTS, TABLES, meaning
from chunktune.kinds import Schema, allowed_names
from chunktune.tables import FAMILIES, SECTIONS, Spec

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCHEMA_FILE = "spec.schema.json"


def spec_schema() -> Schema:
    """The JSON Schema (draft 2020-12) of the tables of a spec file, as tomllib parses them.

    What lies between keys (layers against parts, heads against hidden) is beyond it but for N and b, of which a file
    gives one.
    """
    made = Spec.model_json_schema()
    definitions = {name: _table(schema) for name, schema in made["$defs"].items()}
    for section, table in SECTIONS.items():
        _describe(definitions[table.__name__], section)
    for family, table in FAMILIES.items():
        _describe(definitions[table.__name__], "model", family)
    definitions["BatchSpec"]["oneOf"] = [{"required": [keys[-1]]} for keys in EXCLUSIVE]
    properties = {name: _reference(name, schema) for name, schema in made["properties"].items()}
    return {
        "$schema": DIALECT,
        "title": "chunktune spec",
        "description": "What `chunktune sweep` and `chunktune whatif` read: a TOML file.",
        "type": "object",
        "additionalProperties": False,
        "required": ["model", "batch"],
        "properties": properties,
        "$defs": definitions,
    }


def _table(schema: Schema) -> Schema:
    """A table without what pydantic adds: titles, and nulls, which TOML does not have."""
    properties = {key: _plain(part) for key, part in schema["properties"].items()}
    kept = {key: value for key, value in schema.items() if key not in ("title", "description", "properties")}
    return {**kept, "properties": properties}


def _plain(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if key != "title" and (key, value) != ("default", None)}


def _describe(table: Schema, section: str, family: str | None = None) -> None:
    table["description"] = TABLES[section] if family is None else FAMILY_TEXTS[family]
    for key, part in table["properties"].items():
        part["description"] = meaning(section, key, family)


def _reference(section: str, schema: Schema) -> Schema:
    """A table of the spec by its definition, without the defaults of pydantic's own making."""
    kept = {key: value for key, value in schema.items() if key in ("$ref", "oneOf")}
    return {"description": TABLES[section], **kept}


@cache
def shipped_spec_schema() -> Schema:
    """The JSON Schema that the installed package ships; equal to `spec_schema()`."""
    text = (resources.files("chunktune") / "schema" / SCHEMA_FILE).read_text(encoding="utf-8")
    schema: Schema = json.loads(text)
    return schema


def key_schema(section: str, key: str, family: str | None = None) -> Schema:
    """The schema of one key, of [model] for a family. Raises KeyError for a key that no table has."""
    table = FAMILIES[str(family)] if section == "model" else SECTIONS[section]
    found: Schema = shipped_spec_schema()["$defs"][table.__name__]["properties"][key]
    return found


def allowed(dotted_key: str) -> tuple[str, ...]:
    """The texts that a key takes, of those that can be listed; none for an unknown key."""
    section, _, key = dotted_key.partition(".")
    if (section, key) == ("model", "family"):
        return tuple(FAMILIES)
    families: list[Any] = [*FAMILIES] if section == "model" else [None]
    known = [_or_none(section, key, family) for family in families]
    return tuple(dict.fromkeys(name for schema in known if schema for name in allowed_names(schema)))


def _or_none(section: str, key: str, family: str | None) -> Schema | None:
    try:
        return key_schema(section, key, family)
    except KeyError:
        return None


def schema_json(schema: Schema) -> str:
    """A schema as text, as it is shipped."""
    return json.dumps(schema, indent=2) + "\n"


def _write_schema() -> Path:
    path = Path(__file__).parent / "schema" / SCHEMA_FILE
    path.write_text(schema_json(spec_schema()), encoding="utf-8")
    return path


if __name__ == "__main__":
    print(f"Wrote {_write_schema()}")
