"""Where activations lie on the mesh: by name in our models, by dataflow in anybody's.

In: a plan, and a function or the names that a model gives its values. Out: the same function with
sharding constraints. Never knows: training, files, model families.
"""
