"""Arrays onto the mesh: parameters, whole train states, batches.

In: a tree and a plan. Out: the tree as sharded arrays, or the shardings for `jit`. Never knows:
training, files.
"""
