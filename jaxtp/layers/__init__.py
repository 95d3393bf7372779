"""How stacked layers run: one after the other, in pipeline stages, interleaved, recomputed.

In: one layer as a function, and its stacked parameters. Out: the same result under another
schedule. Never knows: model families.
"""
