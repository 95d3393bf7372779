"""Mixtures of experts with expert findings; see `jaxpr_models`."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxpr_models import Case, Sizes, f32, model, stream, swiglu, swiglu_expected, swiglu_params


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

    # XLA divides a ragged product by width, not by groups.
    width = {"gate": (2, (s.ffn,)), "up": (2, (s.ffn,)), "down": (1, (s.ffn,))}
    return Case(fn, expert_params(s), (stream(s),), width)


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
    """Each token picks its expert's matrices by index, and its bias rows: width is split."""
    s = dataclasses.replace(s, batch=max(s.batch, 2))

    def fn(p, x):
        chosen = jnp.argmax(x @ p["router"], -1)
        hidden = jax.nn.silu(jnp.einsum("btd,btdf->btf", x, p["gate"][chosen]) + p["bias"][chosen])
        hidden = hidden * jnp.einsum("btd,btdf->btf", x, p["up"][chosen])
        return x + jnp.einsum("btf,btfd->btd", hidden, p["down"][chosen])

    params = expert_params(s) | {"bias": f32(s.experts, s.ffn)}
    width = {"gate": (2, (s.ffn,)), "up": (2, (s.ffn,)), "down": (1, (s.ffn,))}
    return Case(fn, params, (stream(s),), width | {"bias": (1, (s.ffn,))})


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
