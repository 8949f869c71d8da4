"""Predicting what nobody has run: the sweep's search over a simulated pipeline. No torch of its own.

setting.py      a spec made concrete: K, V, the layers of each part, what a rank may use
runner.py       the search's runner that simulates and counts bytes instead of measuring
engine.py       a spec and a source of costs to a record, with mode "predicted"
calibration.py  how far predictions are from what a record measured
grid.py         many settings, a row each, ranked
"""

from __future__ import annotations

from chunktune.whatif.engine import Engine
from chunktune.whatif.setting import Room, settle

__all__ = ["Engine", "Room", "settle"]
