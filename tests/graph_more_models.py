"""More models with expert findings: experts, stacked layers, two streams, odd residuals, tables.

See `graph_models` for the form.
"""

import dataclasses

import jax
import jax.numpy as jnp
from graph_models import (
    MODELS,
    Case,
    Sizes,
    attend,
    f32,
    heads,
    layer_norm,
    merge,
    model,
    qkvo_expected,
    qkvo_params,
    rms,
    self_attention,
    stream,
    swiglu,
    swiglu_expected,
    swiglu_params,
    tokens,
)

__all__ = ["MODELS"]

# ---- experts -----------------------------------------------------------------------------------


def expert_params(s: Sizes):
    return {
        "router": f32(s.width, s.experts),
        "gate": f32(s.experts, s.width, s.ffn),
        "up": f32(s.experts, s.width, s.ffn),
        "down": f32(s.experts, s.ffn, s.width),
    }


def expert_expected(s: Sizes):
    return {name: (0, (s.experts,)) for name in ("gate", "up", "down")}


def routed(p, x, k=2):
    """Weights of the chosen experts and zeros (..., k, experts), their indices (..., k), both."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"], -1), k)
    dense = (
        jax.nn.one_hot(chosen, p["router"].shape[1])
        * (weights / weights.sum(-1, keepdims=True))[..., None]
    )
    return dense, chosen, weights


@model
def moe_dense(s: Sizes) -> Case:
    """E1: every expert on every token, combined by top-k weights; a router bias; expert biases."""

    def fn(p, x):
        flat = x.reshape(-1, s.width)
        dense, *_ = routed(p, flat + 0 * p["router_bias"].sum())
        weights = dense.sum(1)
        h = jnp.einsum("td,edf->etf", flat, p["gate"]) + p["gate_bias"][:, None]
        out = jnp.einsum("etf,efd->etd", jax.nn.gelu(h), p["down"]) + p["down_bias"][:, None]
        return x + jnp.einsum("etd,te->td", out, weights).reshape(x.shape)

    params = expert_params(s) | {
        "router_bias": f32(s.experts),
        "gate_bias": f32(s.experts, s.ffn),
        "down_bias": f32(s.experts, s.width),
    }
    del params["up"]
    unit = (s.experts,)
    expected = {name: (0, unit) for name in ("gate", "down", "gate_bias", "down_bias")}
    return Case(fn, params, (stream(s),), expected)


@model
def moe_top_k(s: Sizes) -> Case:
    """Three-operand einsums over the dispatch weights; a shared expert beside."""

    def fn(p, x):
        dense, *_ = routed(p["moe"], x)
        weights = dense.sum(-2)
        hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, p["moe"]["gate"]))
        hidden = hidden * jnp.einsum("btd,edf->btef", x, p["moe"]["up"])
        out = jnp.einsum("btef,efd,bte->btd", hidden, p["moe"]["down"], weights)
        return x + out + swiglu(p["shared"], x)

    params = {"moe": expert_params(s), "shared": swiglu_params(s)}
    expected = {f"moe/{k}": v for k, v in expert_expected(s).items()} | swiglu_expected(
        s, "shared/"
    )
    return Case(fn, params, (stream(s),), expected)


@model
def moe_grouped_routing(s: Sizes) -> Case:
    """DeepSeek's group-limited routing: the expert dim is seen as (groups, rest)."""
    s = dataclasses.replace(s, experts=8)

    def fn(p, x):
        scores = jax.nn.sigmoid(x @ p["router"]) + p["correction"]
        groups = scores.reshape(*x.shape[:2], 2, 4)
        best = jax.lax.top_k(groups, 2)[0].sum(-1)
        keep = jax.nn.one_hot(jnp.argmax(best, -1), 2)[..., None]
        weights, chosen = jax.lax.top_k((groups * keep).reshape(scores.shape), 2)
        dispatch = (jax.nn.one_hot(chosen, 8) * weights[..., None]).sum(-2)
        hidden = jax.nn.silu(jnp.einsum("btd,edf->betf", x, p["gate"])) * jnp.einsum(
            "btd,edf->betf", x, p["up"]
        )
        return x + jnp.einsum("betf,efd,bte->btd", hidden, p["down"], dispatch)

    params = expert_params(s) | {"correction": f32(8)}
    return Case(fn, params, (stream(s),), {n: (0, (8,)) for n in ("gate", "up", "down")})


