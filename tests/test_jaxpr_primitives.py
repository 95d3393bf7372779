"""No primitive aborts the analysis, every finding is legal, and what cannot be read is named."""

import functools
import importlib
import inspect
import itertools
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtp.rules.jaxpr import analyse, analyse_jaxpr

N = 8  # square, so that linear algebra takes it


def check_legal(analysis, shapes):
    """Dims in range, units that divide them, pieces that tile them, groups that exist."""
    assert set(analysis.findings) | set(analysis.unreached) == set(shapes)
    assert str(analysis)
    assert analysis.classes() is not None
    for path, finding in analysis.findings.items():
        assert finding.reasons, path
        if finding.dim is None:
            assert (finding.units, finding.pieces, finding.group) == ((), (), "")
            continue
        size = shapes[path][finding.dim]
        assert path in analysis.groups[finding.group]
        assert finding.units
        assert min(finding.units) > 1
        assert len(finding.classes) in (0, len(finding.units))
        pieces = finding.pieces or ((0, size),)
        assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
        assert pieces[-1][1] == size
        dealt = [stop - start for start, stop in pieces if (start, stop) not in finding.replicated]
        assert all(part % math.prod(finding.units) == 0 for part in dealt)
        assert 2 * sum(dealt) > size


def program(op, width=N):
    """A kernel, the operation, a kernel if the shape is still the same, and a residual if it is."""

    def fn(params, x):
        h = op(x @ params["in"])
        h = next((leaf for leaf in jax.tree.leaves(h) if hasattr(leaf, "shape")), x)
        h = jnp.real(h).astype(x.dtype) if jnp.iscomplexobj(h) else h
        if h.ndim and h.shape[-1] == width and jnp.issubdtype(h.dtype, jnp.floating):
            h = h @ params["out"]
            return x + h if h.shape == x.shape else h
        return h

    return fn


def names_in(jaxpr):
    """Every primitive of a jaxpr and what it holds."""
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        for leaf in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(leaf, "jaxpr", leaf)
            found |= names_in(inner) if hasattr(inner, "eqns") else set()
    return found


@jax.custom_vjp
def custom(x):
    return jnp.sin(x) @ x.mT


custom.defvjp(lambda x: (custom(x), x), lambda x, g: (g,))


def sharded(x):
    mesh = Mesh(np.array(jax.devices()[:2]), ("i",))

    def body(x):
        y = lax.psum(x, "i") + lax.ppermute(x, "i", [(0, 1), (1, 0)]) + lax.axis_index("i")
        y = y + lax.all_to_all(x, "i", 1, 1, tiled=True) + lax.pmax(x, "i") + lax.pmin(x, "i")
        return y + lax.all_gather(x, "i").sum(0)

    return jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)(x)


def kernel_call(x):
    def kernel(source, target):
        target[...] = source[...]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="mine")(x)


def square(x):
    return x[0] if x.ndim > 2 else x


