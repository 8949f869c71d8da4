"""What this machine is, what stands in the way of a sweep, and how well it can tell two speeds apart. No torch here:
what torch knows is asked in a process of its own, since a broken driver may hang or abort it.
"""
