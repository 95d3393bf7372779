"""A block as partial results, one for each tensor-parallel device, that are summed when we say so.

Left alone, XLA sums a row product over the devices where it stands, and what stands around it is
then all that can hide the all-reduce. Here the tensor axes are a dim of the arrays: weights are
reshaped so that each device's part is one entry, `jax.vmap` runs the block on every entry, and the
sum over that dim is an operation of its own. Its local size is one, so products and kernels are
those of the ordinary program.

Shape suffixes as in `jaxtp.models.layers`, and W ways: the devices along the tensor axes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxtp.activations.ahead.weights import Replicas, decision_of
from jaxtp.activations.by_name import ActivePlan, in_force
from jaxtp.errors import NotInterleaved, join
from jaxtp.plan.decisions import ParamDecision
from jaxtp.plan.trees import PyTree, flatten, leaves, map_with_path
from jaxtp.rules.roles import Role

CUT = (Role.COLUMN, Role.COLUMN_BIAS, Role.ROW)
ON_ALL = (Role.NORM, Role.REPLICATED)

Context = Mapping[str, jax.Array | None]
"""Arrays `(batch or 1, ...)` that blocks take beside their input, by name; no gradients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualBranch:
    """`x + block(norm(x))`, one of the residual branches of a layer.

    Attributes:
        name: Path of the block from the layer, e.g. `self_attn`.
        norm: `(norm_params, x_BTD) -> h_BTD`.
        block: `(block_params, h_BTD, context) -> (batch, tokens, width)`, in by column products and
            out by one row product. It takes its sizes from its arguments, never from a config.
        norm_params: Stacked over layers, `(layers, ...)`.
        block_params: Stacked likewise.
        tokenwise: Whether the block works on each token alone, without context.
    """

    name: str
    norm: Callable[[PyTree, jax.Array], jax.Array]
    block: Callable[[PyTree, jax.Array, Context], jax.Array]
    norm_params: PyTree
    block_params: PyTree
    tokenwise: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class WeightCut:
    """How a weight of one layer comes to the devices.

    Attributes:
        dim: The dim that is sharded, without the layer dim; None for a replicated weight.
        ways: In how many pieces; fewer than the devices where some share a piece.
        added_once: A bias behind the row product: replicated, and added to the sum.
    """

    dim: int | None = None
    ways: int = 1
    added_once: bool = False


