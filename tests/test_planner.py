"""`make_plan` from every kind of input, and everything it refuses or notes."""

import functools
import html
import json
import time

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from planning import attention, layers, llama, mlp, norms, plan, specs, structs, vocab

import jaxtp
from jaxtp.errors import (
    BadConfig,
    BadMesh,
    BadSpec,
    BadTree,
    ConflictingDecisions,
    HeadsNotDivisible,
    IdleDevices,
    JaxtpWarning,
    NoTensorAxis,
    NothingSharded,
    PlanMismatch,
    ReplicatedTooMuch,
    SizeMismatch,
    UnusedOverride,
)
from jaxtp.plan import trees

ATTENTION_12 = attention(768, 768, 768) | mlp(768, 3072) | norms(768)


# ---------------------------------------------------------------- overrides


def test_an_override_outranks_everything():
    overrides = {"embed_tokens": P(None, "tp"), "o_proj": P()}
    result = plan(llama(), 4, heads=8, kv_heads=4, overrides=overrides)
    assert specs(result)["embed_tokens/embedding"] == "P(-, tp)"
    assert specs(result)["layers/0/attn/o_proj/kernel"] == "P()"
    decision = result["embed_tokens/embedding"]
    assert decision.role == "given"
    assert decision.reasons[0].startswith("names: table of 512 tokens")
    assert decision.reasons[0].endswith("(overruled)")
    assert decision.reasons[-1] == "override: override 'embed_tokens'"
    assert "costs" in decision.fallback


def test_an_override_that_matches_nothing_lists_close_paths():
    with pytest.raises(UnusedOverride, match=r"TP040.*'q_porj' .*none of 4 parameters") as err:
        plan(attention(64, 64, 64), 2, overrides={"q_porj": P()})
    assert "attn/q_proj/kernel" in err.value.fix


def test_two_overrides_that_disagree_name_both():
    both = {"q_proj": P("tp"), "attn/.*kernel": P(None, "tp")}
    with pytest.raises(ConflictingDecisions, match="TP001 at attn/q_proj/kernel") as err:
        plan(attention(64, 64, 64), 2, overrides=both)
    for side in ("'q_proj' says P(tp, -)", "'attn/.*kernel' says P(-, tp)"):
        assert side in str(err.value)


def test_two_overrides_may_agree():
    both = {"q_proj": P(None, "tp"), "attn/q": P(None, "tp")}
    assert specs(plan(attention(64, 64, 64), 2, overrides=both))["attn/q_proj/kernel"] == "P(-, tp)"


@pytest.mark.parametrize(
    ("pattern", "spec", "text"),
    [
        ("q_proj", P("model"), "'?model'?, which this mesh does not have"),
        ("q_proj", P(None, None, "tp"), "3 entries for an array of 2 dims"),
        ("q_proj", P("tp", "tp"), "twice"),
        ("q_proj(", P(), r"q_proj\("),
    ],
)
def test_overrides_that_cannot_apply(pattern, spec, text):
    with pytest.raises(BadSpec, match=f"TP044.*{text}"):
        plan(attention(64, 64, 64), 2, overrides={pattern: spec})


def test_all_bad_overrides_are_reported_at_once():
    with pytest.raises(BadSpec) as err:
        plan(attention(64, 64, 64), 2, overrides={"q_proj": P("a"), "k_proj": P("b"), "zzz": P()})
    assert "attn/k_proj/kernel" in str(err.value)
    assert "TP040" in str(err.value)


def test_a_given_spec_that_does_not_divide_lists_sizes_that_do():
    with pytest.raises(SizeMismatch, match="TP003 at lm_head/kernel") as err:
        plan(vocab(32001, 64), 2, overrides={"lm_head": P(None, "tp")})
    assert "dim 1 of size 32001 does not divide 2 ways" in str(err.value)
    assert "ways that divide: 1, 3" in err.value.fix


