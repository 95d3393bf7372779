"""What the model families share: config, block, layer scan, attention, loss, decoding.

Everything is single-device code: no mesh and no PartitionSpec. `constrain` names the values whose
place matters; it does nothing without an active plan.

Shape suffixes, here and in the families: B batch, T tokens, D hidden size, N query heads, K kv
heads, H head width, F MLP width, V vocab. They name logical dims, never shards.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from numpy.typing import NDArray

from jaxtp.activations.by_name import ActivePlan, active_plan, constrain
from jaxtp.errors import NotInterleaved, join, warn
from jaxtp.hardware.links import MIB
from jaxtp.layers import interleaving, stacked
from jaxtp.layers.recomputation import BLOCK_OUTPUT, remat_of
from jaxtp.models.bounds import Depth, Width, check_bounds
from jaxtp.models.lora import Lora


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Settings of every decoder; names are those of Hugging Face configs where these have one.

    Raises:
        BadConfig: TP020, if `remat` names no policy or a number is out of its bounds.
    """

    masks_padding: ClassVar[bool] = True
    """The models ignore logits beyond the vocabulary, which a plan may have padded."""

    vocab_size: Width
    """Rows of the embedding and columns of the head."""

    hidden_size: Width
    """Width of the residual stream."""

    num_hidden_layers: Depth
    """Number of blocks."""

    num_attention_heads: Depth
    """Number of query heads."""

    dtype: str = "bfloat16"
    """Type of activations and matrix products. Parameters are cast inside the layer, so gradients
    are reduced in this type and converted afterwards."""

    param_dtype: str = "float32"
    """Type in which parameters are stored."""

    remat: str = "none"
    """What to recompute in the backward pass: none, full, block_outputs (keep the two block outputs
    of a layer), dots (keep the results of matrix products with parameters) or stage (keep what
    enters a pipeline stage; block_outputs without stages)."""

    lora: Lora | None = None
    """Low-rank adapters beside some of the linear maps; None for none."""

    quantize: Literal["none", "int8", "int4"] = "none"
    """Type of the kernels of linear maps, for generation: float, or integers of so many bits and a
    scale for each output. Layers are then not stacked; see `jaxtp.models.quantized`."""

    attention_implementation: Literal["xla", "cudnn"] = "xla"
    """Kernel of `jax.nn.dot_product_attention`; cudnn needs an NVIDIA GPU and 16-bit
    activations."""

    def __post_init__(self) -> None:
        check_bounds(self)
        remat_of(self.remat)

    def of_depth(self, num_layers: int) -> Self:
        """The same with so many layers; 0 for its own.

        What is said of each layer is cut there, or said again from the first one on.
        """
        num_layers = num_layers or self.num_hidden_layers
        changes: dict[str, Any] = {"num_hidden_layers": num_layers}
        for name in ("layer_types", "rotary_layers"):
            if rows := getattr(self, name, None):
                changes[name] = tuple(itertools.islice(itertools.cycle(rows), num_layers))
        return dataclasses.replace(self, **changes)

    @property
    def num_staged_layers(self) -> int:
        """Layers that pipeline stages share; those in front of them all stages run."""
        return self.num_hidden_layers

    @property
    def caches_latents(self) -> bool:
        """Whether the cache has one latent a token, of which keys and values are made."""
        return False

    @property
    def cached_heads(self) -> tuple[int, int]:
        """Heads that the cache has of a token, and the width of each."""
        config: Any = self  # families have both as fields or as properties
        return config.num_key_value_heads, config.head_dim


def residual_init(num_layers: int) -> jax.nn.initializers.Initializer:
    """Initialiser of a row kernel: variance 1/fan_in over the number of row products.

    Every block adds two of them to the residual stream, so its variance stays near one at any
    depth; the 1/sqrt(2L) of section 2.3 of the GPT-2 paper (Radford et al. 2019).
    """
    return jax.nn.initializers.variance_scaling(0.5 / num_layers, "fan_in", "truncated_normal")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """`x + post_norm(block(norm(x)))`: half a layer; a norm without a name is left out.

    A block takes its input by column products and gives its output by one row product.
    """

    norm: str
    """Attribute of the layer that holds the norm of the block's input."""

    post_norm: str = ""
    """Attribute of the layer that holds the norm of the block's output."""

    block: str
    """Attribute of the layer that holds the block: attention or MLP."""

    takes: tuple[str, ...] = ()
    """What the block takes beside its input, by keyword; None where the context has none; see
    `scan_layers`."""

    tokenwise: bool = False
    """Whether the block works on each token alone."""