@model
def moe_capacity(s: Sizes) -> Case:
    """One-hot dispatch to (experts, capacity) slots."""

    def fn(p, x):
        flat = x.reshape(-1, s.width)
        _, chosen, weights = routed(p, flat)
        slots = max(2, flat.shape[0] // 2)
        mask = jax.nn.one_hot(chosen[:, 0], s.experts)
        place = jax.nn.one_hot((jnp.cumsum(mask, 0) * mask - 1).astype(jnp.int32), slots)
        combine = jnp.einsum("te,tec->tec", mask * weights[:, :1], place)
        dispatch = (combine > 0).astype(flat.dtype)
        inside = jnp.einsum("tec,td->ecd", dispatch, flat)
        hidden = jax.nn.silu(jnp.einsum("ecd,edf->ecf", inside, p["gate"]))
        hidden = hidden * jnp.einsum("ecd,edf->ecf", inside, p["up"])
        out = jnp.einsum("ecf,efd->ecd", hidden, p["down"])
        return x + jnp.einsum("tec,ecd->td", combine, out).reshape(x.shape)

    return Case(fn, expert_params(s), (stream(s),), expert_expected(s))


@model
def moe_sorted(s: Sizes) -> Case:
    """Tokens sorted by expert and multiplied by `ragged_dot`."""

    def fn(p, x):
        flat = x.reshape(-1, s.width)
        _, chosen, weights = routed(p, flat)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=s.experts).astype(jnp.int32)
        rows = jnp.repeat(flat, 2, axis=0)[order]
        hidden = jax.nn.silu(jax.lax.ragged_dot(rows, p["gate"], sizes))
        hidden = hidden * jax.lax.ragged_dot(rows, p["up"], sizes)
        out = jax.lax.ragged_dot(hidden, p["down"], sizes)[jnp.argsort(order)]
        out = out.reshape(flat.shape[0], 2, s.width) * weights[..., None]
        return x + out.sum(1).reshape(x.shape)

    return Case(fn, expert_params(s), (stream(s),), expert_expected(s))


@model
def moe_scatter(s: Sizes) -> Case:
    """Tokens scattered into (experts, capacity) slots and gathered back."""

    def fn(p, x):
        flat = x.reshape(-1, s.width)
        _, chosen, weights = routed(p, flat)
        expert, slot = chosen[:, 0], jnp.arange(flat.shape[0])
        inside = jnp.zeros((s.experts, flat.shape[0], s.width)).at[expert, slot].add(flat)
        hidden = jax.nn.silu(jnp.einsum("ecd,edf->ecf", inside, p["gate"]))
        hidden = hidden * jnp.einsum("ecd,edf->ecf", inside, p["up"])
        out = jnp.einsum("ecf,efd->ecd", hidden, p["down"])[expert, slot]
        return x + (out * weights[:, :1]).reshape(x.shape)

    return Case(fn, expert_params(s), (stream(s),), expert_expected(s))


@model
def moe_picked(s: Sizes) -> Case:
    """Each token picks its expert's matrices by index, and its bias rows."""
    s = dataclasses.replace(s, batch=max(s.batch, 2))

    def fn(p, x):
        chosen = jnp.argmax(x @ p["router"], -1)
        hidden = jax.nn.silu(jnp.einsum("btd,btdf->btf", x, p["gate"][chosen]) + p["bias"][chosen])
        hidden = hidden * jnp.einsum("btd,btdf->btf", x, p["up"][chosen])
        return x + jnp.einsum("btf,btfd->btd", hidden, p["down"][chosen])

    params = expert_params(s) | {"bias": f32(s.experts, s.ffn)}
    return Case(fn, params, (stream(s),), expert_expected(s) | {"bias": (0, (s.experts,))})


