"""Models without softmax attention, and one with windows; see `jaxpr_models`."""

import jax
import jax.numpy as jnp
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
    stream,
    swiglu,
    swiglu_expected,
    swiglu_params,
)


@model
def plain_mlp(s: Sizes) -> Case:
    """F9: the widest inner dim wins, whichever sends fewer bytes."""

    def fn(p, x):
        h = jax.nn.relu(x @ p["fc1"])
        return jax.nn.relu(h @ p["fc2"]) @ p["fc3"]

    params = {"fc1": f32(s.width, s.ffn), "fc2": f32(s.ffn, s.ffn // 2), "fc3": f32(s.ffn // 2, 10)}
    expected = {"fc1": (1, (s.ffn,)), "fc2": (0, (s.ffn,))}
    return Case(fn, params, (f32(s.batch, s.width),), expected)


@model
def scores(s: Sizes) -> Case:
    """Two critics, one number a row each: a kernel with one output is the second of its pair."""
    inner = 2 * s.ffn

    def fn(p, x):
        first = jax.nn.relu(x @ p["a"]) @ p["b"]
        return first[..., 0], jnp.tanh(x @ p["c"]) @ p["d"]

    params = {
        "a": f32(s.width, inner),
        "b": f32(inner, 1),
        "c": f32(s.width, inner),
        "d": f32(inner),
    }
    expected = {"a": (1, (inner,)), "b": (0, (inner,)), "c": (1, (inner,)), "d": (0, (inner,))}
    return Case(fn, params, (f32(s.batch, s.width),), expected)


@model
def square_chain(s: Sizes) -> Case:
    """Four square kernels without a residual: two column/row pairs cover all of them."""

    def fn(p, x):
        for kernel in p["kernels"]:
            x = jnp.tanh(x @ kernel)
        return x

    n = s.ffn
    expected = {f"kernels/{i}": ((1, 0)[i % 2], (n,)) for i in range(4)}
    return Case(fn, {"kernels": [f32(n, n)] * 4}, (f32(s.batch, n),), expected)


@model
def mixer(s: Sizes) -> Case:
    """MLPs over positions and over channels in turn."""

    def fn(p, x):
        y = jnp.swapaxes(x, 1, 2)
        x = x + jnp.swapaxes(jax.nn.gelu(y @ p["a"]) @ p["b"], 1, 2)
        return x + jax.nn.gelu(x @ p["c"]) @ p["d"]

    patches = max(s.seq, 2)
    params = {
        "a": f32(patches, s.ffn),
        "b": f32(s.ffn, patches),
        "c": f32(s.width, s.ffn),
        "d": f32(s.ffn, s.width),
    }
    expected = {"a": (1, (s.ffn,)), "b": (0, (s.ffn,)), "c": (1, (s.ffn,)), "d": (0, (s.ffn,))}
    return Case(fn, params, (f32(s.batch, patches, s.width),), expected)


@model
def convolutions(s: Sizes) -> Case:
    """A bottleneck block and a classifier of ten: the last pair of kernels is column and row."""

    def conv(x, kernel, stride=1):
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def fn(p, x):
        x = jax.nn.relu(conv(x, p["stem"], 2))
        y = jax.nn.relu(conv(x, p["narrow"]))
        y = jax.nn.relu(conv(y, p["middle"]))
        x = x + conv(y, p["wide"])
        return x.mean((1, 2)) @ p["head"] + p["bias"]

    params = {
        "stem": f32(3, 3, 3, s.width),
        "narrow": f32(1, 1, s.width, s.ffn),
        "middle": f32(3, 3, s.ffn, s.ffn),
        "wide": f32(1, 1, s.ffn, s.width),
        "head": f32(s.width, 10),
        "bias": f32(10),
    }
    expected = {"middle": (3, (s.ffn,)), "wide": (2, (s.ffn,))}
    return Case(fn, params, (f32(s.batch, 16, 16, 3),), expected)


@model
def diffusion_block(s: Sizes) -> Case:
    """Two convolutions, group norms and a projection of the time; the shortcut has a kernel too."""

    def conv(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def group_norm(x, p, groups=8):
        y = x.reshape(*x.shape[:-1], groups, -1)
        y = y - y.mean((1, 2, 4), keepdims=True)
        y = y * jax.lax.rsqrt((y * y).mean((1, 2, 4), keepdims=True) + 1e-6)
        return y.reshape(x.shape) * p["scale"] + p["bias"]

    def block(p, x, t):
        h = conv(jax.nn.silu(group_norm(x, p["n1"])), p["c1"])
        h = h + (jax.nn.silu(t) @ p["time"])[:, None, None]
        h = conv(jax.nn.silu(group_norm(h, p["n2"])), p["c2"])
        return h + (conv(x, p["shortcut"]) if "shortcut" in p else x)

    def fn(p, x, t):
        return block(p["same"], block(p["wider"], x, t), t)

    def norm(c):
        return {"scale": f32(c), "bias": f32(c)}

    def params(a, b):
        return {
            "n1": norm(a),
            "c1": f32(3, 3, a, b),
            "time": f32(s.width, b),
            "n2": norm(b),
            "c2": f32(3, 3, b, b),
        }

    a, b, units = 32, 48, (8,)  # a group of the norm stays on one device
    wider = params(a, b) | {"shortcut": f32(1, 1, a, b)}
    dims = {"c1": 3, "time": 1, "n2/scale": 0, "n2/bias": 0, "c2": 2}
    expected = {f"{at}/{n}": (d, units) for at in ("wider", "same") for n, d in dims.items()}
    image = f32(s.batch, 16, 16, a)
    return Case(
        fn, {"wider": wider, "same": params(b, b)}, (image, f32(s.batch, s.width)), expected
    )


@model
def gated_attention_unit(s: Sizes) -> Case:
    """One narrow matrix of scores for all channels: channels are split, scores are not."""

    def fn(p, x):
        u, v, z = (jax.nn.silu(x @ p[name]) for name in ("gate", "value", "base"))
        q, k = z * p["turn"], z + p["shift"]
        scores = jax.nn.relu(jnp.einsum("bqs,bks->bqk", q, k)) ** 2
        return x + (u * jnp.einsum("bqk,bke->bqe", scores, v)) @ p["out"]

    params = {
        "gate": f32(s.width, s.ffn),
        "value": f32(s.width, s.ffn),
        "base": f32(s.width, s.head),
        "turn": f32(s.head),
        "shift": f32(s.head),
        "out": f32(s.ffn, s.width),
    }
    split = {"gate": (1, (s.ffn,)), "value": (1, (s.ffn,)), "out": (0, (s.ffn,))}
    return Case(fn, params, (stream(s),), split)


@model
def scaled_by_einsum(s: Sizes) -> Case:
    """A number for each position, multiplied in by `einsum`: it sums nothing and mixes nothing."""

    def fn(p, x):
        g = jax.nn.sigmoid(x @ p["gate"])[..., 0]
        h = jnp.einsum("bt,btf->btf", g, jax.nn.gelu(x @ p["up"]))
        return x + jnp.einsum("bt,btf,fd,d->btd", g, h, p["down"], p["scale"])

    params = {
        "gate": f32(s.width, 1),
        "up": f32(s.width, s.ffn),
        "down": f32(s.ffn, s.width),
        "scale": f32(s.width),
    }
    return Case(fn, params, (stream(s),), {"up": (1, (s.ffn,)), "down": (0, (s.ffn,))})


def selective_scan(u, dt, a, b, c):
    """A diagonal state space: u, dt are (batch, seq, inner), b, c are (batch, seq, state)."""

    def step(h, now):
        u, dt, b, c = now
        h = jnp.exp(dt[..., None] * a) * h + (dt * u)[..., None] * b[:, None]
        return h, jnp.einsum("bdn,bn->bd", h, c)

    start = jnp.zeros((u.shape[0], u.shape[2], a.shape[1]))
    rows = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (u, dt, b, c))
    return jnp.swapaxes(jax.lax.scan(step, start, rows)[1], 0, 1)


@model
def mamba(s: Sizes) -> Case:
    """A selective state space mixer: the inner width is split, though D * x looks residual."""
    inner, state, rank = s.ffn, 4, 3

    def fn(p, x):
        u, z = jnp.split(rms(x, p["norm"]) @ p["in"], 2, -1)
        u = jax.lax.conv_general_dilated(
            u,
            p["conv"],
            (1,),
            [(3, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=inner,
        )
        u = jax.nn.silu(u + p["conv_bias"])
        dt, b, c = jnp.split(u @ p["x"], [rank, rank + state], -1)
        dt = jax.nn.softplus(dt @ p["dt"] + p["dt_bias"])
        y = selective_scan(u, dt, -jnp.exp(p["a"]), b, c) + p["d"] * u
        return x + (y * jax.nn.silu(z)) @ p["out"]

    params = {
        "norm": f32(s.width),
        "in": f32(s.width, 2 * inner),
        "conv": f32(4, 1, inner),
        "conv_bias": f32(inner),
        "x": f32(inner, rank + 2 * state),
        "dt": f32(rank, inner),
        "dt_bias": f32(inner),
        "a": f32(inner, state),
        "d": f32(inner),
        "out": f32(inner, s.width),
    }
    unit = (inner,)
    expected = {
        "in": (1, unit, ((0, inner), (inner, 2 * inner))),
        "conv": (2, unit),
        "conv_bias": (0, unit),
        "x": (0, unit),
        "dt": (1, unit),
        "dt_bias": (0, unit),
        "a": (0, unit),
        "d": (0, unit),
        "out": (0, unit),
    }
    return Case(fn, params, (stream(s),), expected)


@model
def recurrence(s: Sizes) -> Case:
    """A GRU and an LSTM: what a kernel both contracts and produces is replicated."""

    def fn(p, x):
        def gru(h, u):
            z, r = (
                jax.nn.sigmoid(u @ p["wz"] + h @ p["uz"]),
                jax.nn.sigmoid(u @ p["wr"] + h @ p["ur"]),
            )
            h = (1 - z) * h + z * jnp.tanh(u @ p["wh"] + (r * h) @ p["uh"])
            return h, h

        def lstm(carry, u):
            h, c = carry
            i, f, g, o = jnp.split(u @ p["w"] + h @ p["u"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((s.batch, s.ffn))
        rows = jax.lax.scan(gru, start, jnp.swapaxes(x, 0, 1))[1]
        return jax.lax.scan(lstm, (start, start), rows)[1]

    params = {n: f32(s.width, s.ffn) for n in ("wz", "wr", "wh")}
    params |= {n: f32(s.ffn, s.ffn) for n in ("uz", "ur", "uh")}
    params |= {"w": f32(s.ffn, 4 * s.ffn), "u": f32(s.ffn, 4 * s.ffn)}
    return Case(fn, params, (stream(s),), {})


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
        u = merge(heads(x @ p["x"], blocks) * jax.nn.sigmoid(x @ p["weigh"])[..., None])
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
        "weigh": f32(s.width, blocks),
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
    expected |= {"gate_bias": (0, unit), "decay": (0, unit), "weigh": (1, unit)}
    return Case(fn, params, (stream(s),), expected)


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
def sparse_mlp(s: Sizes) -> Case:
    """Only the largest hidden units count: all of the width is needed, and nothing is split."""

    def fn(p, x):
        hidden = jax.nn.relu(x @ p["up"])
        least = jax.lax.top_k(hidden, 3)[0][..., -1:]
        return x + jnp.where(hidden >= least, hidden, 0) @ p["down"]

    params = {"up": f32(s.width, s.ffn), "down": f32(s.ffn, s.width)}
    return Case(fn, params, (stream(s),), {})