class Layer(nnx.Module):
    """A layer is its residual branches, one after the other."""

    @property
    def branches(self) -> tuple[Branch, ...]:
        """In the order in which they run."""
        raise NotImplementedError

    @property
    def has_experts(self) -> bool:
        """Whether a branch takes a `tally`."""
        return any(TALLY in branch.takes for branch in self.branches)

    def __call__(self, x_BTD: jax.Array, context: Mapping[str, jax.Array | None]) -> jax.Array:
        """The residual stream after this layer, (batch, tokens, hidden size)."""
        for branch in self.branches:
            block = getattr(self, branch.block)
            taken = {name: context.get(name) for name in branch.takes}
            norm = getattr(self, branch.norm) if branch.norm else _same
            out_BTD = constrain(block(normed(norm, x_BTD), **taken), "residual")
            if branch.post_norm:
                out_BTD = constrain(getattr(self, branch.post_norm)(out_BTD), "residual")
            out_BTD = checkpoint_name(out_BTD, BLOCK_OUTPUT)
            x_BTD = x_BTD + out_BTD
        return x_BTD


AnyLayer = TypeVar("AnyLayer", bound=nnx.Module)

TALLY = "tally"
"""What a block of experts takes to count with, a `Tally`."""

Sums = dict[str, jax.Array]
"""What experts count, float32 and summed over layers; (batch,) in a layer, scalars behind them. The
losses `load_balance` and `router_z`, summed over tokens, see `jaxtp.models.moe`; and of tokens x
chosen how many were `assigned` and how many of those `dropped`."""


class Tally:
    """Collects what one layer counts while it runs."""

    def __init__(self, x_BTD: jax.Array) -> None:
        self.sums = no_sums(x_BTD)

    def add(self, found: Sums) -> None:
        """Adds what one mixture of experts counts."""
        self.sums = jax.tree.map(jnp.add, self.sums, found)


def no_sums(x_BTD: jax.Array) -> Sums:
    """What no layer counts of a residual stream."""
    names = ("load_balance", "router_z", "assigned", "dropped")
    return {name: jnp.zeros(x_BTD.shape[:1], jnp.float32) for name in names}


def _same(x: jax.Array) -> jax.Array:
    return x


def stack_layers(make: Callable[[nnx.Rngs], AnyLayer], num_layers: int, rngs: nnx.Rngs) -> AnyLayer:
    """`num_layers` separately initialised modules as one, with a leading layer dim everywhere."""
    return nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(num_layers))


def scan_layers(
    layers: Layer,
    x_BTD: jax.Array,
    context: Mapping[str, jax.Array | None],
    remat: str,
    rows: stacked.Rows | None = None,
    *,
    in_stages: bool = True,
) -> tuple[jax.Array, Sums | None]:
    """Runs stacked layers one after the other; compile time does not grow with depth.

    Under a plan with `overlap="aggressive"` two halves of the batch take turns instead, where they
    can: the same numbers, see `jaxtp.layers.interleaving`. Under a plan with stages it is a
    pipeline, see `jaxtp.layers.stacked`.

    Args:
        layers: Result of `stack_layers`.
        x_BTD: The residual stream in front of the first layer.
        context: What blocks take beside their input, (batch or 1, ...), the same for all layers.
        remat: Key of `jaxtp.layers.recomputation.REMAT`.
        rows: What differs between layers and is no parameter, (layers, ...), by name.
        in_stages: Whether the plan's stages share these layers; otherwise each one runs all of them
            on its part of the batch.

    Returns:
        The residual stream behind the last layer; and what experts count, None without any.
    """
    active = active_plan()
    if active is not None and active.interleave and active.shape.tp_size > 1:
        try:
            _check_alike(layers, rows)
            return _interleave(layers, x_BTD, context, remat, active), None
        except NotInterleaved as obstacle:
            warn(str(obstacle))
    graph, params = nnx.split(layers)

    def layer(
        x_BTD: jax.Array, params: nnx.State, context: Mapping[str, jax.Array | None]
    ) -> jax.Array:
        return nnx.merge(graph, params)(x_BTD, context)

    def counting(
        x_BTD: jax.Array, params: nnx.State, context: Mapping[str, Any]
    ) -> tuple[jax.Array, Sums]:
        tally = Tally(x_BTD)
        with_tally: dict[str, Any] = {**context, TALLY: tally}
        return nnx.merge(graph, params)(x_BTD, with_tally), tally.sums

    how: Any = {"context": context, "remat": remat, "rows": rows}
    if layers.has_experts:
        return stacked.scan_counting(counting, x_BTD, params, zeros=no_sums, **how)
    if not in_stages:

        def plain(*inputs: Any) -> tuple[jax.Array, tuple[()]]:
            return layer(*inputs), ()

        how |= {"zeros": lambda _: (), "in_stages": False}
        return stacked.scan_counting(plain, x_BTD, params, **how)[0], None
    return stacked.scan_layers(layer, x_BTD, params, **how), None