KEY = jax.random.key(0)
TRICKY = {
    "all_to_all": sharded,
    "pallas_call": kernel_call,
    "custom_vjp_call": custom,
    "cond": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "switch": lambda x: lax.switch(jnp.argmax(x[0, 0]), [jnp.sin, jnp.cos, jnp.tan], x),
    "while": lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + x, x),
    "scan": lambda x: lax.scan(lambda c, r: (c + r, c * r), x[0], x),
    "scan_reversed": lambda x: lax.scan(lambda c, r: (c, r.sum()), 0.0, x, reverse=True)[1],
    "map": lambda x: lax.map(jnp.sort, x),
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x, axis=1),
    "fori_loop": lambda x: lax.fori_loop(0, 3, lambda i, c: c + i * x, x),
    "remat2": lambda x: jax.checkpoint(jnp.sin)(x),
    "jit": jax.jit(lambda x: x * 2),
    "custom_jvp_call": jax.nn.relu,
    "closed_over": lambda x: x + jnp.arange(N, dtype=x.dtype)[None, None],
    "custom_linear_solve": lambda x: jax.scipy.sparse.linalg.cg(lambda v: 2 * v, x)[0],
    "custom_root": lambda x: lax.custom_root(lambda v: v - x, x, lambda f, v: v, lambda g, y: y),
    "fft": jnp.fft.fft,
    "rfft": lambda x: jnp.fft.irfft(jnp.fft.rfft(x)),
    "sort": lambda x: lax.sort((x, x * 2), num_keys=2),
    "argsort": lambda x: jnp.argsort(x),
    "top_k": lambda x: lax.top_k(x, 3),
    "approx_top_k": lambda x: lax.approx_max_k(x, 3),
    "argmax": lambda x: lax.argmax(x, 1, jnp.int32),
    "argmin": lambda x: lax.argmin(x, 1, jnp.int32),
    "cumsum": lambda x: lax.cumsum(x, 1),
    "cumprod": lambda x: lax.cumprod(x, 1, reverse=True),
    "cummax": lambda x: lax.cummax(x, 1),
    "cummin": lambda x: lax.cummin(x, 1),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 1),
    "random_bits": lambda x: (
        x + jax.random.normal(jax.random.fold_in(KEY, x[0, 0, 0].astype(int)), x.shape)
    ),
    "random_gamma": lambda x: jax.random.gamma(KEY, jnp.exp(x)),
    "random_split": lambda x: jax.random.uniform(
        jax.random.split(jax.random.key(x[0, 0, 0].astype(jnp.uint32)))[0], x.shape
    ),
    "rng_bit_generator": lambda x: lax.rng_bit_generator(
        jnp.zeros(4, jnp.uint32) + x[0, 0, 0].astype(jnp.uint32), x.shape
    ),
    "rng_uniform": lambda x: lax.rng_uniform(x.min(), x.max(), x.shape),
    "gather": lambda x: jnp.take_along_axis(x, jnp.argsort(x), -1),
    "gather_rows": lambda x: x[:, jnp.array([1, 0, 1])],
    "scatter": lambda x: x.at[:, 0].set(1),
    "scatter-add": lambda x: x.at[0, jnp.argmax(x[0])].add(x[1, 0]),
    "scatter-mul": lambda x: x.at[:, 1].multiply(2),
    "scatter-min": lambda x: x.at[:, 1].min(2),
    "scatter-max": lambda x: x.at[:, 1].max(2),
    "scatter-sub": lambda x: x.at[:, 1].subtract(2),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (0, x[0, 0, 0].astype(int), 0), (2, 1, N)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:, :1] * 2, (0, 1, 0)),
    "slice_strided": lambda x: x[..., ::2],
    "rev": lambda x: x[..., ::-1],
    "pad": lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 0))),
    "pad_negative": lambda x: lax.pad(x, 0.0, ((0, 0, 0), (-1, 0, 0), (0, 3, 1))),
    "concatenate": lambda x: jnp.concatenate([x, x * 2], 1),
    "stack": lambda x: jnp.stack([x, x * 2], 1),
    "unstack": lambda x: jnp.unstack(x, axis=1),
    "split": lambda x: lax.split(x, (3, N - 3), 2),
    "tile": lambda x: jnp.tile(x, (1, 2, 1)),
    "repeat": lambda x: jnp.repeat(x, 2, -1),
    "roll": lambda x: jnp.roll(x, 1, -1),
    "reshape_odd": lambda x: x.reshape(-1)[: 6 * 4].reshape(6, 4).reshape(4, 6),
    "reshape_empty": lambda x: x[:0].reshape(0, 4),
    "squeeze": lambda x: x[:1, :1].squeeze(),
    "select_n": lambda x: lax.select_n((x > 0).astype(jnp.int32), x, x * 2),
    "select_and_scatter_add": jax.grad(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID").sum()
    ),
    "reduce_window": lambda x: lax.reduce_window(
        x, 1.0, lambda a, b: a * b + a, (1, 2, 1), (1, 1, 1), "SAME"
    ),
    "reduce_window_sum": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 1), (1, 1, 1), "SAME"),
    "reduce_window_min": lambda x: lax.reduce_window(
        x, jnp.inf, lax.min, (1, 2, 1), (1, 2, 1), "SAME"
    ),
    "reduce": lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + a, (1,)),
    "reduce_prod": lambda x: x.prod(1),
    "reduce_xor": lambda x: lax.reduce_xor((x > 0).astype(jnp.int32), (1,)),
    "reduce_and": lambda x: (x > 0).all(1),
    "reduce_or": lambda x: (x > 0).any(1),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 7),
    "convolution": lambda x: lax.conv_general_dilated(
        x, jnp.ones((3, N, N)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    ),
    "convolution_batch_grouped": lambda x: lax.conv_general_dilated(
        x,
        jnp.ones((3, N, 2)),
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        batch_group_count=2,
    ),
    "ragged_dot": lambda x: lax.ragged_dot(x[0], jnp.ones((2, N, N)), jnp.array([1, N - 1])),
    "bitcast_convert_type": lambda x: lax.bitcast_convert_type(x, jnp.int8),
    "optimization_barrier": lambda x: lax.optimization_barrier((x, x * 2)),
    "device_put": lambda x: jax.device_put(x),
    "name": lambda x: checkpoint_name(x, "here"),
    "copy": lambda x: jnp.copy(x),
    "imag": lambda x: jnp.imag(lax.complex(x, x)),
    "lu_pivots_to_permutation": lambda x: lax.linalg.lu_pivots_to_permutation(
        square(x)[0].astype(jnp.int32), N
    ),
    "sharding_constraint": lambda x: lax.with_sharding_constraint(
        x, NamedSharding(Mesh(np.array(jax.devices()[:2]), ("i",)), P("i"))
    ),
    "polynomial": lambda x: jnp.exp(jax.scipy.special.erf(x)),
    "pure_callback": lambda x: jax.pure_callback(
        lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), x
    ),
    "debug_callback": lambda x: (jax.debug.print("{}", x.sum()), x)[1],
    "cholesky": lambda x: lax.linalg.cholesky(square(x)),
    "cholesky_update": lambda x: lax.linalg.cholesky_update(square(x), square(x)[0]),
    "eig": lambda x: lax.linalg.eig(square(x)),
    "eigh": lambda x: lax.linalg.eigh(square(x)),
    "hessenberg": lambda x: lax.linalg.hessenberg(square(x)),
    "householder_product": lambda x: lax.linalg.householder_product(square(x), square(x)[0]),
    "lu": lambda x: lax.linalg.lu(square(x)),
    "qr": lambda x: lax.linalg.qr(square(x)),
    "schur": lambda x: lax.linalg.schur(square(x)),
    "svd": lambda x: lax.linalg.svd(square(x)),
    "symmetric_product": lambda x: lax.linalg.symmetric_product(square(x), square(x)),
    "triangular_solve": lambda x: lax.linalg.triangular_solve(square(x), square(x)),
    "tridiagonal": lambda x: lax.linalg.tridiagonal(square(x)),
    "tridiagonal_solve": lambda x: lax.linalg.tridiagonal_solve(*(square(x)[:3] * 1.0), square(x)),
    "gradient": jax.grad(lambda x: jnp.tanh(x).sum()),
    "vmap": jax.vmap(jnp.sort),
    "einsum": lambda x: jnp.einsum("bsd,bte,bsf->bte", x, x, x),
    "digamma": lambda x: jax.scipy.special.digamma(x),
    "polygamma": lambda x: lax.polygamma(x, x),
    "integers": lambda x: lax.population_count(lax.clz(x.astype(jnp.uint32)) >> 1 << 2),
    "complex": lambda x: jnp.conj(lax.complex(x, x)),
    "igamma": lambda x: lax.igamma(x, x) + lax.igammac(x, x) + lax.random_gamma_grad(x, x),
    "betainc": lambda x: lax.betainc(x, x, x),
    "zeta": lambda x: lax.zeta(x, x),
    "clamp": lambda x: lax.clamp(0.0, x, 1.0),
}


