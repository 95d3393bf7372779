"""Training: the jitted step, the data, the loop, restarts.

In: a `Config`. Out: a run. Never knows: the command line.
"""
