"""The GPU compiler without a GPU, and compiled programs as data.

In: a function and a target such as `h100:4x8`. Out: a report: memory, collectives, overlap,
modelled time. Never knows: model families, training.
"""
