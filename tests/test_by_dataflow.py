"""The same numbers with constraints as without, in functions that never heard of jaxtp."""

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rounding import bound

import jaxtp
from jaxtp.activations.by_dataflow import parallelize
from jaxtp.compile.deviceless import preflight
from jaxtp.compile.options import compile_options
from jaxtp.cost.floor import floor_bytes
from jaxtp.errors import BadMesh, JaxtpWarning

WIDTH, HEADS, HEAD_DIM, INNER, VOCAB = 32, 8, 4, 64, 1024


class Norm(nn.Module):
    """RMS norm that computes in float32, as third-party ones do."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("weight", nn.initializers.ones, (x.shape[-1],))
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)
        return (y * scale[None, None]).astype(x.dtype)


class Block(nn.Module):
    """Pre-norm attention and MLP; projections apart or fused, key heads few or many."""

    kv_heads: int = HEADS
    fused: bool = False
    width: int = WIDTH
    heads: int = HEADS
    inner: int = INNER
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x, _=None):
        dense = functools.partial(nn.Dense, use_bias=self.fused, dtype=self.dtype)
        batch, tokens, _ = x.shape
        h = Norm(name="before")(x)
        if self.fused:
            q, k, v = jnp.split(dense(3 * self.width, name="qkv")(h), 3, axis=-1)
        else:
            size = self.width // self.heads
            q = dense(self.width, name="one")(h)
            k, v = (dense(self.kv_heads * size, name=n)(h) for n in ("two", "three"))
        q, k, v = (a.reshape(batch, tokens, -1, self.width // self.heads) for a in (q, k, v))
        k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        mask = jnp.tril(jnp.ones((tokens, tokens), bool))[None, None]
        probs = jax.nn.softmax(jnp.where(mask, scores, -1e9).astype(jnp.float32), -1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", probs.astype(self.dtype), v)
        x = x + dense(self.width, name="four")(mixed.reshape(batch, tokens, -1))
        h = Norm(name="between")(x)
        if self.fused:
            gate, up = jnp.split(dense(2 * self.inner, name="five")(h), 2, axis=-1)
        else:
            gate, up = dense(self.inner, name="five")(h), dense(self.inner, name="six")(h)
        return x + dense(self.width, name="seven")(nn.silu(gate) * up), None


class Model(nn.Module):
    """Embedding, scanned blocks, head."""

    block: Block
    layers: int = 2
    remat: bool = False
    vocab: int = VOCAB

    @nn.compact
    def __call__(self, tokens):
        b = self.block
        x = nn.Embed(self.vocab, b.width, dtype=b.dtype, name="table")(tokens)
        make = nn.remat(Block, prevent_cse=False) if self.remat else Block
        fields = {f.name: getattr(b, f.name) for f in dataclasses.fields(b)}
        kept = {k: v for k, v in fields.items() if k not in ("parent", "name")}
        loop = nn.scan(
            make, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
        )
        x, _ = loop(**kept, name="layers")(x, None)
        return nn.Dense(self.vocab, use_bias=False, dtype=b.dtype, name="out")(Norm(name="n")(x))


def loss(fn):
    def value(params, tokens):
        logits = fn(params, tokens).astype(jnp.float32)
        hit = jnp.arange(logits.shape[-1])[None, None] == tokens[..., None]
        return (jax.nn.logsumexp(logits, -1) - jnp.where(hit, logits, 0).sum(-1)).mean()

    return value


CASES = {
    "many key heads": Model(Block()),
    "few key heads": Model(Block(kv_heads=2)),
    "one key head": Model(Block(kv_heads=1)),
    "fused": Model(Block(fused=True)),
    "remat": Model(Block(kv_heads=2), remat=True),
}


@pytest.fixture(scope="module", params=CASES, ids=lambda n: n.replace(" ", "-"))
def case(request):
    model = CASES[request.param]
    tokens = jax.random.randint(jax.random.key(1), (4, 8), 0, VOCAB)
    params = model.init(jax.random.key(0), tokens)
    return (
        model.apply,
        params,
        tokens,
        jax.jit(jax.value_and_grad(loss(model.apply)))(params, tokens),
    )


def same(a, b, tolerance=2e-5):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=str(path))


@pytest.mark.parametrize(
    ("sizes", "sequence_parallel"),
    [({"tp": 8}, False), ({"tp": 4, "dp": 2}, True)],
    ids=["tp8", "dp2-tp4-sequence"],
)
def test_loss_and_gradients_stay_the_same(case, sizes, sequence_parallel):
    apply, params, tokens, want = case
    mesh = jaxtp.make_mesh(**sizes)
    plan = jaxtp.make_plan(params, mesh, fn=apply, inputs=(tokens,))
    plan = dataclasses.replace(plan, sequence_parallel=sequence_parallel)
    fn = parallelize(apply, plan, mesh)
    placed = jaxtp.shard(params, mesh, plan=plan)
    got = jax.jit(jax.value_and_grad(loss(fn)))(placed, jaxtp.shard_batch(tokens, mesh))
    same(got, want)
    assert "sharding_constraint" in str(jax.make_jaxpr(fn)(params, tokens))


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(2, {"tp": 8}), (8, {"tp": 8}), (8, {"dp": 1, "tp": 8}), (1, {"dp": 2, "tp": 4})],
    ids=str,
)
def test_the_sequence_is_split_where_no_axis_shares_the_batch(rows, sizes):
    apply, tokens = CASES["many key heads"].apply, jax.ShapeDtypeStruct((rows, 16), "int32")
    params = jax.eval_shape(CASES["many key heads"].init, jax.random.key(0), tokens)
    mesh = jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=(AxisType.Auto,) * len(sizes))
    plan = jaxtp.make_plan(params, mesh, fn=apply, inputs=(tokens,))
    fn = parallelize(apply, dataclasses.replace(plan, sequence_parallel=True), mesh)
    program = str(jax.make_jaxpr(fn)(params, tokens))
    assert "P(None, 'tp', None)" in program
    assert "P('tp'," not in program
    assert "'dp'" not in "".join(re.findall(r"P\([^)]*\)", program))


@pytest.mark.parametrize("sizes", [{"tp": 8}, {"dp": 1, "tp": 8}], ids=str)
@pytest.mark.parametrize(
    ("shape", "want"), [((16, 16), "P('tp', None)"), ((1, 8, 16), "P(None, 'tp', None)")]
)
def test_the_sequence_is_split_where_it_is_the_first_dim(shape, want, sizes):
    model, x = jaxtp_model(), jnp.ones(shape)
    mesh = jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=(AxisType.Auto,) * len(sizes))
    plan = jaxtp.make_plan(model, mesh, inputs=(x,))
    fn = parallelize(lambda m, x: m(x), dataclasses.replace(plan, sequence_parallel=True), mesh)
    assert want in str(jax.make_jaxpr(fn)(model, x))


@pytest.mark.parametrize("name", ["few key heads", "fused"])
def test_it_composes_with_what_jax_offers(name):
    apply, tokens = CASES[name].apply, jnp.arange(16).reshape(2, 8)
    params = CASES[name].init(jax.random.key(0), tokens)
    mesh = jaxtp.make_mesh(tp=8)
    plan = jaxtp.make_plan(params, mesh, fn=apply, inputs=(tokens,))
    fn = parallelize(apply, plan, mesh)
    want = apply(params, tokens)
    same(fn(params, tokens), want)
    same(jax.vmap(fn, in_axes=(None, 0))(params, tokens[:, None])[:, 0], want, 1e-4)
    same(jax.checkpoint(fn)(params, tokens), want)
    total, _ = jax.lax.scan(lambda c, t: (c + fn(params, t[None]).sum(), None), 0.0, tokens)
    np.testing.assert_allclose(total, want.sum(), rtol=1e-3)


def test_an_nnx_module_inside_nnx_jit():
    model = jaxtp_model()
    x = jnp.ones((4, 8, 16))
    mesh = jaxtp.make_mesh(tp=8)
    plan = jaxtp.make_plan(model, mesh, inputs=(x,))
    fn = nnx.jit(parallelize(lambda m, x: m(x), plan, mesh))
    same(fn(model, x), model(x))


def jaxtp_model():
    class Mlp(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

        def __call__(self, x):
            return x + self.b(nnx.gelu(self.a(x)))

    return Mlp(nnx.Rngs(0))


def test_the_state_of_a_module_changes_as_in_a_plain_call():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)
            self.norm, self.drop = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return x + self.down(self.drop(nnx.gelu(self.up(self.norm(x)))))

    def call(model, x):
        return (model(x) ** 2).mean()

    x = jax.random.normal(jax.random.key(0), (4, 16))
    mesh = jaxtp.make_mesh(tp=8)
    plan = jaxtp.make_plan(Noisy(nnx.Rngs(0)), mesh, inputs=(x,))
    for wrap in (lambda fn: fn, nnx.jit, nnx.value_and_grad):
        mine, theirs = Noisy(nnx.Rngs(0)), Noisy(nnx.Rngs(0))
        placed, plain = wrap(parallelize(call, plan, mesh)), wrap(call)
        got, want = (
            [fn(model, x) for _ in range(2)] for fn, model in ((placed, mine), (plain, theirs))
        )
        same(got, want)
        same(nnx.state(mine, nnx.BatchStat), nnx.state(theirs, nnx.BatchStat))
        assert mine.drop.rngs.count[...] == theirs.drop.rngs.count[...] > 0


def test_random_keys_among_the_inputs_advance():
    """What was drawn is counted in the caller's `nnx.Rngs`, or every step drops the same."""

    def call(params, x, rngs):
        return (x @ params["up"]) @ params["down"] * rngs.dropout.uniform(x.shape)

    params = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}
    x, mesh = jnp.ones((4, 16)), jaxtp.make_mesh(tp=2, devices=jax.devices()[:2])
    inputs = (x, nnx.Rngs(dropout=0))
    plan = jaxtp.make_plan(params, mesh, fn=call, inputs=inputs)
    mine, theirs = nnx.Rngs(dropout=1), nnx.Rngs(dropout=1)
    placed, jitted = parallelize(call, plan, mesh), nnx.jit(parallelize(call, plan, mesh))
    same(placed(params, x, mine), call(params, x, theirs))
    same(placed(params, x, rngs=mine), call(params, x, theirs))
    same(jitted(params, x, mine), call(params, x, theirs))
    same(jitted(params, x, rngs=mine), call(params, x, theirs))
    assert mine.dropout.count[...] == theirs.dropout.count[...] == 4
    result = jaxtp.verify(call, params, inputs, mesh, show=lambda _: None)
    assert len(result.rows) == 2  # of which each drew the same numbers