@model
def moe_unrolled(s: Sizes) -> Case:
    """A Python loop over stacked experts cannot be told from layers: the width inside is split."""

    def fn(p, x):
        dense, *_ = routed(p, x)
        weights = dense.sum(-2)
        out = 0
        for i in range(s.experts):
            hidden = jax.nn.silu(x @ p["gate"][i]) * (x @ p["up"][i])
            out = out + weights[..., i, None] * (hidden @ p["down"][i])
        return x + out

    expected = {"gate": (2, (s.ffn,)), "up": (2, (s.ffn,)), "down": (1, (s.ffn,))}
    return Case(fn, expert_params(s), (stream(s),), expected)


@model
def moe_vmapped(s: Sizes) -> Case:
    """Experts by `jax.vmap` of a dense MLP."""

    def fn(p, x):
        dense, *_ = routed(p, x)
        kernels = {name: p[name] for name in ("gate", "up", "down")}
        out = jax.vmap(swiglu, (0, None), -2)(kernels, x)
        return x + jnp.einsum("bted,bte->btd", out, dense.sum(-2))

    return Case(fn, expert_params(s), (stream(s),), expert_expected(s))


# ---- stacked layers ----------------------------------------------------------------------------


def stacked(s: Sizes, tree, at=0):
    def lead(leaf):
        return f32(*leaf.shape[:at], s.layers, *leaf.shape[at:])

    return jax.tree.map(lead, tree)


def scanned(s: Sizes, at: int) -> Case:
    """F5: nn.scan's parameters with the layer dim at any position."""

    def fn(p, ids):
        def block(x, layer):
            x = x + self_attention(layer["attn"], rms(x, layer["norm"]), s, s.kv)
            return jax.checkpoint(lambda x: x + swiglu(layer["mlp"], x))(x), None

        layers = jax.tree.map(
            lambda leaf: jnp.moveaxis(leaf, min(at, leaf.ndim - 1), 0), p["layers"]
        )
        return jax.lax.scan(block, p["embed"][ids], layers)[0] @ p["embed"].T

    def lead(leaf):
        position = min(at, len(leaf.shape))
        return f32(*leaf.shape[:position], s.layers, *leaf.shape[position:])

    layer = {"attn": qkvo_params(s, s.kv), "mlp": swiglu_params(s), "norm": f32(s.width)}
    params = {"embed": f32(s.vocab, s.width), "layers": jax.tree.map(lead, layer)}
    inner = qkvo_expected(s, "layers/attn/", s.kv) | swiglu_expected(s, "layers/mlp/")
    moved = {path: (dim + (at <= dim), units) for path, (dim, units) in inner.items()}
    return Case(fn, params, (tokens(s),), {"embed": (0, (s.vocab,))} | moved)


@model
def scan_first(s: Sizes) -> Case:
    return scanned(s, 0)


@model
def scan_second(s: Sizes) -> Case:
    return scanned(s, 1)


@model
def scan_of_experts(s: Sizes) -> Case:
    """F6: stacked layers of stacked experts: (layers, experts, in, out)."""

    def fn(p, x):
        def block(x, layer):
            dense, *_ = routed(layer, x)
            hidden = jnp.einsum("btd,edf->betf", x, layer["gate"])
            out = jnp.einsum("betf,efd->betd", jax.nn.gelu(hidden), layer["down"])
            return x + jnp.einsum("betd,bte->btd", out, dense.sum(-2)), None

        return jax.lax.scan(block, x, p)[0]

    params = stacked(s, expert_params(s))
    del params["up"]
    return Case(fn, params, (stream(s),), {"gate": (1, (s.experts,)), "down": (1, (s.experts,))})


