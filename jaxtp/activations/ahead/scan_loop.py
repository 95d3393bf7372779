"""A scan of a model as a loop with weights one turn ahead: its operands cut, its results joined."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jaxtp.activations.ahead.passes import differentiable, is_float
from jaxtp.activations.ahead.scan_layer import Pieces, Pullback, ScanRun, Turn
from jaxtp.activations.ahead.weights import Replicas, Weights
from jaxtp.activations.batch_parts import along_batch
from jaxtp.activations.placer import FREE, Placer
from jaxtp.rules.jaxpr.rows import Lies


class LeftAlone(Exception):
    """Why a scan or a layer runs as it is."""


@dataclasses.dataclass(frozen=True)
class BatchCut:
    """How arrays are cut into what replicas have, and that into pieces.

    Attributes:
        replicas: Who shares the batch.
        rows: Of the whole batch.
        pieces: Of one replica's rows.
    """

    replicas: Replicas
    rows: int
    pieces: int

    def split(self, x: Any, lies: Lies | None) -> Pieces:
        """Pieces, (R, ...); an array without rows as it is."""
        if lies is None:
            return (x,)
        sizes, dim = self._sizes, lies.dim
        num = len(sizes)
        x = x.reshape(*x.shape[:dim], *sizes, self.pieces, -1, *x.shape[dim + 1 :])
        x = jnp.moveaxis(x, range(dim, dim + num), range(num))
        active, axes = self.replicas.active, self.replicas.axes
        x = active.place(x, *axes, *[FREE] * (x.ndim - num))
        take = jax.lax.index_in_dim
        pieces = [take(x, n, dim + num, keepdims=False) for n in range(self.pieces)]
        # What comes from a gathered table may have its features in front; XLA would then copy all
        # that the passes keep.
        return tuple(with_layout_constraint(one, Layout(tuple(range(one.ndim)))) for one in pieces)

    def join(self, pieces: Pieces, lies: Lies | None) -> Any:
        """Inverse of `split`."""
        if lies is None:
            return pieces[0]
        num, dim = len(self._sizes), lies.dim
        x = jnp.stack(pieces, dim + num)
        x = jnp.moveaxis(x, range(num), range(dim, dim + num))
        return x.reshape(*x.shape[:dim], -1, *x.shape[dim + num + 2 :])

    def struct(self, aval: Any, lies: Lies | None) -> tuple[Any, ...]:
        """Structs of the pieces on one replica."""
        shape = list(aval.shape)
        if lies is None:
            return (jax.ShapeDtypeStruct(aval.shape, aval.dtype),)
        shape[lies.dim] //= self.replicas.active.shape.ways(self.replicas.axes) * self.pieces
        return (jax.ShapeDtypeStruct(tuple(shape), aval.dtype),) * self.pieces

    @property
    def _sizes(self) -> list[int]:
        return [self.replicas.active.shape[axis] for axis in self.replicas.axes]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan that runs with weights one turn ahead.

    Attributes:
        cut: How arrays with rows are cut.
        turn: Its body on one replica.
        weights: How rows with gradients come and gradients go.
        num_layers: Turns.
        lies: Where the batch lies in its operands: constants, what is carried, rows.
        results: Where it lies in its body's results.
        first: How many operands are no rows.
    """

    cut: BatchCut
    turn: Turn
    weights: Weights
    num_layers: int
    lies: Sequence[Lies | None]
    results: Sequence[Lies | None]
    first: int

    def __call__(self, placer: Placer, operands: Sequence[Any]) -> list[Any]:
        """The results of the scan for its operands, on all of the batch."""
        num_carry = self.turn.num_carry
        # A literal is a number with a type.
        operands = [
            x if isinstance(x, jax.Array) else jnp.asarray(x, getattr(x, "dtype", None))
            for x in operands
        ]
        pieces = [
            self.cut.split(x, lies)
            for x, lies in zip(operands[: self.first], self.lies, strict=False)
        ]
        context, x = pieces[:-num_carry], pieces[-num_carry:]
        params, others = dict[str, Any](), dict[str, Any]()
        for n, row in enumerate(operands[self.first :]):
            (params if str(n) in self.weights.by_path else others)[str(n)] = row
        run = self.run(operands, params, others)
        x, ys = differentiable(run)(params, x, context, others)
        joined = [self.cut.join(*pair) for pair in zip(x, self.results, strict=False)]
        stacked = zip(ys, self.results[num_carry:], strict=True)
        joined += [
            jax.vmap(lambda *p, at=lies: self.cut.join(p, at))(*one) for one, lies in stacked
        ]
        return [
            out if lies is None else along_batch(placer, out, lies.dim + (n >= num_carry))
            for n, (out, lies) in enumerate(zip(joined, self.results, strict=True))
        ]

    def run(
        self, operands: Sequence[Any], params: Mapping[str, Any], others: Mapping[str, Any]
    ) -> ScanRun:
        """Its turns for operands of these shapes: constants, what is carried, and stacked rows."""
        num_carry, num = self.turn.num_carry, self.first
        pairs = list(zip(operands[:num], self.lies[:num], strict=True))
        structs = [self.cut.struct(x, lies) for x, lies in pairs]
        in_rows = [
            tuple(lies is not None for _ in one)
            for one, (_, lies) in zip(structs, pairs, strict=True)
        ]
        x, context = structs[-num_carry:], structs[:-num_carry]
        row = {n: jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for n, w in others.items()}
        w = {
            n: jax.ShapeDtypeStruct(w.shape[1:], self.weights.by_path[n].dtype)
            for n, w in params.items()
        }
        flags = [
            *jax.tree.leaves(in_rows[-num_carry:]),
            *[False] * len(w),
            *jax.tree.leaves(in_rows[:-num_carry]),
            *[False] * len(row),
        ]
        axes = jax.tree.map(lambda lies: 0 if lies else None, in_rows)
        return ScanRun(
            turn=self.turn,
            weights=self.weights,
            num_layers=self.num_layers,
            pullback=Pullback.of(self.turn, x, w, (context, row), flags),
            x=x,
            axes=(axes[-num_carry:], axes[:-num_carry], dict.fromkeys(row)),
            shared=[
                not lies
                for one, lies in zip(context, in_rows, strict=False)
                for part, lies in zip(one, lies, strict=True)
                if is_float(part)
            ],
        )
