"""Models of many kinds as a stranger writes them, in Flax NNX: no mesh, no annotation, own names.

Each comes with the specs that an expert would write by hand; see `kinds_of_models`.
"""

import jax
import jax.numpy as jnp
from flax import nnx

WIDTH, HEADS, INNER, VOCAB = 256, 8, 1024, 2048


class Attend(nnx.Module):
    """Causal or full attention with plain projections."""

    def __init__(self, width, heads, rngs, *, causal=True):
        self.heads, self.causal = heads, causal
        self.to_q, self.to_k, self.to_v, self.merge = (
            nnx.Linear(width, width, use_bias=False, rngs=rngs) for _ in range(4)
        )

    def __call__(self, x, memory=None):
        memory = x if memory is None else memory
        split = [a.reshape(*a.shape[:2], self.heads, -1) for a in self.project(x, memory)]
        y = jax.nn.dot_product_attention(*split, is_causal=self.causal)
        return self.merge(y.reshape(x.shape))

    def project(self, x, memory):
        return self.to_q(x), self.to_k(memory), self.to_v(memory)


class Wide(nnx.Module):
    """Two layers with biases."""

    def __init__(self, width, inner, rngs):
        self.grow, self.shrink = (
            nnx.Linear(width, inner, rngs=rngs),
            nnx.Linear(inner, width, rngs=rngs),
        )

    def __call__(self, x):
        return self.shrink(jax.nn.gelu(self.grow(x)))


class Dense(nnx.Module):
    """A decoder: embedding, two blocks, head."""

    def __init__(self, rngs):
        self.words = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.mixers = nnx.List([Attend(WIDTH, HEADS, rngs) for _ in range(2)])
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(4)])
        self.mlps = nnx.List([Wide(WIDTH, INNER, rngs) for _ in range(2)])
        self.out = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = self.words(ids)
        for i in range(2):
            x = x + self.mixers[i](self.norms[2 * i](x))
            x = x + self.mlps[i](self.norms[2 * i + 1](x))
        return self.out(x)