@functools.cache
def simple():
    """Every function of jax.lax that takes one, two or three arrays of one shape."""
    x = jax.ShapeDtypeStruct((2, N, N), jnp.float32)
    casts = (lambda a: a), (lambda a: a.astype(jnp.int32)), (lambda a: a > 0)
    found = {}
    for name, fn in inspect.getmembers(lax, callable):
        if name.startswith("_") or inspect.isclass(fn):
            continue
        for cast, count in itertools.product(casts, (1, 2, 3)):
            op = functools.partial(
                lambda fn, cast, count, x: fn(*[cast(x)] * count), fn, cast, count
            )
            try:
                jax.eval_shape(op, x)
            except Exception:  # whatever the refusal, it does not take such arguments
                continue
            found[name] = op
            break
    return found


SHAPES = {"in": (N, N), "out": (N, N)}
PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
INPUT = jax.ShapeDtypeStruct((2, N, N), jnp.float32)


@pytest.mark.parametrize("name", TRICKY)
def test_tricky_operation(name):
    check_legal(analyse(program(TRICKY[name]), PARAMS, INPUT), SHAPES)


def test_every_primitive():
    """The two tables reach what jax.lax exposes, and each program is read without an error."""
    exposed = {getattr(lax, n).name for n in dir(lax) if n.endswith("_p")}
    exposed |= {getattr(lax.linalg, n).name for n in dir(lax.linalg) if n.endswith("_p")}
    reached = set()
    for op in (*simple().values(), *TRICKY.values()):
        closed = jax.make_jaxpr(program(op))(PARAMS, INPUT)
        reached |= names_in(closed.jaxpr)
        check_legal(analyse_jaxpr(closed, tuple(SHAPES)), SHAPES)
    # For effects, made by other transformations only, or never made from Python.
    absent = {"after_all", "eq_to", "le_to", "lt_to", "stage", "polynomial", "ormqr"}
    absent |= {"ragged_all_to_all", "select_and_gather_add", "select_and_scatter"}
    assert exposed - reached <= absent


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_programs_of_several_operations(data):
    """Chains of operations between kernels stay legal, and a second reading says the same."""
    ops = {**simple(), **TRICKY}
    names = data.draw(st.lists(st.sampled_from(sorted(ops)), min_size=2, max_size=4))

    def fn(params, x):
        for name in names:
            y = program(ops[name])(params, x)
            x = y if y.shape == x.shape and y.dtype == x.dtype else x + y.astype(x.dtype).sum()
        return x

    closed = jax.make_jaxpr(fn)(PARAMS, INPUT)
    first = analyse_jaxpr(closed, tuple(SHAPES))
    check_legal(first, SHAPES)
    assert analyse_jaxpr(closed, tuple(SHAPES)).findings == first.findings


