"""The plan read from the model: `make_plan(fn=, inputs=)`, beside and above the names."""

import collections
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.errors import BadTree, JaxtpWarning
from jaxtp.models import abstract
from jaxtp.plan import trees
from jaxtp.rules import dataflow, resolve
from jaxtp.rules.roles import Role, Source, Vote

TOKENS = jax.ShapeDtypeStruct((2, 16), jnp.int32)


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


class Backwards(nn.Module):
    """Dense_0 is the second layer called, as Python evaluates arguments first (F7)."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(256)(nn.relu(nn.Dense(1024)(x)))


def test_a_linen_module_is_traced_with_or_without_its_params_key():
    x = shape(2, 256)
    variables = jax.eval_shape(Backwards().init, jax.random.key(0), x)
    for tree, prefix in ((variables, "params/"), (variables["params"], "")):
        plan = jaxtp.make_plan(tree, {"tp": 4}, fn=Backwards(), inputs=(x,))
        assert plan[f"{prefix}Dense_1/kernel"].partition_spec == P(None, "tp")
        assert plan[f"{prefix}Dense_0/kernel"].partition_spec == P("tp")
        assert "test_dataflow.py" in plan[f"{prefix}Dense_0/kernel"].reasons[-1]


def test_a_pair_of_init_and_apply_is_traced_and_what_only_applies_is_refused():
    module, x = Backwards(), shape(2, 256)
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    pair = collections.namedtuple("Pair", ["init", "apply"])(
        module.init, lambda v, x: module.apply(v, x)
    )
    plan = jaxtp.make_plan(variables, {"tp": 4}, fn=pair, inputs=(x,))
    assert plan["params/Dense_1/kernel"].partition_spec == P(None, "tp")
    with pytest.raises(BadTree, match=r"TP046 at inputs: .*given 2 inputs after the parameters"):
        jaxtp.make_plan(variables, {"tp": 4}, fn=pair, inputs=(x, x))
    with pytest.raises(BadTree, match="TP046 at inputs: fn takes v, x, and"):
        jaxtp.make_plan(variables, {"tp": 4}, fn=pair)
    with pytest.raises(BadTree, match=r"TP046 at fn: .*cannot be called"):
        jaxtp.make_plan(variables, {"tp": 4}, fn=types.SimpleNamespace(apply=len), inputs=(x,))


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2", "qwen3-8b"])
@pytest.mark.parametrize("tp", [2, 8])
def test_presets_get_the_same_plan_from_names_and_from_dataflow(name, tp):
    model = abstract(name)
    by_names = jaxtp.make_plan(model, {"tp": tp})
    by_flow = jaxtp.make_plan(model, {"tp": tp}, inputs=(TOKENS,))
    assert by_names.diff(by_flow) == ""
    sources = {d.reasons[-1].split(":")[0] for d in by_flow.decisions if d.units}
    assert sources == {"dataflow"}


def swapped(params, x):
    """Names that lie: `down` is the first matrix and `up` the second."""
    return x + jax.nn.relu(x @ params["mlp"]["down"]) @ params["mlp"]["up"]


def test_dataflow_wins_over_names_with_a_warning_and_both_reasons():
    params = {"mlp": {"up": shape(64, 64), "down": shape(64, 64)}}
    with pytest.warns(
        JaxtpWarning, match=r"mlp/.*: dataflow overrules names .*more in plan\.notes"
    ):
        plan = jaxtp.make_plan(params, {"tp": 4}, fn=swapped, inputs=(shape(2, 3, 64),))
    assert plan["mlp/down"].partition_spec == P(None, "tp")
    assert plan["mlp/up"].partition_spec == P("tp")
    names, flow = plan["mlp/up"].reasons
    assert names.endswith("(overruled)")
    assert flow.startswith("dataflow: ")
    assert len(plan.notes) == 2


def test_an_override_wins_over_dataflow_and_says_what_it_costs():
    model, x = nnx.eval_shape(lambda: Mlp(nnx.Rngs(0))), shape(2, 3, 16)
    plan = jaxtp.make_plan(model, {"tp": 4}, inputs=(x,), overrides={"^a/kernel$": P("tp")})
    assert plan["a/kernel"].partition_spec == P("tp")
    assert "given instead of dim 1 4-way" in plan["a/kernel"].fallback
    assert "MB sent at each use" in plan["a/kernel"].fallback


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)
        self.unused = nnx.Linear(16, 64, rngs=rngs)

    def __call__(self, x):
        return x + self.b(nnx.gelu(self.a(x)))


def test_parameters_that_the_call_does_not_reach_are_left_to_names():
    model = nnx.eval_shape(lambda: Mlp(nnx.Rngs(0)))
    plan = jaxtp.make_plan(model, {"tp": 4}, inputs=(shape(2, 3, 16),))
    assert plan["a/kernel"].reasons[-1].startswith("dataflow")
    assert plan["unused/kernel"].reasons[-1].startswith("names")


def test_a_byte_vocabulary_is_left_to_names():
    # 256 rows are too few for dataflow to call them a vocabulary, but a name may know.
    plan = jaxtp.make_plan(abstract("llama-tiny"), {"tp": 4}, inputs=(TOKENS,))
    assert plan["embed_tokens/embedding"].partition_spec == P("tp")


def test_tiled_key_heads_are_kept_whole():
    def attend(params, x):
        q = (x @ params["q"]).reshape(*x.shape[:2], 8, 4)
        k, v = (jnp.tile((x @ params[n]).reshape(*x.shape[:2], 2, 4), (1, 1, 4, 1)) for n in "kv")
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
        return x + jnp.einsum("bhqk,bkhd->bqhd", p, v).reshape(x.shape) @ params["o"]

    params = {"q": shape(32, 32), "k": shape(32, 8), "v": shape(32, 8), "o": shape(32, 32)}
    plan = jaxtp.make_plan(params, {"tp": 4}, fn=attend, inputs=(shape(2, 6, 32),))
    assert plan["k"].partition_spec == P()
    assert plan["q"].partition_spec == P(None, "tp")


def test_inputs_without_a_function():
    with pytest.raises(BadTree, match=r"TP046: inputs were given, but a dict cannot be called"):
        jaxtp.make_plan({"w": shape(8, 8)}, {"tp": 2}, inputs=(shape(2, 8),))


@pytest.mark.parametrize("axis", [0, 1])
def test_dims_that_a_scan_runs_along_are_told_whoever_decides(axis):
    def model(params, x):
        def layer(x, w):
            return x + jax.nn.gelu(x @ w["one"]) @ w["two"], None

        return jax.lax.scan(layer, x, jax.tree.map(lambda w: jnp.moveaxis(w, axis, 0), params))[0]

    shapes = {"one": [32, 48], "two": [48, 32]}
    params = {k: shape(*s[:axis], 64, *s[axis:]) for k, s in shapes.items()}
    votes = dataflow.trace(model, params, (shape(2, 3, 32),)).votes
    assert {v.path: v.stacked_dims for v in votes} == {"one": (axis,), "two": (axis,)}
    given = Vote("one", Source.OVERRIDE, Role.GIVEN, "given", spec=((), (), ()))
    claims = resolve.decide(trees.flatten(params), [*votes, given])
    assert [claim.stacked_dims for claim in claims] == [(axis,), (axis,)]


class Patches(nnx.Module):
    """A vision transformer's start, block and end."""

    def __init__(self, rngs):
        self.proj = nnx.Conv(3, 64, (8, 8), strides=(8, 8), rngs=rngs)
        self.attention = nnx.MultiHeadAttention(8, 64, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.linear1, self.linear2 = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, image):
        x = self.proj(image).reshape(image.shape[0], -1, 64)
        x = x + self.attention(self.norm(x))
        return x + self.linear2(jax.nn.gelu(self.linear1(x)))


def test_sources_that_choose_the_same_dims_leave_no_note():
    model = nnx.eval_shape(lambda: Patches(nnx.Rngs(0)))
    with jax.numpy_rank_promotion("allow"):
        flow = jaxtp.make_plan(model, {"tp": 4}, inputs=(shape(2, 32, 32, 3),))
    assert flow.specs() == jaxtp.make_plan(model, {"tp": 4}).specs()
    assert not [note for note in flow.notes if "overrules" in note]
