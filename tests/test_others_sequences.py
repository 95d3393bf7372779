"""Sequences that devices along cp share, in models that never heard of it."""

import dataclasses
import functools
import importlib
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rounding import assert_close
from test_by_dataflow import Block, Model, loss

import jaxtp
from jaxtp.activations import row_chunks
from jaxtp.activations.by_dataflow import parallelize
from jaxtp.errors import IdleDevices, JaxtpWarning, SizeMismatch

TOKENS, VOCAB, WIDTH = 32, 64, 32
PACKED = jnp.asarray(np.repeat([[1, 1, 2, 3], [1, 2, 2, 2]], TOKENS // 4, axis=1))


class Layer(nnx.Module):
    """Attention in a window within each segment, its mask an array; then a shift and an MLP."""

    def __init__(self, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.ask, self.answer = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.offer, self.content = linear(WIDTH, 16), linear(WIDTH, 16)
        self.up, self.down = linear(WIDTH, 64), linear(64, WIDTH)
        self.before, self.between = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        h = self.before(x)
        q, k, v = (f(h).reshape(*x.shape[:2], -1, 8) for f in (self.ask, self.offer, self.content))
        y = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)
        x = x + self.answer(y.reshape(x.shape))
        h = self.between(x)
        shifted = jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return x + self.down(nnx.gelu(self.up(h + shifted)))


class Packed(nnx.Module):
    """Unrolled layers over packed sequences; rows and tokens first."""

    def __init__(self, rngs):
        self.table = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])

    def __call__(self, tokens, segments):
        place = jnp.arange(tokens.shape[1])
        near = (place[:, None] - place[None])[None] < 7
        mask = ((segments[:, :, None] == segments[:, None, :]) & near)[:, None]
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.table.attend(x)


def packed_loss(params, tokens, segments):
    logits = nnx.merge(nnx.split(nnx.eval_shape(lambda: Packed(nnx.Rngs(0))))[0], params)(
        tokens[:, :-1], segments
    )
    rows = jnp.log(jnp.exp(logits).sum(-1)) - jnp.take_along_axis(
        logits, tokens[:, 1:, None], axis=-1
    ).squeeze(-1)
    return jnp.where(segments > 1, rows, 0).sum() / (segments > 1).sum()


@functools.cache
def program(name):
    """A loss of another's model, its parameters, inputs, and the numbers of one device."""
    if name == "packed":
        params = nnx.split(Packed(nnx.Rngs(0)))[1]
        tokens = jax.random.randint(jax.random.key(1), (2, TOKENS + 1), 0, VOCAB)
        fn, inputs = packed_loss, (tokens, PACKED)
    else:
        model = Model(Block(kv_heads=2), remat=name == "remat")
        inputs = (jax.random.randint(jax.random.key(1), (1 if name == "scan" else 2, 16), 0, 1024),)
        params, fn = model.init(jax.random.key(0), *inputs), loss(model.apply)
    return fn, params, inputs, jax.jit(jax.value_and_grad(fn))(params, *inputs)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("scan", {"cp": 4, "tp": 2}),
        ("remat", {"cp": 2, "tp": 2, "fsdp": 2}),
        ("packed", {"cp": 8, "tp": 1}),
        ("packed", {"cp": 2, "tp": 2, "fsdp": 2}),
    ],
    ids=["scan-cp4-tp2", "remat-cp2-tp2-fsdp2", "packed-cp8", "packed-cp2-tp2-fsdp2"],
)
def test_a_strangers_model_has_the_numbers_of_one_device(name, sizes):
    fn, params, inputs, want = program(name)
    mesh = jaxtp.make_mesh(**sizes)
    plan = jaxtp.make_plan(params, mesh, fn=fn, inputs=inputs, zero=3)
    plan = dataclasses.replace(plan, sequence_parallel=name == "remat")
    placed = jaxtp.shard(params, mesh, plan=plan)
    got = jax.jit(jax.value_and_grad(parallelize(fn, plan, mesh)))(placed, *inputs)
    assert_close(got, want, 4 * TOKENS * 64)


