"""An examination of the machine as text, and as JSON. Pure; what the machine says is stripped of control characters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from chunktune.doctor.examination import Examination
from chunktune.doctor.facts import Fact
from chunktune.doctor.noise import Noise
from chunktune.report import plain, wrap
from chunktune.units import format_bytes, format_seconds, format_share

_COLUMN = 22
_MOST_PAIRS = 12


def to_json(found: Examination) -> str:
    """The facts by group, null where not available; why not, by "group.name"; noise and warnings.

    Bytes, seconds and shares.
    """
    facts = {group: {name: fact.value for name, fact in own.items()} for group, own in found.facts.items()}
    why = {f"{group}.{name}": fact.why for group, own in found.facts.items() for name, fact in own.items() if fact.why}
    data = {
        "tool": found.tool,
        "facts": facts,
        "not_available": why,
        "noise": [one.model_dump(mode="json") for one in found.noise],
        "no_noise": found.no_noise,
        "warnings": list(found.warnings),
    }
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def to_text(found: Examination, width: int | None = None) -> str:
    """Groups of lines, then the noise, the warnings last; at most `width` columns wide (None: unlimited)."""
    groups = [(group, list(_rows(own))) for group, own in found.facts.items()]
    blocks = [_block(group, rows or [("", "none set")], width) for group, rows in groups]
    blocks.append(_block("noise", list(_noise_rows(found)), width))
    blocks.append(_block("warnings", [("", text) for text in found.warnings] or [("", "none")], width))
    return "\n\n".join(blocks) + "\n"


def _block(title: str, rows: Sequence[tuple[str, str]], width: int | None) -> str:
    lines = [line for label, text in rows for line in wrap(plain(text), width, _label(label))]
    return "\n".join([title, *lines])


def _label(label: str) -> str:
    return "  " + (f"{plain(label):<{_COLUMN}} " if label else "- ")


def _rows(facts: dict[str, Fact]) -> Iterator[tuple[str, str]]:
    """A line a fact; one each for what is a list of things."""
    for name, fact in facts.items():
        label = _words(name)
        if fact.value is None:
            yield label, f"not available: {fact.why}"
        elif isinstance(fact.value, list) and any(isinstance(item, dict) for item in fact.value):
            yield from _things(name, [item for item in fact.value if isinstance(item, dict)])
        else:
            yield label, _shown(name, fact.value)


def _words(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ") if name.islower() else name


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{_words(key)} {_shown(key, item)}" for key, item in value.items() if item not in (None, ""))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_shown(name, item) for item in value) or "none"
    if name.endswith("_bytes") and isinstance(value, int) and value >= 0:
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _things(name: str, items: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    if name in ("links", "peer_access"):
        yield _words(name), _pairs(items, "link" if name == "links" else "access")
        return
    for item in items:
        number = item.get("index", item.get("gpu"))
        rest = {key: value for key, value in item.items() if key not in ("index", "gpu", "uuid", "driver")}
        label = "GPU" if name == "gpus" else "process on GPU" if name == "processes" else _words(name)
        yield f"{label} {'' if number is None else number}".strip(), _shown(name, rest)


def _pairs(items: Sequence[dict[str, Any]], key: str) -> str:
    """Pairs of GPUs by what connects them: "NV18: 0-1, 0-2; SYS: 1-2"."""
    by_kind: dict[str, list[str]] = {}
    for item in items:
        by_kind.setdefault(_shown(key, item.get(key)), []).append(f"{item.get('a')}-{item.get('b')}")
    return "; ".join(f"{kind}: {_first(pairs)}" for kind, pairs in by_kind.items())


def _first(pairs: Sequence[str]) -> str:
    rest = len(pairs) - _MOST_PAIRS
    return ", ".join(pairs[:_MOST_PAIRS]) + (f" and {rest} more" if rest > 0 else "")


def _noise_rows(found: Examination) -> Iterator[tuple[str, str]]:
    for noise in found.noise:
        yield noise.where, _noise_text(noise)
    if found.no_noise is not None:
        yield "measured", f"not available: {found.no_noise}" if not found.noise else f"in part: {found.no_noise}"


def _noise_text(noise: Noise) -> str:
    interval = ""
    if noise.interval is not None:
        interval = f" [{noise.interval[0]:.4f} to {noise.interval[1]:.4f}]"
    resolved = "not known" if noise.resolution is None else format_share(noise.resolution)
    return (
        f"smallest difference in throughput that {noise.window} rounds resolve: {resolved}; a workload of "
        f"{format_seconds(noise.unit_s)} against itself: {noise.ratio:.4f}{interval} in {noise.rounds} rounds; "
        f"slowest block {noise.drift:.2f} times the fastest"
    )