# ---- what cannot be read is named ----------------------------------------------------------------

OPAQUE = {
    "pallas_call:mine": kernel_call,
    "cholesky": TRICKY["cholesky"],
    "eigh": TRICKY["eigh"],
    "custom_linear_solve": TRICKY["custom_linear_solve"],
    "pure_callback": TRICKY["pure_callback"],
    "all_to_all": sharded,
}


@pytest.mark.parametrize("name", OPAQUE)
def test_opaque_primitives_are_named(name):
    """The record has the primitive and the line; a kernel into it is replicated for that reason."""
    params = {"wide": jax.ShapeDtypeStruct((N, N), jnp.float32)}
    analysis = analyse(lambda p, x: OPAQUE[name](x @ p["wide"]), params, INPUT, min_vocab=N)
    assert name in [entry.primitive for entry in analysis.opaque]
    assert "test_jaxpr_primitives.py" in analysis.opaque[0].where
    finding = analysis.findings["wide"]
    assert finding.dim is None
    if name != "all_to_all":  # other collectives beside it can be read
        assert f"`{name}`" in " ".join(finding.reasons)


def test_parameter_used_by_an_opaque_primitive_only():
    analysis = analyse(lambda p, x: x + kernel_call(p["out"])[None], {"out": PARAMS["out"]}, INPUT)
    assert "`pallas_call:mine`" in " ".join(analysis.findings["out"].reasons)
    assert analysis.opaque[0].paths == ("out",)


# ---- attention kernels ---------------------------------------------------------------------------

HEADS, KV, WIDTH, HEAD = 8, 2, 48, 64


def attention_params(kv):
    wide, narrow = HEADS * HEAD, kv * HEAD
    shapes = {"q": (WIDTH, wide), "k": (WIDTH, narrow), "v": (WIDTH, narrow), "o": (wide, WIDTH)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}


