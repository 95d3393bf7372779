"""Sequences that devices along cp share: the numbers of one device, bytes by formula, refusals."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hybrid_runs import check
from rounding import assert_close

import jaxtp
from jaxtp.activations.by_name import use_plan
from jaxtp.activations.context import blocks
from jaxtp.activations.context.blocks import Scores, TokenSpan, View, gradients_of, merge, part_of
from jaxtp.activations.context.dealing import pieces_of
from jaxtp.activations.context.tiles import LEAST_TOKENS, attend_in_tiles
from jaxtp.config.batch_sizes import resolve
from jaxtp.config.settings import Batch, Communication, Config, Mesh
from jaxtp.errors import JaxtpWarning, SizeMismatch
from jaxtp.mesh.build import make_mesh, plan_mesh
from jaxtp.models import GPTConfig, LlamaConfig, build, cross_entropy
from jaxtp.models.attention import attend, capped_attention

TOKENS = 48
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = LlamaConfig(
    num_key_value_heads=2, head_dim=8, intermediate_size=48, dtype="float32", **SIZES
)
SOME_SLIDE = dataclasses.replace(
    LLAMA,
    sliding_window=7,
    layer_types=("sliding_attention", "full_attention"),
    attn_logit_softcapping=5.0,
    remat="block_outputs",
)
GPT2 = GPTConfig(max_position_embeddings=TOKENS, dtype="float32", **SIZES)
PACKED = np.repeat([[1, 2, 3], [1, 1, 2], [1, 2, 2], [1, 1, 1]], 16, axis=1)
PADDED = np.where(np.arange(TOKENS) < [[48], [30], [17], [5]], 1, 0)
CASES = {
    "plain": (LLAMA, None),
    "packed": (LLAMA, PACKED),
    "padded": (GPT2, PADDED),
    "window": (SOME_SLIDE, PACKED),
    "window, padded": (SOME_SLIDE, PADDED),
}


@functools.cache
def program(name):
    """Parameters, a loss of them, and the loss and gradients on one device."""
    config, segments = CASES[name]
    graph, params = nnx.split(build(config))
    tokens = jax.random.randint(jax.random.key(1), (4, TOKENS + 1), 0, 64)
    targets, counts = tokens[:, 1:], None if segments is None else segments > 0

    def loss(params):
        logits = nnx.merge(graph, params)(tokens[:, :-1], None, segments)
        return cross_entropy(logits, targets, counts)

    return params, loss, jax.jit(jax.value_and_grad(loss))(params)


def sharded(name, sizes, *, sequence_parallel=False):
    """Its parameters on a mesh, and a context in which its activations are sharded."""
    config, (params, loss, _) = CASES[name][0], program(name)
    count = int(np.prod(list(sizes.values())))
    mesh = make_mesh(devices=jax.devices()[:count], **sizes)
    plan = jaxtp.make_plan(params, mesh, config=config)
    plan = dataclasses.replace(plan, sequence_parallel=sequence_parallel)
    placed = jaxtp.shard(params, mesh, plan=plan)
    return placed, loss, use_plan(plan, plan_mesh(mesh, plan.mesh))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("plain", {"cp": 8, "tp": 1}),
        ("packed", {"cp": 2, "tp": 2, "fsdp": 2}),
        ("padded", {"cp": 4, "tp": 2}),
        ("window", {"cp": 4, "tp": 2}),
        ("window, padded", {"cp": 2, "tp": 2, "fsdp": 2}),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_one_device(name, sizes):
    params, loss, around = sharded(name, sizes, sequence_parallel=name == "padded")
    with around:
        got = jax.jit(jax.value_and_grad(loss))(params)
    assert_close(got, program(name)[2], 4 * TOKENS * 48)


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("llama", {"cp": 2, "tp": 2, "fsdp": 2}, {"zero": 3, "num_micro": 2}),
        ("llama", {"pp": 2, "cp": 2, "tp": 2}, {"zero": 2}),
    ],
    ids=str,
)
def test_updates_along_shared_sequences_are_those_of_one_device(name, sizes, options):
    check(name, sizes, **options)


def test_every_device_meets_as_many_tokens():
    for ways in (2, 4, 8):
        pieces = pieces_of(ways)
        assert sorted(pieces.reshape(-1)) == list(range(2 * ways))
        assert set(pieces.sum(axis=1)) == {2 * ways - 1}


def with_gradients(fn):
    """The result and what it pulls back, as one program: alone, each operation is compiled."""

    @jax.jit
    def run(d_out, *args):
        out, pull = jax.vjp(fn, *args)
        return out, pull(d_out)

    return run


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(blocks, "LARGEST", 4)


@pytest.mark.parametrize(
    ("half", "window", "softcap", "packed"),
    [
        (12, None, None, True),
        (12, 5, 2.0, True),
        (11, None, 2.0, False),  # the last of three tiles is padded
        (11, 5, None, True),
    ],
)
def test_parts_add_up_to_all_attention(small_tiles, half, window, softcap, packed):
    keys = jax.random.split(jax.random.key(0), 4)
    q, d_out = (jax.random.normal(key, (2, half, 4, 8)) for key in keys[:2])
    k, v = (jax.random.normal(key, (2, 2 * half, 2, 8)) for key in keys[2:])
    ids = jnp.asarray(np.repeat([[1, 2, 3, 3], [1, 1, 1, 2]], 6, axis=1))[:, : 2 * half]
    scores = Scores(0.3, softcap, "xla")
    late, early = (
        TokenSpan(jnp.int32(first), ids[:, first : first + half] if packed else None)
        for first in (half, 0)
    )
    views = [View(late, late, window, diagonal=True), View(late, early, window, diagonal=False)]
    halves = [(k[:, half:], v[:, half:]), (k[:, :half], v[:, :half])]

    def whole(q, k, v):
        mask = ids[:, None, :, None] == ids[:, None, None, :] if packed else None
        reach = None if window is None else (window - 1, 0)
        options = {"is_causal": True, "scale": 0.3, "local_window_size": reach}
        every = jnp.concatenate([jnp.zeros_like(q), q], axis=1)
        return capped_attention(every, k, v, softcap=softcap, mask=mask, **options)[:, half:]

    @jax.jit
    def in_parts(q, halves, d_out):
        pairs = list(zip(halves, views, strict=True))
        both = merge(*[part_of(q, *kv, view, scores) for kv, view in pairs])
        grads = [gradients_of(q, *kv, both, d_out, view, scores) for kv, view in pairs]
        (dq, *late), (more, *early) = grads
        joined = [jnp.concatenate(pair, axis=1) for pair in zip(early, late, strict=True)]
        return both.out_BTNH, (dq + more, *joined)

    got, grads = in_parts(q, halves, d_out)
    want, pulled = with_gradients(whole)(d_out, q, k, v)
    assert_close(got, want, 2 * half * 8)
    assert_close(grads, pulled, 2 * half * 8)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("window", [None, 5])
def test_tiles_of_one_sequence_are_all_attention(small_tiles, window, tp):
    """With packed sequences and sinks, on whatever shards the heads."""
    keys = jax.random.split(jax.random.key(1), 5)
    q, d_out = (jax.random.normal(key, (2, 12, 4, 8)) for key in keys[:2])
    k, v = (jax.random.normal(key, (2, 12, 2, 8)) for key in keys[2:4])
    sinks = jax.random.normal(keys[4], (4,))
    ids = jnp.asarray(np.repeat([[1, 2, 2], [1, 1, 2]], 4, axis=1))
    reach = None if window is None else (window - 1, 0)

    def whole(q, k, v, sinks):
        mask = ids[:, None, :, None] == ids[:, None, None, :]
        options = {"is_causal": True, "scale": 0.3, "local_window_size": reach}
        return capped_attention(q, k, v, softcap=None, sinks_N=sinks, mask=mask, **options)

    def tiled(q, k, v, sinks):
        reach = None if window is None else jnp.int32(window)
        return attend_in_tiles(q, k, v, ids, reach, sinks, Scores(0.3, None, "xla"))

    plan = jaxtp.make_plan({"w": jnp.zeros((8, 8))}, {"tp": tp}, strict=False)
    with use_plan(plan, plan_mesh(make_mesh(tp=tp, devices=jax.devices()[:tp]), plan.mesh)):
        got, grads = with_gradients(tiled)(d_out, q, k, v, sinks)
    want, pulled = with_gradients(whole)(d_out, q, k, v, sinks)
    assert_close(got, want, 12 * 8)
    assert_close(grads, pulled, 2 * 12 * 8)


def test_long_sequences_without_cp_have_no_array_of_tokens_by_tokens():
    heads = [jax.ShapeDtypeStruct((1, LEAST_TOKENS, n, 8), jnp.float32) for n in (2, 1, 1)]
    lowered = jax.jit(jax.grad(lambda *x: attend(*x, None, "xla").sum())).lower(*heads).as_text()
    assert max(sizes_in(lowered)) < 2 * LEAST_TOKENS**2
    assert max(sizes_in(lowered)) == 2 * blocks.LARGEST**2


def test_a_length_without_divisors_has_as_few_tiles_as_any():
    keys = jax.random.split(jax.random.key(0), 3)
    heads = [jax.random.normal(key, (1, LEAST_TOKENS + 5, 1, 8)) for key in keys]
    tiled = jax.jit(lambda *x: attend(*x, None, "xla"))
    assert "length=6" in str(jax.make_jaxpr(tiled)(*heads))  # 3 tiles: 3 x 4 / 2 pairs
    want = capped_attention(*heads, softcap=None, is_causal=True)
    assert_close(tiled(*heads), want, heads[0].shape[1])


def sizes_in(lowered):
    """Elements of every array of a program."""
    found = set(re.findall(r"tensor<([\dx]+x)[a-z]", lowered))
    return [np.prod([int(n) for n in dims.split("x")[:-1]]) for dims in found]


def test_no_array_of_tokens_by_tokens():
    """Forward and backward, of a sequence far longer than a tile."""
    tokens, config = 32_768, dataclasses.replace(LLAMA, num_hidden_layers=1, remat="block_outputs")
    graph, params = nnx.split(jaxtp.models.abstract(config))
    plan = jaxtp.make_plan(params, {"cp": 4, "tp": 2}, config=config)
    mesh = plan_mesh(make_mesh(cp=4, tp=2), plan.mesh)

    def loss(params, rows):
        return cross_entropy(nnx.merge(graph, params)(rows), rows)

    with use_plan(plan, mesh):
        rows = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        lowered = jax.jit(jax.grad(loss)).lower(params, rows).as_text()
    # One tile's scores of two heads on each of eight devices.
    assert max(sizes_in(lowered)) <= 16 * blocks.LARGEST**2 == tokens**2 // 64


@pytest.mark.parametrize(
    ("seq_len", "sequence_parallel", "message"),
    [
        (
            60,
            False,
            r"TP003 at seq_len: cp=8 assigns two pieces of 60 .* fix: seq_len of 48, 64",
        ),
        (48, True, r"shards 48 tokens 32 ways\n  fix: seq_len of 32, 64"),
    ],
)
def test_lengths_that_do_not_divide_are_refused(seq_len, sequence_parallel, message):
    config = Config(
        model="llama3.2-1b",
        seq_len=seq_len,
        mesh=Mesh(cp=8, tp=4),
        batch=Batch(size=1),
        communication=Communication(sequence_parallel=sequence_parallel),
    )
    with pytest.raises(SizeMismatch, match=f"(?s){message}"):
        resolve(config, 32)


def test_a_model_refuses_a_length_that_does_not_divide():
    params, _, around = sharded("plain", {"cp": 4, "tp": 2})
    graph = nnx.split(build(LLAMA))[0]
    with around, pytest.raises(SizeMismatch, match=r"(?s)TP003 at tokens: .* 8, such as 40 or 48"):
        jax.eval_shape(lambda p: nnx.merge(graph, p)(jnp.zeros((1, 44), jnp.int32)), params)


def test_interleaving_says_that_it_does_not_go_with_it():
    params, loss, _ = sharded("plain", {"cp": 4, "tp": 2})
    plan = jaxtp.make_plan(params, {"cp": 4, "tp": 2}, config=LLAMA)
    plan = dataclasses.replace(plan, overlap="aggressive")
    with (
        use_plan(plan, plan_mesh(make_mesh(cp=4, tp=2), plan.mesh)),
        pytest.warns(JaxtpWarning, match="TP073 at cp: devices along cp share every sequence"),
    ):
        jax.eval_shape(loss, params)