@dataclasses.dataclass(frozen=True)
class Ways:
    """The devices of a plan as the leading dim of arrays: replicas major, tensor axes minor."""

    active: ActivePlan

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the dim: the batch axes, then the tensor axes."""
        return (*self.active.shape.batch, *self.active.shape.tp)

    @property
    def num(self) -> int:
        """Tensor-parallel devices of a replica."""
        return self.active.shape.tp_size

    @property
    def num_replicas(self) -> int:
        """Replicas that share the batch."""
        return self.active.shape.batch_ways

    def place(self, x_R: jax.Array) -> jax.Array:
        """`(R or batch, ...)`, the same on all devices of a replica."""
        return self.active.place(x_R, self._batch, *[None] * (x_R.ndim - 1))

    def each(self, x_R: jax.Array) -> jax.Array:
        """(W, ...) of what each replica has, (R, ...)."""
        tensor = self.active.shape.tp
        x_RW = jnp.broadcast_to(x_R[:, None], (x_R.shape[0], self.num, *x_R.shape[1:]))
        x_RW = self.active.place(x_RW, self._batch, tensor, *[None] * (x_RW.ndim - 2))
        x_W = x_RW.reshape(-1, *x_R.shape[1:])
        return self.active.place(x_W, self.axes, *[None] * (x_W.ndim - 1))

    def by_replica(self, x_W: jax.Array) -> jax.Array:
        """(R, devices of one, ...) of `(W, ...)`."""
        x_RW = x_W.reshape(self.num_replicas, self.num, *x_W.shape[1:])
        return self.active.place(x_RW, self._batch, self.active.shape.tp, *[None] * (x_W.ndim - 1))

    @property
    def _batch(self) -> tuple[str, ...] | None:
        return self.active.shape.batch or None


@dataclasses.dataclass(frozen=True)
class Partial:
    """The block of a branch, mapped over the tensor axes.

    Attributes:
        ways: The dim.
        block: As in the branch.
        cuts: How each of its weights comes to the devices, by path.
        row: Path of the row product's weight.
    """

    ways: Ways
    block: Callable[[PyTree, jax.Array, Context], jax.Array]
    cuts: Mapping[str, WeightCut]
    row: str

    def cut(self, params: PyTree, dtype: jnp.dtype) -> PyTree:
        """One layer's weights with an entry per device, (W, ...), products' weights in `dtype`.

        Cast before both halves use them, so that their gradients are added in that type, as one
        product over all of the batch would.
        """

        def leaf(w_W: jax.Array) -> jax.Array:
            num = self.ways.num_replicas
            w_RW = jnp.broadcast_to(w_W[None], (num, *w_W.shape))
            active, batch = self.ways.active, self.ways.active.shape.batch
            w_RW = active.place(w_RW, batch, active.shape.tp, *[None] * (w_W.ndim - 1))
            w_W = w_RW.reshape(-1, *w_W.shape[1:])
            return active.place(w_W, self.ways.axes, *[None] * (w_W.ndim - 1))

        return jax.tree.map(leaf, self.cut_once(params, dtype))

    def cut_once(self, params: PyTree, dtype: jnp.dtype) -> PyTree:
        """The same with an entry for each of one replica's devices."""

        def leaf(path: str, w: jax.Array) -> jax.Array:
            cut = self.cuts[path]
            if cut.added_once:
                w = jnp.zeros_like(w)
            if cut.dim is None:
                w = jnp.broadcast_to(w[None], (self.ways.num, *w.shape))
            else:
                w = w.astype(dtype)
                before, size, after = w.shape[: cut.dim], w.shape[cut.dim], w.shape[cut.dim + 1 :]
                w = w.reshape(*before, cut.ways, size // cut.ways, *after)
                w = jnp.repeat(jnp.moveaxis(w, cut.dim, 0), self.ways.num // cut.ways, axis=0)
            return self.ways.active.place(w, self.ways.active.shape.tp, *[None] * (w.ndim - 1))

        return map_with_path(leaf, params)

    def uncut(
        self, params: PyTree, dtype: jnp.dtype, d_cut: PyTree, d_sums: Sequence[jax.Array]
    ) -> PyTree:
        """Gradients of one layer's weights on each replica, (R, ...), one dim for each batch axis.

        Args:
            params: The weights, as `cut` takes them.
            dtype: Likewise.
            d_cut: Cotangents of what `cut` gives.
            d_sums: Cotangents of the block's sums, (batch, tokens, width), for a bias behind them.
        """
        _, pull = jax.vjp(lambda params: self.cut_once(params, dtype), params)
        d_R = jax.vmap(lambda d: pull(d)[0], spmd_axis_name=self.ways.active.shape.batch or None)(
            jax.tree.map(self.ways.by_replica, d_cut)
        )
        sizes = [self.ways.active.shape[axis] for axis in self.replica_axes]

        def leaf(path: str, g_R: jax.Array) -> jax.Array:
            if self.cuts[path].added_once:
                g_R = sum((self._by_replica(d).sum((1, 2)) for d in d_sums), jnp.zeros_like(g_R))
            return g_R.reshape(*sizes, *g_R.shape[1:])

        return map_with_path(leaf, d_R)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Batch axes of more than one device."""
        return Replicas(self.ways.active).axes

    def bias(self, params: PyTree, dtype: jnp.dtype) -> jax.Array | None:
        """What is added to the sum once, (width,); None if nothing is."""
        found = (w.astype(dtype) for path, w in leaves(params) if self.cuts[path].added_once)
        return next(found, None)

    def __call__(self, cut_params: PyTree, h_WBTD: jax.Array, context: Context) -> jax.Array:
        """The partial results, (W, batch, tokens, width); nothing moves."""
        whole = self.ways.num_replicas == 1
        axes = {
            name: None if one is None or whole or one.shape[0] == 1 else 0
            for name, one in context.items()
        }
        own = {
            name: one if one is None or axes[name] is None else self._own(one)
            for name, one in context.items()
        }
        # Constraints inside speak of one device's part.
        with in_force(self.ways.active.mapped()):
            mapped = jax.vmap(self.block, (0, 0, axes), spmd_axis_name=self.ways.axes)
            return mapped(cut_params, h_WBTD, own)

    def columns(
        self, cut_params: PyTree, h_WBTD: jax.Array, context: Context
    ) -> tuple[list[jax.Array], Callable[[PyTree, list[jax.Array]], jax.Array]]:
        """All but the row product: what it multiplies, and how, `(cut_params, of it) -> partial`.

        A block is linear in the weight of its row product, so that is what its derivative keeps.
        """

        def whole(row: jax.Array) -> jax.Array:
            return self(self._with_row(cut_params, row), h_WBTD, context)

        row = dict(leaves(cut_params))[self.row]
        _, derivative = jax.linearize(whole, row)
        product, inner = jax.closure_convert(derivative, row)

        def multiply(cut_params: PyTree, inner: list[jax.Array]) -> jax.Array:
            return product(dict(leaves(cut_params))[self.row], *inner)

        return inner, multiply

    def _with_row(self, params: PyTree, row: jax.Array) -> PyTree:
        return map_with_path(lambda path, w: row if path == self.row else w, params)

    def _own(self, x_B: jax.Array) -> jax.Array:
        return self.ways.each(self._by_replica(x_B))

    def _by_replica(self, x_B: jax.Array) -> jax.Array:
        return x_B.reshape(self.ways.num_replicas, -1, *x_B.shape[1:])


def partial_of(branch: ResidualBranch, active: ActivePlan) -> Partial:
    """The block of a branch, divided as the plan in force shards its weights.

    Raises:
        NotInterleaved: TP073, if its parts do not add up to the block: a weight that the plan does
            not know or does not shard over all tensor axes, experts, no or several row products.
    """
    shapes = {path: param.shape for path, param in flatten(branch.block_params).items()}
    found = {path: decision_of(f"{branch.name}/{path}", shapes[path], active) for path in shapes}
    rows = [path for path, decision in found.items() if decision.role == Role.ROW]
    biases = [path for path, decision in found.items() if decision.role == Role.ROW_BIAS]
    if len(rows) != 1 or len(biases) > 1:
        raise NotInterleaved(
            f"row products: {join(rows) or 'none'}; biases behind them: {join(biases) or 'none'}",
            where=branch.name,
            fix="a block comes in by column products and goes out by one row product",
        )
    cuts = {path: _cut(decision, active) for path, decision in found.items()}
    return Partial(Ways(active), branch.block, cuts, rows[0])


def _cut(decision: ParamDecision, active: ActivePlan) -> WeightCut:
    shape, spec = active.shape, decision.spec
    along = [tuple(axis for axis in axes if axis in shape.tp) for axes in spec]
    dims = [dim for dim, axes in enumerate(along) if axes]
    if spec[0]:
        problem = f"layers are sharded over {'+'.join(spec[0])}"
    elif decision.role == Role.ROW_BIAS:
        return WeightCut(added_once=True)
    elif decision.role in CUT and len(dims) == 1 and along[dims[0]] in _prefixes(decision, active):
        return WeightCut(dims[0] - 1, shape.ways(along[dims[0]]))
    elif decision.role in ON_ALL and not dims:
        return WeightCut()
    else:
        problem = f"a {decision.role} parameter with {shape.ways(sum(along, ()))} parts"
    raise NotInterleaved(
        f"{problem} on {shape.tp_size} tensor-parallel devices",
        where=decision.path,
        fix="sizes that divide over all tensor-parallel devices, layers on one stage, no experts",
    )


def _prefixes(decision: ParamDecision, active: ActivePlan) -> list[tuple[str, ...]]:
    """Tensor axes that may shard a weight: all of them for a row product, whose parts add up.

    Fewer will do for a column whose units several devices share, such as kv heads.
    """
    prefixes = list(active.shape.prefixes())
    return prefixes[:1] if decision.role == Role.ROW else prefixes
