"""Random numbers of layers: drawn for all of the batch, as one device draws them, then shared out.

A layer on one replica has a part of the batch, and would draw that part's numbers from a key that
is meant for all. So they are drawn outside, by running the equations of the layer that need neither
its input nor its weights on the whole batch; and the layer is run with them in place of its own.
Neither pass keeps them: the backward pass draws them again.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from jaxtp.activations.ahead.weights import Replicas
from jaxtp.activations.by_name import in_force
from jaxtp.errors import NotInterleaved
from jaxtp.plan.trees import PyTree
from jaxtp.rules.jaxpr.primitives import PRIMITIVES
from jaxtp.rules.jaxpr.reentry import bind, read

DRAWS = "draws"
"""Where the context of a layer has the numbers that it does not draw itself."""

_UNKNOWN = object()
"""A value that depends on the layer's input or weights."""

_CALLS = ("jit", "pjit", "closed_call")
"""Equations that are their program and nothing else."""

Layer = Callable[[jax.Array, PyTree, Mapping[str, Any]], jax.Array]
"""`(x, parameters of one layer, context) -> x`."""

OnDraw = Callable[[JaxprEqn, list[Any]], Any]
"""`(equation, its operands) -> random bits`."""


def drawn_shapes(
    body: Layer, x: Any, w: PyTree, context: Mapping[str, Any]
) -> list[jax.ShapeDtypeStruct]:
    """What a layer draws: structs of random bits, in order.

    Args:
        body: The layer.
        x: Its input, an array or a struct; likewise what follows.
        w: Its parameters.
        context: What it takes beside them.

    Raises:
        NotInterleaved: TP073, if it draws where its numbers cannot be taken out.
    """
    found = _drawing(jax.make_jaxpr(body)(x, w, dict(context)).jaxpr)
    avals: list[Any] = [equation.outvars[0].aval for equation in found]
    return [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in avals]


def refuse_draws(body: Any, x: Any, w: PyTree, context: Mapping[str, Any]) -> None:
    """Refuses a layer that draws random numbers; arguments as for `drawn_shapes`.

    Raises:
        NotInterleaved: TP073, if it does.
    """
    if found := drawn_shapes(body, x, w, context):
        raise _refused(f"of shape {found[0].shape}")