def stream(mix):
    """A model of one residual block around `mix(params, h)`, with its parameters and input."""
    params = {n: jax.random.normal(jax.random.key(i), (16, 16)) / 4 for i, n in enumerate("abc")}

    def fn(params, x):
        h = x @ params["a"]
        return x + mix(params, h) @ params["c"]

    return fn, params, jax.random.normal(jax.random.key(9), (2, 16, 16))


def on_mesh(fn, params, x):
    """Numbers of a function on a mesh with cp=4 against those of one device; what was compiled."""
    loss = lambda fn: jax.jit(jax.value_and_grad(lambda *args: (fn(*args) ** 2).mean()))  # noqa: E731
    mesh = jaxtp.make_mesh(cp=4, tp=2)
    plan = jaxtp.make_plan(params, mesh, fn=fn, inputs=(x,))
    placed = jaxtp.shard(params, mesh, plan=plan)
    step = loss(parallelize(fn, plan, mesh)).lower(placed, x).compile()
    assert_close(step(placed, x), loss(fn)(params, x), 2 * x.size)
    return step.as_text()


def recurrent(params, h):
    step = lambda state, now: (jnp.tanh(state @ params["b"] + now),) * 2  # noqa: E731
    return jax.lax.scan(step, h[:, 0], h.swapaxes(0, 1))[1].swapaxes(0, 1)


def convolved(params, h, taps=4):
    """Causal; 4 tokens lie on a device."""
    kernel = jnp.stack([params["b"]] * taps)
    order = ("NTC", "TIO", "NTC")
    return jax.lax.conv_general_dilated(h, kernel, (1,), [(taps - 1, 0)], dimension_numbers=order)


def pooled(params, h):
    """The largest of three neighbours."""
    return jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 3, 1), (1, 1, 1), "SAME")


GATHERING = {
    "cumsum": lambda params, h: jnp.cumsum(h, 1),
    "scan": recurrent,
    "sort": lambda params, h: jnp.sort(h, axis=1),
    "reshape": lambda params, h: jnp.tanh(h.reshape(-1, 16)).reshape(h.shape),
    "slice": lambda params, h: jnp.repeat(h[:, ::2], 2, axis=1),
    "conv_general_dilated": functools.partial(convolved, taps=6),
}


@pytest.mark.parametrize("name", GATHERING)
def test_what_needs_all_tokens_is_said_by_line(name):
    fn, params, x = stream(GATHERING[name])
    said = rf"`{name}` at test_others_sequences.py:\d+ .*: it gathers 2,048 bytes of all"
    with pytest.warns(JaxtpWarning, match=said):
        on_mesh(fn, params, x)


def keys_first(params, h):
    """Scores with a row for each key; the softmax runs over rows."""
    scores = jax.nn.softmax(jnp.einsum("bkd,bqd->bkq", h @ params["b"], h), axis=1)
    return jnp.einsum("bkq,bkd->bqd", scores, h)


QUIET = {
    "shift": lambda params, h: jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1],
    "flip": lambda params, h: h[:, ::-1],
    "convolution": convolved,
    "pooling": pooled,
    "keys first": keys_first,
}


@pytest.mark.parametrize("name", QUIET)
@pytest.mark.filterwarnings("error")
def test_nothing_is_said_of_edges_and_of_keys(name):
    fn, params, x = stream(QUIET[name])
    on_mesh(fn, params, x)


def test_the_derivative_of_a_pooling_may_stand_in_the_function_itself():
    model, params, x = stream(pooled)
    fn = jax.value_and_grad(lambda *args: (model(*args) ** 2).mean())
    mesh = jaxtp.make_mesh(cp=4, tp=2)
    plan = jaxtp.make_plan(params, mesh, fn=fn, inputs=(x,))
    placed, said = (
        jaxtp.shard(params, mesh, plan=plan),
        "`select_and_scatter_add` at .* 2,048 bytes",
    )
    with pytest.warns(JaxtpWarning, match=said):
        got = jax.jit(parallelize(fn, plan, mesh))(placed, x)
    assert_close(got, jax.jit(fn)(params, x), 2 * x.size)