@pytest.mark.parametrize("overlap", ["auto", "aggressive"])
def test_forward_mode(overlap):
    def call(params, x):
        return x + jax.nn.gelu(x @ params["up"]) @ params["down"]

    params = {"up": jnp.full((16, 32), 0.1), "down": jnp.full((32, 16), 0.1)}
    x, mesh = jax.random.normal(jax.random.key(0), (4, 16)), jaxtp.make_mesh(dp=2, tp=4)
    fn = parallelize(
        call, jaxtp.make_plan(params, mesh, fn=call, inputs=(x,)), mesh, overlap=overlap
    )

    def derivatives(fn):
        tangents = jax.tree.map(jnp.ones_like, params)
        forward = jax.jvp(lambda p: fn(p, x), (params,), (tangents,))
        of_gradient = jax.jvp(jax.grad(lambda p: (fn(p, x) ** 2).mean()), (params,), (tangents,))
        return forward, of_gradient, jax.linearize(lambda x: fn(params, x), x)[1](x)

    same(jax.jit(lambda: derivatives(fn))(), jax.jit(lambda: derivatives(call))())


def test_what_is_new_in_a_module_is_said():
    class Sown(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(16, 64, rngs=rngs)

        def __call__(self, x):
            self.seen = nnx.Intermediate(x.sum())
            return self.a(x)

    model, x = Sown(nnx.Rngs(0)), jnp.ones((4, 16))
    mesh = jaxtp.make_mesh(tp=8)
    fn = parallelize(lambda m, x: m(x), jaxtp.make_plan(model, mesh), mesh)
    with pytest.warns(JaxtpWarning, match="does not keep seen") as said:
        fn(model, x), fn(model, x)
    assert len(said) == 1


def test_nothing_is_added_where_the_plan_has_nothing_to_say():
    model = jaxtp_model()
    x = jnp.ones((4, 8, 16))
    mesh = jaxtp.make_mesh(tp=1, devices=jax.devices()[:1])
    plan = jaxtp.make_plan(model, mesh, inputs=(x,))
    fn = parallelize(lambda m, x: m(x), plan, mesh)
    assert "sharding_constraint" not in str(jax.make_jaxpr(fn)(model, x))


def test_structure_names_and_errors_come_through():
    def forward(params, x, *, scale):
        """The user's words."""
        return {"y": x @ params["w"] * scale, "n": 3}

    params, x = {"w": jnp.ones((8, 8))}, jnp.ones((2, 8))
    mesh = jaxtp.make_mesh(tp=8)
    fn = parallelize(forward, jaxtp.make_plan(params, mesh), mesh)
    assert (fn.__name__, fn.__doc__) == ("forward", "The user's words.")
    out = fn(params, x, scale=jnp.float32(2))
    assert set(out) == {"y", "n"}
    np.testing.assert_array_equal(out["y"], 16 * np.ones((2, 8)))
    with pytest.raises(jaxtp.JaxtpError, match="TP010"):
        parallelize(forward, jaxtp.make_plan(params, {"tp": 4}))(params, x, scale=1)
    with pytest.raises(jaxtp.JaxtpError, match="TP045"):
        fn({"v": jnp.ones((8, 8)), "w": params["w"]}, x, scale=1)


def compiled(model, *, sequence_parallel=False, overlap="auto"):
    """The GPU program of loss and gradients on 8 H100, as far as communication goes."""
    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    mesh = AbstractMesh((8,), ("tp",), axis_types=(AxisType.Auto,))
    plan = jaxtp.make_plan(params, mesh, fn=model, inputs=(tokens,))
    plan = dataclasses.replace(plan, sequence_parallel=sequence_parallel)
    placed = jaxtp.shard(params, mesh, plan=plan)
    places = jax.tree.map(lambda leaf: leaf.sharding, placed)
    own = jax.tree.leaves(places)[0].mesh
    fn = jax.value_and_grad(loss(parallelize(model.apply, plan, mesh, overlap=overlap)))
    batch = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=NamedSharding(own, P()))
    floor = floor_bytes(size=8, message_bytes=2 * 128 * 512 * 2, layers=3)
    step = jax.jit(fn, out_shardings=(None, places))
    return preflight(
        step,
        (placed, batch),
        target="h100:1x8",
        tensor_axes=plan.mesh.tp,
        floor_bytes=floor,
        options=compile_options(overlap=overlap),
    )


