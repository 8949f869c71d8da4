"""Public figures of devices: what an estimate of time rests on where nothing was measured. Pure.

All are peaks as their vendor prints them, dense (NVIDIA's tables print the doubled figure of 2:4 sparsity, which
no dense training step reaches). `memory_bytes` takes the GB in a device's name as GiB, as the memory chips are: an
A100 40 GB reports 39.5 GiB, an H200 141 GB 139.8 GiB. What ECC takes of GDDR6 is off. `link_bytes_per_s` is one
direction between two neighbours: half of NVLink's total, one Infinity Fabric link, PCIe where there is neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

GIB = 2**30
DEFAULT = "h100-80gb"
LINK_LATENCY_S = 5e-6
LAUNCH_S = 2e-6
"""Below what NCCL and eager kernels take, so that an estimate stays a lower bound; of no datasheet."""


@dataclass(frozen=True)
class Datasheet:
    """One device. `flops_per_s`: dense 16-bit (bfloat16 where it has it), `flops_float32_per_s`: without TF32."""

    memory_bytes: int
    flops_per_s: float
    flops_float32_per_s: float
    bandwidth_bytes_per_s: float
    link_bytes_per_s: float
    source: str


@dataclass(frozen=True)
class Hardware:
    """A device to estimate for.

    `efficiency`: share of the peaks that is reached. `launch_s`: seconds of an operation however small.
    `overridden`: the keys of [hardware] that the spec gives itself.
    """

    name: str
    sheet: Datasheet
    link_latency_s: float
    launch_s: float
    efficiency: float
    overridden: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name, and what of it is the spec's own."""
        return f"{self.name} with the spec's {', '.join(self.overridden)}" if self.overridden else self.name

    def peak_flops_per_s(self, precision: str) -> float:
        """Floating-point operations a second that are reached at this `training.precision`."""
        peak = self.sheet.flops_per_s if precision == "bfloat16" else self.sheet.flops_float32_per_s
        return peak * self.efficiency

    def operation_s(self, flops: float, moved_bytes: float, precision: str) -> float:
        """One operation under the roofline: the slower of arithmetic and memory, and the launch.

        Source: Williams, Waterman and Patterson 2009, Roofline, doi 10.1145/1498765.1498785.
        """
        arithmetic_s = flops / self.peak_flops_per_s(precision)
        return max(arithmetic_s, self.memory_s(moved_bytes)) + self.launch_s

    def memory_s(self, moved_bytes: float) -> float:
        """Seconds to move bytes between the device and its memory."""
        return moved_bytes / (self.sheet.bandwidth_bytes_per_s * self.efficiency)

    def transfer_s(self, size_bytes: float) -> float:
        """Seconds of a tensor between two neighbours."""
        return self.link_latency_s + size_bytes / self.sheet.link_bytes_per_s


DATASHEETS: dict[str, Datasheet] = {
    "v100-32gb": Datasheet(
        32 * GIB, 125e12, 15.7e12, 900e9, 150e9, "NVIDIA V100 Tensor Core GPU Datasheet, V100 SXM2 (16-bit: float16)"
    ),
    "a100-40gb": Datasheet(
        40 * GIB, 312e12, 19.5e12, 1555e9, 300e9, "NVIDIA A100 Tensor Core GPU Datasheet, A100 40GB SXM"
    ),
    "a100-80gb": Datasheet(
        80 * GIB, 312e12, 19.5e12, 2039e9, 300e9, "NVIDIA A100 Tensor Core GPU Datasheet, A100 80GB SXM"
    ),
    "h100-80gb": Datasheet(80 * GIB, 989e12, 67e12, 3.35e12, 450e9, "NVIDIA H100 Tensor Core GPU Datasheet, H100 SXM"),
    "h200-141gb": Datasheet(141 * GIB, 989e12, 67e12, 4.8e12, 450e9, "NVIDIA H200 Tensor Core GPU Datasheet, H200 SXM"),
    "b200-180gb": Datasheet(
        180 * GIB,
        2250e12,
        80e12,
        8e12,
        900e9,
        "NVIDIA Blackwell Architecture Technical Brief, HGX B200 (memory: NVIDIA DGX B200 Datasheet, 1,440 GB over 8)",
    ),
    "l40s-48gb": Datasheet(
        45 * GIB, 362.05e12, 91.6e12, 864e9, 32e9, "NVIDIA L40S Datasheet (1/16 of the memory is ECC's; PCIe Gen4 x16)"
    ),
    "rtx-4090-24gb": Datasheet(
        24 * GIB,
        165.2e12,
        82.6e12,
        1008e9,
        32e9,
        "NVIDIA Ada GPU Architecture whitepaper, GeForce RTX 4090 (16-bit with float32 sums; PCIe Gen4 x16)",
    ),
    "mi300x-192gb": Datasheet(
        192 * GIB,
        1307.4e12,
        163.4e12,
        5.3e12,
        64e9,
        "AMD Instinct MI300X Accelerator Data Sheet (one Infinity Fabric link, 128 GB/s both ways)",
    ),
}

FIGURES: dict[str, str] = {
    "memory": "memory_bytes",
    "flops": "flops_per_s",
    "flops_float32": "flops_float32_per_s",
    "bandwidth": "bandwidth_bytes_per_s",
    "link_bandwidth": "link_bytes_per_s",
}
"""Key of [hardware] -> the figure that it overrides; a device outside the table needs all of them."""


def missing_figures(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys that a [hardware] table still needs; none where its device, or the default, is in the table.

    `settings`: key -> value, null or absent where not given.
    """
    if settings.get("name") is None or settings["name"] in DATASHEETS:
        return ()
    return tuple(key for key in FIGURES if settings.get(key) is None)


def hardware(settings: Mapping[str, Any]) -> Hardware:
    """The device that a valid [hardware] table names: h100-80gb where it names none, with the given keys over it.

    `settings`: `spec.hardware.model_dump()`. Raises ValueError where figures are missing.
    """
    missing = missing_figures(settings)
    if missing:
        raise ValueError(f"hardware {settings['name']!r} is not in the table and has no {', '.join(missing)}")
    given = {key: settings[key] for key in FIGURES if settings.get(key) is not None}
    own = len(given) == len(FIGURES)
    name = settings.get("name") or ("hardware of the spec" if own else DEFAULT)
    figures: dict[str, Any] = {FIGURES[key]: value for key, value in given.items()}
    if own:
        figures["source"] = "the spec"
    sheet = replace(DATASHEETS.get(name, DATASHEETS[DEFAULT]), **figures)
    return Hardware(
        name=name,
        sheet=sheet,
        link_latency_s=_given(settings, "link_latency", LINK_LATENCY_S),
        launch_s=_given(settings, "launch_s", LAUNCH_S),
        efficiency=_given(settings, "efficiency", 1.0),
        overridden=() if own else tuple(given),
    )


def _given(settings: Mapping[str, Any], key: str, default: float) -> float:
    value = settings.get(key)
    return default if value is None else float(value)
