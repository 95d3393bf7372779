"""Decode steps as strangers write them: every way of keeping a cache, all names scrambled.

Each builder returns a `Case`; `want` says per path pattern of the cache what an expert writes, for
the axes "dp" and a tensor axis whose part that kv heads use is called "kv".
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

BATCH, SLOTS, WIDTH, HEAD, MLP, VOCAB, LAYERS = 4, 24, 64, 16, 192, 2048, 2
STEPS = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """A decode step, `fn(params, *inputs) -> results`, and what is known about it."""

    fn: Callable[..., Any]
    params: Any
    state: Any
    want: Mapping[str, tuple[str, ...]]
    """Regular expression of a cache path -> axes per dim, "" for none."""
    per_layer: int = 2
    """All-reduces a layer, beside that of the embedding."""
    num_layers: int = LAYERS
    fused: bool = False
    """Whether one kernel makes queries, keys and values."""


def _params(rng, **shapes):
    def scaled(shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(max(shape[0], 1)), jnp.float32)

    return {name: scaled(shape) for name, shape in shapes.items()}


def _norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def _attend(q, k, v, seen):
    """q (B, N, H), k and v (B, S, K, H); K divides N."""
    batch, heads, width = q.shape
    q = q.reshape(batch, k.shape[2], -1, width)
    scores = jnp.einsum("bkgh,bskh->bkgs", q, k) / np.sqrt(width)
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
    return jnp.einsum("bkgs,bskh->bkgh", weights, v).reshape(batch, heads * width)


def _plain(cache, k, v, position):
    """A slice in place of a (B, S, K, H) array a layer."""
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=position, axis=1)
    new = {"zz": put(cache["zz"], k[:, None]), "qp": put(cache["qp"], v[:, None])}
    return new, new["zz"], new["qp"], jnp.arange(SLOTS) <= position


def _scattered(cache, k, v, position):
    """A scatter: every row has a position of its own."""
    rows, places = jnp.arange(BATCH), jnp.full(BATCH, position)
    new = {"zz": cache["zz"].at[rows, places].set(k), "qp": cache["qp"].at[rows, places].set(v)}
    return new, new["zz"], new["qp"], jnp.arange(SLOTS) <= position


def _one_hot(cache, k, v, position):
    """A product with a one-hot position, as TPU models write it."""
    hot = jax.nn.one_hot(position, SLOTS)[None, :, None, None]
    new = {name: cache[name] * (1 - hot) + hot * x[:, None] for name, x in (("zz", k), ("qp", v))}
    return new, new["zz"], new["qp"], jnp.arange(SLOTS) <= position


def _rolling(cache, k, v, position):
    """A window: the oldest entry goes, the new one comes last."""
    new = {
        name: jnp.concatenate([cache[name][:, 1:], x[:, None]], axis=1)
        for name, x in (("zz", k), ("qp", v))
    }
    return new, new["zz"], new["qp"], jnp.arange(SLOTS) >= SLOTS - 1 - position


def _flat(cache, k, v, position):
    """Heads and their width in one dim, slots last."""
    new = {
        name: jax.lax.dynamic_update_slice(cache[name], x.reshape(BATCH, -1, 1), (0, 0, position))
        for name, x in (("zz", k), ("qp", v))
    }
    shape = (BATCH, k.shape[1], k.shape[2], SLOTS)
    keys, values = (new[n].reshape(shape).transpose(0, 3, 1, 2) for n in ("zz", "qp"))
    return new, keys, values, jnp.arange(SLOTS) <= position


def _quantised(cache, k, v, position):
    """int8 with a scale for each head and token."""
    new, out = {}, []
    for name, x in (("zz", k), ("qp", v)):
        scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
        small = jnp.round(x / scale).astype(jnp.int8)
        for key, part in ((name, small), (name + "_s", scale)):
            start = (0, position, 0, 0)
            new[key] = jax.lax.dynamic_update_slice(cache[key], part[:, None], start)
        out.append(new[name].astype(jnp.float32) * new[name + "_s"])
    return new, *out, jnp.arange(SLOTS) <= position


KEEPERS = {
    "slices": _plain,
    "scatter": _scattered,
    "one-hot": _one_hot,
    "rolling": _rolling,
    "flat": _flat,
    "int8": _quantised,
}


def _block(w, x, cache, position, keep, heads, kv_heads):
    """One pre-norm layer; (x, cache)."""
    h = _norm(x)
    q = (h @ w["a"]).reshape(-1, heads, HEAD)
    k, v = ((h @ w[n]).reshape(-1, kv_heads, HEAD) for n in ("e", "b"))
    cache, keys, values, seen = keep(cache, k, v, position)
    x = x + _attend(q, keys, values, seen) @ w["d"]
    h = _norm(x)
    return x + (jax.nn.silu(h @ w["c"]) * (h @ w["g"])) @ w["f"], cache


def _shapes(heads, kv_heads):
    return {
        "a": (WIDTH, heads * HEAD),
        "e": (WIDTH, kv_heads * HEAD),
        "b": (WIDTH, kv_heads * HEAD),
        "d": (heads * HEAD, WIDTH),
        "c": (WIDTH, MLP),
        "g": (WIDTH, MLP),
        "f": (MLP, WIDTH),
    }


def decoder(kind, heads=8, kv_heads=4):
    """A Llama-like decoder with one array a layer, kept in one of the ways of `KEEPERS`."""
    rng, keep = np.random.default_rng(0), KEEPERS[kind]

    def fn(tree, xs, tok, at):
        x = tree["k7"][tok]
        new = []
        for w, cache in zip(tree["m"], xs, strict=True):
            x, cache = _block(w, x, cache, at, keep, heads, kv_heads)
            new.append(cache)
        return _norm(x) @ tree["a0"], new

    params = {
        "m": [_params(rng, **_shapes(heads, kv_heads)) for _ in range(LAYERS)],
        **_params(rng, k7=(VOCAB, WIDTH), a0=(WIDTH, VOCAB)),
    }
    full = (BATCH, kv_heads * HEAD, SLOTS) if kind == "flat" else (BATCH, SLOTS, kv_heads, HEAD)
    dtype = jnp.int8 if kind == "int8" else jnp.float32
    state = [{n: jnp.zeros(full, dtype) for n in ("zz", "qp")} for _ in range(LAYERS)]
    kv = "kv" if kv_heads > 1 else ""
    place = ("dp", kv, "") if kind == "flat" else ("dp", "", kv, "")
    if kind == "int8":
        for one in state:
            one |= {n + "_s": jnp.ones((*full[:3], 1)) for n in ("zz", "qp")}
    return Case(fn, params, state, {".*": place})


def stacked(how):
    """All layers in one array: scanned along, or carried and written by slices."""
    rng, heads, kv_heads = np.random.default_rng(1), 8, 4
    shapes = {n: (LAYERS, *s) for n, s in _shapes(heads, kv_heads).items()}
    params = {"u": _params(rng, **shapes), **_params(rng, k7=(VOCAB, WIDTH), a0=(WIDTH, VOCAB))}
    full = jnp.zeros((LAYERS, BATCH, SLOTS, kv_heads, HEAD))

    def fn(tree, xs, tok, at):
        x = tree["k7"][tok]

        def scanned(x, row):
            w, cache = row
            return _block(w, x, cache, at, _plain, heads, kv_heads)

        def carried(carry, row):
            x, caches = carry
            w, layer = row
            pick = {n: jax.lax.dynamic_index_in_dim(c, layer, 0, False) for n, c in caches.items()}
            x, new = _block(w, x, pick, at, _plain, heads, kv_heads)
            put = jax.lax.dynamic_update_index_in_dim
            return (x, {n: put(c, new[n], layer, 0) for n, c in caches.items()}), None

        if how == "scanned":
            x, xs = jax.lax.scan(scanned, x, (tree["u"], xs))
        else:
            (x, xs), _ = jax.lax.scan(carried, (x, xs), (tree["u"], jnp.arange(LAYERS)))
        return _norm(x) @ tree["a0"], xs

    return Case(fn, params, {"zz": full, "qp": full}, {".*": ("", "dp", "", "kv", "")})


def latent():
    """DeepSeek's latent attention: the cache is a low rank that all heads share."""
    rng, heads, rank = np.random.default_rng(2), 8, 12
    shapes = {
        "a": (WIDTH, heads * HEAD),
        "e": (WIDTH, rank),
        "b": (rank, heads * HEAD),
        "z": (rank, heads * HEAD),
        "d": (heads * HEAD, WIDTH),
        "c": (WIDTH, MLP),
        "f": (MLP, WIDTH),
    }

    def fn(tree, xs, tok, at):
        x, new = tree["k7"][tok], []
        for w, cache in zip(tree["m"], xs, strict=True):
            h = _norm(x)
            q = (h @ w["a"]).reshape(-1, heads, HEAD)
            cache = jax.lax.dynamic_update_slice(cache, (h @ w["e"])[:, None], (0, at, 0))
            k, v = ((cache @ w[n]).reshape(BATCH, SLOTS, heads, HEAD) for n in ("b", "z"))
            x = x + _attend(q, k, v, jnp.arange(SLOTS) <= at) @ w["d"]
            x = x + jax.nn.gelu(_norm(x) @ w["c"]) @ w["f"]
            new.append(cache)
        return _norm(x) @ tree["a0"], new

    params = {
        "m": [_params(rng, **shapes) for _ in range(LAYERS)],
        **_params(rng, k7=(VOCAB, WIDTH), a0=(WIDTH, VOCAB)),
    }
    state = [jnp.zeros((BATCH, SLOTS, rank)) for _ in range(LAYERS)]
    return Case(fn, params, state, {".*": ("dp", "", "")})