def test_the_users_tensor_axis_means_all_its_factors():
    shapes = ATTENTION_12 | {"extra/kernel": (768, 1024)}
    result = plan(shapes, 8, heads=12, overrides={"extra": P(None, "tp")})
    assert result.mesh.tp == ("tp_0", "tp_1")
    assert result["extra/kernel"].spec == ((), ("tp_0", "tp_1"))
    assert result["attn/q_proj/kernel"].spec == ((), ("tp_0",))


def test_an_override_may_use_other_axes():
    result = jaxtp.make_plan(
        structs(vocab(512, 64)), {"dp": 2, "tp": 4}, overrides={"embed": P(("dp", "tp"))}
    )
    assert result["embed_tokens/embedding"].spec == (("dp", "tp"), ())
    assert result["embed_tokens/embedding"].bytes_per_device(result.mesh) == 512 * 64 * 2 // 8


# -------------------------------------------------------------- annotations


class Annotated(nn.Module):
    names: tuple
    box: object = nn.with_partitioning

    @nn.compact
    def __call__(self, x):
        init = self.box(nn.initializers.lecun_normal(), self.names)
        return nn.Dense(256, kernel_init=init, name="odd")(x)


def annotated(names, box=nn.with_partitioning):
    return jax.eval_shape(Annotated(names, box).init, jax.random.key(0), jnp.ones((1, 64)))[
        "params"
    ]


def test_a_factored_moment_keeps_the_box_of_its_parameter():
    """Of `optax.adafactor`: rows and columns have one dim, the names in their box two."""
    params = annotated((None, "tp"))
    state = jax.eval_shape(optax.adafactor(1e-3, min_dim_size_to_factor=8).init, params)
    run = {"run": {"params": params, "state": state}}
    result = specs(jaxtp.make_plan(run, {"tp": 4}))
    assert result["run/params/odd/kernel"] == "P(-, tp)"
    assert {result[f"run/state/0/{kind}/odd/kernel"] for kind in ("v_row", "v_col")} == {"P()"}


@pytest.mark.parametrize(
    ("names", "box", "want"),
    [
        ((None, "tp"), nn.with_partitioning, "P(-, tp)"),
        (("tp", None), nn.with_partitioning, "P(tp, -)"),
        (("embed", "mlp"), nn.with_logical_partitioning, "P(-, tp)"),
        (("vocab", "embed"), nn.with_logical_partitioning, "P(tp, -)"),
    ],
)
def test_linen_boxes(names, box, want):
    result = jaxtp.make_plan(annotated(names, box), {"tp": 4})
    assert specs(result)["odd/kernel"] == want
    assert result["odd/kernel"].reasons[-1] == f"annotation: annotated {names}"
    assert result.notes == ()


@pytest.mark.parametrize("name", ["model", "something"])
def test_an_annotation_that_means_nothing_here_is_said_once(name):
    tree = annotated(("embed", name), nn.with_logical_partitioning)
    with pytest.warns(JaxtpWarning, match=f"'{name}', which is no axis of the mesh tp=4") as seen:
        result = jaxtp.make_plan(tree, {"tp": 4})
    assert len(seen) == 1
    assert "the first is at odd/kernel" in result.notes[0]
    assert f'axis_names={{"tp": "{name}"}}' in result.notes[0]


def test_an_annotation_for_an_axis_that_this_mesh_could_have_is_noted():
    tree = annotated(("fsdp", "tp"), nn.with_partitioning)
    result = jaxtp.make_plan(tree, {"tp": 4})
    assert specs(result)["odd/kernel"] == "P(-, tp)"
    assert "'fsdp', which is no axis of the mesh tp=4" in result.notes[0]


