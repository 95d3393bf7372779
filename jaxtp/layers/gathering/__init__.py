"""Hiding what the batch axes move: each layer's weights are gathered one layer ahead.

`weights` says how a layer's weights come to the devices and its gradients leave them; `one_ahead`
runs plain layers so. All of it is ordinary single-program JAX: XLA still writes every collective.
"""

from jaxtp.layers.gathering.one_ahead import run_ahead

__all__ = ["run_ahead"]
