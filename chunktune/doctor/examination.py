"""The whole examination: facts, noise, and the warnings that follow."""

from __future__ import annotations

from collections.abc import Callable

from chunktune import __version__
from chunktune.doctor.facts import Fact
from chunktune.doctor.host import cores_usable, host_facts
from chunktune.doctor.noise import Noise, measure
from chunktune.doctor.nvidia import nvidia_facts
from chunktune.doctor.torch_facts import torch_facts
from chunktune.doctor.warnings import warnings_of
from chunktune.results import Frozen

Say = Callable[[str], None]


class Examination(Frozen):
    """What was found. `noise`: alone, then on every core at once; `no_noise`: why there is none."""

    tool: dict[str, str]
    facts: dict[str, dict[str, Fact]]
    noise: tuple[Noise, ...] = ()
    no_noise: str | None = None
    warnings: tuple[str, ...] = ()


def examine(noise_s: float | None, say: Say) -> Examination:
    """Look at this machine; `noise_s`: seconds to measure its noise for, null for not at all."""
    facts = host_facts()
    say("Asking the NVIDIA driver ...")
    facts["nvidia"] = nvidia_facts()  # before torch, whose own memory would count as used
    say("Asking torch ...")
    facts["torch"] = torch_facts()
    noise, no_noise = _noise(facts, noise_s, say)
    warnings = warnings_of(facts, noise)
    tool = {"name": "chunktune", "version": __version__}
    return Examination(tool=tool, facts=facts, noise=noise, no_noise=no_noise, warnings=warnings)


def _noise(facts: dict[str, dict[str, Fact]], noise_s: float | None, say: Say) -> tuple[tuple[Noise, ...], str | None]:
    """Half of the time one process alone, half of it one on every core."""
    if noise_s is None:
        return (), "not asked for"
    cores = max(1, int(cores_usable(facts) or 1))
    say(f"Measuring noise for {noise_s:g} s ...")
    counts = [1] if cores == 1 else [1, cores]
    found = [measure(noise_s / len(counts), count) for count in counts]
    trouble = next((one for one in found if isinstance(one, str)), None)
    return tuple(one for one in found if isinstance(one, Noise)), trouble