def gpt2():
    """Flax GPT-2's layout: Conv1D kernels (out, in), fused qkv, `past_key_values`."""
    rng, heads = np.random.default_rng(3), 8
    inner = heads * HEAD

    def fn(tree, past, tok, at):
        x, new = tree["k7"][tok] + tree["w8"][at], {}
        for name, w in tree["m"].items():
            h = _norm(x) * w["n1"]
            q, k, v = jnp.split(h @ w["a"].T + w["a1"], 3, axis=-1)
            q, k, v = (y.reshape(-1, heads, HEAD) for y in (q, k, v))
            new[name], keys, values, seen = _plain(past[name], k, v, at)
            x = x + _attend(q, keys, values, seen) @ w["d"].T + w["d1"]
            h = _norm(x) * w["n2"]
            x = x + jax.nn.gelu(h @ w["c"].T + w["c1"]) @ w["f"].T + w["f1"]
        return _norm(x) @ tree["k7"].T, new

    shapes = {
        "a": (3 * inner, WIDTH),
        "a1": (3 * inner,),
        "d": (WIDTH, inner),
        "d1": (WIDTH,),
        "c": (MLP, WIDTH),
        "c1": (MLP,),
        "f": (WIDTH, MLP),
        "f1": (WIDTH,),
        "n1": (WIDTH,),
        "n2": (WIDTH,),
    }
    params = {
        "m": {n: _params(rng, **shapes) for n in ("x", "o")},
        **_params(rng, k7=(VOCAB, WIDTH), w8=(SLOTS, WIDTH)),
    }
    full = jnp.zeros((BATCH, SLOTS, heads, HEAD))
    state = {n: {"zz": full, "qp": full} for n in ("x", "o")}
    return Case(fn, params, state, {".*": ("dp", "", "kv", "")}, fused=True)


