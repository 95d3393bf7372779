"""A plan as rules and as Flax annotations, and back."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.errors import PlanMismatch
from jaxtp.inspect.export import annotate, export_rules, match_rules
from jaxtp.models import abstract


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def tree(layers=3, odd=None):
    """Layers of attention and MLP; one may have other key heads."""
    layer = {
        "attn": {n: {"kernel": shape(64, 64)} for n in "qkvo"},
        "mlp": {
            "experts": {str(e): {"w1": shape(64, 256), "w2": shape(256, 64)} for e in range(2)}
        },
    }
    layers = {str(i): layer for i in range(layers)}
    if odd is not None:
        narrow = {n: {"kernel": shape(64, 16)} for n in "kv"}
        layers[str(odd)] = {**layer, "attn": {**layer["attn"], **narrow}}
    return {"embed": shape(1000, 64), "layers": layers}


@pytest.mark.parametrize("odd", [None, 1])
@pytest.mark.parametrize("tp", [2, 8])
def test_rules_give_every_path_its_spec(tp, odd):
    plan = jaxtp.make_plan(tree(odd=odd), {"tp": tp}, head_dim=8)
    rules = export_rules(plan)
    assert {p: match_rules(rules, p) for p in plan.params} == plan.specs()


def test_numbers_are_wildcards_only_as_whole_parts():
    rules = dict(export_rules(jaxtp.make_plan(tree(), {"tp": 8}, heads=8)))
    assert rules[r"^layers/\d+/mlp/experts/\d+/w1$"] == P(None, "tp")
    assert len(rules) == 7
    assert export_rules(jaxtp.make_plan(tree(20), {"tp": 8}, heads=8)) == list(rules.items())


def test_a_layer_that_differs_comes_first_under_its_own_path():
    rules = export_rules(jaxtp.make_plan(tree(odd=1), {"tp": 8}, head_dim=8))
    exact = [pattern for pattern, _ in rules if r"layers/1/" in pattern]
    assert [pattern for pattern, _ in rules[: len(exact)]] == exact
    assert len(exact) == 2


def test_a_path_without_a_rule_is_an_error():
    with pytest.raises(PlanMismatch, match="at b: none of 1 rules matches"):
        match_rules([("^a$", P())], "b")


def test_nnx_metadata_says_what_the_plan_says():
    model = abstract("gpt2")
    plan = jaxtp.make_plan(model, {"tp": 4})
    written = annotate(model, plan)
    specs = nnx.get_partition_spec(nnx.state(written))
    found = {path: jaxtp.Plan.partition_specs(plan, {path: 0})[path] for path in plan.params}
    flat = {"/".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(specs)}
    assert {p: tuple(s) for p, s in flat.items()} == {p: tuple(s) for p, s in found.items()}
    # And a planner that trusts annotations comes to the same plan.
    assert jaxtp.make_plan(written, {"tp": 4}).specs() == plan.specs()


def test_linen_boxes_say_what_the_plan_says():
    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            boxed = nn.with_partitioning(nn.initializers.lecun_normal(), ("old", "names"))
            return nn.Dense(8)(nn.relu(nn.Dense(32, kernel_init=boxed)(x)))

    params = Mlp().init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    with pytest.warns(jaxtp.JaxtpWarning, match="'old', which is no axis of the mesh"):
        plan = jaxtp.make_plan(params, {"tp": 4})
    written = annotate(params, plan)
    # Dense_0 is the second layer called: Python evaluates Dense(8) before its argument.
    assert nn.get_partition_spec(written)["Dense_1"]["kernel"] == P(None, "tp")
    assert nn.get_partition_spec(written)["Dense_0"]["kernel"] == P("tp", None)
    assert jaxtp.make_plan(written, {"tp": 4}).specs() == plan.specs()


def test_annotations_need_the_trees_own_plan():
    plan = jaxtp.make_plan({"a": shape(8, 8)}, {"tp": 1})
    with pytest.raises(PlanMismatch, match="TP045 at b"):
        annotate({"b": shape(8, 8)}, plan)
