"""Models of many kinds as a stranger writes them, in Flax Linen; see `kinds_nnx`."""

import flax.linen as nn
import jax
import jax.numpy as jnp

WIDTH, HEADS, INNER = 256, 8, 1024


def heads(x):
    return x.reshape(*x.shape[:2], HEADS, -1)


class Mix(nn.Module):
    """Attention of one sequence to itself or to another."""

    causal: bool = False

    @nn.compact
    def __call__(self, x, other=None):
        other = x if other is None else other
        q = nn.Dense(WIDTH, use_bias=False, name="ask")(x)
        k, v = (nn.Dense(WIDTH, use_bias=False, name=n)(other) for n in ("offer", "content"))
        y = jax.nn.dot_product_attention(heads(q), heads(k), heads(v), is_causal=self.causal)
        return nn.Dense(WIDTH, use_bias=False, name="gather")(y.reshape(x.shape))


class Think(nn.Module):
    """An MLP."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(nn.gelu(nn.Dense(INNER)(x)))


class Router(nn.Module):
    """The two best experts of each token: (tokens, 2) weights and indices."""

    experts: int = 8

    @nn.compact
    def __call__(self, rows):
        scores = nn.Dense(self.experts, use_bias=False)(rows)
        return jax.lax.top_k(jax.nn.softmax(scores.astype(jnp.float32)), 2)


class Stack(nn.Module):
    """Weights of all experts."""

    inner: int = 512
    experts: int = 8

    @nn.compact
    def __call__(self, slots):
        """(experts, slots, width) or (tokens, width) to the same with one expert's output each."""
        init = nn.initializers.normal(0.02)
        one = self.param("one", init, (self.experts, WIDTH, self.inner)).astype(slots.dtype)
        two = self.param("two", init, (self.experts, self.inner, WIDTH)).astype(slots.dtype)
        if slots.ndim == 2:
            h = nn.silu(jnp.einsum("nd,edf->nef", slots, one))
            return jnp.einsum("nef,efd->ned", h, two)
        return jnp.einsum("ecf,efd->ecd", nn.silu(jnp.einsum("ecd,edf->ecf", slots, one)), two)


class EinsumExperts(nn.Module):
    """Every expert on every token, weighted."""

    @nn.compact
    def __call__(self, x):
        rows = x.reshape(-1, WIDTH)
        weight, chosen = Router()(rows)
        mask = (jax.nn.one_hot(chosen, 8) * weight[..., None]).sum(1).astype(x.dtype)
        return x + jnp.einsum("ned,ne->nd", Stack()(rows), mask).reshape(x.shape)


class CapacityExperts(nn.Module):
    """Each expert takes as many tokens as it has slots."""

    slots: int = 64

    @nn.compact
    def __call__(self, x):
        rows = x.reshape(-1, WIDTH)
        weight, chosen = Router()(rows)
        mine = jax.nn.one_hot(chosen[:, 0], 8)
        place = (jnp.cumsum(mine, 0) - 1) * mine
        fits = mine * (place < self.slots)
        sent = (
            fits[..., None] * jax.nn.one_hot(place.sum(-1).astype(jnp.int32), self.slots)[:, None]
        )
        out = Stack()(jnp.einsum("nd,nec->ecd", rows, sent.astype(x.dtype)))
        back = (sent * weight[:, :1, None]).astype(x.dtype)
        return x + jnp.einsum("ecd,nec->nd", out, back).reshape(x.shape)


class TimeMix(nn.Module):
    """RWKV's block: a recurrence over time for each head, and a squared-relu channel mix."""

    @nn.compact
    def __call__(self, x):
        def blend(name, h):
            mu = self.param(name, nn.initializers.ones, (WIDTH,)).astype(h.dtype)
            before = jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1]
            return h * mu[None, None] + before * (1 - mu)[None, None]

        h = nn.LayerNorm()(x)
        r, k, v, g = (nn.Dense(WIDTH, use_bias=False, name=n)(blend(f"mix_{n}", h)) for n in "rkvg")
        decay = self.param("decay", nn.initializers.ones, (HEADS, WIDTH // HEADS))
        first = self.param("first", nn.initializers.ones, (HEADS, WIDTH // HEADS))

        def step(state, now):
            r, k, v = now
            both = k[..., None] * v[..., None, :]
            y = jnp.einsum(
                "bhk,bhkv->bhv", r, state + first.astype(r.dtype)[None, ..., None] * both
            )
            return state * jnp.exp(-jnp.exp(decay)).astype(r.dtype)[None, ..., None] + both, y

        moved = [heads(a).swapaxes(0, 1) for a in (r, k, v)]
        size = WIDTH // HEADS
        state = jnp.zeros((x.shape[0], HEADS, size, size), moved[0].dtype)
        _, y = jax.lax.scan(step, state, tuple(moved))
        y = y.swapaxes(0, 1).reshape(x.shape) * nn.silu(g)
        x = x + nn.Dense(WIDTH, use_bias=False, name="o")(y)
        h = nn.LayerNorm()(x)
        k = jnp.square(nn.relu(nn.Dense(INNER, use_bias=False, name="key2")(blend("mix_a", h))))
        gate = nn.sigmoid(nn.Dense(WIDTH, use_bias=False, name="rec2")(blend("mix_b", h)))
        return x + gate * nn.Dense(WIDTH, use_bias=False, name="val2")(k)


class ConvNeXt(nn.Module):
    """Depthwise convolutions and pointwise pairs, with a layer scale; one change of resolution."""

    @nn.compact
    def __call__(self, image):
        x = nn.Conv(64, (4, 4), strides=(4, 4))(image)
        for width in (64, 128):
            if width > 64:
                x = nn.Conv(width, (2, 2), strides=(2, 2))(nn.LayerNorm()(x))
            for _ in range(2):
                h = nn.LayerNorm()(nn.Conv(width, (7, 7), feature_group_count=width)(x))
                h = nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(h)))
                scale = self.param(f"scale{width}{_}", nn.initializers.ones, (width,))
                x = x + h * scale.astype(h.dtype)[None, None, None]
        return nn.Dense(10)(x.mean((1, 2)))


class Translate(nn.Module):
    """Encoder and decoder with one table."""

    @nn.compact
    def __call__(self, source, target):
        table = nn.Embed(2048, WIDTH)
        x, y = table(source), table(target)
        x = x + Mix()(nn.LayerNorm()(x))
        x = x + Think()(nn.LayerNorm()(x))
        y = y + Mix(causal=True)(nn.LayerNorm()(y))
        y = y + Mix()(nn.LayerNorm()(y), x)
        y = y + Think()(nn.LayerNorm()(y))
        return table.attend(nn.LayerNorm()(y))


class Listen(nn.Module):
    """Audio: two strided convolutions over time, then an encoder."""

    @nn.compact
    def __call__(self, sound):
        x = nn.gelu(nn.Conv(WIDTH, (3,))(sound))
        x = nn.gelu(nn.Conv(WIDTH, (3,), strides=(2,))(x))
        where = self.param("where", nn.initializers.ones, (x.shape[1], WIDTH))
        x = x + where.astype(x.dtype)[None]
        for _ in range(2):
            x = x + Mix()(nn.LayerNorm()(x))
            x = x + Think()(nn.LayerNorm()(x))
        return nn.LayerNorm()(x)