def cross(precomputed):
    """T5's decoder: a cache of its own tokens, and the encoder's: keys and values, or states."""
    rng, heads, source = np.random.default_rng(4), 8, 10
    shapes = _shapes(heads, heads) | {
        "r": (WIDTH, heads * HEAD),
        "s": (WIDTH, heads * HEAD),
        "t": (WIDTH, heads * HEAD),
        "v": (heads * HEAD, WIDTH),
    }

    def fn(tree, past, tok, at):
        own, other = past
        x, new = tree["k7"][tok], []
        for i, (w, cache) in enumerate(zip(tree["m"], own, strict=True)):
            h = _norm(x)
            q, k, v = ((h @ w[n]).reshape(-1, heads, HEAD) for n in ("a", "e", "b"))
            cache, keys, values, seen = _plain(cache, k, v, at)
            x = x + _attend(q, keys, values, seen) @ w["d"]
            q = (_norm(x) @ w["r"]).reshape(-1, heads, HEAD)
            if precomputed:
                keys, values = other[i]
            else:
                keys, values = ((other @ w[n]).reshape(BATCH, -1, heads, HEAD) for n in "st")
            x = x + _attend(q, keys, values, True) @ w["v"]
            x = x + jax.nn.relu(_norm(x) @ w["c"]) @ w["f"]
            new.append(cache)
        return _norm(x) @ tree["a0"], (new, other)

    if precomputed:
        shapes = {n: s for n, s in shapes.items() if n not in "st"}
    params = {
        "m": [_params(rng, **shapes) for _ in range(LAYERS)],
        **_params(rng, k7=(VOCAB, WIDTH), a0=(WIDTH, VOCAB)),
    }
    full = jnp.zeros((BATCH, SLOTS, heads, HEAD))
    own = [{"zz": full, "qp": full} for _ in range(LAYERS)]
    if precomputed:
        pair = [jnp.asarray(rng.normal(size=(BATCH, source, heads, HEAD)), jnp.float32)] * 2
        other = [tuple(pair)] * LAYERS
        want = {".*": ("dp", "", "kv", "")}
    else:
        other = jnp.asarray(rng.normal(size=(BATCH, source, WIDTH)), jnp.float32)
        want = {"xs?/1|past/1$": ("dp", "", ""), "past/0": ("dp", "", "kv", "")}
    return Case(fn, params, (own, other), want, per_layer=3)


