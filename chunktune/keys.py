"""What every key of a spec means, in a line: comments of `chunktune init`, descriptions in the JSON Schema. Pure."""

from __future__ import annotations

from collections.abc import Mapping

FREE_KEYS = ("sweep.budget", "sweep.trial_timeout")
"""Keys that say how long to go on, not what is measured: they may change, and are no difference."""

TABLES: Mapping[str, str] = {
    "model": "what is trained; the other keys belong to the family",
    "pipeline": "how the model is spread over the ranks",
    "batch": "what is held fixed as M changes, and which M may be tried",
    "training": "the step as you train",
    "device": "what a rank runs on, and the memory it may use",
    "hardware": "the device that `whatif` estimates for; a sweep does not read it",
    "sweep": "how M is chosen",
}

FAMILY_TEXTS: Mapping[str, str] = {
    "transformer": "a decoder-only language model",
    "mlp": "a multi-layer perceptron",
    "sleep": "layers that only sleep, to see what chunktune does without a GPU: the best M is known beforehand",
    "costs": "times known from elsewhere, for `whatif` alone",
    "python": "your own model",
}

_OF_MODELS: Mapping[str, Mapping[str, str]] = {
    "transformer": {
        "layers": "blocks; embedding, final norm and head are layers of their own",
        "hidden": "width of a block; a multiple of heads",
        "heads": "attention heads; divides hidden",
        "vocab": "tokens in the vocabulary",
        "sequence": "tokens a sample",
    },
    "mlp": {
        "layers": "linear layers",
        "hidden": "width of a layer",
        "features": "inputs; hidden where absent",
        "classes": "outputs; hidden where absent",
    },
    "sleep": {
        "layers": "layers, each with its forward and backward",
        "seconds_per_chunk": "a forward of b samples sleeps seconds_per_chunk + b seconds_per_sample",
        "seconds_per_sample": "the gradients of inputs and of weights sleep once that each",
        "bytes_per_sample": 'kept from forward to backward; bytes, or a text such as "16MiB"',
        "slowdown": "one factor a layer, such as [1, 1, 2, 1], or empty",
        "width": "numbers in a boundary tensor, a sample",
    },
    "costs": {
        "micro_batch": "samples in the chunk that the times are of",
        "forward_s": "seconds of a forward; one value, or a list with one a part",
        "backward_s": "seconds of a backward; with weight_s of the gradient of the inputs alone",
        "weight_s": "seconds of the gradient of the weights",
        "communication_s": "seconds of a boundary tensor from part to part, and of its gradient back",
        "update_s": "seconds of the optimizer",
        "step_constant_s": "seconds that a step takes besides",
        "static_bytes": "weights, gradients and optimizer state of a part; without bytes memory is left open",
        "kept_bytes": "what a chunk keeps from forward to backward, beside the boundary tensors",
        "boundary_bytes": "the tensor that a part hands on",
        "workspace_bytes": "what an operation takes while it runs",
    },
    "python": {
        "factory": "module:function that returns layers, sample_batch and loss",
        "arguments": "handed to the factory",
    },
}

KEYS: Mapping[str, str] = {
    "pipeline.stages": "K, ranks of one process each; auto: one for each visible GPU",
    "pipeline.schedule": "the order of forwards and backwards",
    "pipeline.virtual_stages": "V, parts of the model a rank; auto: 1, or 2 for the looped and V schedules",
    "pipeline.recompute": "full computes activations again in the backward, around every layer",
    "pipeline.partition": "how layers are cut into K V parts; or their counts, [4, 4, ...]",
    "batch.mini_batch": "N, samples a step, held fixed: a chunk holds N / M; or give micro_batch",
    "batch.micro_batch": "b, samples a chunk, held fixed: a step takes M b; or give mini_batch",
    "batch.chunks": 'the M that may be tried: auto, values such as [1, 2, 4], or a range such as "1:64"',
    "training.optimizer": "what updates the weights",
    "training.precision": "bfloat16 is autocast",
    "training.seed": "of weights and batches, the same for every M",
    "device.kind": "auto takes CUDA where there is a GPU, else the CPU",
    "device.memory": "what a rank may use, such as \"12GiB\"; auto: the GPU's, or this machine's divided by the ranks",
    "device.headroom": "share of the memory kept free; 0.05 or 5%",
    "device.reserve": "memory that your trainer holds besides",
    "hardware.name": "the device, h100-80gb where none is named, or a name of your own with the five figures below",
    "hardware.memory": 'its memory, such as "80GiB"',
    "hardware.flops": "dense 16-bit operations a second, such as 989e12",
    "hardware.flops_float32": "32-bit operations a second",
    "hardware.bandwidth": "bytes a second of its memory",
    "hardware.link_bandwidth": "bytes a second to a neighbour, one way",
    "hardware.link_latency": "seconds of a transfer however small",
    "hardware.launch_s": "seconds of an operation however small",
    "hardware.efficiency": "share of these peaks that is reached, above 0",
    "sweep.criterion": "what must not fall: throughput of the whole step, or of the slowest stage while busy",
    "sweep.tolerance": "a loss of throughput that does not count; 0.01 or 1%, below 50%",
    "sweep.patience": "values of M tried past a fall",
    "sweep.budget": "time for all trials: ms, s, m or h",
    "sweep.trial_timeout": "when a trial counts as hung, such as 90s; auto: from the trials before",
}
"""Dotted key -> meaning, of every table but [model]."""


def meaning(section: str, key: str, family: str | None = None) -> str:
    """What a key of a table means; of [model] for a family. Raises KeyError for a key that no table has."""
    if section == "model":
        return _OF_MODELS[str(family)][key] if key != "family" else TABLES["model"]
    return KEYS[f"{section}.{key}"]
