"""Sequences that several devices share: how tokens are dealt, and attention over all of them.

In: global arrays of a model under a plan with a `cp` axis. Out: the same numbers as on one device.
The collectives are written here, permutes along cp, because no spec expresses them:
docs/long-sequences.md.
"""