LARGE = {"width": 512, "heads": 8, "inner": 2048, "dtype": jnp.bfloat16}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("kv_heads", [8, 4])
def test_the_gpu_program_moves_the_floor(kv_heads, sequence_parallel):
    model = Model(Block(kv_heads=kv_heads, **LARGE), layers=3)
    report = compiled(model, sequence_parallel=sequence_parallel)
    large = [row for row in report.collectives if row.num_bytes > 2**17]
    assert {row.dtype for row in large} == {"bf16"}
    assert not {row.kind for row in report.collectives} & {"all-to-all", "collective-permute"}
    # With 4 key heads on 8 devices their small cotangents are reduced within pairs.
    assert report.ratio < (1.25 if sequence_parallel else 1.02 if kv_heads == 8 else 1.05)


@jax.custom_vjp
def fused_mlp(x, one, two):
    return jnp.sin(x @ one) @ two


def _mlp_forward(x, one, two):
    h = x @ one
    return jnp.sin(h) @ two, (x, h, one, two)


def _mlp_backward(kept, g):
    x, h, one, two = kept
    d_h = (g @ two.T) * jnp.cos(h)
    rows = x.reshape(-1, x.shape[-1]), d_h.reshape(-1, h.shape[-1]), g.reshape(-1, g.shape[-1])
    return d_h @ one.T, rows[0].T @ rows[1], jnp.sin(h).reshape(rows[1].shape).T @ rows[2]


