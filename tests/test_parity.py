"""The newcomer's check: it passes on what is right and fails on what is not."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType
from rounding import assert_close, bound
from small_models import LLAMA, drawn, mesh, tokens

import jaxtp
from jaxtp.errors import BadConfig, ParityFailed
from jaxtp.inspect.parity import verify

QUIET = str  # a function that prints nothing
X = jax.random.normal(jax.random.key(0), (4, 6, 32))


class Encoder(nn.Module):
    """Stock Linen attention and MLP."""

    @nn.compact
    def __call__(self, x):
        # A key bias has no gradient but rounding; here every array is held to its own size.
        attention = nn.MultiHeadDotProductAttention(num_heads=8, use_bias=False)
        x = x + attention(nn.LayerNorm()(x))
        return x + nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))


class Decoder(nnx.Module):
    """Stock NNX attention and MLP."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(x)
        return x + self.down(nnx.gelu(self.up(x)))


def test_a_linen_module_step_by_step(capsys):
    params = Encoder().init(jax.random.key(1), X)["params"]
    result = verify(Encoder(), params, (X,), jaxtp.make_mesh(tp=4, dp=2))
    assert [row.mesh for row in result.rows] == [
        *(f"dp=1 x tp={n}" for n in (1, 2, 4)),
        "dp=2 x tp=4",
    ]
    assert all(row.error < bound(64) < row.tolerance / 10 for row in result.rows)
    sizes = [row.bytes_per_device for row in result.rows]
    assert sizes[0] > sizes[1] > sizes[2] == sizes[3]
    out = capsys.readouterr().out
    assert "largest difference" in out
    assert out.count("dp=") == 4


def test_an_nnx_module_on_explicit_axes_with_other_names():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    names = {"tp": "model", "dp": "data"}
    result = verify(None, Decoder(nnx.Rngs(0)), (X,), mesh, axis_names=names, show=lambda _: None)
    assert result.rows[-1].mesh == "data=2 x model=4"
    assert result.rows[-1].sharded == "10 of 12"