@model
def fori_layers(s: Sizes) -> Case:
    """A `fori_loop` that slices its layer, and a `while_loop` around a shared block."""

    def fn(p, x):
        def block(i, x):
            layer = jax.tree.map(lambda leaf: leaf[i], p["layers"])
            return x + swiglu(layer, x)

        x = jax.lax.fori_loop(0, s.layers, block, x)
        again = (jnp.zeros((), jnp.int32), x)
        return jax.lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + swiglu(p["shared"], c[1])), again
        )[1]

    params = {"layers": stacked(s, swiglu_params(s)), "shared": swiglu_params(s)}
    layers = {
        path: (dim + 1, units) for path, (dim, units) in swiglu_expected(s, "layers/").items()
    }
    return Case(fn, params, (stream(s),), layers | swiglu_expected(s, "shared/"))


@model
def cond_branches(s: Sizes) -> Case:
    """Layer drop and a choice between two MLPs; a custom_vjp and a custom_jvp on the way."""

    @jax.custom_vjp
    def act(x):
        return jax.nn.relu(x) ** 2

    act.defvjp(lambda x: (act(x), x), lambda x, g: (g * 2 * jax.nn.relu(x),))

    def fn(p, x, flag):
        x = jax.lax.cond(flag, lambda x: x + swiglu(p["a"], x), lambda x: x, x)
        return (
            x + jax.lax.cond(flag, lambda x: act(x @ p["b"]), lambda x: act(x @ p["c"]), x) @ p["d"]
        )

    params = {
        "a": swiglu_params(s),
        "b": f32(s.width, s.ffn),
        "c": f32(s.width, s.ffn),
        "d": f32(s.ffn, s.width),
    }
    expected = swiglu_expected(s, "a/") | {
        "b": (1, (s.ffn,)),
        "c": (1, (s.ffn,)),
        "d": (0, (s.ffn,)),
    }
    return Case(fn, params, (stream(s), jax.ShapeDtypeStruct((), bool)), expected)


# ---- streams -----------------------------------------------------------------------------------


@model
def encoder_decoder(s: Sizes) -> Case:
    """Two streams and cross attention: k and v read one, o writes the other."""

    def mix(p, x, other):
        q, k, v = (
            heads(x @ p["q"], s.heads),
            heads(other @ p["k"], s.heads),
            heads(other @ p["v"], s.heads),
        )
        return merge(attend(q, k, v)) @ p["o"]

    def fn(p, ids, frames):
        memory = frames @ p["project"]
        memory = memory + mix(p["self"], memory, memory)
        x = p["embed"][ids]
        x = x + mix(p["cross"], x, memory)
        return (x + swiglu(p["mlp"], x)) @ p["embed"].T

    params = {
        "project": f32(7, s.width),
        "embed": f32(s.vocab, s.width),
        "self": qkvo_params(s),
        "cross": qkvo_params(s),
        "mlp": swiglu_params(s),
    }
    expected = {"embed": (0, (s.vocab,))} | qkvo_expected(s, "self/") | qkvo_expected(s, "cross/")
    frames = f32(s.batch, s.seq + 3, 7)
    return Case(fn, params, (tokens(s), frames), expected | swiglu_expected(s, "mlp/"))