fused_mlp.defvjp(_mlp_forward, _mlp_backward)


@jax.custom_jvp
def pushed_mlp(x, one, two):
    return jnp.sin(x @ one) @ two


@pushed_mlp.defjvp
def _mlp_rule(primals, tangents):
    (x, one, two), (d_x, d_one, d_two) = primals, tangents
    h = x @ one
    d_h = (d_x @ one + x @ d_one) * jnp.cos(h)
    return jnp.sin(h) @ two, d_h @ two + jnp.sin(h) @ d_two


def looped(x, one, two):
    return jax.lax.fori_loop(0, jnp.int32(2), lambda _, x: x + jnp.sin(x @ one) @ two, x) - x


def mapped(x, one, two):
    def local(x, one, two):
        return jnp.sin(x @ one) @ two

    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    specs = (P("dp"), P(), P())
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("dp"), axis_names={"dp"})(
        x, one, two
    )


BRANCHES = {
    "custom_vjp": (fused_mlp, True),
    "custom_jvp": (pushed_mlp, True),
    "while": (looped, False),
    "cond": (lambda *a: jax.lax.cond(a[0].sum() > 0, fused_mlp, looped, *a), False),
    "remat": (jax.checkpoint(fused_mlp), True),
    "scan": (
        lambda x, *w: jax.lax.scan(lambda c, _: (fused_mlp(c, *w), None), x, None, 2)[0],
        True,
    ),
    "shard_map": (mapped, True),
}