def test_an_annotation_inside_heads_shows_its_price():
    attention = nn.MultiHeadDotProductAttention(
        num_heads=4,
        qkv_features=32,
        deterministic=True,
        kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tp")),
    )
    tree = jax.eval_shape(attention.init, jax.random.key(0), jnp.ones((1, 2, 32)))["params"]
    result = jaxtp.make_plan(tree, {"tp": 4})
    # (heads, head_dim, embed): the annotation names the middle dim.
    assert specs(result)["out/kernel"] == "P(-, tp, -)"
    assert "given instead of dim 0 4-way" in result["out/kernel"].fallback
    # A ring all-gather of 4 x 8 x 32 float32 over four devices.
    sent = f"and up to {3 / 4 * 4096 / 1e6:,.2f} MB sent at each use"
    assert [n for n in result.notes if n.startswith("out/kernel: ") and sent in n]


def test_logical_names_tell_rows_from_columns():
    tree = {
        "Dense_0": {"kernel": nn.LogicallyPartitioned(jnp.ones((128, 32)), ("mlp", "embed"))},
        "Dense_1": {"kernel": nn.LogicallyPartitioned(jnp.ones((32, 128)), ("embed", "mlp"))},
    }
    result = jaxtp.make_plan(tree, {"tp": 4})
    assert [d.role for d in result.decisions] == ["row", "column"]


@pytest.mark.parametrize("tp", [1, 2])
def test_an_axis_that_shards_nothing(tp):
    tree = structs(llama())
    with pytest.warns(JaxtpWarning, match="TP011 at x: the axis x shards nothing"):
        result = jaxtp.make_plan(tree, {"x": 2, "tp": tp})
    assert [n for n in result.notes if n.startswith("TP011")]
    with pytest.raises(IdleDevices, match=r"leave x out, and give its devices to dp, fsdp, tp"):
        jaxtp.make_plan(tree, {"x": 2, "tp": tp}, strict=True)


@pytest.mark.parametrize("tp", [1, 2])
def test_an_axis_of_experts_without_experts(tp):
    notes = jaxtp.make_plan(structs(llama()), {"ep": 2, "tp": tp}).notes
    assert "ep=2: no parameter has experts that it could shard, so the axis is one of data" in notes


def test_an_unknown_head_count_is_the_reason():
    result = plan(attention(64, 64, 64), 4)
    assert "head count unknown (give heads=), 1 unit assumed on tp=4" in result.notes[0]


@pytest.mark.parametrize("budget", [float("nan"), -1, 1.5, "0.1", True])
def test_budgets_that_are_no_share(budget):
    with pytest.raises(BadConfig, match="TP020 at replicated_budget"):
        plan(llama(), 4, replicated_budget=budget)


def test_a_budget_of_nothing_is_kept_where_every_matrix_is_sharded():
    assert not plan(llama(), 4, heads=8, strict=True, replicated_budget=0).notes


