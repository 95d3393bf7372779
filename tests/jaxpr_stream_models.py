"""Stacked layers, several residual streams, unusual residuals and tables; see `jaxpr_models`."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxpr_expert_models import expert_params, routed
from jaxpr_models import (
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
    """Two residual streams and cross attention: k and v read one, o writes the other."""

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
        return layer_norm(2.5 * x + self_attention(p["attn"], x, s), p["norm"])

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
    """Values carried from layer to layer look like a residual stream of heads; they are split."""

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
def output_heads(s: Sizes) -> Case:
    """Heads of several layers behind the stream: wide ones are MLPs, square ones are not."""

    def fn(p, x):
        x = x + self_attention(p["attn"], x, s)
        near = jax.nn.gelu(jax.nn.gelu(x @ p["one"] + p["one_bias"]) @ p["two"]) @ p["three"]
        near = near / jnp.linalg.norm(near, axis=-1, keepdims=True)
        scores = jnp.tanh(x[:, 0] @ p["square"]) @ p["labels"]
        return near @ p["prototypes"], scores

    wide = 4 * s.width
    params = {
        "attn": qkvo_params(s),
        "one": f32(s.width, wide),
        "one_bias": f32(wide),
        "two": f32(wide, wide),
        "three": f32(wide, s.width // 2),
        "prototypes": f32(s.width // 2, s.vocab),
        "square": f32(s.width, s.width),
        "labels": f32(s.width, 2),
    }
    expected = {"one": (1, (wide,)), "one_bias": (0, (wide,)), "two": (0, (wide,))}
    expected |= {"prototypes": (1, (s.vocab,))} | qkvo_expected(s, "attn/")
    return Case(fn, params, (stream(s),), expected)


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


@model
def carried_weights(s: Sizes) -> Case:
    """A loop that carries its weights along unchanged."""

    def fn(p, x):
        def step(carry):
            i, x, kernels = carry
            return i + 1, x + swiglu(kernels, x), kernels

        return jax.lax.while_loop(lambda c: c[0] < 3, step, (0, x, p))[1]

    return Case(fn, swiglu_params(s), (stream(s),), swiglu_expected(s, ""))


@model
def moving_average(s: Sizes) -> Case:
    """A loop that carries a parameter and changes it: reached, and replicated."""

    def fn(p, x):
        def step(mean, row):
            mean = 0.9 * mean + 0.1 * row.mean(0)
            return mean, row - mean[None]

        _, rows = jax.lax.scan(step, p["mean"], jnp.swapaxes(x, 0, 1))
        return x + swiglu(p["mlp"], jnp.swapaxes(rows, 0, 1))

    params = {"mean": f32(s.width), "mlp": swiglu_params(s)}
    return Case(fn, params, (stream(s),), swiglu_expected(s, "mlp/"))


@model
def shared_constant(s: Sizes) -> Case:
    """One array of ones scales two widths, outside and inside a call: it ties nothing together."""

    def fn(p, x):
        ones = jnp.ones((1, 1, s.ffn))
        narrow = ones[..., : s.width]

        @jax.jit
        def scale(hidden, x, ones, narrow):
            return hidden * ones, x * (ones if s.ffn == s.width else narrow)

        hidden, x = scale(jax.nn.relu(x @ p["up"]), x * narrow, ones, narrow)
        return x + (hidden * ones) @ p["down"]

    params = {"up": f32(s.width, s.ffn), "down": f32(s.ffn, s.width)}
    return Case(fn, params, (stream(s),), {"up": (1, (s.ffn,)), "down": (0, (s.ffn,))})


@model
def shared_bias(s: Sizes) -> Case:
    """T5: one bias, table plus mask, is added to the scores of every layer: no residual."""

    def fn(p, x, mask):
        at = jnp.arange(s.seq)
        table = p["table"][jnp.clip(jnp.abs(at[:, None] - at[None]), 0, 31)].transpose(2, 0, 1)
        bias = jnp.where(mask[:, None, None], 0, -1e9) + table[None]
        for layer in p["layers"]:
            x = x + merge(attend(*(heads(x @ layer[n], s.heads) for n in "qkv"), bias)) @ layer["o"]
        return x

    s = dataclasses.replace(s, seq=max(s.seq, 2))
    params = {"table": f32(32, s.heads), "layers": [qkvo_params(s)] * 3}
    expected = {"table": (1, (s.heads,))}
    for i in range(3):
        expected |= qkvo_expected(s, f"layers/{i}/")
    mask = jax.ShapeDtypeStruct((s.batch, s.seq), bool)
    return Case(fn, params, (stream(s), mask), expected)


@model
def learned_positions(s: Sizes) -> Case:
    """A parameter of positions on the residual stream, flat projections: no head is divided."""

    def fn(p, x):
        x = x + p["positions"]
        return x + merge(attend(*(heads(x @ p[n], s.heads) for n in "qkv"))) @ p["o"]

    params = qkvo_params(s) | {"positions": f32(1, s.seq, s.width)}
    return Case(fn, params, (stream(s),), qkvo_expected(s, ""))


@model
def narrow_embedding(s: Sizes) -> Case:
    """OPT-350m: a tied table narrower than the stream, widened and narrowed again."""

    def fn(p, ids):
        x = p["embed"][ids] @ p["widen"]
        x = x + swiglu(p["mlp"], x)
        return (x @ p["narrow"]) @ p["embed"].T

    params = {
        "embed": f32(s.vocab, 20),
        "widen": f32(20, s.width),
        "narrow": f32(s.width, 20),
        "mlp": swiglu_params(s),
    }
    expected = {"embed": (0, (s.vocab,))} | swiglu_expected(s, "mlp/")
    return Case(fn, params, (tokens(s),), expected)
