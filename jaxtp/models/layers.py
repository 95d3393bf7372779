"""What the model families share: config, block, layer scan, attention, loss, decoding.

Everything is single-device code: no mesh and no PartitionSpec. `constrain` names the values whose
place matters; it does nothing without an active plan.

Shape suffixes, here and in the families: B batch, T tokens, D hidden size, N query heads, K kv
heads, H head width, F MLP width, V vocab. They name logical dims, never shards.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtp.activations.by_name import ActivePlan, active_plan, constrain
from jaxtp.errors import JaxtpWarning, NotInterleaved, SizeMismatch
from jaxtp.layers import interleaving, stacked
from jaxtp.layers.recomputation import BLOCK_OUTPUT, remat_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Settings of every decoder; names are those of Hugging Face configs where these have one.

    Raises:
        BadConfig: TP020, if `remat` names no policy.
    """

    masks_padding: ClassVar[bool] = True
    """The models ignore logits beyond the vocabulary, which a plan may have padded."""

    vocab_size: int
    """Rows of the embedding and columns of the head."""

    hidden_size: int
    """Width of the residual stream."""

    num_hidden_layers: int
    """Number of blocks."""

    num_attention_heads: int
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

    attention_implementation: Literal["xla", "cudnn"] = "xla"
    """Kernel of `jax.nn.dot_product_attention`; cudnn needs an NVIDIA GPU and 16-bit
    activations."""

    def __post_init__(self) -> None:
        remat_of(self.remat)


