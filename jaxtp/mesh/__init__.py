"""Mesh axes: names, sizes and the construction of meshes.

In: sizes, devices. Out: a `MeshShape` as data, a jax mesh of Auto axes. Never knows: plans, data
sheets of GPUs.
"""
