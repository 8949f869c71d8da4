"""The words of a program: what a rank computes, posts and waits for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transfer:
    """A boundary tensor on its way between two ranks: `kind` F (activation) or B (gradient), into `part`."""

    kind: str
    part: int
    chunk: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Compute:
    """F (forward), B (whole backward), I (input gradient) or W (weight gradient) of one micro-batch in one part."""

    kind: str
    part: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Post:
    """Transfers handed to the back end together; the rank goes on at once."""

    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """The rank goes on when these have come through."""

    transfers: tuple[Transfer, ...]


Step = Compute | Post | Wait

Group = tuple[Compute, ...]
"""Computes that torch places as one: two under DualPipeV's overlap, else one. None: a slot with no compute in it."""


@dataclass(frozen=True, slots=True)
class Size:
    """K ranks (`stages`), M micro-batches (`chunks`), V parts a rank (`virtual_stages`)."""

    stages: int
    chunks: int
    virtual_stages: int

    @property
    def parts(self) -> int:
        """Parts of the model, K V."""
        return self.stages * self.virtual_stages