def test_nnx_metadata():
    class Model(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tp"))
            self.odd = nnx.Linear(64, 256, kernel_init=init, rngs=rngs)

    # Outside of a mesh the names must not be applied, only kept.
    with nnx.use_eager_sharding(False):
        model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    result = jaxtp.make_plan(model, {"tp": 4})
    assert result["odd/kernel"].spec == ((), ("tp",))
    assert result["odd/kernel"].role == "given"


@pytest.mark.parametrize(
    ("rules", "want"),
    [
        ((("wide", "tp"),), "P(-, tp)"),
        ((("embed", "tp"), ("wide", None)), "P(tp, -)"),
        ((("wide", "tp"), ("embed", "tp")), "P(-, tp)"),  # another dim has it
    ],
)
@pytest.mark.parametrize("where", ["around", "own", "nnx"])
def test_rules_say_what_logical_names_stand_for(rules, want, where):
    """Flax's own: those in force around the call, of a Linen box, and of NNX metadata."""
    names = ("embed", "wide")
    if where == "nnx":
        with nnx.use_eager_sharding(False):
            kernel = nnx.Param(jnp.ones((64, 256)), out_sharding=names, sharding_rules=rules)
        tree = {"odd": {"kernel": kernel}}
    else:
        own = {"rules": rules} if where == "own" else {}
        tree = annotated(names, functools.partial(nn.with_logical_partitioning, **own))
    with nn.logical_axis_rules(rules if where == "around" else ()):
        result = jaxtp.make_plan(tree, {"tp": 4})
    assert specs(result)["odd/kernel"] == want
    assert result.notes[1:] == ()  # names that no rule maps are none of the mesh


def test_of_several_rules_for_a_name_the_first_counts_that_is_free():
    """As Flax applies them: the list of T5X for two axes, and None before an axis."""
    lists = (
        (("wide", "tp"), ("embed", "tp"), ("embed", "fsdp")),
        (("embed", None), ("wide", "tp"), ("embed", "fsdp")),
    )
    for rules in lists:
        tree = annotated(
            ("embed", "wide"), functools.partial(nn.with_logical_partitioning, rules=rules)
        )
        want = nn.logical_to_mesh_axes(("embed", "wide"), rules)
        annotation = trees.flatten(tree)["odd/kernel"].annotation
        assert annotation == tuple(want)


@pytest.mark.parametrize(
    "kind", [lambda *n: n, P, lambda *n: NamedSharding(jaxtp.make_mesh(tp=8), P(*n))]
)
def test_nnx_metadata_may_be_a_spec_or_a_sharding(kind):
    names = kind("tp", None)
    with nnx.use_eager_sharding(False):
        tree = {"odd": nnx.Param(jnp.ones((64, 256)), out_sharding=names)}
    assert specs(jaxtp.make_plan(tree, {"tp": 8})) == {"odd": "P(tp, -)"}


def test_an_annotation_takes_units_from_names():
    """Somebody wrote where the heads go; names still know that there are 12 of them."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            part = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tp"))
            q, k, v = (
                nn.Dense(768, kernel_init=part, name=n)(x) for n in ("query", "key", "value")
            )
            return nn.Dense(768, name="out")(q + k + v)

    params = jax.eval_shape(Block().init, jax.random.key(0), jnp.ones((1, 768)))["params"]
    result = jaxtp.make_plan({"attention": params}, {"tp": 8}, heads=12)
    query = result["attention/query/kernel"]
    assert query.units == (12,)
    assert query.spec == ((), ("tp_0",))
    assert query.group == result["attention/out/kernel"].group


# ------------------------------------------------- sizes, policies and strict


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"heads": 7}, "7 heads .* do not fit"),
        ({"heads": 12, "kv_heads": 5}, "12 query heads are not a multiple of 5 kv heads"),
        ({"heads": -1}, "below 0"),
    ],
)
def test_sizes_that_do_not_fit(options, text):
    with pytest.raises(SizeMismatch, match=f"TP003.*{text}"):
        plan(ATTENTION_12, 4, **options)


def test_a_config_that_speaks_of_something_else_is_only_ignored():
    result = plan(ATTENTION_12, 4, config={"num_attention_heads": 7})
    assert result["attn/q_proj/kernel"].role == "unknown"
    assert "give heads=" in result["attn/q_proj/kernel"].reasons[-1]


@pytest.mark.parametrize(
    "config",
    [
        {"num_attention_heads": 12},
        {"n_head": 12},
        {"num_heads": 12, "num_kv_heads": 12},
        type("Config", (), {"num_attention_heads": 12, "hidden_size": 768})(),
    ],
)
def test_config_objects_and_dicts(config):
    assert plan(ATTENTION_12, 8, config=config)["attn/q_proj/kernel"].units == (12,)


def test_the_policy_error_lists_every_head_and_what_divides():
    with pytest.raises(HeadsNotDivisible, match="TP041 at attn/k_proj/kernel") as err:
        plan(ATTENTION_12, 8, heads=12, policy="error")
    assert "12 units on tp=8" in str(err.value)
    assert "attn/q_proj/kernel" in str(err.value)
    assert "tp of 1, 2, 3, 4, 6, 12" in err.value.fix


def test_the_policy_replicate_keeps_the_mesh():
    result = plan(ATTENTION_12, 8, heads=12, policy="replicate")
    assert result.mesh.tp == ("tp",)
    assert specs(result)["attn/q_proj/kernel"] == "P()"
    assert specs(result)["mlp/up_proj/kernel"] == "P(-, tp)"


def test_an_unknown_policy():
    with pytest.raises(BadConfig, match=r"TP020.*policy"):
        plan(ATTENTION_12, 8, policy="split")


def test_strict_refuses_when_nothing_is_split():
    shapes = {"conv/kernel": (3, 3, 16, 16)}
    assert "TP042: nothing to shard" in plan(shapes, 4).notes[0]
    with pytest.raises(NothingSharded, match=r"none of 1 parameters .* conv/kernel"):
        plan(shapes, 4, strict=True)


def test_a_convolutional_network_gives_notes_and_no_error():
    class ResNet(nnx.Module):
        def __init__(self, rngs):
            sizes = [(3, 16, 7), (16, 32, 3), (32, 16, 1)]
            self.convs = nnx.List([nnx.Conv(a, b, (k, k), rngs=rngs) for a, b, k in sizes])
            self.norms = nnx.List([nnx.BatchNorm(b, rngs=rngs) for _, b, _ in sizes])
            self.head = nnx.Linear(16, 10, rngs=rngs)

    result = jaxtp.make_plan(nnx.eval_shape(lambda: ResNet(nnx.Rngs(0))), {"tp": 4})
    assert set(specs(result).values()) == {"P()"}
    assert any("nothing to shard" in note for note in result.notes)
    assert result["convs/0/kernel"].role == "conv"


def test_strict_refuses_replicated_matrices_beyond_the_budget():
    shapes = mlp(64, 256) | norms(64) | {"odd": (64, 1000)}
    assert any(note.startswith("TP043") for note in plan(shapes, 4).notes)
    with pytest.raises(ReplicatedTooMuch, match=r"TP043 at odd: replicated matrices take 0.1 MB"):
        plan(shapes, 4, strict=True)
    assert plan(shapes, 4, strict=True, replicated_budget=0.9).notes == ()


def test_strict_refuses_idle_devices():
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4])
    tree = structs(llama())
    with pytest.raises(IdleDevices, match="leaves 7 of 8 devices idle"):
        jaxtp.make_plan(tree, jax.make_mesh((1,), ("tp",), devices=jax.devices()[:1]), strict=True)
    assert any("leaves 4 of 8 devices idle" in n for n in jaxtp.make_plan(tree, mesh).notes)
    with pytest.raises(IdleDevices, match="TP011"):
        jaxtp.make_plan(tree, mesh, strict=True)


def test_strict_refuses_a_group_that_an_override_splits():
    with pytest.raises(ConflictingDecisions, match="given 1-way, its group is sharded 4 ways"):
        plan(llama(), 4, heads=8, overrides={"0/mlp/up_proj": P()}, strict=True)


def test_one_device_needs_nothing():
    result = plan(llama(), 1, strict=True)
    assert result.notes == ()
    assert result.bytes_per_device == result.num_bytes


# ------------------------------------------------------------ meshes, trees


@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        ({"tp": 4}, None),
        ({"data": 2, "model": 4}, {"tp": "model", "dp": "data"}),
        (AbstractMesh((2, 4), ("dp", "tp")), None),
        (AbstractMesh((4, 1), ("mp", "x"), axis_types=(AxisType.Auto,) * 2), {"tp": "mp"}),
        (jaxtp.MeshShape.of({"tp": 4}), None),
    ],
)
def test_every_kind_of_mesh_gives_the_same_plan(mesh, names):
    tree = structs(llama())
    result = jaxtp.make_plan(tree, mesh, axis_names=names)
    name = result.mesh.tp_name
    want = jaxtp.make_plan(tree, {name: 4}, axis_names={"tp": name})
    assert specs(result) == specs(want)


def test_a_mesh_without_a_tensor_axis_says_how_to_name_it():
    with pytest.raises(NoTensorAxis, match="TP013") as err:
        jaxtp.make_plan(structs(llama()), {"data": 2, "model": 4})
    assert 'axis_names={"tp": "model"}' in err.value.fix
    with pytest.raises(BadMesh, match="points at tensor"):
        jaxtp.make_plan(structs(llama()), {"tp": 2}, axis_names={"tp": "tensor"})


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(512, 64, name="embed_tokens")(tokens)
        y = nn.LayerNorm(name="norm")(x)
        x = x + nn.MultiHeadDotProductAttention(4, name="attn")(y, y)
        x = x + nn.Dense(64, name="down")(nn.gelu(nn.Dense(256, name="up")(x)))
        return nn.Dense(512, name="lm_head")(x)


def decoder_params():
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    return jax.eval_shape(Decoder().init, jax.random.key(0), tokens)["params"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda p: p,
        flax.core.freeze,
        lambda p: TrainState.create(apply_fn=None, params=p, tx=optax.identity()),
        lambda p: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), p),
        lambda p: jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), p),
        lambda p: jax.tree.map(lambda x: nn.Partitioned(x, (None,) * len(x.shape)), p),
    ],
    ids=["structs", "frozen", "train-state", "arrays", "numpy", "boxed"],
)
def test_every_linen_container_gives_the_same_specs(wrap):
    want = jaxtp.make_plan(decoder_params(), {"tp": 4}).specs()
    assert jaxtp.make_plan(wrap(decoder_params()), {"tp": 4}).specs() == want
    assert want["attn/query/kernel"] == P(None, "tp")
    assert want["lm_head/kernel"] == P(None, "tp")


def test_a_module_and_its_state_give_the_same_specs():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(64, rngs=rngs)
            self.attn = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

    model = nnx.eval_shape(lambda: Block(nnx.Rngs(0)))
    result = jaxtp.make_plan(model, {"tp": 4})
    assert result.specs() == jaxtp.make_plan(nnx.state(model), {"tp": 4}).specs()
    assert specs(result)["attn/query/kernel"] == "P(-, tp, -)"
    assert specs(result)["attn/out/kernel"] == "P(tp, -, -)"
    tree = result.partition_specs(nnx.state(model))
    assert jax.tree.leaves(tree.attn.query.kernel)[0] == P(None, "tp")


@pytest.mark.parametrize("tree", [{}, {"a": "text"}, {"a": print}])
def test_what_is_no_tree_of_arrays(tree):
    with pytest.raises(BadTree, match="TP046"):
        jaxtp.make_plan(tree, {"tp": 2})


# -------------------------------------------------------------- text, JSON


def test_explain_says_all_there_is():
    text = plan(ATTENTION_12, 8, heads=12).explain("attn/q_proj/kernel")
    for part in (
        "attn/q_proj/kernel  bfloat16[768, 768]",
        "spec     P(-, tp_0) on tp_0=4 x tp_1=2",
        "role     column, decided with group 'attn:attention'",
        "bytes    1,179,648 in all, 294,912 per device",
        "because  names: query, dim 1 holds 12 heads (12 heads were given)",
        "fallback 12 units on tp=8: 4-way; costs 0.15 MB",
    ):
        assert part in text


def test_an_unknown_path_is_refused():
    with pytest.raises(PlanMismatch, match="TP045 at nowhere"):
        plan(ATTENTION_12, 8).explain("nowhere")
    with pytest.raises(PlanMismatch, match="TP045"):
        plan(ATTENTION_12, 8).partition_specs({"other": jnp.ones(2)})


def test_the_table_folds_repeated_layers():
    text = str(plan(llama(num_layers=6), 4, heads=8, kv_heads=4))
    lines = text.splitlines()
    assert lines[0].startswith("plan for tp=4: 56 parameters")
    (line,) = (line for line in lines if "q_proj" in line)
    assert line.startswith("layers/*/attn/q_proj/kernel (x6)")
    assert "P(-, tp)" in line
    assert len(lines) < 16
    numbered = {f"layer_{i}/fc1/kernel": (64, 256) for i in range(2)}
    assert "\nlayer_*/fc1/kernel (x2) " in str(plan(numbered, 1))


def test_diff_names_what_changed_and_why():
    narrow, wide = plan(ATTENTION_12, 8, heads=12), plan(ATTENTION_12, 8, heads=24)
    assert narrow.diff(narrow) == ""
    text = narrow.diff(wide)
    assert "mesh: tp_0=4 x tp_1=2 -> tp=8" in text
    assert "attn/q_proj/kernel: P(-, tp_0) -> P(-, tp)  (names: query, dim 1 holds 24" in text
    assert "mlp/up_proj/kernel: P(-, tp_0+tp_1) -> P(-, tp)" in text
    assert "norm1/scale" not in text
    assert "lm_head/kernel: absent -> P(-, tp)" in plan(norms(64), 2).diff(plan(llama(), 2))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "not the JSON of a plan"),
        ("{", "not the JSON of a plan"),
        ('{"format": 1}', "mesh"),
        ('{"format": 99}', "newer jaxtp"),
        ('{"format": 1, "mesh": {"sizes": [["tp", 2]]}, "decisions": []}', "tp"),
    ],
)
def test_text_that_is_no_plan(text, problem):
    with pytest.raises(PlanMismatch, match=f"TP045.*{problem}"):
        jaxtp.Plan.from_json(text)


def test_unknown_fields_are_refused():
    data = json.loads(plan(norms(64), 2).to_json())
    data["decisions"][0]["colour"] = "red"
    with pytest.raises(PlanMismatch, match="colour"):
        jaxtp.Plan.from_json(json.dumps(data))


def test_specs_are_in_the_trees_order():
    tree = structs(llama())
    assert list(jaxtp.make_plan(tree, {"tp": 2}).specs()) == list(trees.flatten(tree))


def test_a_405b_model_plans_in_less_than_a_second():
    block = attention(16384, 16384, 1024) | mlp(16384, 53248) | norms(16384)
    tree = structs(vocab(128256, 16384) | layers(126, block))
    start = time.process_time()  # of this process: other tests run beside it
    result = jaxtp.make_plan(tree, {"dp": 128, "tp": 8}, heads=128, kv_heads=8)
    assert time.process_time() - start < 1
    assert len(result.decisions) == 2 + 126 * 9
    # All but norms are split eight ways.
    assert result.bytes_per_device * 8 < result.num_bytes * 1.001


def test_a_plan_shows_itself_in_a_hundred_columns():
    tree = structs({"a" * 90 + "/kernel": (64, 64), **llama(num_layers=2)})
    result = jaxtp.make_plan(tree, {"dp": 2, "tp": 4})
    lines = str(result).splitlines()
    assert max(map(len, lines)) <= 100
    assert any("..." in line for line in lines)
    assert repr(result) == f"<{lines[0]}>"
    page = result._repr_html_()
    reasons = (d.fallback or d.reasons[-1] for _, _, d in result.rows())
    assert all(reason in html.unescape(page) for reason in reasons)
    assert page.count("<tr>") == 1 + len(list(result.rows()))


def test_apply_of_a_linen_module_takes_variables_and_parameters():
    model, x = nn.Dense(64), jnp.ones((8, 32))
    variables = model.init(jax.random.key(0), x)
    for given in (variables, variables["params"]):
        plans = [jaxtp.make_plan(given, {"tp": 2}, fn=f, inputs=(x,)) for f in (model, model.apply)]
        assert plans[0] == plans[1]
