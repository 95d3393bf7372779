"""q|k|v and gate|up in one array: three ways to hold it, priced, and what the programs move."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.activations.by_dataflow import parallelize
from jaxtp.compile.deviceless import preflight
from jaxtp.mesh.build import abstract_mesh

HEADS = 8


def heads(x, n=HEADS):
    return x.reshape(*x.shape[:2], n, -1)


def by_split(p, x):
    """GPT-2 and most others."""
    return map(heads, jnp.split(x @ p["qkv"] + p["bias"][None, None], 3, -1))


def by_slices(p, x):
    """Of the result."""
    y, n = x @ p["qkv"], p["qkv"].shape[1] // 3
    return (heads(y[..., i * n : (i + 1) * n]) for i in range(3))


def by_index(p, x):
    """The thirds become a dim of their own."""
    y = (x @ p["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
    return (y[:, :, i] for i in range(3))


def by_unpacking(p, x):
    """As vision models do it, with the thirds in front."""
    q, k, v = (
        (x @ p["qkv"] + p["bias"][None, None])
        .reshape(*x.shape[:2], 3, HEADS, -1)
        .transpose(2, 0, 3, 1, 4)
    )
    return (a.swapaxes(1, 2) for a in (q, k, v))


def by_weight(p, x):
    """The weight is split before it is multiplied."""
    return (heads(x @ w) for w in jnp.split(p["qkv"], 3, -1))


def grouped(p, x):
    """F3: eight query heads, four of keys and of values."""
    y = heads(x @ p["qkv"], 16)
    k, v = (jnp.repeat(a, 2, 2) for a in (y[:, :, 8:12], y[:, :, 12:]))
    return y[:, :, :8], k, v


def apart(p, x):
    """What a fused kernel is compared with."""
    return (heads(x @ p[name]) for name in "qkv")


def norm(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def block(take, p, x):
    """Attention by `take`, then an MLP with gate and up in one kernel, or apart."""
    q, k, v = take(p, norm(x))
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
    probs = jax.nn.softmax(scores, -1).astype(x.dtype)
    x = x + jnp.einsum("bhts,bshd->bthd", probs, v).reshape(*x.shape[:2], -1) @ p["o"]
    h = norm(x)
    gate, up = (
        jnp.split(h @ p["gate_up"], 2, -1) if "gate_up" in p else (h @ p["gate"], h @ p["up"])
    )
    return x + (jax.nn.silu(gate) * up) @ p["down"]


def shapes(take, width, inner=0):
    inner = inner or 4 * width
    qkv = 2 * width if take is grouped else 3 * width
    sizes = {"qkv": (width, qkv), "bias": (qkv,), "gate_up": (width, 2 * inner)}
    if take is apart:
        sizes = dict.fromkeys("qkv", (width, width)) | dict.fromkeys(("gate", "up"), (width, inner))
    sizes |= {"o": (width, width), "down": (inner, width)}
    return {name: jax.ShapeDtypeStruct(size, jnp.bfloat16) for name, size in sizes.items()}


def planned(take, width, tokens, mesh, dtype=jnp.bfloat16):
    fn, params = functools.partial(block, take), shapes(take, width)
    x = jax.ShapeDtypeStruct((*tokens, width), dtype)
    return fn, params, x, jaxtp.make_plan(params, mesh, fn=fn, inputs=(x,))


ON_INPUT, AS_IT_LIES, WHOLE = P("tp"), P(None, "tp"), P()


@pytest.mark.parametrize(
    ("tokens", "mesh", "want"),
    [
        ((8, 64), {"tp": 8}, ON_INPUT),  # many tokens for a width of 128
        ((8, 7), {"tp": 8}, AS_IT_LIES),
        ((8, 64), {"tp": 8, "dp": 16}, AS_IT_LIES),  # few on each of 16 replicas
        ((1, 1), {"tp": 8}, AS_IT_LIES),
        ((3, 13), {"tp": 8}, ON_INPUT),  # few, but no dim of theirs divides: gathered
    ],
)
def test_the_batch_decides_how_a_fused_kernel_is_held(tokens, mesh, want):
    *_, plan = planned(by_split, 128, tokens, mesh)
    assert plan["qkv"].partition_spec == plan["gate_up"].partition_spec == want
    assert plan["bias"].partition_spec == WHOLE
    assert not plan["qkv"].fallback


def test_a_width_that_does_not_divide_leaves_two_ways():
    *_, plan = planned(by_split, 8 * 9, (64, 64), {"tp": 16})
    assert plan["gate_up"].partition_spec == WHOLE
    *_, plan = planned(by_split, 8 * 9, (16, 2), {"tp": 16})
    assert plan["gate_up"].partition_spec == P(None, ("tp_0", "tp_1"))


def test_the_reason_prices_all_three():
    *_, plan = planned(by_split, 1024, (8, 512), {"tp": 8})
    weight, result = 1024 * 3072 * 2, 8 * 512 * 3072 * 2
    wire = [7 / 8 * weight, 2 * 7 / 64 * weight, 4 * 7 / 64 * result]
    held = [weight, weight / 8, weight / 8]
    said = [
        f"{w / 1e6:.2f} MB sent, {h / 1e6:.2f} MB stored" for w, h in zip(wire, held, strict=True)
    ]
    assert plan["qkv"].reasons[-1] == (
        "on dim 0, the cheapest with `parallelize` for a layer forward and backward, per device: "
        f"replicated {said[0]}; on dim 0 {said[1]}; sharded as stored {said[2]}"
    )
    assert plan["qkv"].num_bytes == weight


def test_key_heads_that_do_not_divide_narrow_every_piece():
    *_, plan = planned(grouped, 128, (8, 64), {"tp": 8})
    assert plan["qkv"].partition_spec == P("tp_0")
    assert plan["qkv"].fallback.startswith("4 units on tp=8: 4-way; costs")
    assert plan["o"].partition_spec == P(("tp_0", "tp_1"))


def test_experts_that_do_not_divide_are_not_cut_through_their_pieces():
    def fn(p, x):
        scores = jax.nn.softmax(x @ p["router"])
        weights, chosen = jax.lax.top_k(scores, 2)
        weights = (jax.nn.one_hot(chosen, 6) * weights[..., None]).sum(-2)
        gate, up = jnp.split(jnp.einsum("btd,edf->btef", x, p["w_in"]), 2, -1)
        hidden = jax.nn.silu(gate) * up * weights[..., None]
        return x + jnp.einsum("btef,efd->btd", hidden, p["w_out"])

    sizes = {"router": (64, 6), "w_in": (6, 64, 256), "w_out": (6, 128, 64)}
    params = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    x = jax.ShapeDtypeStruct((2, 8, 64), jnp.float32)
    by_expert = jaxtp.make_plan(params, {"tp": 2}, fn=fn, inputs=(x,))
    assert by_expert["w_in"].partition_spec == P("tp")
    narrow = jaxtp.make_plan(params, {"tp": 8}, fn=fn, inputs=(x,))
    assert narrow["w_in"].partition_spec == narrow["w_out"].partition_spec == P("tp_0")


def test_without_a_batch_and_when_overruled_nothing_is_chosen():
    fn, params, x, _ = planned(by_split, 128, (8, 64), {"tp": 8})
    assert jaxtp.make_plan(params, {"tp": 8})["qkv"].partition_spec == WHOLE
    given = {"qkv": P(None, "tp")}
    plan = jaxtp.make_plan(params, {"tp": 8}, fn=fn, inputs=(x,), overrides=given)
    assert plan["qkv"].partition_spec == AS_IT_LIES


def assert_same_gradients(fn, placed, plain, params, x):
    def run(fn):
        return jax.value_and_grad(lambda p, x: (fn(p, x) ** 2).mean())

    got, want = jax.jit(run(fn))(placed, x), jax.jit(run(plain))(params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("take", "tokens", "sequence_parallel"),
    [
        (by_split, (4, 16), False),
        (by_slices, (2, 4), True),
        (by_unpacking, (1, 8), False),
        (by_weight, (4, 16), True),
        (grouped, (1, 1), False),
    ],
)
def test_every_way_gives_the_same_numbers(take, tokens, sequence_parallel):
    mesh = jaxtp.make_mesh(tp=8)
    fn, params, x, plan = planned(take, 32, tokens, mesh, jnp.float32)
    keys = iter(jax.random.split(jax.random.key(0), len(params) + 1))
    params = {n: jax.random.normal(next(keys), p.shape) / 6 for n, p in params.items()}
    x = jax.random.normal(next(keys), x.shape)
    plan = dataclasses.replace(plan, sequence_parallel=sequence_parallel)
    placed = jaxtp.shard(params, mesh, plan=plan)
    assert_same_gradients(parallelize(fn, plan, mesh), placed, fn, params, x)


def compiled(take, tokens, width=256):
    """The GPU program of gradients on 8 H100."""
    fn, params, x, plan = planned(take, width, tokens, {"tp": 8})
    mesh = abstract_mesh(plan.mesh)
    places = {n: NamedSharding(mesh, plan[n].partition_spec) for n in params}
    placed = {
        n: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=places[n]) for n, p in params.items()
    }
    x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))
    fn = parallelize(fn, plan, mesh)
    step = jax.jit(
        jax.grad(lambda p, x: (fn(p, x).astype(jnp.float32) ** 2).sum()), out_shardings=places
    )
    return preflight(step, (placed, x), target="h100:1x8", tensor_axes=plan.mesh.tp)


@pytest.mark.parametrize(
    ("take", "tokens"), [(by_unpacking, (8, 64)), (by_weight, (8, 64)), (by_index, (8, 8))]
)
def test_the_gpu_program_moves_the_floor_and_what_the_reason_says(take, tokens):
    report, best = compiled(take, tokens), compiled(apart, tokens)
    width, rows = 256, tokens[0] * tokens[1]
    exchanged = min(2 * width, 4 * rows) * (3 + 8) * width * 2 * 7 / 64
    bias = 7 / 8 * 3 * width * 2
    assert 0 <= report.wire_bytes - best.wire_bytes - exchanged <= bias
    # The products themselves are split.
    assert report.flops_per_device == pytest.approx(best.flops_per_device, rel=0.01)
    # Attention and MLP, forward and backward, but for the gradient of x, which nobody asks for.
    assert best.wire_bytes == pytest.approx(3 * 2 * 7 / 8 * rows * width * 2, rel=0.01)


SPLIT, STATE = 16, 4


def mixer(p, u):
    """Mamba-2's mixer: z, x | B | C behind a convolution, dt; heads share B and C."""
    inner = p["last"].shape[0]
    z, xbc, dt = jnp.split(u @ p["first"], [inner, 2 * inner + 2 * STATE], -1)
    xbc = jax.nn.silu(
        jax.lax.conv_general_dilated(
            xbc,
            p["conv"],
            (1,),
            [(3, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=xbc.shape[-1],
        )
    )
    x, b, c = jnp.split(xbc, [inner, inner + STATE], -1)
    x = x.reshape(*x.shape[:2], dt.shape[-1], -1)
    w = jnp.einsum("bln,bsn->bls", c, b)[..., None] * jax.nn.softplus(dt)[:, None]
    y = jnp.einsum("blsh,bshp->blhp", w, x)
    return u + (y.reshape(z.shape) * jax.nn.silu(z)) @ p["last"]


def test_a_piece_that_every_device_needs_is_replicated_beside_split_ones():
    width, inner, heads = 16, 32, 8
    sizes = {
        "first": (width, 2 * inner + 2 * STATE + heads),
        "conv": (4, 1, inner + 2 * STATE),
        "last": (inner, width),
    }
    keys = jax.random.split(jax.random.key(0), 4)
    params = {n: jax.random.normal(k, sizes[n]) / 4 for n, k in zip(sizes, keys, strict=False)}
    u = jax.random.normal(keys[3], (4, 6, width))
    mesh = jaxtp.make_mesh(tp=8)
    plan = jaxtp.make_plan(params, mesh, fn=mixer, inputs=(u,))
    assert plan["first"].partition_spec == ON_INPUT
    assert plan["last"].partition_spec == P("tp")
    fn = parallelize(mixer, plan, mesh)
    assert_same_gradients(fn, jaxtp.shard(params, mesh, plan=plan), mixer, params, u)
    # The pieces are never put together again: nothing is concatenated but its own gradient.
    assert "concatenate[" not in str(jax.make_jaxpr(fn)(params, u))


def test_a_piece_that_every_device_needs_moves_nothing_backward():
    width, inner, heads = 1024, 2048, 8
    columns = 2 * inner + 2 * STATE + heads
    sizes = {"first": (width, columns), "conv": (4, 1, inner + 2 * STATE), "last": (inner, width)}
    params = {name: jax.ShapeDtypeStruct(size, "float32") for name, size in sizes.items()}
    u = jax.ShapeDtypeStruct((4, 4096, width), "float32")
    plan = jaxtp.make_plan(params, {"tp": 8}, fn=mixer, inputs=(u,))
    gathered = 7 / 8 * 4 * width * (columns - 2 * STATE)
    assert f"replicated {gathered / 1e6:,.2f} MB sent" in plan.explain("first")


def ragged(p, x):
    """Experts picked by a ragged product, gate and up in one array."""
    rows = x.reshape(-1, x.shape[-1])
    order = jnp.argsort(jnp.argmax(rows @ p["router"], -1))
    sizes = jnp.bincount(jnp.argmax(rows @ p["router"], -1), length=p["two"].shape[0])
    gate, up = jnp.split(jax.lax.ragged_dot(rows[order], p["one"], sizes), 2, -1)
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["two"], sizes)
    return x + jnp.zeros_like(y).at[order].set(y).reshape(x.shape)


def test_gate_and_up_of_ragged_experts():
    sizes = {"router": (16, 4), "one": (4, 16, 64), "two": (4, 32, 16)}
    keys = jax.random.split(jax.random.key(0), 4)
    params = {n: jax.random.normal(k, sizes[n]) / 4 for n, k in zip(sizes, keys, strict=False)}
    x = jax.random.normal(keys[3], (4, 8, 16))
    mesh = jaxtp.make_mesh(tp=8)
    with pytest.warns(jaxtp.JaxtpWarning, match="a ragged product picks by group"):
        plan = jaxtp.make_plan(params, mesh, fn=ragged, inputs=(x,))
    assert plan["one"].role == "fused"
    assert plan["two"].partition_spec == P(None, "tp")
    fn = parallelize(ragged, plan, mesh)
    assert_same_gradients(fn, jaxtp.shard(params, mesh, plan=plan), ragged, params, x)
    # Each piece is a product of its own: gate, up, and the way back.
    assert str(jax.make_jaxpr(fn)(params, x)).count("ragged_dot_general[") == 3


def test_value_and_gate_of_a_convolution():
    def fn(p, x):
        value, gate = jnp.split(
            jax.lax.conv_general_dilated(
                x, p["in"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            ),
            2,
            -1,
        )
        return x + (jnp.tanh(value) * jax.nn.sigmoid(gate)) @ p["out"]

    mesh = jaxtp.make_mesh(tp=8)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"in": (3, 16, 64), "out": (32, 16)}
    params = {n: jax.random.normal(k, shapes[n]) / 4 for n, k in zip(shapes, keys, strict=False)}
    x = jax.random.normal(keys[2], (4, 24, 16))
    plan = jaxtp.make_plan(params, mesh, fn=fn, inputs=(x,))
    assert plan["in"].role == "fused"

    def gradients(fn):
        return jax.jit(jax.grad(lambda p, x: (fn(p, x) ** 2).mean()))

    placed = jaxtp.shard(params, mesh, plan=plan)
    step = gradients(parallelize(fn, plan, mesh)).lower(placed, x).compile()
    assert "collective-permute" not in step.as_text()
    for a, b in zip(
        jax.tree.leaves(step(placed, x)), jax.tree.leaves(gradients(fn)(params, x)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
