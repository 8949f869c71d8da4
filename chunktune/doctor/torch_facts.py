"""The facts that torch knows, asked in a child with a deadline. This module imports no torch."""

from __future__ import annotations

import json
import os
from typing import Any

from chunktune.doctor.child import Ended, module_command, module_environment, run
from chunktune.doctor.facts import Fact, known, unknown

TIMEOUT_S = 90.0
NAMES = (
    *("version", "cuda_build", "hip_build", "compiled_for", "backends", "nccl", "threads"),
    *("cuda_available", "gpu_count"),
)
IMPORT = "import"
MODULE = "chunktune.doctor.torch_child"


def torch_facts(timeout_s: float = TIMEOUT_S) -> dict[str, Fact]:
    """Versions, builds, and every visible GPU (`gpu 0`, ...); `peer_access` where there are several."""
    return parsed(run(module_command(MODULE), timeout_s, module_environment(os.environ)))


def parsed(ended: Ended) -> dict[str, Fact]:
    """The facts that a child wrote; those that it did not come to, with what ended it."""
    lines = [line for line in map(_line, ended.stdout.splitlines()) if line]
    facts = {str(line["name"]): _fact(line) for line in lines if "name" in line}
    asked = [str(line["asked"]) for line in lines if "asked" in line]
    missing = facts["version"].why if "version" in facts else None
    for name in [*NAMES, *asked]:
        if name not in facts and name != IMPORT:
            facts[name] = unknown(_why(ended, asked, missing))
    return facts


def _why(ended: Ended, asked: list[str], missing: str | None) -> str:
    if ended.trouble is None:
        return f"torch cannot be imported: {missing}" if missing else "torch did not say it"
    if not asked or asked[-1] == IMPORT:
        return f"{ended.trouble}, when torch was imported"
    return f"{ended.trouble}, when torch was asked for {asked[-1]}"


def _line(text: str) -> dict[str, Any] | None:
    """A line of the child; None for what a library has printed between."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def _fact(line: dict[str, Any]) -> Fact:
    return unknown(str(line["why"])) if "why" in line else known(line.get("value"))