@dataclasses.dataclass(frozen=True)
class Draw:
    """What one layer draws for all of the batch.

    Attributes:
        body: The layer.
        x: A struct of the residual stream, of all of the batch.
        w: Structs of one layer's parameters.
        dims: Of each draw the dim that counts sequences; None for what all replicas share.
        parts: Structs of what one replica gets of each, sequences in front.
        replicas: Who shares the batch.
    """

    body: Layer
    x: jax.ShapeDtypeStruct
    w: PyTree
    dims: tuple[int | None, ...]
    parts: list[jax.ShapeDtypeStruct]
    replicas: Replicas

    @classmethod
    def of(
        cls,
        body: Layer,
        x: jax.ShapeDtypeStruct,
        w: PyTree,
        context: Mapping[str, Any],
        parts: Sequence[jax.ShapeDtypeStruct],
        replicas: Replicas,
    ) -> "Draw":
        """From structs for all of the batch, and of what one replica draws by itself.

        Raises:
            NotInterleaved: TP073, if a draw grows with the batch in several dims, or in one that is
                not the batch.
        """
        whole = drawn_shapes(body, x, w, context)
        dims: list[int | None] = []
        moved: list[jax.ShapeDtypeStruct] = []
        for every, part in zip(whole, parts, strict=True):
            pairs = zip(every.shape, part.shape, strict=True)
            grows = [dim for dim, (all_, own) in enumerate(pairs) if all_ != own]
            if grows and (len(grows) > 1 or every.shape[grows[0]] != x.shape[0]):
                raise _refused(f"of shape {every.shape}, {part.shape} for one replica")
            dim = grows[0] if grows else None
            dims.append(dim)
            shape = list(part.shape)
            if dim is not None:
                shape.insert(0, shape.pop(dim))
            moved.append(jax.ShapeDtypeStruct(tuple(shape), part.dtype))
        return cls(body, x, w, tuple(dims), moved, replicas)

    @property
    def axes(self) -> list[int | None]:
        """Which draws differ between replicas: 0, else None."""
        return [None if dim is None else 0 for dim in self.dims]

    def __call__(self, context: Mapping[str, Any]) -> list[jax.Array]:
        """Random bits, `(R, ...)` with sequences in front, or (...) for all replicas.

        Args:
            context: One layer's, for all of the batch.
        """
        found: list[jax.Array] = []

        def keep(equation: JaxprEqn, operands: list[Any]) -> Any:
            if any(one is _UNKNOWN for one in operands):
                raise _refused("by a key that depends on what it computes")
            (bits,) = bind(equation, operands)
            found.append(bits)
            return bits

        with in_force(self.replicas.inner):
            closed = jax.make_jaxpr(self.body)(self.x, self.w, dict(context))
        unknown = [_UNKNOWN] * len(jax.tree.leaves((self.x, self.w)))
        _run(closed.jaxpr, closed.consts, [*unknown, *jax.tree.leaves(dict(context))], keep)
        return [
            bits if dim is None else self.replicas.split(jnp.moveaxis(bits, dim, 0))
            for bits, dim in zip(found, self.dims, strict=True)
        ]

    def taken(self, body: Layer) -> Layer:
        """The layer with what `context[DRAWS]` has in place of its own draws."""

        def layer(x: jax.Array, w: PyTree, context: Mapping[str, Any]) -> jax.Array:
            own = {name: one for name, one in context.items() if name != DRAWS}
            closed, shape = jax.make_jaxpr(body, return_shape=True)(x, w, own)
            given = iter(
                bits if dim is None else jnp.moveaxis(bits, 0, dim)
                for bits, dim in zip(context[DRAWS], self.dims, strict=True)
            )
            args = jax.tree.leaves((x, w, own))
            values = _run(closed.jaxpr, closed.consts, args, lambda *_: next(given))
            return jax.tree.unflatten(jax.tree.structure(shape), values)

        return layer


def _refused(how: str) -> NotInterleaved:
    return NotInterleaved(
        f"a layer draws random numbers {how}, and one replica alone would draw others",
        where="layers",
        fix='overlap="auto"',
    )


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], on_draw: OnDraw) -> list[Any]:
    """Runs a program as far as its values are known, and `on_draw` in place of what draws."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))

    for equation in jaxpr.eqns:
        operands = [read(atom, values) for atom in equation.invars]
        inner = list(jaxprs_in_params(equation.params))
        if _draws(equation):
            results = [on_draw(equation, operands)]
        elif any(_drawing(one) for one in inner):
            (closed,) = inner
            own = getattr(equation.params["jaxpr"], "consts", ())
            results = _run(closed, own, operands, on_draw)
        elif any(one is _UNKNOWN for one in operands):
            results = [_UNKNOWN] * len(equation.outvars)
        else:
            results = bind(equation, operands)
        values |= dict(zip(equation.outvars, results, strict=True))
    return [read(atom, values) for atom in jaxpr.outvars]


def _drawing(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The equations of a program that draw, in order.

    Raises:
        NotInterleaved: TP073, if one stands inside an equation that cannot be run in place, or
            makes more than bits of a key.
    """
    found: list[JaxprEqn] = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        own = (
            [equation]
            if _draws(equation)
            else [e for j in jaxprs_in_params(equation.params) for e in _drawing(j)]
        )
        if own and name not in (*_CALLS, "random_bits"):
            raise _refused(f"by {name}" if own[0] is equation else f"inside {name}")
        found += own
    return found


def _draws(equation: JaxprEqn) -> bool:
    row = PRIMITIVES.get(equation.primitive.name)
    return row is not None and row.draws
