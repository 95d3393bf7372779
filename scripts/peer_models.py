"""The models of `bench_peers.py`: plain single-device Flax, and where an expert would shard each.

No model knows a mesh. Every one is a language model, so that one loss and one floor serve all: a
vocabulary-parallel table and head, and between them the column/row pairs of its blocks.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from jaxtp import models
from jaxtp.hardware.links import wire_bytes

BATCH, SEQ, WIDTH, HEADS, INNER, VOCAB, LAYERS, EXPERTS = 8, 64, 512, 8, 2048, 2048, 2, 8
"""As many tokens as the model is wide, which is where tensor parallelism is used: what fsdp moves
does not grow with tokens, and from about twice as many on it is less."""

TOKENS = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
DTYPE = jnp.bfloat16
TP: Mapping[str, int] = {"tp": 8}
FACTORED: Mapping[str, int] = {"tp": 4, "tp_minor": 2}
"""The expert's mesh for four kv heads, or twelve heads, on eight devices."""

BOTH = ("tp", "tp_minor")
Cut = Mapping[int, str | tuple[str, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model on its example input, and the expert's plan.

    Attributes:
        apply: Parameters and token ids (batch, seq) -> logits (batch, seq, vocab).
        params: Tree of `ShapeDtypeStruct`, float32.
        rules: Regular expression that matches a whole path -> dim -> axes; the first match counts,
            and what nothing matches is replicated.
        mesh: The axes that the rules name, and their sizes.
        pairs: Column/row pairs of all blocks: two in attention with MLP, one in an MLP alone.
        form_bytes: What the model's form adds to the floor of such pairs, in bytes that a device
            sends: see `shared_heads`, `exchanged` and `fewer_ways`.
        width: Of the residual stream, in elements.
        tokens: Struct of the ids, (batch, seq).
    """

    apply: Callable[[Any, Any], Any]
    params: Any
    rules: Mapping[str, Cut]
    mesh: Mapping[str, int] = dataclasses.field(default_factory=lambda: TP)
    pairs: int = 2 * LAYERS
    form_bytes: float = 0.0
    width: int = WIDTH
    tokens: Any = dataclasses.field(default_factory=lambda: TOKENS)


def shared_heads(head_dim: int) -> float:
    """Four key heads on eight devices: gradients of k and of v are summed within each pair."""
    return LAYERS * 2 * wire_bytes("all-reduce", BATCH * SEQ * head_dim * 2, 2)


def exchanged(columns: int) -> float:
    """Projections in one kernel, rows sharded: its shares are exchanged, the gradient's back."""
    return LAYERS * 2 * wire_bytes("all-to-all", WIDTH * columns * 2 / 8, 8)


def fewer_ways(width: int) -> float:
    """Attention on four of eight devices: its two reductions a layer are among four (negative)."""
    message = BATCH * SEQ * width * 2
    each = wire_bytes("all-reduce", message, 4) - wire_bytes("all-reduce", message, 8)
    return LAYERS * 2 * each


ENDS: Mapping[str, Cut] = {r".*table/embedding": {0: "tp"}, r".*head/kernel": {1: "tp"}}
STOCK: Mapping[str, Cut] = {
    r".*(query|key|value)/kernel": {1: "tp"},
    r".*(query|key|value)/bias": {0: "tp"},
    r".*out/kernel": {0: "tp"},
    r".*up/kernel": {1: "tp"},
    r".*up/bias": {0: "tp"},
    r".*down/kernel": {0: "tp"},
    **ENDS,
}


def dense(width: int, name: str | None = None, *, bias: bool = False) -> nn.Dense:
    """A Linen product in the type of the activations."""
    return nn.Dense(width, use_bias=bias, dtype=DTYPE, name=name)


def causal(x: jax.Array) -> jax.Array:
    """Lower triangle (1, 1, seq, seq) for (batch, seq, ...)."""
    return jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None, None]


def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: Any = 0.0, mask: Any = True) -> Any:
    """Softmax attention on (batch, seq, heads x width), eight heads."""
    q, k, v = (a.reshape(*a.shape[:2], HEADS, -1) for a in (q, k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    scores = scores.astype(jnp.float32) + bias
    probs = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1).astype(DTYPE)
    out = jnp.einsum("bhts,bshd->bthd", probs, v)
    return out.reshape(*out.shape[:2], -1)


class Language(nn.Module):
    """Token table, blocks one after the other, norm, head."""

    block: Callable[..., nn.Module]
    positions: bool = False

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        """Logits (batch, seq, vocab)."""
        x = nn.Embed(VOCAB, WIDTH, dtype=DTYPE, name="table")(ids)
        if self.positions:
            x = x + nn.Embed(SEQ, WIDTH, dtype=DTYPE, name="wpe")(jnp.arange(SEQ)[None])
        for layer in range(LAYERS):
            x = self.block(name=f"block_{layer}")(x)
        return dense(VOCAB, "head")(nn.LayerNorm(dtype=DTYPE, name="last")(x))


class StockEncoder(nn.Module):
    """Linen's own attention, not masked, with a two-layer MLP."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """One pre-norm block."""
        h = nn.LayerNorm(dtype=DTYPE)(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, dtype=DTYPE, name="attention")(h)
        h = dense(INNER, "up", bias=True)(nn.LayerNorm(dtype=DTYPE)(x))
        return x + dense(WIDTH, "down", bias=True)(nn.gelu(h))


class RelativeBias(nn.Module):
    """T5: no biases, RMS norms, and a table of distances per head added to the scores."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """One pre-norm block."""
        h = nn.RMSNorm(dtype=DTYPE)(x)
        at = jnp.arange(SEQ)
        buckets = jnp.clip(at[:, None] - at[None], -16, 15) + 16
        bias = nn.Embed(32, HEADS, name="relative_bias")(buckets).transpose(2, 0, 1)[None]
        q, k, v = (dense(WIDTH, name)(h) for name in "qkv")
        x = x + dense(WIDTH, "o")(attend(q, k, v, bias))
        h = nn.relu(dense(INNER, "wi")(nn.RMSNorm(dtype=DTYPE)(x)))
        return x + dense(WIDTH, "wo")(h)


class FusedAttention(nn.Module):
    """GPT-2 as published: q, k and v side by side in one flat kernel."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """One pre-norm block."""
        h = nn.LayerNorm(dtype=DTYPE)(x)
        q, k, v = jnp.split(dense(3 * WIDTH, "c_attn", bias=True)(h), 3, axis=-1)
        x = x + dense(WIDTH, "c_proj", bias=True)(attend(q, k, v, mask=causal(x)))
        h = nn.gelu(dense(INNER, "c_fc", bias=True)(nn.LayerNorm(dtype=DTYPE)(x)))
        return x + dense(WIDTH, "c_out", bias=True)(h)


class FusedGate(nn.Module):
    """Phi-3's MLP: gate and up side by side in one kernel; q, k and v apart."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """One pre-norm block."""
        h = nn.RMSNorm(dtype=DTYPE)(x)
        q, k, v = (dense(WIDTH, name)(h) for name in "qkv")
        x = x + dense(WIDTH, "o")(attend(q, k, v, mask=causal(x)))
        gate, up = jnp.split(dense(2 * INNER, "gate_up")(nn.RMSNorm(dtype=DTYPE)(x)), 2, axis=-1)
        return x + dense(WIDTH, "down")(nn.silu(gate) * up)


class Experts(nn.Module):
    """Top-2 of eight experts; every expert sees every token, the router's zeros remove the rest."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """One pre-norm block."""
        h = nn.RMSNorm(dtype=DTYPE)(x)
        q, k, v = (dense(WIDTH, name)(h) for name in "qkv")
        x = x + dense(WIDTH, "o")(attend(q, k, v, mask=causal(x)))
        h = nn.RMSNorm(dtype=DTYPE)(x)
        init = nn.initializers.lecun_normal(batch_axis=0)
        w_in = self.param("w_in", init, (EXPERTS, WIDTH, INNER // 2)).astype(DTYPE)
        w_out = self.param("w_out", init, (EXPERTS, INNER // 2, WIDTH)).astype(DTYPE)
        scores = jax.nn.softmax(dense(EXPERTS, "router")(h).astype(jnp.float32), -1)
        weights, chosen = jax.lax.top_k(scores, 2)
        weights = (jax.nn.one_hot(chosen, EXPERTS) * weights[..., None]).sum(-2).astype(DTYPE)
        hidden = nn.gelu(jnp.einsum("btd,edf->btef", h, w_in)) * weights[..., None]
        return x + jnp.einsum("btef,efd->btd", hidden, w_out)


class Nested(nn.Module):
    """`Dense(Dense(x))`: Flax names the outer, second product `Dense_0`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """A residual MLP."""
        h = nn.LayerNorm(dtype=DTYPE)(x)
        return x + nn.Dense(WIDTH, dtype=DTYPE)(nn.gelu(nn.Dense(INNER, dtype=DTYPE)(h)))


class NnxBlock(nnx.Module):
    """NNX's own attention and a two-layer MLP."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        kind = {"dtype": DTYPE, "rngs": rngs}
        self.before = nnx.LayerNorm(WIDTH, **kind)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, **kind)
        self.between = nnx.LayerNorm(WIDTH, **kind)
        self.up, self.down = nnx.Linear(WIDTH, INNER, **kind), nnx.Linear(INNER, WIDTH, **kind)

    def __call__(self, x: jax.Array) -> jax.Array:
        """One pre-norm block."""
        x = x + self.attention(self.before(x), mask=causal(x))
        return x + self.down(nnx.gelu(self.up(self.between(x))))


class NnxDecoder(nnx.Module):
    """Token table, blocks, head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(VOCAB, WIDTH, dtype=DTYPE, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.last = nnx.LayerNorm(WIDTH, dtype=DTYPE, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, dtype=DTYPE, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Logits (batch, seq, vocab)."""
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def _linen(block: type[nn.Module], rules: Mapping[str, Cut], **fields: Any) -> Case:
    positions = block is FusedAttention
    module = Language(block, positions)
    params = jax.eval_shape(module.init, jax.random.key(0), TOKENS)
    return Case(apply=module.apply, params=params, rules={**rules, **ENDS}, **fields)


def _nnx(module: nnx.Module, rules: Mapping[str, Cut], **fields: Any) -> Case:
    graph, state = nnx.split(module)
    return Case(apply=lambda p, ids: nnx.merge(graph, p)(ids), params=state, rules=rules, **fields)


def _llama(kv_heads: int) -> Case:
    config = models.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2 * HEADS,
        num_key_value_heads=kv_heads,
        head_dim=64,
        intermediate_size=INNER,
    )
    # Four kv heads lie on the outer factor; everything else uses both.
    mesh, wide = (TP, "tp") if kv_heads == 8 else (FACTORED, BOTH)
    rules: dict[str, Cut] = {
        r".*q_proj/kernel": {2: wide},
        r".*[kv]_proj/kernel": {2: "tp"},
        r".*(o|down)_proj/kernel": {1: wide},
        r".*(gate|up)_proj/kernel": {2: wide},
        r".*embed_tokens/embedding": {0: wide},
        r".*lm_head/kernel": {1: wide},
    }
    form = 0.0 if kv_heads == 8 else shared_heads(64)
    return _nnx(models.abstract(config), rules, mesh=mesh, form_bytes=form)


def _gpt() -> Case:
    config = models.GPTConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        num_hidden_layers=LAYERS,
        num_attention_heads=12,
        max_position_embeddings=SEQ,
    )
    rules: dict[str, Cut] = {
        r".*wte/embedding": {0: BOTH},
        r".*c_attn/kernel": {3: "tp"},
        r".*c_attn/bias": {2: "tp"},
        r".*attn/c_proj/kernel": {1: "tp"},
        r".*c_fc/kernel": {2: BOTH},
        r".*c_fc/bias": {1: BOTH},
        r".*mlp/c_proj/kernel": {1: BOTH},
    }
    form = fewer_ways(768)
    return _nnx(models.abstract(config), rules, mesh=FACTORED, width=768, form_bytes=form)


APART: Mapping[str, Cut] = {r".*/[qkv]/kernel": {1: "tp"}, r".*/o/kernel": {0: "tp"}}

MODELS: Mapping[str, Callable[[], Case]] = {
    "llama, 8 kv heads": lambda: _llama(8),
    "llama, 4 kv heads": lambda: _llama(4),
    "gpt2, 12 heads": _gpt,
    "linen encoder": lambda: _linen(StockEncoder, STOCK),
    "nnx decoder": lambda: _nnx(nnx.eval_shape(lambda: NnxDecoder(nnx.Rngs(0))), STOCK),
    "t5, relative bias": lambda: _linen(
        RelativeBias,
        {
            **APART,
            r".*relative_bias/embedding": {1: "tp"},
            r".*/wi/kernel": {1: "tp"},
            r".*/wo/kernel": {0: "tp"},
        },
    ),
    "gpt2, fused qkv": lambda: _linen(
        FusedAttention,
        {
            r".*/(c_attn|c_fc)/kernel": {1: "tp"},
            r".*/(c_attn|c_fc)/bias": {0: "tp"},
            r".*/(c_proj|c_out)/kernel": {0: "tp"},
        },
        form_bytes=exchanged(3 * WIDTH),
    ),
    "phi3, fused gate|up": lambda: _linen(
        FusedGate,
        {**APART, r".*/gate_up/kernel": {1: "tp"}, r".*/down/kernel": {0: "tp"}},
        form_bytes=exchanged(2 * INNER),
    ),
    "moe, top 2 of 8": lambda: _linen(Experts, {**APART, r".*/w_(in|out)": {0: "tp"}}),
    "linen Dense(Dense)": lambda: _linen(
        Nested,
        {
            r".*/Dense_1/kernel": {1: "tp"},
            r".*/Dense_1/bias": {0: "tp"},
            r".*/Dense_0/kernel": {0: "tp"},
        },
        pairs=LAYERS,
    ),
}
"""What is compared."""
