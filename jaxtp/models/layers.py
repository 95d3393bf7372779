"""What the model families share: config, block, layer scan, attention, loss, decoding.

Stage in: shapes from a config, arrays from a model. Stage out: arrays. Everything is single-device
code: no mesh and no PartitionSpec. `constrain` names the values whose place matters; it does
nothing without an active plan.

Shape suffixes, here and in the families: B batch, T tokens, D hidden size, N query heads, K kv
heads, H head width, F MLP width, V vocab. They name logical dims, never shards.
"""

import dataclasses
import difflib
import functools
from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtp.activations import constrain
from jaxtp.errors import BadConfig, SizeMismatch, join

BLOCK_OUTPUTS = ("attention_output", "mlp_output")
"""`checkpoint_name`s of the values behind the two row products of a block, where its all-reduces
are."""

Policy = Callable[..., bool]
REMAT: dict[str, Policy | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    # Saving what comes out of an all-reduce keeps recomputation from running it again: 4
    # all-reduces a layer in the compiled GPU step as without remat, where "full" has 5, at nearly
    # the memory of "full".
    "block_outputs": jax.checkpoint_policies.save_only_these_names(*BLOCK_OUTPUTS),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""Remat policy name -> what `jax.checkpoint` may keep of a layer; None: no remat."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Settings of every decoder; names are those of Hugging Face configs where these have one.

    Raises:
        BadConfig: TP020, if `remat` names no policy.
    """

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
    of a layer) or dots (keep the results of matrix products with parameters)."""

    attention_implementation: Literal["xla", "cudnn"] = "xla"
    """Kernel of `jax.nn.dot_product_attention`; cudnn needs an NVIDIA GPU and 16-bit
    activations."""

    def __post_init__(self) -> None:
        if self.remat not in REMAT:
            near = difflib.get_close_matches(self.remat, REMAT, n=1) or REMAT
            raise BadConfig(f"no remat policy {self.remat!r}", where="remat", fix=join(near))


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


Layer = TypeVar("Layer", bound=nnx.Module)


def stack_layers(make: Callable[[nnx.Rngs], Layer], num_layers: int, rngs: nnx.Rngs) -> Layer:
    """`num_layers` separately initialised modules as one, with a leading layer dim everywhere."""
    return nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(num_layers))


def scan_layers(
    layers: Layer, x: jax.Array, call: Callable[[Layer, jax.Array], jax.Array], remat: str
) -> jax.Array:
    """Runs stacked layers one after the other; compile time does not grow with depth.

    Args:
        layers: Result of `stack_layers`.
        x: What enters the first layer; each layer's result has its shape and type.
        call: `(one layer, x) -> x`. Values it closes over are shared by all layers.
        remat: Key of `REMAT`.
    """
    graph, params = nnx.split(layers)

    def body(x: jax.Array, params: nnx.State) -> tuple[jax.Array, None]:
        return call(nnx.merge(graph, params), x), None

    policy = REMAT[remat]
    if policy is not None:
        # A scan body is compiled on its own, so XLA cannot merge recomputation with the first run.
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    return jax.lax.scan(body, x, params)[0]


def add_block(
    x_BTD: jax.Array,
    norm: Callable[[jax.Array], jax.Array],
    block: Callable[[jax.Array], jax.Array],
    name: str,
) -> jax.Array:
    """`x + block(norm(x))`: half a layer, in by column products and out by one row product.

    Args:
        x_BTD: The residual stream.
        norm: Norm before the block.
        block: Attention or MLP.
        name: The output's `checkpoint_name`, one of `BLOCK_OUTPUTS`.
    """
    out_BTD = constrain(block(normed(norm, x_BTD)), "residual")
    return x_BTD + checkpoint_name(out_BTD, name)


def normed(norm: Callable[[jax.Array], jax.Array], x_BTD: jax.Array) -> jax.Array:
    """`norm(x)`, whole again where sequence parallelism cuts the residual stream."""
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


def mask_padding(logits_BTV: jax.Array, vocab_size: int) -> jax.Array:
    """The logits, with entries past `vocab_size` at the lowest number of their type.

    They exist only when a plan padded the vocab so that it divides over the tensor axis.
    """
    if logits_BTV.shape[-1] == vocab_size:
        return logits_BTV
    real_V = jnp.arange(logits_BTV.shape[-1]) < vocab_size
    return jnp.where(real_V[None, None, :], logits_BTV, jnp.finfo(logits_BTV.dtype).min)


def cross_entropy(
    logits_BTV: jax.Array, targets_BT: jax.Array, where_BT: jax.Array | None = None
) -> jax.Array:
    """Mean negative log-likelihood in nats per counted token, a float32 scalar.

    The target's logit is found by comparing and summing, not by indexing: with the vocab on the
    tensor axis each device adds up its own part and per-token scalars cross the wire (one max, two
    sums), while a gather along the vocab would bring all logits to every device. XLA fuses the
    comparison into the sum; no one-hot array exists.

    Args:
        logits_BTV: Scores, of any float type; sums are taken in fp32.
        targets_BT: Token ids.
        where_BT: True for tokens that count; default: all.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    is_target_BTV = targets_BT[:, :, None] == jnp.arange(logits_BTV.shape[-1])[None, None, :]
    target_BT = jnp.sum(logits_BTV, axis=-1, where=is_target_BTV)
    nats_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT
    return jnp.mean(nats_BT, where=where_BT)


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