@model
def post_norm(s: Sizes) -> Case:
    """DeepNorm: norm(alpha x + f(x)); a cast on the stream; a dropout on the branch."""

    def fn(p, x, key):
        x = x.astype(jnp.bfloat16)
        y = swiglu(p["mlp"], x.astype(jnp.float32))
        y = jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y / 0.9, 0).astype(jnp.bfloat16)
        x = layer_norm((2.5 * x + y).astype(jnp.float32), p["norm"])
        return x + self_attention(p["attn"], x, s)

    params = {
        "mlp": swiglu_params(s),
        "norm": {"scale": f32(s.width), "bias": f32(s.width)},
        "attn": qkvo_params(s),
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    expected = swiglu_expected(s, "mlp/") | qkvo_expected(s, "attn/")
    return Case(fn, params, (stream(s), key), expected)


@model
def highway(s: Sizes) -> Case:
    """x (1 - t) + f(x) t is a residual too."""

    def fn(p, x):
        t = jax.nn.sigmoid(x @ p["t"])
        return x * (1 - t) + swiglu(p["mlp"], x) * t

    params = {"t": f32(s.width, s.width), "mlp": swiglu_params(s)}
    return Case(fn, params, (stream(s),), swiglu_expected(s, "mlp/"))


@model
def value_residual(s: Sizes) -> Case:
    """Values carried from layer to layer look like a stream of heads; they are split."""

    def fn(p, ids):
        x, first = p["embed"][ids], None
        for layer in p["layers"]:
            v = heads(x @ layer["v"], s.heads)
            first = v if first is None else first
            v = 0.5 * v + 0.5 * first
            q, k = heads(x @ layer["q"], s.heads), heads(x @ layer["k"], s.heads)
            x = x + merge(attend(q, k, v)) @ layer["o"]
        return x @ p["embed"].T

    params = {"embed": f32(s.vocab, s.width), "layers": [qkvo_params(s)] * 2}
    expected = qkvo_expected(s, "layers/0/") | qkvo_expected(s, "layers/1/")
    return Case(fn, params, (tokens(s),), expected | {"embed": (0, (s.vocab,))})


@model
def pooled_classifier(s: Sizes) -> Case:
    """BERT: tokens, positions by range, segments; a pooler and two labels."""

    def fn(p, ids, segments):
        x = p["words"][ids] + p["positions"][jnp.arange(s.seq)][None] + p["segments"][segments]
        x = layer_norm(x, p["norm"])
        x = x + self_attention(p["attn"], x, s)
        h = jax.nn.gelu(x @ p["in"] + p["in_bias"])
        x = layer_norm(x + h @ p["out"] + p["out_bias"], p["norm"])
        return jnp.tanh(x[:, 0] @ p["pool"] + p["pool_bias"]) @ p["labels"] + p["labels_bias"]

    params = {
        "words": f32(s.vocab, s.width),
        "positions": f32(max(s.seq, 32), s.width),
        "segments": f32(2, s.width),
        "norm": {"scale": f32(s.width), "bias": f32(s.width)},
        "attn": qkvo_params(s),
        "in": f32(s.width, s.ffn),
        "in_bias": f32(s.ffn),
        "out": f32(s.ffn, s.width),
        "out_bias": f32(s.width),
        "pool": f32(s.width, s.width),
        "pool_bias": f32(s.width),
        "labels": f32(s.width, 2),
        "labels_bias": f32(2),
    }
    unit = (s.ffn,)
    expected = {"words": (0, (s.vocab,)), "in": (1, unit), "in_bias": (0, unit), "out": (0, unit)}
    return Case(fn, params, (tokens(s), tokens(s)), expected | qkvo_expected(s, "attn/"))


@model
def one_hot_tokens(s: Sizes) -> Case:
    """A lookup written as a product with one-hot tokens, and a narrow embedding that is widened."""

    def fn(p, ids):
        x = jax.nn.one_hot(ids, s.vocab) @ p["embed"] @ p["widen"]
        x = x + swiglu(p["mlp"], x)
        return x @ p["head"]

    params = {
        "embed": f32(s.vocab, 20),
        "widen": f32(20, s.width),
        "mlp": swiglu_params(s),
        "head": f32(s.width, s.vocab),
    }
    expected = {"embed": (0, (s.vocab,)), "head": (1, (s.vocab,))}
    return Case(fn, params, (tokens(s),), expected | swiglu_expected(s, "mlp/"))


@model
def learned_queries(s: Sizes) -> Case:
    """A pooling head whose query is a parameter, as in SigLIP and the Perceiver."""

    def fn(p, x):
        probe = jnp.broadcast_to(p["probe"], (s.batch, 3, s.width))
        q = heads(probe @ p["q"] + p["q_bias"], s.heads)
        k, v = heads(x @ p["k"], s.heads), heads(x @ p["v"], s.heads)
        probs = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k), -1)
        y = merge(jnp.einsum("bhts,bshd->bthd", probs, v)) @ p["o"]
        return y + swiglu(p["mlp"], y)

    params = qkvo_params(s) | {
        "probe": f32(1, 3, s.width),
        "q_bias": f32(s.inner),
        "mlp": swiglu_params(s),
    }
    expected = qkvo_expected(s, "") | {"q_bias": (0, (s.heads,))} | swiglu_expected(s, "mlp/")
    return Case(fn, params, (stream(s),), expected)


