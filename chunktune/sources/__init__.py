"""Who says what operations cost: the sources behind `chunktune.costs.CostSource`.

given.py      the spec: layers that sleep (family sleep), parts of known costs (family costs)
recorded.py   a record: its rehearsals, its layers, and overheads fitted from its measured steps
estimated.py  fake tensors for bytes, a device's datasheet for seconds; the only one that needs torch, once asked
figures.py    bytes between the sizes that were profiled; interpolation.py: seconds between those that were measured
seconds.py    what they share: parts under recomputation and under a split backward
"""
