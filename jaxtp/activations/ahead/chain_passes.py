"""Layers without a loop, each with the next one's weights on their way, as `passes` has loops.

The layers may differ. They stand in the program one after the other, so that each keeps what its
own backward pass needs, and gradients go where its parameters are. The last one's weights, with
which the backward pass begins, are kept too.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtp.activations.ahead.passes import barrier, is_float
from jaxtp.activations.ahead.scan_layer import Pieces, ScanRun
from jaxtp.plan.trees import PyTree

Context = Sequence[Pieces]


@dataclasses.dataclass(frozen=True)
class ChainRun:
    """Layers that hand on one array, all arrays in pieces, (R, ...) or the same for all replicas.

    Attributes:
        layers: They, one turn each.
        picks: Of each layer which arrays of the context it takes.
        shared: Of each array of the context whether all replicas have the same.
    """

    layers: Sequence[ScanRun]
    picks: Sequence[Sequence[int]]
    shared: Sequence[bool]

    def __call__(self, params: list[PyTree], x: Pieces, context: list[Pieces]) -> Pieces:
        """What the last layer hands on; has its own backward pass.

        Args:
            params: Of each layer.
            x: What the first layer takes.
            context: What layers take beside that.
        """

        @jax.custom_vjp
        def whole(params: list[PyTree], x: Pieces, context: list[Pieces]) -> Pieces:
            return self._forward(params, x, context, keep=False)[0]

        def forward(params: list[PyTree], x: Pieces, context: list[Pieces]) -> Any:
            out, *saved = self._forward(params, x, context, keep=True)
            return out, (params, context, *saved)

        def backward(saved: Any, d_out: Pieces) -> Any:
            params, context, kept, w = saved
            return self._backward(params, context, kept, w, d_out)

        whole.defvjp(forward, backward)
        return whole(params, x, context)

    def _forward(
        self, params: Sequence[PyTree], x: Pieces, context: Context, *, keep: bool
    ) -> tuple[Pieces, list[Any], PyTree]:
        """What the last layer hands on, what is kept of each if `keep`, the last one's weights."""
        all_kept: list[Any] = []
        following = self._gather(0, self._shards(0, params))
        w: PyTree = ()
        for n, layer in enumerate(self.layers):
            # Between the barriers stand a layer, and gathers that wait for nothing else. The second
            # half's last sum is not waited for: it moves beside the first half of the next layer.
            first, w, shards = barrier((x[:1], following, self._shards(n + 1, params)))
            x = (*first, *x[1:])
            following = self._gather(n + 1, shards)
            one = layer.forward if keep else layer.value
            (x,), _, kept = one([x], w, self._around(n, context))
            all_kept.append(kept)
            first, following = barrier((x[:1], following))
            x = (*first, *x[1:])
        return x, all_kept, w

    def _backward(
        self,
        params: Sequence[PyTree],
        context: Context,
        all_kept: Sequence[Any],
        w: PyTree,
        d_out: Pieces,
    ) -> tuple[list[PyTree], Pieces, list[Any]]:
        """Cotangents of the parameters, of what the first layer takes, and of the context."""
        d_x, partial = list(d_out), ()
        reduced: list[PyTree] = []  # last layer first
        sums: dict[tuple[int, int], jax.Array] = {}
        last = len(self.layers) - 1
        for n in range(last, -1, -1):
            alive = d_x[-1:], w, partial, self._shards(n - 1, params)
            d_x[-1:], w, partial, shards = barrier(alive)
            preceding = self._gather(n - 1, shards)
            behind = self.layers[n + 1].weights.reduce(partial) if n < last else ()
            around = self._around(n, context)
            d_x, partial, found = self.layers[n].backward(all_kept[n], w, around, d_x, [])
            self._add(sums, n, context, found)
            d_x[-1:], w, partial, behind = barrier((d_x[-1:], preceding, partial, behind))
            reduced.append(behind)
        reduced.append(self.layers[0].weights.reduce(partial))
        gradients = [
            layer.weights.finished(g, w)
            for layer, g, w in zip(self.layers, reduced[:0:-1], params, strict=True)
        ]
        return gradients, tuple(d_x), [self._of_context(sums, *one) for one in enumerate(context)]

    def _shards(self, n: int, params: Sequence[PyTree]) -> PyTree:
        """One layer's weights as they are stored; nothing of layers that are none."""
        return self.layers[n].weights.stored(params[n]) if 0 <= n < len(self.layers) else ()

    def _gather(self, n: int, shards: PyTree) -> PyTree:
        return self.layers[n].weights.gather(shards) if 0 <= n < len(self.layers) else ()

    def _around(self, n: int, context: Context) -> Any:
        return self.layers[n].around([context[k] for k in self.picks[n]], {})

    def _add(
        self, sums: dict[tuple[int, int], jax.Array], n: int, context: Context, found: Sequence[Any]
    ) -> None:
        """Adds one layer's cotangents of the context to those of the layers behind it."""
        floats = [k for k in self.picks[n] if is_float(context[k][0])]
        places = [(k, piece) for k in floats for piece in range(len(context[k]))]
        for place, g in zip(places, found, strict=True):
            sums[place] = jnp.add(sums[place], g) if place in sums else g

    def _of_context(
        self, sums: dict[tuple[int, int], jax.Array], k: int, pieces: Pieces
    ) -> tuple[Any, ...]:
        """Cotangents of one array's pieces, over replicas where all have the same."""
        found = [sums.get((k, piece)) for piece in range(len(pieces))]
        if not self.shared[k]:
            return tuple(found)
        axes = tuple(range(len(self.layers[0].weights.replicas.axes)))
        return tuple(g if g is None else lax.reduce_sum(g, axes) for g in found)