@model
def modulated(s: Sizes) -> Case:
    """Diffusion transformer: six pieces of one kernel scale and shift the stream."""

    def fn(p, x, t):
        c = jax.nn.silu(t @ p["t_in"]) @ p["t_out"]
        pieces = jnp.split((jax.nn.silu(c) @ p["modulate"])[:, None], 6, -1)
        x = x + pieces[2] * self_attention(p["attn"], rms(x, 1.0) * (1 + pieces[1]) + pieces[0], s)
        return x + pieces[5] * swiglu(p["mlp"], rms(x, 1.0) * (1 + pieces[4]) + pieces[3])

    params = {
        "t_in": f32(16, s.ffn + 1),
        "t_out": f32(s.ffn + 1, 24),
        "modulate": f32(24, 6 * s.width),
        "attn": qkvo_params(s),
        "mlp": swiglu_params(s),
    }
    expected = qkvo_expected(s, "attn/") | swiglu_expected(s, "mlp/")
    # The conditioning vector is an inner class: `modulate` contracts it and writes the stream.
    expected |= {"t_out": (1, (24,)), "modulate": (0, (24,))}
    return Case(fn, params, (stream(s), f32(s.batch, 16)), expected)


@model
def linear_attention(s: Sizes) -> Case:
    """The state k^T v mixes positions: heads are split, widths are not."""

    def fn(p, x):
        q, k, v = (heads(x @ p[n], s.heads) for n in "qkv")
        state = jnp.einsum("bthd,bthe->bhde", jax.nn.relu(k), v)
        return x + merge(jnp.einsum("bthd,bhde->bthe", jax.nn.relu(q), state)) @ p["o"]

    return Case(fn, qkvo_params(s), (stream(s),), qkvo_expected(s, ""))


@model
def language_loss(s: Sizes) -> Case:
    """A loss: log-softmax over the vocabulary, the label's entry picked; vmapped over sequences."""

    def one(p, ids):
        x = p["embed"][ids]
        x = x + swiglu(p["mlp"], x)
        logits = jax.nn.log_softmax(x @ p["head"], -1)
        return -jnp.take_along_axis(logits, jnp.roll(ids, -1)[:, None], -1).mean()

    def fn(p, ids):
        return jax.vmap(one, (None, 0))(p, ids).mean()

    params = {
        "embed": f32(s.vocab, s.width),
        "mlp": swiglu_params(s),
        "head": f32(s.width, s.vocab),
    }
    expected = {"embed": (0, (s.vocab,)), "head": (1, (s.vocab,))} | swiglu_expected(s, "mlp/")
    return Case(fn, params, (tokens(s),), expected)