class Decoder(Protocol):
    """What the loss, decoding and the train loop need of a model."""

    def hidden(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Final normed hidden states, (batch, tokens, hidden size)."""
        ...

    def logits(self, h_BTD: jax.Array) -> jax.Array:
        """Scores over the vocab, (batch, tokens, vocab)."""
        ...


def residual_init(num_layers: int) -> jax.nn.initializers.Initializer:
    """Initialiser of a row kernel: variance 1/fan_in over the number of row products.

    Every block adds two of them to the residual stream, so its variance stays near one at any
    depth; the 1/sqrt(2L) of section 2.3 of the GPT-2 paper (Radford et al. 2019).
    """
    return jax.nn.initializers.variance_scaling(0.5 / num_layers, "fan_in", "truncated_normal")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """`x + block(norm(x))`: half a layer, in by column products and out by one row product."""

    norm: str
    """Attribute of the layer that holds the norm."""

    block: str
    """Attribute of the layer that holds the block: attention or MLP."""

    takes: tuple[str, ...] = ()
    """What the block takes beside its input, by keyword; see `scan_layers`."""

    tokenwise: bool = False
    """Whether the block works on each token alone."""


class Layer(nnx.Module):
    """A layer is its residual branches, one after the other."""

    branches: ClassVar[tuple[Branch, ...]]

    def __call__(self, x_BTD: jax.Array, context: Mapping[str, jax.Array | None]) -> jax.Array:
        """The residual stream after this layer, (batch, tokens, hidden size)."""
        for branch in self.branches:
            block = getattr(self, branch.block)
            taken = {name: context[name] for name in branch.takes}
            out_BTD = block(normed(getattr(self, branch.norm), x_BTD), **taken)
            out_BTD = checkpoint_name(constrain(out_BTD, "residual"), BLOCK_OUTPUT)
            x_BTD = x_BTD + out_BTD
        return x_BTD


AnyLayer = TypeVar("AnyLayer", bound=nnx.Module)


def stack_layers(make: Callable[[nnx.Rngs], AnyLayer], num_layers: int, rngs: nnx.Rngs) -> AnyLayer:
    """`num_layers` separately initialised modules as one, with a leading layer dim everywhere."""
    return nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(num_layers))


def scan_layers(
    layers: Layer, x_BTD: jax.Array, context: Mapping[str, jax.Array | None], remat: str
) -> jax.Array:
    """Runs stacked layers one after the other; compile time does not grow with depth.

    Under a plan with `overlap="aggressive"` two halves of the batch take turns instead, where they
    can: the same numbers, see `jaxtp.overlap`. Under a plan with stages it is a pipeline, see
    `jaxtp.pipeline`.

    Args:
        layers: Result of `stack_layers`.
        x_BTD: The residual stream in front of the first layer.
        context: What blocks take beside their input, (batch or 1, ...), the same for all layers.
        remat: Key of `jaxtp.remat.REMAT`.
    """
    active = active_plan()
    if active is not None and active.interleave and active.shape.tp_size > 1:
        try:
            return _interleave(layers, x_BTD, context, remat, active)
        except NotInterleaved as obstacle:
            warnings.warn(str(obstacle), JaxtpWarning, stacklevel=3)
    graph, params = nnx.split(layers)

    def layer(
        x_BTD: jax.Array, params: nnx.State, context: Mapping[str, jax.Array | None]
    ) -> jax.Array:
        return nnx.merge(graph, params)(x_BTD, context)

    return stacked.scan_layers(layer, x_BTD, params, context=context, remat=remat)


def _interleave(
    layers: Layer,
    x_BTD: jax.Array,
    context: Mapping[str, jax.Array | None],
    remat: str,
    active: ActivePlan,
) -> jax.Array:
    if active.stages is not None:
        raise NotInterleaved(
            "layers run in pipeline stages", where="pp", fix="one of the two, not both"
        )
    if remat != "block_outputs":
        raise NotInterleaved(
            f"interleaved layers recompute all but the residual stream, and remat is {remat!r}",
            where="remat",
            fix='remat="block_outputs"',
        )
    branches = [_as_data(layers, branch) for branch in layers.branches]
    return interleaving.interleave(branches, x_BTD, context, active)


def _as_data(layers: Layer, branch: Branch) -> interleaving.Branch:
    norm_graph, norm_params = nnx.split(getattr(layers, branch.norm))
    block_graph, block_params = nnx.split(getattr(layers, branch.block))

    def norm(params: nnx.State, x_BTD: jax.Array) -> jax.Array:
        return normed(nnx.merge(norm_graph, params), x_BTD)

    def block(params: nnx.State, h_BTD: jax.Array, context: interleaving.Context) -> jax.Array:
        taken = {name: context[name] for name in branch.takes}
        return nnx.merge(block_graph, params)(h_BTD, **taken)

    return interleaving.Branch(
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


def attend(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    implementation: Literal["xla", "cudnn"],
    window: int | None = None,
) -> jax.Array:
    """Causal attention with grouped key/value heads, (batch, tokens, query heads, head width).

    A token sees itself and earlier tokens of its own segment, the last `window` of them if there is
    a window. Query head n uses kv head n // (N / K).
    """
    num_heads, num_kv_heads = q_BTNH.shape[2], k_BTKH.shape[2]
    units = (num_kv_heads, num_heads // num_kv_heads)
    q_BTNH = constrain(q_BTNH, "heads", units)
    k_BTKH, v_BTKH = constrain(k_BTKH, "kv_heads"), constrain(v_BTKH, "kv_heads")
    mask_B1TT = None
    if segment_ids_BT is not None:
        mask_B1TT = segment_ids_BT[:, None, :, None] == segment_ids_BT[:, None, None, :]
    out_BTNH = jax.nn.dot_product_attention(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        mask=mask_B1TT,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )
    return constrain(out_BTNH, "heads", units)


def rotary(x_BTNH: jax.Array, angles_BTH: jax.Array) -> jax.Array:
    """Rotates pairs (i, i + H/2) of each head by their token's angles, in fp32; like `x`.

    Halves rather than neighbours, as Hugging Face checkpoints are stored.

    Args:
        x_BTNH: Queries or keys.
        angles_BTH: Radians, (batch or 1, tokens, head width / 2).
    """
    cos, sin = jnp.cos(angles_BTH)[:, :, None, :], jnp.sin(angles_BTH)[:, :, None, :]
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def default_positions(tokens_BT: jax.Array) -> jax.Array:
    """Positions 0, 1, ... of one row, (1, tokens)."""
    return jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None, :]


def token_nats(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Negative log-likelihood in nats of each token, float32 (batch, tokens).

    The target's logit is found by comparing and summing, not by indexing: with the vocab on the
    tensor axis each device adds up its own part and per-token scalars cross the wire (one max, two
    sums), while a gather along the vocab would bring all logits to every device. XLA fuses the
    comparison into the sum; no one-hot array exists.

    Args:
        logits_BTV: Scores, of any float type; sums are taken in fp32.
        targets_BT: Token ids.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    is_target_BTV = targets_BT[:, :, None] == jnp.arange(logits_BTV.shape[-1])[None, None, :]
    target_BT = jnp.sum(logits_BTV, axis=-1, where=is_target_BTV)
    return jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT


def cross_entropy(
    logits_BTV: jax.Array, targets_BT: jax.Array, where_BT: jax.Array | None = None
) -> jax.Array:
    """Mean of `token_nats` over the tokens that count, a float32 scalar.

    Args:
        logits_BTV: Scores, of any float type.
        targets_BT: Token ids.
        where_BT: True for tokens that count; default: all.
    """
    return jnp.mean(token_nats(logits_BTV, targets_BT), where=where_BT)


def generate(
    model: Decoder,
    prompt_BT: jax.Array,
    num_tokens: int,
    *,
    temperature: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """The prompt followed by `num_tokens` tokens of the model, (batch, prompt + num_tokens).

    One program per total length: each step runs the model on the whole buffer, where causality
    keeps what is not written yet from mattering. There is no key/value cache; this is for looking
    at samples.

    Args:
        model: A model of this package.
        prompt_BT: Token ids, at least one per row, all rows of one length.
        num_tokens: Tokens to add.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it and a token is
            drawn.
        key: PRNG key for drawing; default: `jax.random.key(0)`.

    Raises:
        SizeMismatch: TP003, if the prompt is empty.
    """
    num_given = prompt_BT.shape[1]
    if num_given == 0:
        raise SizeMismatch("the prompt has no tokens", fix="start from at least one token per row")
    tokens_BT = jnp.pad(prompt_BT, ((0, 0), (0, num_tokens)))
    key = jax.random.key(0) if key is None else key
    graph, params = nnx.split(model)
    return _fill(graph, params, tokens_BT, num_given, temperature, key)


@functools.partial(jax.jit, static_argnums=0)
def _fill(
    graph: nnx.GraphDef,
    params: nnx.State,
    tokens_BT: jax.Array,
    num_given: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
) -> jax.Array:
    model: Decoder = nnx.merge(graph, params)

    def write(t: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        h_BTD = model.hidden(tokens_BT)
        # Only the last known token meets the head: with a large vocab the head is most of a step.
        h_B1D = jax.lax.dynamic_slice_in_dim(h_BTD, t - 1, 1, axis=1)
        logits_BV = model.logits(h_B1D)[:, 0].astype(jnp.float32)
        drawn_B = jax.random.categorical(
            jax.random.fold_in(key, t), logits_BV / jnp.maximum(temperature, 1e-6)
        )
        token_B = jnp.where(temperature > 0, drawn_B, jnp.argmax(logits_BV, axis=-1))
        return jax.lax.dynamic_update_index_in_dim(
            tokens_BT, token_B.astype(tokens_BT.dtype), t, axis=1
        )

    return jax.lax.fori_loop(num_given, tokens_BT.shape[1], write, tokens_BT)