def test_tokens_are_shared_and_not_rows_where_nothing_shards_the_batch():
    fn, params, _ = stream(lambda params, h: jnp.tanh(h @ params["b"]))
    struct = jax.ShapeDtypeStruct((4, 32, 16), jnp.float32)
    mesh = jaxtp.make_mesh(cp=4, tp=2)
    plan = jaxtp.make_plan(params, mesh, fn=fn, inputs=(struct,))
    lowered = jax.jit(parallelize(fn, plan, mesh)).lower(params, struct).as_text()
    places = [line for line in lowered.splitlines() if "sharding_constraint" in line]
    assert places
    assert all(re.search(r'\[\{\??\}, \{"cp"\}, ', line) for line in places)


def seen(params, h):
    """Others look at the weights, too."""
    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", h @ params["b"], h))
    return jnp.einsum("bqk,bkd->bqd", scores, h) * scores.max()


@pytest.mark.parametrize(
    ("mix", "said"),
    [
        (
            seen,
            r"1,073,741,824 bytes at test_others_sequences.py:\d+ \(seen\) \(`reduce_max` takes",
        ),
        (keys_first, ""),
    ],
    ids=["looked-at", "in-chunks"],
)
def test_scores_that_are_held_at_once_are_said_with_their_bytes(mix, said):
    fn, params, _ = stream(mix)
    struct = jax.ShapeDtypeStruct((2, 32_768, 16), jnp.float32)
    mesh = jaxtp.make_mesh(dp=2, cp=4, tp=1)
    plan = jaxtp.make_plan(params, mesh, fn=fn, inputs=(struct,))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        jax.eval_shape(parallelize(fn, plan, mesh), params, struct)
    texts = [str(warning.message) for warning in told]
    assert len(texts) == bool(said)
    assert all(re.search(f"scores of its own queries by all keys, {said}", t) for t in texts)


def biased(params, h):
    """Two products make the scores; beside them a mask, a trained bias and a column of no key."""
    q, tokens = h @ params["b"], h.shape[1]
    scores = jnp.einsum("bqd,bkd->bqk", q, h) + jnp.einsum("bkd,bqd->bqk", jnp.sin(h), h)
    apart = jnp.arange(tokens)[None, :, None] - jnp.arange(tokens)[None, None]
    scores += params["a"][0][jnp.clip(apart, 0, 15)]
    scores = jnp.where(apart >= 0, scores, -1e9)
    sink = jnp.broadcast_to(params["a"][1, :1], (*scores.shape[:2], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1))[..., :-1]
    return jnp.einsum("bqk,bkd->bqd", weights, h)


def dropping(params, h):
    """Keys first; which weights are dropped is drawn for all at once."""
    scores = jax.nn.softmax(jnp.einsum("bkd,bqd->bkq", h @ params["b"], h), axis=1)
    scores = jnp.where(jax.random.bernoulli(jax.random.key(3), 0.9, scores.shape), scores, 0)
    return jnp.einsum("bkq,bkd->bqd", scores, h)