def run_alone(
    layers: Iterable[Layer],
    x_BTD: jax.Array,
    context: Mapping[str, Any],
    rows: Mapping[str, Sequence[Any] | NDArray[Any]],
) -> jax.Array:
    """Runs layers that are not stacked; see `scan_layers`, of whose arguments these are some."""
    for number, layer in enumerate(layers):
        own = {name: row[number] for name, row in rows.items()}
        x_BTD = layer(x_BTD, {**context, **own})
    return x_BTD


def _check_alike(layers: Layer, rows: stacked.Rows | None) -> None:
    if rows:
        raise NotInterleaved(
            f"layers differ in {join(sorted(rows))}", where="layers", fix='overlap="off"'
        )
    if layers.has_experts:
        raise NotInterleaved("experts choose tokens", where="layers", fix='overlap="off"')
    if any(branch.post_norm or not branch.norm for branch in layers.branches):
        raise NotInterleaved(
            "blocks have norms at their outputs", where="layers", fix='overlap="off"'
        )


def _interleave(
    layers: Layer,
    x_BTD: jax.Array,
    context: Mapping[str, jax.Array | None],
    remat: str,
    active: ActivePlan,
) -> jax.Array:
    if active.stages is not None:
        raise NotInterleaved(_sums_in_stages(x_BTD, active), where="pp", fix="pp=1")
    if active.shape.ways(active.tokens) > 1:
        raise NotInterleaved(
            "devices along cp share every sequence", where="cp", fix='overlap="off"'
        )
    if remat != "block_outputs":
        raise NotInterleaved(
            f"interleaved layers recompute all but the residual stream, and remat is {remat!r}",
            where="remat",
            fix='remat="block_outputs"',
        )
    branches = [_as_data(layers, branch) for branch in layers.branches]
    return interleaving.interleave(branches, x_BTD, context, active)


def _sums_in_stages(x_BTD: jax.Array, active: ActivePlan) -> str:
    """What stages leave to XLA: two all-reduces a layer and pass for every micro-batch."""
    stages = active.stages
    assert stages is not None
    parts = active.shape.batch_ways * stages.micro_batches
    count = 4 * stages.micro_batches * stages.num_layers // stages.num_stages
    each = x_BTD.nbytes / parts / MIB
    return (
        f"layers run in pipeline stages: their all-reduces over tp, {count:,} of {each:,.3g} MiB a "
        "step, move where XLA puts them"
    )


def _as_data(layers: Layer, branch: Branch) -> interleaving.ResidualBranch:
    norm_graph, norm_params = nnx.split(getattr(layers, branch.norm))
    block_graph, block_params = nnx.split(getattr(layers, branch.block))

    def norm(params: nnx.State, x_BTD: jax.Array) -> jax.Array:
        return normed(nnx.merge(norm_graph, params), x_BTD)

    def block(params: nnx.State, h_BTD: jax.Array, context: interleaving.Context) -> jax.Array:
        taken = {name: context.get(name) for name in branch.takes}
        return nnx.merge(block_graph, params)(h_BTD, **taken)

    return interleaving.ResidualBranch(
        name=branch.block,
        norm=norm,
        block=block,
        norm_params=norm_params,
        block_params=block_params,
        tokenwise=branch.tokenwise,
    )


def normed(norm: Callable[[jax.Array], jax.Array], x_BTD: jax.Array) -> jax.Array:
    """`norm(x)`, gathered where sequence parallelism shards the residual stream."""
    # Placed twice: norms compute in fp32 and cast at their end. Without the first constraint XLA
    # gathers before the cast, and twice the bytes cross the wire.
    return constrain(constrain(norm(x_BTD), "residual"), "block_input")