def mamba():
    """A selective state space: a window of the convolution and a state of every channel."""
    rng, inner, states, taps, rank = np.random.default_rng(5), 128, 6, 3, 10

    def fn(tree, xs, tok):
        x, new = tree["k7"][tok], []
        for w, (window, state) in zip(tree["m"], xs, strict=True):
            h = _norm(x)
            u, z = h @ w["a"], h @ w["b"]
            window = jnp.concatenate([window[:, :, 1:], u[:, :, None]], axis=-1)
            u = jax.nn.silu(jnp.sum(window * w["c"], axis=-1))
            small = u @ w["d"]
            dt, b, c = jnp.split(small, [rank, rank + states], axis=-1)
            dt = jax.nn.softplus(dt @ w["e"])
            decay = jnp.exp(dt[:, :, None] * -jnp.exp(w["f"]))
            state = state * decay + (dt * u)[:, :, None] * b[:, None, :]
            y = jnp.einsum("bdn,bn->bd", state, c) + w["g"] * u
            x = x + (y * jax.nn.silu(z)) @ w["h"]
            new.append((window, state))
        return _norm(x) @ tree["a0"], new

    shapes = {
        "a": (WIDTH, inner),
        "b": (WIDTH, inner),
        "c": (inner, taps),
        "d": (inner, rank + 2 * states),
        "e": (rank, inner),
        "f": (inner, states),
        "g": (inner,),
        "h": (inner, WIDTH),
    }
    params = {
        "m": [_params(rng, **shapes) for _ in range(LAYERS)],
        **_params(rng, k7=(VOCAB, WIDTH), a0=(WIDTH, VOCAB)),
    }
    state = [(jnp.zeros((BATCH, inner, taps)), jnp.zeros((BATCH, inner, states)))] * LAYERS
    return Case(fn, params, state, {".*": ("dp", "kv", "")})


