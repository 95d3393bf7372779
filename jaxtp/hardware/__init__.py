"""Data sheets: what a GPU, a link and a cluster can do.

In: a name such as `h100:4x8`. Out: FLOP/s, bytes, bytes a second. Never knows: plans, models,
devices that are present.
"""
