"""Hiding what the batch axes move: each layer's weights are gathered one layer ahead.

`weights` says how a layer's weights come to the devices and its gradients leave them; `one_ahead`
runs plain layers so, and `once` gathers those of a pipeline stage in front of its first tick. All
of it is ordinary single-program JAX: XLA still writes every collective.
"""

from jaxtp.layers.gathering.draws import refuse_draws
from jaxtp.layers.gathering.once import Once, once_of, room_in, with_gradients
from jaxtp.layers.gathering.one_ahead import run_ahead
from jaxtp.layers.gathering.one_layer import layer_structs, product_types

__all__ = [
    "Once",
    "layer_structs",
    "once_of",
    "product_types",
    "refuse_draws",
    "room_in",
    "run_ahead",
    "with_gradients",
]
