"""`python -m chunktune.doctor.torch_child`: what torch knows, a JSON line a fact, each written at once.

A process of its own, so that a driver that hangs or aborts takes nothing else with it; what was said before stays.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any


def main() -> None:
    """Say every fact, the safe ones first."""
    print(json.dumps({"asked": "import"}), flush=True)
    try:
        import torch
    except BaseException as error:
        tell("version", why=_reason(error))
        return
    say("version", lambda: torch.__version__)
    say("cuda_build", lambda: torch.version.cuda or "none")
    say("hip_build", lambda: torch.version.hip or "none")
    say("compiled_for", lambda: torch.cuda.get_arch_list() or "no GPU")
    say("backends", lambda: _backends(torch))
    say("nccl", lambda: _nccl(torch))
    say("threads", torch.get_num_threads)
    say("cuda_available", lambda: _available(torch))
    count = say("gpu_count", torch.cuda.device_count) or 0
    for index in range(count):
        say(f"gpu {index}", partial(_gpu, torch, index))
    if count > 1:
        say("peer_access", lambda: _peers(torch, count))


def say(name: str, reader: Callable[[], Any]) -> Any:
    """Write one fact as a line, its value or why there is none; the value is the result."""
    # Said before it is asked: where the process ends here, this is what ended it.
    print(json.dumps({"asked": name}), flush=True)
    try:
        value = reader()
    except BaseException as error:
        return tell(name, why=_reason(error))
    tell(name, value=value)
    return value


def tell(name: str, **answer: Any) -> None:
    """Write one line."""
    print(json.dumps({"name": name, **answer}), flush=True)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0][:300]


def _backends(torch: Any) -> list[str]:
    distributed = torch.distributed
    if not distributed.is_available():
        return []
    known = {"gloo": distributed.is_gloo_available, "nccl": distributed.is_nccl_available}
    return [name for name, is_there in known.items() if is_there()]


def _nccl(torch: Any) -> str:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_nccl_available()):
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _available(torch: Any) -> bool:
    """Whether CUDA works. Raises what stands in its way, which `is_available` keeps to itself."""
    if torch.cuda.is_available():
        return True
    if torch.version.cuda or torch.version.hip:
        torch.cuda.init()
    return False


def _gpu(torch: Any, index: int) -> dict[str, Any]:
    """One visible GPU, after an operation on it. `free_bytes`: with this process's own context on it."""
    properties = torch.cuda.get_device_properties(index)
    values = torch.ones(256, device=f"cuda:{index}") + 1
    torch.cuda.synchronize(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": total,
        "free_bytes": free,
        "multiprocessors": properties.multi_processor_count,
        "works": bool((values == 2).all().item()),
        "uuid": str(getattr(properties, "uuid", "")),
    }


def _peers(torch: Any, count: int) -> list[dict[str, Any]]:
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    return [{"a": a, "b": b, "access": bool(torch.cuda.can_device_access_peer(a, b))} for a, b in pairs]


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # torch takes seconds to be torn down, for nothing.
    os._exit(0)