def constrained(jaxpr):
    """How many constraints a jaxpr holds, inside everything that it holds."""
    text = str(jaxpr)
    return text.count("sharding_constraint[")


@pytest.mark.parametrize("name", BRANCHES)
def test_constraints_hold_inside(name):
    branch, is_differentiable = BRANCHES[name]
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "one": jax.random.normal(keys[0], (16, 32)) / 4,
        "two": jax.random.normal(keys[1], (32, 16)) / 6,
    }
    x = jax.random.normal(keys[2], (4, 6, 16))

    def model(params, x):
        return x + branch(x, params["one"], params["two"])

    mesh = jaxtp.make_mesh(dp=2, tp=4)
    plan = jaxtp.make_plan(params, mesh, fn=model, inputs=(x,))
    assert plan["one"].partition_spec == P(None, "tp")
    fn = parallelize(model, plan, mesh)
    same(jax.jit(fn)(params, x), model(params, x))
    # The width inside is split, the sum is placed; a third is the residual stream's. A `shard_map`
    # over the batch axis has placed the sum itself.
    least = 2 if name == "shard_map" else 3
    assert constrained(jax.make_jaxpr(fn)(params, x)) >= least
    if is_differentiable:
        loss = [lambda p, x, f=f: (f(p, x) ** 2).mean() for f in (fn, model)]
        got, want = (jax.jit(jax.grad(f, argnums=(0, 1)))(params, x) for f in loss)
        same(got, want)
        # Forward as above, and the derivative's own products.
        assert constrained(jax.make_jaxpr(jax.grad(loss[0]))(params, x)) >= least + 2


def test_what_stays_as_it_was_is_said_once_with_its_line():
    @jax.custom_batching.custom_vmap
    def inside(x, one, two):
        return jnp.sin(x @ one) @ two

    inside.def_vmap(lambda _, batched, *args: (jax.vmap(inside.fun)(*args), batched[0]))

    def model(params, x):
        return x + inside(x, params["one"], params["two"])

    params, x = {"one": jnp.ones((16, 32)), "two": jnp.ones((32, 16))}, jnp.ones((4, 6, 16))
    mesh = jaxtp.make_mesh(tp=8)
    fn = parallelize(model, jaxtp.make_plan(params, mesh, fn=model, inputs=(x,)), mesh)
    with pytest.warns(JaxtpWarning, match=r"custom_vmap_call` at test_by_dataflow.py:\d+ ") as said:
        same([fn(params, x), fn(params, x)], [model(params, x)] * 2)
    assert len(said) == 1


@pytest.mark.parametrize("jitted", [False, True])
def test_arrays_of_explicit_meshes_beside_placed_ones(jitted):
    explicit = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    params = {"up": jnp.full((8, 16), 0.1), "down": jnp.full((16, 8), 0.1)}
    x = jnp.arange(32.0).reshape(4, 8) / 32

    def loss(params, x):
        return jnp.sin(jnp.sin(x @ params["up"]) @ params["down"]).sum()

    plan = jaxtp.make_plan(params, explicit, fn=loss, inputs=(x,))
    value = jax.value_and_grad(parallelize(loss, plan, explicit))
    value = jax.jit(value) if jitted else value
    placed = jaxtp.shard(params, explicit, plan=plan)
    want = jax.value_and_grad(loss)(params, x)
    on_explicit = jax.device_put(x, NamedSharding(explicit, P("dp")))
    masked = parallelize(lambda params, x, *, mask: loss(params, x * mask), plan, explicit)
    masked = jax.jit(masked) if jitted else masked
    np.testing.assert_allclose(
        masked(placed, x, mask=jnp.ones_like(on_explicit)), want[0], bound(64)
    )
    for batch in (on_explicit, x):
        got = value(placed, batch)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=bound(64)), got, want)
    with jax.set_mesh(explicit):
        with pytest.raises(BadMesh, match=r"TP010 at jax\.set_mesh: .*Explicit.*\n.*axis_types="):
            value(placed, x)
        with (
            pytest.raises(BadMesh, match=r"TP010 at jax\.set_mesh"),
            jaxtp.use_plan(plan, explicit),
        ):
            pass
