"""Layers whose weights come one layer ahead, and whose gradients leave one layer behind.

`weights` says how a layer's weights come to the devices and its gradients leave them, `passes`
writes the loop over layers and its backward pass, and `scans` finds such loops in anybody's model.
All of it is ordinary single-program JAX: XLA still writes every collective.
"""