def rwkv():
    """RWKV: the last token of two mixes, and a matrix of every head."""
    rng, heads = np.random.default_rng(6), 8
    inner = heads * HEAD

    def fn(tree, xs, tok):
        x, new = tree["k7"][tok], []
        for w, old in zip(tree["m"], xs, strict=True):
            h = _norm(x)
            mixed = h + (old["i"] - h) * w["mu"]
            r, k, v, g = ((mixed @ w[n]).reshape(BATCH, heads, HEAD) for n in ("a", "e", "b", "z"))
            outer = k[..., :, None] * v[..., None, :]
            bonus = old["s"] + w["bo"][None, :, :, None] * outer
            y = jnp.einsum("bhk,bhkv->bhv", r, bonus)
            state = old["s"] * jnp.exp(-jnp.exp(w["de"]))[None, :, :, None] + outer
            x = x + (y * jax.nn.silu(g)).reshape(BATCH, inner) @ w["d"]
            h2 = _norm(x)
            mixed = h2 + (old["j"] - h2) * w["mv"]
            x = x + jnp.square(jax.nn.relu(mixed @ w["c"])) @ w["f"]
            new.append({"i": h, "j": h2, "s": state})
        return _norm(x) @ tree["a0"], new

    shapes = {
        **{n: (WIDTH, inner) for n in ("a", "e", "b", "z")},
        "d": (inner, WIDTH),
        "c": (WIDTH, MLP),
        "f": (MLP, WIDTH),
        "mu": (WIDTH,),
        "mv": (WIDTH,),
        "bo": (heads, HEAD),
        "de": (heads, HEAD),
    }
    params = {
        "m": [_params(rng, **shapes) for _ in range(LAYERS)],
        **_params(rng, k7=(VOCAB, WIDTH), a0=(WIDTH, VOCAB)),
    }
    state = [
        {
            "i": jnp.zeros((BATCH, WIDTH)),
            "j": jnp.zeros((BATCH, WIDTH)),
            "s": jnp.zeros((BATCH, heads, HEAD, HEAD)),
        }
        for _ in range(LAYERS)
    ]
    want = {"/[ij]$": ("dp", ""), "/s$": ("dp", "kv", "", "")}
    return Case(fn, params, state, want)


class _Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        heads = nn.MultiHeadDotProductAttention(8, qkv_features=8 * HEAD, decode=True, name="z")
        x = x + heads(nn.LayerNorm(name="b")(x))
        h = nn.gelu(nn.Dense(MLP, name="y")(nn.LayerNorm(name="a")(x)))
        return x + nn.Dense(WIDTH, name="c")(h)


class _Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="x")(tokens)
        for name in ("q", "k"):
            x = _Layer(name=name)(x)
        return nn.Dense(VOCAB, use_bias=False, name="e")(nn.LayerNorm(name="f")(x))


def linen():
    """Linen's `cache` collection."""
    model = _Decoder()
    made = model.init(jax.random.key(0), jnp.zeros((BATCH, SLOTS), int))

    def fn(tree, xs, tok):
        logits, changed = model.apply(
            {"params": tree, "cache": xs}, tok[:, None], mutable=["cache"]
        )
        return logits[:, 0], changed["cache"]

    want = {"index$": (), "cached": ("dp", "", "kv", "")}
    return Case(fn, made["params"], made["cache"], want)


class _Block(nnx.Module):
    def __init__(self, rngs):
        self.n1, self.n2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.z = nnx.MultiHeadAttention(
            8, in_features=WIDTH, qkv_features=8 * HEAD, decode=True, rngs=rngs
        )
        self.y = nnx.Linear(WIDTH, MLP, rngs=rngs)
        self.c = nnx.Linear(MLP, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.z(self.n1(x))
        return x + self.c(nnx.gelu(self.y(self.n2(x))))


class _Model(nnx.Module):
    def __init__(self, rngs):
        self.x = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.q, self.k = _Block(rngs), _Block(rngs)
        self.e = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        return self.e(self.k(self.q(self.x(tokens))))


def of_nnx():
    """`nnx.Cache` variables, split from the parameters."""
    model = _Model(nnx.Rngs(0))
    for block in (model.q, model.k):
        block.z.init_cache((BATCH, SLOTS, WIDTH))
    graph, params, cache, rest = nnx.split(model, nnx.Param, nnx.Cache, ...)

    def fn(tree, xs, tok):
        model = nnx.merge(graph, tree, xs, rest)
        logits = model(tok[:, None])
        return logits[:, 0], nnx.state(model, nnx.Cache)

    want = {"index$": (), "cached": ("dp", "", "kv", "")}
    return Case(fn, params, cache, want)


CASES: dict[str, Callable[[], Case]] = {
    **{kind: functools.partial(decoder, kind) for kind in KEEPERS},
    "fewer kv heads": functools.partial(decoder, "slices", 8, 2),
    "one kv head": functools.partial(decoder, "slices", 8, 1),
    "scanned": functools.partial(stacked, "scanned"),
    "carried": functools.partial(stacked, "carried"),
    "latent": latent,
    "gpt2": gpt2,
    "t5 states": functools.partial(cross, False),
    "t5 keys": functools.partial(cross, True),
    "mamba": mamba,
    "rwkv": rwkv,
    "linen": linen,
    "nnx": of_nnx,
}