@model
def windows(s: Sizes) -> Case:
    """Swin: shifted windows, a bias table by relative position, patches merged to 2 x width."""
    side, window = 8, 4

    def attention(p, x):
        b = x.shape[0]
        x = jnp.roll(x, (-2, -2), (1, 2)).reshape(b, 2, window, 2, window, s.width)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(b * 4, window * window, s.width)
        q, k, v = (heads(x @ p[n], s.heads) for n in "qkv")
        at = jnp.stack(
            jnp.meshgrid(jnp.arange(window), jnp.arange(window), indexing="ij"), -1
        ).reshape(-1, 2)
        apart = at[:, None] - at[None] + window - 1
        bias = p["table"][apart[..., 0] * (2 * window - 1) + apart[..., 1]]
        x = merge(attend(q, k, v, bias.transpose(2, 0, 1)[None])) @ p["o"]
        x = x.reshape(b, 2, 2, window, window, s.width).transpose(0, 1, 3, 2, 4, 5)
        return jnp.roll(x.reshape(b, side, side, s.width), (2, 2), (1, 2))

    def fn(p, image):
        x = image @ p["patch"]
        x = x + attention(p["attn"], layer_norm(x, p["norm"]))
        x = x + swiglu(p["mlp"], x)
        x = jnp.concatenate([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1) @ p["merge"]
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    params = {
        "patch": f32(5, s.width),
        "norm": {"scale": f32(s.width), "bias": f32(s.width)},
        "attn": qkvo_params(s) | {"table": f32((2 * window - 1) ** 2, s.heads)},
        "mlp": swiglu_params(s),
        "merge": f32(4 * s.width, 2 * s.width),
        "up": f32(2 * s.width, s.ffn),
        "down": f32(s.ffn, 2 * s.width),
    }
    expected = qkvo_expected(s, "attn/") | swiglu_expected(s, "mlp/")
    expected |= {"attn/table": (1, (s.heads,)), "up": (1, (s.ffn,)), "down": (0, (s.ffn,))}
    return Case(fn, params, (f32(s.batch, side, side, 5),), expected)


@model
def gated_recurrence(s: Sizes) -> Case:
    """Griffin: a linear recurrence with block-diagonal gates; the blocks are the units."""
    blocks, block = s.heads, s.head

    def fn(p, x):
        u = x @ p["x"]
        u = jax.lax.conv_general_dilated(
            u,
            p["conv"],
            (1,),
            [(3, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=s.inner,
        )
        gate = jax.nn.sigmoid(
            jnp.einsum("btne,nef->btnf", heads(u, blocks), p["gate"]) + p["gate_bias"]
        )
        decay = jnp.exp(-jax.nn.softplus(p["decay"]) * merge(gate))

        def step(h, now):
            a, u = now
            h = a * h + jnp.sqrt(1 - a * a) * u
            return h, h

        rows = jax.tree.map(lambda y: jnp.swapaxes(y, 0, 1), (decay, u))
        _, y = jax.lax.scan(step, jnp.zeros((x.shape[0], s.inner)), rows)
        return x + (jnp.swapaxes(y, 0, 1) * jax.nn.gelu(x @ p["y"])) @ p["out"]

    params = {
        "x": f32(s.width, s.inner),
        "y": f32(s.width, s.inner),
        "conv": f32(4, 1, s.inner),
        "gate": f32(blocks, block, block),
        "gate_bias": f32(blocks, block),
        "decay": f32(s.inner),
        "out": f32(s.inner, s.width),
    }
    unit = (blocks,)
    expected = {
        "x": (1, unit),
        "y": (1, unit),
        "conv": (2, unit),
        "gate": (0, unit),
        "out": (0, unit),
    }
    return Case(fn, params, (stream(s),), expected | {"gate_bias": (0, unit), "decay": (0, unit)})


@model
def time_mixing(s: Sizes) -> Case:
    """RWKV: token shift by padding, a WKV recurrence per channel, square kernels."""

    def fn(p, x):
        shifted = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        mixed = x * p["mix"] + shifted * (1 - p["mix"])
        r, k, v = (mixed @ p[n] for n in "rkv")

        def step(state, now):
            k, v = now
            top, bottom = state
            out = (top + jnp.exp(p["first"] + k) * v) / (bottom + jnp.exp(p["first"] + k))
            decay = jnp.exp(-jnp.exp(p["decay"]))
            return (decay * top + jnp.exp(k) * v, decay * bottom + jnp.exp(k)), out

        zero = jnp.zeros((x.shape[0], s.width))
        rows = jax.tree.map(lambda y: jnp.swapaxes(y, 0, 1), (k, v))
        _, out = jax.lax.scan(step, (zero, zero), rows)
        return x + (jax.nn.sigmoid(r) * jnp.swapaxes(out, 0, 1)) @ p["o"]

    params = {n: f32(s.width, s.width) for n in "rkvo"}
    params |= {n: f32(s.width) for n in ("mix", "first", "decay")}
    unit = (s.width,)
    expected = {"r": (1, unit), "k": (1, unit), "v": (1, unit), "o": (0, unit)}
    return Case(fn, params, (stream(s),), expected | {"first": (0, unit), "decay": (0, unit)})


@model
def shared_layers(s: Sizes) -> Case:
    """ALBERT: one set of parameters for all layers; YOCO: keys and values made once."""

    def fn(p, x):
        for _ in range(s.layers):
            x = x + self_attention(p["attn"], x, s)
            x = x + swiglu(p["mlp"], x)
        k, v = heads(x @ p["k"], s.heads), heads(x @ p["v"], s.heads)
        for layer in p["readers"]:
            x = x + merge(attend(heads(x @ layer["q"], s.heads), k, v)) @ layer["o"]
        return x

    reader = {"q": f32(s.width, s.inner), "o": f32(s.inner, s.width)}
    params = {
        "attn": qkvo_params(s),
        "mlp": swiglu_params(s),
        "k": f32(s.width, s.inner),
        "v": f32(s.width, s.inner),
        "readers": [reader, reader],
    }
    unit = (s.heads,)
    expected = (
        qkvo_expected(s, "attn/") | swiglu_expected(s, "mlp/") | {"k": (1, unit), "v": (1, unit)}
    )
    for i in range(2):
        expected |= {f"readers/{i}/q": (1, unit), f"readers/{i}/o": (0, unit)}
    return Case(fn, params, (stream(s),), expected)


@model
def side_table(s: Sizes) -> Case:
    """Gemma 3n: a second token table per layer, on a narrow side path that joins the stream."""
    narrow = 6

    def fn(p, ids):
        x = p["embed"][ids]
        side = p["side"][ids].reshape(*ids.shape, 2, narrow)
        for i in range(2):
            gate = jax.nn.gelu(x @ p["gate"][i]) * side[:, :, i]
            x = x + swiglu(p["mlp"], x) + gate @ p["project"][i]
        return x @ p["embed"].T

    params = {
        "embed": f32(s.vocab, s.width),
        "side": f32(s.vocab, 2 * narrow),
        "gate": [f32(s.width, narrow)] * 2,
        "project": [f32(narrow, s.width)] * 2,
        "mlp": swiglu_params(s),
    }
    # The side path's width is a stream of its own: it comes from a token table.
    expected = {"embed": (0, (s.vocab,)), "side": (0, (s.vocab,))} | swiglu_expected(s, "mlp/")
    return Case(fn, params, (tokens(s),), expected)


@model
def manual_mesh(s: Sizes) -> Case:
    """A model that shards its batch by hand with `shard_map`: the body is read all the same."""

    def fn(p, x):
        mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
        spec = jax.sharding.PartitionSpec("data")

        def body(p, x):
            x = x + self_attention(p["attn"], x, s)
            return x + swiglu(p["mlp"], x) + 0 * jax.lax.psum(x.sum(), "data")

        whole = jax.sharding.PartitionSpec()
        return jax.shard_map(body, mesh=mesh, in_specs=(whole, spec), out_specs=spec)(p, x)

    s = dataclasses.replace(s, batch=max(s.batch, 2))
    params = {"attn": qkvo_params(s), "mlp": swiglu_params(s)}
    return Case(fn, params, (stream(s),), qkvo_expected(s, "attn/") | swiglu_expected(s, "mlp/"))
