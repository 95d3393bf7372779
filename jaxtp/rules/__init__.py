"""Evidence about parameters, and how it becomes a plan.

In: a tree of shapes, a mesh shape, perhaps the function. Out: a `Plan`. Never knows: arrays,
devices, training.
"""
