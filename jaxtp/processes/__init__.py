"""Many processes: how each starts, whether all run the same, and how they end when one is lost.

In: arguments, the environment, the text of a failure. Out: a running `jax.distributed`, or a coded
error. Never knows: plans.
"""