def attention_layer(kernel, kv):
    def fn(p, x):
        q, k, v = (
            (x @ p[name]).reshape(*x.shape[:2], n, HEAD)
            for name, n in (("q", HEADS), ("k", kv), ("v", kv))
        )
        return x + kernel(q, k, v).reshape(*x.shape[:2], -1) @ p["o"]

    return fn


ROWS = jax.ShapeDtypeStruct((2, 128, WIDTH), jnp.bfloat16)
GROUPED = {"q": (1, (2, 4)), "k": (1, (2,)), "v": (1, (2,)), "o": (0, (2, 4))}


def split(analysis):
    return {path: (f.dim, f.units) for path, f in analysis.findings.items() if f.dim is not None}


def cudnn(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def test_cudnn_attention_is_read_by_its_signature(monkeypatch):
    """JAX asks for cuDNN while tracing, so its checks have to be answered here."""
    module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(module, "check_compute_capability", lambda *_: True)
    analysis = analyse(attention_layer(cudnn, KV), attention_params(KV), ROWS)
    assert "dot_product_attention_fwd_wrapper" in names_in(analysis.scope.jaxpr)
    assert split(analysis) == GROUPED
    assert not analysis.opaque


def test_cudnn_attention_without_cudnn():
    """Without it, the model is traced as if there were one, by name or by module."""
    by_name = jax.nn.dot_product_attention
    for attend in (cudnn, functools.partial(by_name, is_causal=True, implementation="cudnn")):
        analysis = analyse(attention_layer(attend, KV), attention_params(KV), ROWS)
        assert split(analysis) == GROUPED
    assert jax.nn.dot_product_attention is by_name


def test_other_threads_still_hear_that_there_is_no_cudnn():
    """What one thread's planning is told is no other thread's answer."""
    heard = []

    def attend(q, k, v):
        out = cudnn(q, k, v)
        thread = threading.Thread(target=lambda: heard.append(refusal(q.shape)))
        thread.start()
        thread.join()
        return out

    analyse(attention_layer(attend, KV), attention_params(KV), ROWS)
    assert len(heard) == 1
    assert "cuDNN" in heard[0]
    assert "cuDNN" in refusal((2, 128, 8, 16))


def refusal(shape):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with pytest.raises(RuntimeError) as caught:
        jax.eval_shape(cudnn, x, x, x)
    return str(caught.value)


def flash(q, k, v):
    """A kernel of one's own: (batch, time, heads, width) as usual, nothing readable inside."""
    shape = jax.ShapeDtypeStruct(q.shape, q.dtype)

    def kernel(q, k, v, out):
        out[...] = q[...]

    return pl.pallas_call(kernel, out_shape=shape, name="flash")(q, k, v)


def test_unknown_kernel_loses_attention_only():
    def fn(p, x):
        x = attention_layer(flash, HEADS)(p, x)
        return x + jax.nn.relu(x @ p["up"]) @ p["down"]

    shapes = {"up": (WIDTH, 80), "down": (80, WIDTH)}
    params = attention_params(HEADS)
    params |= {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    analysis = analyse(fn, params, ROWS, min_vocab=80)
    assert split(analysis) == {"up": (1, (80,)), "down": (0, (80,))}
    assert "`pallas_call:flash`" in " ".join(analysis.findings["q"].reasons)


def test_signature_of_an_own_kernel():
    signatures = {"flash": "bthd,bskd,bskv->bthv"}
    layer, params = attention_layer(flash, KV), attention_params(KV)
    assert split(analyse(layer, params, ROWS, signatures=signatures)) == GROUPED


@pytest.mark.parametrize(
    "signature", ["bthd,bshd,bshv->bthv", "btd,bsd,bsv->btv", "bthd,bskd,bskv->bhtv"]
)
def test_signature_that_does_not_fit_is_refused(signature):
    layer, params = attention_layer(flash, KV), attention_params(KV)
    analysis = analyse(layer, params, ROWS, signatures={"flash": signature})
    assert not split(analysis)
    assert signature in analysis.opaque[0].reason
