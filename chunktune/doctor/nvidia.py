"""What `nvidia-smi` says: driver, every GPU with its memory in use, whose that is, and what connects them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from chunktune.doctor.child import Ended, last_line, run
from chunktune.doctor.facts import Fact, known, unknown

MIB = 2**20
TIMEOUT_S = 20.0
GPU_FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used", "compute_cap")
PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU(\d+)")


def nvidia_facts(timeout_s: float = TIMEOUT_S) -> dict[str, Fact]:
    """driver, gpus, processes and links; each not available where there is no driver."""
    # Old drivers know no compute_cap, and refuse the whole question for it.
    fields: tuple[str, ...] = GPU_FIELDS
    listed = run(_query("gpu", fields), timeout_s)
    if listed.trouble is not None and "not a valid field" in f"{listed.trouble}{listed.stdout}":
        fields = GPU_FIELDS[:-1]
        listed = run(_query("gpu", fields), timeout_s)
    if listed.trouble is not None:
        return dict.fromkeys(("driver", "gpus", "processes", "links"), unknown(_why(listed)))
    gpus = parse_gpus(listed.stdout, fields)
    return {
        "driver": known(next((gpu["driver"] for gpu in gpus), None)),
        "gpus": known(gpus),
        "processes": _fact(run(_query("compute-apps", PROCESS_FIELDS), timeout_s), gpus, parse_processes),
        "links": _links(gpus, timeout_s),
    }


def parse_gpus(text: str, fields: Sequence[str] = GPU_FIELDS) -> list[dict[str, Any]]:
    """The GPUs of a query's CSV, in bytes."""
    return [_gpu(dict(zip(fields, row, strict=False))) for row in _rows(text)]


def _gpu(row: dict[str, str]) -> dict[str, Any]:
    return {
        "index": _whole(row.get("index")),
        "uuid": row.get("uuid"),
        "name": row.get("name"),
        "driver": row.get("driver_version"),
        "memory_bytes": _bytes(row.get("memory.total")),
        "used_bytes": _bytes(row.get("memory.used")),
        "compute_capability": row.get("compute_cap"),
    }


def parse_processes(text: str, gpus: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The processes that hold memory, by the index of their GPU; those of other containers are not listed."""
    by_uuid = {gpu["uuid"]: gpu["index"] for gpu in gpus}
    named = (dict(zip(PROCESS_FIELDS, row, strict=False)) for row in _rows(text))
    return [
        {
            "gpu": by_uuid.get(row.get("gpu_uuid")),
            "pid": _whole(row.get("pid")),
            "name": row.get("process_name"),
            "used_bytes": _bytes(row.get("used_memory")),
        }
        for row in named
    ]


def parse_links(text: str) -> list[dict[str, Any]]:
    """The pairs of GPUs in the matrix of `nvidia-smi topo -m`, with what connects them.

    `link`: NV<n>, n NVLinks; PIX, PXB, a PCIe switch or several; PHB, a host bridge; NODE, SYS, across bridges or
    sockets.
    """
    lines = [_ESCAPE.sub("", line).split() for line in text.splitlines()]
    columns: list[int] = []
    pairs = []
    for words in lines:
        if not columns:
            columns = [int(found[1]) for found in map(_GPU.fullmatch, words) if found]
            continue
        row = _GPU.fullmatch(words[0]) if words else None
        if row is None:
            continue
        cells = zip(columns, words[1:], strict=False)
        pairs += [{"a": int(row[1]), "b": b, "link": link} for b, link in cells if int(row[1]) < b]
    return pairs


def _links(gpus: Sequence[dict[str, Any]], timeout_s: float) -> Fact:
    if len(gpus) < 2:
        return unknown("there is one GPU" if gpus else "there is no GPU")
    ended = run(("nvidia-smi", "topo", "-m"), timeout_s)
    return unknown(_why(ended)) if ended.trouble is not None else known(parse_links(ended.stdout))


def _fact(ended: Ended, gpus: Sequence[dict[str, Any]], parse: Any) -> Fact:
    return unknown(_why(ended)) if ended.trouble is not None else known(parse(ended.stdout, gpus))


def _why(ended: Ended) -> str:
    """What went wrong; nvidia-smi complains on stdout."""
    said = last_line(ended.stdout)
    return f"{ended.trouble}: {said}" if said and ":" not in str(ended.trouble) else str(ended.trouble)


def _query(what: str, fields: Sequence[str]) -> tuple[str, ...]:
    return ("nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits")


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(", ")]
        if len(cells) > 1:
            yield cells


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None


def _bytes(text: str | None) -> int | None:
    """MiB as bytes; "[N/A]" and the like are null."""
    mebibytes = _whole(text)
    return None if mebibytes is None else mebibytes * MIB