def test_heads_that_do_not_divide_still_agree():
    class Odd(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(6, 24, decode=False, rngs=rngs)

        def __call__(self, x):
            return self.attention(x)

    x = jax.random.normal(jax.random.key(0), (2, 5, 24))
    result = verify(None, Odd(nnx.Rngs(0)), (x,), jaxtp.make_mesh(tp=8), show=lambda _: None)
    assert result.rows[-1].mesh == "tp_0=2 x tp_1=4"


def test_a_function_that_depends_on_its_devices_is_found_out():
    def wrong(params, x):
        # What a hand-written collective with a forgotten rescale does.
        return (x @ params["up"]) @ params["down"] * (1 + wrong.calls)

    wrong.calls = 0
    params = {"up": jnp.ones((32, 64)), "down": jnp.ones((64, 32))}

    def counting(params, x):
        out = wrong(params, x)
        wrong.calls += 1  # another program each time it is traced
        return out

    with pytest.raises(ParityFailed, match=r"TP071 at (output|gradient).*: differs by .* on tp="):
        verify(counting, params, (X,), jaxtp.make_mesh(tp=8), show=lambda _: None)


def test_outputs_only_and_integer_outputs():
    def count(params, x):
        return {"n": (x @ params["w"] > 0).sum(), "y": x @ params["w"]}

    params = {"w": jax.random.normal(jax.random.key(2), (32, 64)), "step": jnp.int32(3)}
    result = verify(
        count, params, (X,), jaxtp.make_mesh(tp=8), gradients=False, show=lambda _: None
    )
    assert len(result.rows) == 4


@pytest.mark.parametrize("gradients", [True, False])
def test_experts_and_shared_sequences_on_one_mesh(gradients):
    config = dataclasses.replace(LLAMA, num_experts=4, num_experts_per_tok=2)
    wide = jaxtp.make_mesh(ep=2, cp=2, tp=2)
    model = drawn(jaxtp.models.abstract(config), 0.02)
    options = {"config": config, "gradients": gradients, "show": QUIET}
    result = verify(None, model, (tokens(),), wide, **options)
    assert result.rows[-1].mesh == "cp=2 x ep=2 x tp=2"


def test_a_bf16_program_is_held_to_the_digits_it_has():
    """Gradients of float32 parameters are no more exact than the bf16 products behind them."""
    config = dataclasses.replace(LLAMA, dtype="bfloat16")
    ids = jnp.asarray(tokens())
    result = verify(None, drawn(jaxtp.models.abstract(config)), (ids,), mesh(1, 2), show=QUIET)
    assert {row.tolerance for row in result.rows} == {float(jnp.finfo(jnp.bfloat16).eps) ** 0.5}
    assert 0 < result.rows[-1].error < result.rows[-1].tolerance


def test_a_padded_vocabulary_is_compared_without_its_padding():
    def bare(params, ids):
        return params["embed"]["embedding"][ids] @ params["lm_head"]["kernel"]

    def logits(params, ids):
        return jaxtp.mask_padding(bare(params, ids), 10)

    keys = jax.random.split(jax.random.key(0))
    params = {
        "embed": {"embedding": jax.random.normal(keys[0], (10, 8))},
        "lm_head": {"kernel": jax.random.normal(keys[1], (8, 10))},
    }
    mesh = jaxtp.make_mesh(tp=4, dp=2)
    result = verify(logits, params, (tokens() % 10,), mesh, pad_vocab=True, show=QUIET)
    assert result.rows[-1].bytes_per_device == 2 * 12 * 8 * 4 // 4
    # A model that does not mask would compute another loss: refused, or found by comparing.
    with pytest.raises(BadConfig, match=r"TP020 at pad_vocab: .* from 10 to 12"):
        verify(bare, params, (tokens() % 10,), mesh, pad_vocab=True, show=QUIET)
    with pytest.raises(ParityFailed, match="TP071 at output: the logits of the padded vocabulary"):
        verify(bare, params, (tokens() % 10,), mesh, pad_vocab="masked", show=QUIET)
    ids = (jax.ShapeDtypeStruct((4, 6), "int32"),)
    assert jaxtp.make_plan(params, mesh, pad_vocab=True, fn=logits, inputs=ids)
    with pytest.raises(BadConfig, match=r"jaxtp.mask_padding\(logits, 10\)"):
        jaxtp.make_plan(params, mesh, pad_vocab=True, fn=bare, inputs=ids)


@pytest.mark.parametrize("reads", ["logsumexp", "sum", "max", "scan"])
def test_logits_that_are_read_beside_the_mask_as_well(reads):
    """A loss on z of the raw logits, or their mean: its numbers would change with the padding."""

    def loss(params, ids):
        raw = params["embed"]["embedding"][ids] @ params["embed"]["embedding"].T
        masked = jaxtp.mask_padding(raw, 10)
        if reads == "scan":
            return jax.lax.scan(lambda total, row: (total + row.sum(), None), 0.0, raw)[0]
        extra = {"logsumexp": jax.nn.logsumexp, "sum": jnp.sum, "max": jnp.max}[reads]
        return -jax.nn.log_softmax(masked)[..., 0].mean() + extra(raw)

    params = {"embed": {"embedding": jnp.ones((10, 8))}}
    ids = (jax.ShapeDtypeStruct((4, 6), "int32"),)
    with pytest.raises(BadConfig, match=r"TP020 at pad_vocab: .*beside the mask .* at test_parity"):
        jaxtp.make_plan(params, {"tp": 4}, pad_vocab=True, fn=loss, inputs=ids)


@pytest.mark.parametrize("reads", ["one-hot", "probabilities"])
def test_rows_of_a_padded_table_may_be_summed(reads):
    """Those of the padding are zero: tokens looked up by a product, and tokens that are a mix."""

    def fn(params, ids):
        table, head = params["embed"]["embedding"], params["lm_head"]["kernel"]
        x = jax.nn.one_hot(ids, len(table)) @ table if reads == "one-hot" else table[ids]
        probabilities = jax.nn.softmax(jaxtp.mask_padding(x @ head, 10))
        return probabilities @ table if reads == "probabilities" else probabilities[..., :10]

    keys = jax.random.split(jax.random.key(0))
    params = {
        "embed": {"embedding": jax.random.normal(keys[0], (10, 8))},
        "lm_head": {"kernel": jax.random.normal(keys[1], (8, 10))},
    }
    ids = jnp.arange(8).reshape(2, 4)
    plan = jaxtp.make_plan(params, mesh(1, 4), pad_vocab=True, fn=fn, inputs=(ids,))
    assert {decision.stored for decision in plan.decisions} == {(12, 8), (8, 12)}
    placed = jaxtp.shard(params, mesh(1, 4), plan=plan)
    want, got = jax.jit(fn)(params, ids), jax.jit(fn)(placed, ids)
    assert_close(got, want, 10)


def test_a_function_that_is_not_finite_on_one_device_is_no_bug_of_jaxtp():
    params = {"up": {"kernel": jnp.ones((8, 16))}, "down": {"kernel": jnp.ones((16, 8))}}

    def fn(p, x):
        return x @ p["up"]["kernel"] @ p["down"]["kernel"] * jnp.nan

    with pytest.raises(ParityFailed, match="NaN or infinity on one device already"):
        verify(fn, params, (jnp.ones((4, 8)),), jaxtp.make_mesh(tp=8), show=QUIET)


@pytest.mark.parametrize("gradients", [False, True])
def test_placed_parameters_and_an_ambient_explicit_mesh(gradients):
    mesh = jax.make_mesh(
        (1, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4]
    )
    model = jaxtp.shard(Decoder(nnx.Rngs(0)), mesh)
    with jax.set_mesh(mesh):
        result = verify(None, model, (X,), mesh, gradients=gradients, show=QUIET)
    assert len(result.rows) == 3
