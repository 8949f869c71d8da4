"""The predictor against published measurements: a row each, with errors. Pure; the figures are package data."""

from __future__ import annotations

from chunktune import __version__
from chunktune.validate import bigscience, memory, zero_bubble
from chunktune.validate.tables import Mark, Row, Table, Validation

__all__ = ["Mark", "Row", "Table", "Validation", "validate"]

_SOURCES = (zero_bubble, bigscience, memory)


def validate() -> Validation:
    """Every published figure that is carried along, predicted, with the pass marks."""
    return Validation(
        tool={"name": "chunktune", "version": __version__},
        tables=tuple(table for source in _SOURCES for table in source.tables()),
        marks=tuple(mark for source in _SOURCES for mark in source.marks()),
    )