class Ragged(nnx.Module):
    """Dropless experts: tokens sorted by expert, multiplied by `ragged_dot`."""

    def __init__(self, rngs, experts=8, inner=512):
        init, self.experts = nnx.initializers.normal(0.02), experts
        self.gate = nnx.Linear(WIDTH, experts, use_bias=False, rngs=rngs)
        self.one = nnx.Param(init(rngs.params(), (experts, WIDTH, inner)))
        self.two = nnx.Param(init(rngs.params(), (experts, inner, WIDTH)))

    def __call__(self, x):
        rows = x.reshape(-1, WIDTH)
        weight, chosen = jax.lax.top_k(jax.nn.softmax(self.gate(rows).astype(jnp.float32)), 2)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=self.experts).astype(jnp.int32)
        h = jax.nn.silu(jax.lax.ragged_dot(rows[order // 2], self.one[...], sizes))
        y = jax.lax.ragged_dot(h, self.two[...], sizes)
        y = jnp.zeros_like(y).at[order].set(y).reshape(-1, 2, WIDTH)
        return x + (y * weight[..., None].astype(y.dtype)).sum(1).reshape(x.shape)


class Latent(nnx.Module):
    """Multi-head latent attention: low ranks, then heads; one rotary head that all share."""

    def __init__(self, rngs, rank=64, head=32, shared=16):
        self.sizes = (rank, head, shared)
        self.squeeze_q = nnx.Linear(WIDTH, rank, use_bias=False, rngs=rngs)
        self.norm_q, self.norm_kv = nnx.RMSNorm(rank, rngs=rngs), nnx.RMSNorm(rank, rngs=rngs)
        self.spread_q = nnx.Linear(rank, HEADS * (head + shared), use_bias=False, rngs=rngs)
        self.squeeze_kv = nnx.Linear(WIDTH, rank + shared, use_bias=False, rngs=rngs)
        self.spread_kv = nnx.Linear(rank, HEADS * 2 * head, use_bias=False, rngs=rngs)
        self.last = nnx.Linear(HEADS * head, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        rank, head, shared = self.sizes
        b, t, _ = x.shape
        q = self.spread_q(self.norm_q(self.squeeze_q(x))).reshape(b, t, HEADS, -1)
        low, turned = jnp.split(self.squeeze_kv(x), [rank], -1)
        k, v = jnp.split(self.spread_kv(self.norm_kv(low)).reshape(b, t, HEADS, -1), 2, -1)
        turned = jnp.broadcast_to(turned[:, :, None], (b, t, HEADS, shared))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, jnp.concatenate([k, turned], -1))
        probs = jax.nn.softmax(scores * (head + shared) ** -0.5, -1)
        y = jnp.einsum("bhqk,bkhd->bqhd", probs, v)
        return x + self.last(y.reshape(b, t, -1))


class StateSpace(nnx.Module):
    """Mamba-2's mixer, its projections apart: heads share B and C."""

    def __init__(self, rngs, inner=512, state=32, heads=16):
        self.heads = heads
        self.gate, self.value = (
            nnx.Linear(WIDTH, inner, use_bias=False, rngs=rngs) for _ in range(2)
        )
        self.b, self.c = (nnx.Linear(WIDTH, state, use_bias=False, rngs=rngs) for _ in range(2))
        self.step = nnx.Linear(WIDTH, heads, rngs=rngs)
        self.decay, self.jump = nnx.Param(jnp.zeros(heads)), nnx.Param(jnp.ones(heads))
        self.out = nnx.Linear(inner, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        z, v, b, c = self.gate(x), jax.nn.silu(self.value(x)), self.b(x), self.c(x)
        v = v.reshape(*v.shape[:2], self.heads, -1)
        dt = jax.nn.softplus(self.step(x))
        a = jnp.cumsum(-dt * jnp.exp(self.decay[...]), 1)
        seen = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))[None, :, :, None]
        kept = jnp.exp(jnp.where(seen, a[:, :, None] - a[:, None], -1e4)).astype(x.dtype)
        y = jnp.einsum("bln,bsn,blsh,bsh,bshp->blhp", c, b, kept, dt, v)
        y = (y + v * self.jump[...][:, None]).reshape(z.shape)
        return x + self.out(y * jax.nn.silu(z))


class ResBlock(nnx.Module):
    """A diffusion model's block: two convolutions, group norms, a projection of the time."""

    def __init__(self, before, after, time, rngs):
        self.pre, self.post = (nnx.GroupNorm(c, num_groups=8, rngs=rngs) for c in (before, after))
        self.near, self.far = (
            nnx.Conv(before, after, (3, 3), rngs=rngs),
            nnx.Conv(after, after, (3, 3), rngs=rngs),
        )
        self.when = nnx.Linear(time, after, rngs=rngs)
        self.pass_by = nnx.Conv(before, after, (1, 1), rngs=rngs) if before != after else None

    def __call__(self, x, t):
        h = self.near(jax.nn.silu(self.pre(x))) + self.when(t)[:, None, None]
        h = self.far(jax.nn.silu(self.post(h)))
        return h + (x if self.pass_by is None else self.pass_by(x))


class UNet(nnx.Module):
    """Two resolutions, attention in the middle, skips that are concatenated."""

    def __init__(self, rngs, c=64):
        self.time = nnx.Linear(1, c, rngs=rngs)
        self.stem, self.paint = nnx.Conv(4, c, (3, 3), rngs=rngs), nnx.Conv(c, 4, (3, 3), rngs=rngs)
        self.fine = ResBlock(c, c, c, rngs)
        self.down = nnx.Conv(c, 2 * c, (3, 3), strides=(2, 2), rngs=rngs)
        self.coarse, self.middle = (ResBlock(2 * c, 2 * c, c, rngs) for _ in range(2))
        self.norm, self.look = (
            nnx.GroupNorm(2 * c, num_groups=8, rngs=rngs),
            Attend(2 * c, 8, rngs, causal=False),
        )
        self.back = ResBlock(4 * c, 2 * c, c, rngs)
        self.up = nnx.ConvTranspose(2 * c, c, (2, 2), strides=(2, 2), rngs=rngs)
        self.end = ResBlock(2 * c, c, c, rngs)

    def __call__(self, x, time):
        t = jax.nn.silu(self.time(time[:, None]))
        fine = self.fine(self.stem(x), t)
        low = self.coarse(self.down(fine), t)
        flat = self.norm(low).reshape(low.shape[0], -1, low.shape[-1])
        y = self.middle(low + self.look(flat).reshape(low.shape), t)
        y = self.back(jnp.concatenate([y, low], -1), t)
        return self.paint(self.end(jnp.concatenate([self.up(y), fine], -1), t))


class ViT(nnx.Module):
    """Patches, positions, two blocks, a classifier."""

    def __init__(self, rngs):
        self.cut = nnx.Conv(3, WIDTH, (8, 8), strides=(8, 8), rngs=rngs)
        self.where = nnx.Param(jnp.zeros((1, 64, WIDTH)))
        self.mixers = nnx.List([Attend(WIDTH, HEADS, rngs, causal=False) for _ in range(2)])
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(5)])
        self.mlps = nnx.List([Wide(WIDTH, INNER, rngs) for _ in range(2)])
        self.name_it = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, image):
        x = self.cut(image)
        x = x.reshape(x.shape[0], -1, WIDTH) + self.where[...]
        for i in range(2):
            x = x + self.mixers[i](self.norms[2 * i](x))
            x = x + self.mlps[i](self.norms[2 * i + 1](x))
        return self.name_it(self.norms[4](x).mean(1))


class GatedUnit(nnx.Module):
    """A gated attention unit: one narrow score matrix for all channels."""

    def __init__(self, rngs, inner=512, narrow=32):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.gate, self.value = (nnx.Linear(WIDTH, inner, rngs=rngs) for _ in range(2))
        self.base = nnx.Linear(WIDTH, narrow, rngs=rngs)
        self.turn = nnx.Param(jnp.ones((2, narrow)))
        self.shift = nnx.Param(jnp.zeros((2, narrow)))
        self.out = nnx.Linear(inner, WIDTH, rngs=rngs)

    def __call__(self, x):
        h = self.norm(x)
        u, v, z = (jax.nn.silu(f(h)) for f in (self.gate, self.value, self.base))
        q, k = (z * self.turn[...][i] + self.shift[...][i] for i in range(2))
        scores = jax.nn.relu(jnp.einsum("bqs,bks->bqk", q, k) / x.shape[1]) ** 2
        return x + self.out(u * jnp.einsum("bqk,bke->bqe", scores, v))