def causal(params, h):
    q, k, v = h @ params["b"], h[..., :8], h[..., 8:]
    q, k, v = (x.reshape(*h.shape[:2], -1, 4) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(h.shape)


@pytest.fixture
def few_rows(monkeypatch):
    """Chunks of two of a device's queries."""
    monkeypatch.setattr(row_chunks, "LEAST_ROWS", 2)
    monkeypatch.setattr(row_chunks, "LARGEST", 1)


@pytest.mark.parametrize("mix", [biased, dropping, causal])
def test_chunks_of_queries_have_the_numbers_of_all_at_once(mix, few_rows):
    fn, params, _ = stream(mix)
    x = jax.random.normal(jax.random.key(9), (2, 32, 16))
    text = on_mesh(fn, params, x)
    # 8 queries of a device by all keys, in any order.
    held = re.search(r"\w\[[\d,]*\b(8,32|32,8|32,32)\b", text)
    assert bool(held) == (mix is dropping)


@pytest.mark.parametrize(
    ("shape", "error", "said"),
    [
        ((2, 18, 16), SizeMismatch, "TP003 at tokens: cp=4 does not divide 18 tokens"),
        ((16, 16), IdleDevices, "TP011 at cp: no residual sum .* 4 devices would do the same"),
    ],
    ids=str,
)
def test_sequences_that_cannot_be_shared_are_refused(shape, error, said):
    fn, params, _ = stream(lambda params, h: h)
    struct = jax.ShapeDtypeStruct(shape, jnp.float32)
    plan = jaxtp.make_plan(params, {"cp": 4, "tp": 2}, fn=fn, inputs=(struct,))
    with pytest.raises(error, match=said):
        jax.eval_shape(parallelize(fn, plan, jaxtp.make_mesh(cp=4, tp=2)), params, struct)


@pytest.fixture
def cudnn(monkeypatch):
    """JAX asks for cuDNN while tracing; then XLA computes, for want of a GPU."""
    module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(module, "check_compute_capability", lambda *_: True)
    fused = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    plain = lambda *args, implementation, **rest: fused.func(*args, **rest)  # noqa: E731
    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    return fused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"return_residual": True}, "its residual .* fix: without `return_residual`, or without"),
        ({"is_causal": True, "mask": jnp.ones((1, 1, 8, 8), bool)}, "beside is_causal .* put the"),
    ],
    ids=["residual", "mask-beside-causal"],
)
def test_calls_of_cudnn_that_are_not_shared_say_what_would_be(cudnn, options, said):
    def mix(params, h):
        heads = h[:, :, None].astype(jnp.bfloat16)
        out = cudnn(heads, heads, heads, **options)
        return (out[0] if "return_residual" in options else out)[:, :, 0]

    fn, params, _ = stream(mix)
    x, mesh = jax.ShapeDtypeStruct((2, 8, 16), jnp.float32), jaxtp.make_mesh(dp=4, cp=2, tp=1)
    plan = jaxtp.make_plan(params, mesh, fn=fn, inputs=(x,))
    with pytest.raises(IdleDevices, match=f"(?s)TP011 .*{said}"):
        jax.eval_shape(parallelize(fn, plan, mesh), params, x)


def test_keys_of_another_sequence_need_not_divide(cudnn):
    """8 queries on 2 devices, each with all 7 keys."""

    def fn(params, x, text, attend=cudnn.func):
        q, kv = ((y @ params["a"])[:, :, None].astype(jnp.bfloat16) for y in (x, text))
        return ((x + attend(q, kv, kv)[:, :, 0] @ params["c"]) ** 2).sum()

    params = stream(lambda params, h: h)[1]
    x, text = (jax.random.normal(jax.random.key(i), (2, n, 16)) for i, n in enumerate((8, 7)))
    mesh, fused = jaxtp.make_mesh(dp=4, cp=2, tp=1), functools.partial(fn, attend=cudnn)
    plan = jaxtp.make_plan(params, mesh, fn=fused, inputs=(x, text))
    got = jax.jit(jax.value_and_grad(parallelize(fused, plan, mesh)))(params, x, text)
    want = jax.value_and_grad(fn)(params, x, text)
    # On the way to a gradient 4 values are rounded to bfloat16, and 8 on the way back, in both
    # programs: roundings add up as the root of their number, see `rounding`.
    most = math.sqrt(2 * 12) * float(jnp.finfo(jnp.bfloat16).eps)
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert float(jnp.abs(one - two).max()) <= most * float(jnp.abs(two).max())


def test_inputs_are_planned_along_their_tokens():
    fn, params, inputs, _ = program("packed")
    plan = jaxtp.make_plan(params, {"fsdp": 2, "cp": 4, "tp": 1}, fn=fn, inputs=inputs)
    tokens, segments = plan.inputs
    assert segments.spec == (("fsdp",), ("cp",))
    assert segments.reasons[-1] == "dim 1: tokens of a sequence, over cp"
    assert tokens.spec == (("fsdp",), ())  # a target more than tokens
