"""The parts of names-and-shapes evidence, one at a time."""

import pytest
from planning import attention, norms, plan, specs, structs

from jaxtp.errors import ConflictingDecisions, JaxtpWarning
from jaxtp.mesh.axes import MeshShape
from jaxtp.plan import trees
from jaxtp.plan.trees import Param
from jaxtp.rules import (
    annotations,
    factoring,
    fallback,
    heads,
    model_tree,
    names,
    path_words,
    resolve,
    review,
)
from jaxtp.rules.model_dims import ModelDims
from jaxtp.rules.roles import Placement, Role, Source, Vote
from jaxtp.rules.words import Word


def tree_of(shapes, **dims):
    return model_tree.read(trees.flatten(structs(shapes)), ModelDims(**dims))


def roles(shapes, **dims):
    return {v.path: v.role for v in names.votes(trees.flatten(structs(shapes)), ModelDims(**dims))}


# ------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("model/layers/0/self_attn/q_proj/kernel", Word.Q),
        ("layers/0/attn/q_einsum/w", Word.Q),
        ("layers/0/attn/kv_einsum/w", Word.KV),
        ("encoder/layer/0/attention/self/query/kernel", Word.Q),
        ("encoder/layer/0/attention/output/dense/kernel", Word.O),
        ("encoder/layer/0/output/dense/kernel", Word.OUT),
        ("encoder/layer/0/intermediate/dense/kernel", Word.IN),
        ("h/0/attn/c_attn/kernel", Word.QKV),
        ("h/0/self_attention/query_key_value/kernel", Word.QKV_PER_HEAD),
        ("gpt_neox/layers/0/attention/query_key_value/kernel", Word.QKV),
        ("h/0/attn/c_proj/kernel", Word.O),
        ("h/0/mlp/c_proj/kernel", Word.OUT),
        ("layers/0/self_attn/q_a_proj/kernel", Word.LOW_RANK),
        ("layers/0/self_attn/kv_a_proj_with_mqa/kernel", Word.LOW_RANK),
        ("layers/0/self_attn/kv_b_proj/kernel", Word.KV_UP),
        ("layers/0/self_attn/q_proj/lora_a", Word.FOLLOWER),
        ("layers/0/attn/q_proj/w_lora_b", Word.FOLLOWER),
        ("layers/0/mlp/router/layer/kernel", Word.ROUTER),
        ("layers/0/mlp/gate_up_proj/kernel", Word.IN_FUSED),
        ("layers/0/mlp/gating_einsum", Word.IN),
        ("layers/0/moe_block/wi_0", Word.IN),
        ("layers/0/input_layernorm/kernel", Word.NORM),
        ("encoder/block/0/layer/0/layer_norm/weight", Word.NORM),
        ("relpos_bias/rel_embedding", Word.HEAD_TABLE),
        ("layers/0/self_attn/sinks", Word.HEAD_TABLE),
        ("embed_positions/embedding", Word.POSITION),
        ("token_type_embeddings/embedding", Word.POSITION),
        ("patch_embedding/kernel", Word.CONV),
        ("model/embed_tokens/embedding", Word.TOKENS),
        ("transformer/wte/embedding", Word.TOKENS),
        ("mask_tokens", Word.NONE),
        ("lm_head/kernel", Word.HEAD),
        ("decoder/logitdense/kernel", Word.HEAD),
        ("Dense_0/kernel", Word.NONE),
    ],
)
def test_what_a_name_says(path, word):
    assert path_words.read(path).word is word


@pytest.mark.parametrize(
    ("path", "bias", "stem"),
    [
        ("h/0/mlp/fc1/bias", True, "h/0/mlp/fc1"),
        ("h/0/mlp/fc1/kernel", False, "h/0/mlp/fc1"),
        ("experts/gate_up_proj_bias", True, "experts/gate_up_proj"),
        ("experts/gate_up_proj", False, "experts/gate_up_proj"),
        ("attn/q_bias", True, "attn/q"),
    ],
)
def test_a_bias_and_its_kernel_share_a_stem(path, bias, stem):
    name = path_words.read(path)
    assert (name.bias, name.stem) == (bias, stem)


@pytest.mark.parametrize(
    ("path", "experts"),
    [
        ("mlp/experts/0/w1/kernel", True),
        ("MoeBlock_0/wi_0", True),
        ("mlp/shared_experts/up_proj/kernel", False),
        ("expertise/w1/kernel", False),
    ],
)
def test_who_sits_among_experts(path, experts):
    assert path_words.read(path).experts is experts


def test_attention_is_known_by_its_children():
    """A module named `sa`, or by a number, is attention if it holds q, k and v."""
    shapes = {f"blocks/0/sa/w{n}/kernel": (64, 64) for n in ("q", "k", "v", "o")}
    assert set(roles(shapes).values()) == {Role.COLUMN, Role.ROW}
    assert roles({p: s for p, s in shapes.items() if "wk" not in p})["blocks/0/sa/wq/kernel"] is (
        Role.UNKNOWN
    )


# ------------------------------------------------------------------ blocks


@pytest.mark.parametrize(
    ("shapes", "stacked"),
    [
        ({"h/norm/scale": (4, 64), "h/fc/kernel": (4, 64, 256)}, 0),
        ({"h/norm/scale": (64, 4), "h/fc/kernel": (64, 4, 256)}, 1),
        ({"h/norm/scale": (64, 4), "h/q_norm/scale": (128, 4), "h/fc/kernel": (64, 4, 256)}, 1),
        ({"h/norm/scale": (64,), "h/fc/kernel": (4, 64, 256)}, None),
        ({"h/q_norm/scale": (128, 8), "h/fc/kernel": (64, 256)}, None),  # one scale per head
    ],
)
def test_layer_dims_show_in_norms(shapes, stacked):
    leaf = tree_of(shapes).leaves["h/fc/kernel"]
    everything = tuple(range(len(leaf.param.shape)))
    assert leaf.core == tuple(d for d in everything if d != stacked)


def test_a_stack_without_norms_needs_the_number_of_layers():
    shapes = {"h/fc/kernel": (6, 64, 256)}
    assert tree_of(shapes).leaves["h/fc/kernel"].core == (0, 1, 2)
    assert tree_of(shapes, layers=6).leaves["h/fc/kernel"].core == (1, 2)
    # As many heads or experts as layers leave it open.
    assert tree_of(shapes, layers=6, experts=6).leaves["h/fc/kernel"].core == (0, 1, 2)


@pytest.mark.parametrize(
    ("shapes", "out_first"),
    [
        ({"mlp/fc1/kernel": (64, 256), "mlp/fc1/bias": (256,)}, False),
        ({"mlp/fc1/kernel": (256, 64), "mlp/fc1/bias": (256,)}, True),
        ({"mlp/fc1/kernel": (256, 64), "norm/scale": (64,)}, True),
        ({"mlp/fc1/kernel": (64, 256), "norm/scale": (64,)}, False),
        ({"mlp/fc1/kernel": (64, 256)}, False),
    ],
)
def test_a_kernels_order_shows_in_its_bias_or_the_stream(shapes, out_first):
    tree = tree_of(shapes)
    assert tree.out_first(tree.leaves["mlp/fc1/kernel"]) is out_first


def test_two_towers_may_store_kernels_differently():
    tree = tree_of(
        {
            "vision/fc1/kernel": (64, 256),
            "vision/fc1/bias": (256,),
            "text/attn/c_attn/kernel": (192, 64),
            "text/attn/c_attn/bias": (192,),
            "text/attn/c_proj/kernel": (64, 64),
        }
    )
    assert tree.out_first(tree.leaves["text/attn/c_proj/kernel"])
    assert not tree.out_first(tree.leaves["vision/fc1/kernel"])


def test_a_norm_nearby_outranks_the_token_table():
    """An embedding four times as wide as the model: the token table is no sign of the stream."""
    shapes = {
        "word_embeddings/embedding": (30522, 1024),
        "layer/0/norm/scale": (256,),
        "layer/0/intermediate/dense/kernel": (256, 1024),
        "layer/0/output/dense/kernel": (1024, 256),
    }
    assert roles(shapes)["layer/0/intermediate/dense/kernel"] is Role.COLUMN


# ------------------------------------------------------------------- heads


@pytest.mark.parametrize(
    ("query", "kv", "dims", "found"),
    [
        (4096, 1024, {"heads": 32}, (32, 8)),
        (4096, 1024, {"head_dim": 128}, (32, 8)),
        (768, 768, {"heads": 8, "head_dim": 64}, (4, 4)),  # of another tower: a cut for both
        (16384, 16384, {"heads": 128, "head_dim": 64}, (128, 128)),  # head_dim of the rotary part
        (4096, 1024, {"heads": 7}, None),
        (4096, 1024, {}, (16, 4)),  # 256 wide, the widest there is
        (5120, 1280, {}, (8, 2)),  # 40 and 10 of 128: powers of two only
        (3072, 3072, {}, (8, 8)),  # 24 of 128 or 32 of 96
        (768, 768, {}, (4, 4)),
        (3200, 3200, {}, (2, 2)),
        (100, 100, {}, None),
    ],
)
def test_heads_from_sizes(query, kv, dims, found):
    counted = heads.count(ModelDims(**dims), query, kv, [], [])
    assert (counted and (counted.query, counted.kv)) == found


@pytest.mark.parametrize(
    ("extra", "count"),
    [
        ({"attn/q_norm/scale": (80,), "attn/k_norm/scale": (80,)}, 32),
        ({"attn/q_norm/scale": (32, 80), "attn/k_norm/scale": (8, 80)}, 32),
        ({"attn/q_norm/scale": (80, 32), "attn/k_norm/scale": (80, 8)}, 32),
        ({"attn/relative_attention_bias/embedding": (32, 20)}, 20),
        ({"attn/sinks": (40,)}, 40),
    ],
)
def test_heads_from_norms_and_tables(extra, count):
    kv = 640 if "attn/q_norm/scale" in extra else 2560
    result = plan(attention(2560, 2560, kv) | extra, 2)
    units = result["attn/o_proj/kernel"].units
    assert units[0] * (units[1] if len(units) > 1 else 1) == count


def test_gates_beside_the_query_heads_do_not_count_as_heads():
    shapes = attention(2048, 8192, 512) | {"attn/o_proj/kernel": (4096, 2048)}
    shapes |= {"attn/q_norm/scale": (256,), "attn/k_norm/scale": (256,)}
    result = plan(shapes, 2)
    assert result["attn/q_proj/kernel"].units == result["attn/o_proj/kernel"].units == (2, 8)


# ------------------------------------------------------- roles and reasons


def test_everything_that_stays_whole_says_why():
    shapes = norms(64) | {
        "embed_positions/embedding": (512, 64),
        "conv1/kernel": (3, 80, 64),
        "layers/0/moe/router/kernel": (64, 8),
        "layers/0/moe/experts/up_proj": (8, 64, 256),
        "layers/0/moe/experts/down_proj": (8, 256, 64),
        "layers/0/moe/e_score_correction_bias": (8,),
        "layers/0/attn/q_a_proj/kernel": (64, 16),
        "layers/1/mixer/A_log": (128, 16),
        "layers/1/mixer/in_proj/kernel": (64, 256),
        "layers/1/mixer/out_proj/kernel": (128, 64),
        "head/kernel": (64, 10),
        "temperature": (),
    }
    result = plan(shapes, 2)
    want = {
        "embed_positions/embedding": ("position", "looked up"),
        "conv1/kernel": ("conv", "convolution"),
        "layers/0/moe/router/kernel": ("router", "scores"),
        "layers/0/attn/q_a_proj/kernel": ("low_rank", "rank"),
        "layers/1/mixer/in_proj/kernel": ("unknown", "recurrent mixer"),
        "layers/1/mixer/out_proj/kernel": ("unknown", "recurrent mixer"),
        "head/kernel": ("unknown", "no evidence"),
        "temperature": ("norm", "vector or scalar"),
        "norm1/scale": ("norm", "norm"),
    }
    for path, (role, part) in want.items():
        decision = result[path]
        assert decision.role == role, path
        assert part in decision.reasons[-1], path
        assert result.mesh.ways(a for axes in decision.spec for a in axes) == 1


@pytest.mark.parametrize(
    ("head", "dim"),
    [
        ({"lm_head/kernel": (64, 4096)}, 1),
        ({"output/kernel": (64, 4096)}, 1),  # known by its size alone
        ({"lm_head/weight": (4096, 64)}, 0),
        ({"predictions/bias": (4096,)}, 0),
        ({"final_logits_bias": (1, 4096)}, 1),
        ({"head/kernel": (64, 1000)}, None),
        ({"lm_head/dense/kernel": (64, 64)}, None),
    ],
)
def test_output_heads(head, dim):
    ((path, _),) = head.items()
    decision = plan({"embed_tokens/embedding": (4096, 64)} | head, 2)[path]
    assert decision.dim_on(["tp"]) == dim
    assert (decision.role == "vocab") is (dim is not None)


def test_recurrent_cells_are_whole():
    gates = {
        f"LSTMCell_0/{k}{g}/kernel": (15 if k == "i" else 64, 64) for k in "ih" for g in "ifgo"
    }
    result = plan(gates | {"Dense_0/kernel": (64, 15)}, 2)
    assert set(specs(result).values()) == {"P()"}


@pytest.mark.parametrize(
    ("shapes", "split"),
    [
        ([(256, 1024), (1024, 256)], True),
        ([(256, 1024), (256, 1024), (1024, 256)], True),
        ([(256, 1024), (256, 1024), (1024, 256), (256, 8)], True),  # a router beside them
        ([(256, 512), (256, 512), (256, 512), (512, 256)], False),  # q, k, v and o
        ([(256, 512), (256, 128), (256, 128), (512, 256)], False),  # narrower keys and values
        ([(8, 256, 64), (8, 64, 256)], False),  # layers, experts or heads
        ([(256, 16), (16, 256)], False),  # a low rank
        ([(256, 1024), (1024, 1024), (1024, 256)], False),  # which one is in the middle?
    ],
)
@pytest.mark.parametrize("num_layers", [1, 3])
def test_names_that_say_nothing(shapes, split, num_layers):
    """Sizes alone: an MLP is split, what may be attention or a low rank is not."""
    tree = {f"b/{i}/m{j}/kernel": s for i in range(num_layers) for j, s in enumerate(shapes)}
    tree |= {f"b/{i}/n/scale": (256,) for i in range(num_layers)}
    result = plan(tree | {"n/scale": (256,)}, 4)
    cut = {d.shape for d in result.decisions if d.dim_on(result.mesh.tp) is not None}
    assert cut == ({s for s in shapes if 1024 in s} if split else set())


def test_gate_and_up_together_pair_only_as_the_tree_stores_kernels():
    # q (in, 1024) and k (in, 512) of a strange name are no (2 inner, in) beside (in, inner).
    shapes = {"a/kernel": (512, 1024), "b/kernel": (512, 256), "c/kernel": (1024, 512)}
    result = plan(shapes | {"b/bias": (256,), "n/scale": (512,)}, 4)
    assert result["b/kernel"].role == "unknown"


# ------------------------------------------------------------ votes, fitting


def vote(source, *, dims=(0,), units=(8,), role=Role.COLUMN, **options):
    placements = tuple(Placement(d, units) for d in dims)
    return Vote("w", source, role, f"{source.name} says so", placements, **options)


PARAM = {"w": Param("w", (8, 16), "float32")}


def test_the_stronger_source_wins_and_keeps_what_the_weaker_said():
    weak, strong = vote(Source.NAMES), vote(Source.DATAFLOW, dims=(1,), units=(16,))
    (claim,) = resolve.decide(PARAM, [strong, weak])
    assert claim.vote is strong
    assert claim.reasons == ("names: NAMES says so (overruled)", "dataflow: DATAFLOW says so")
    shape = MeshShape.of({"tp": 2})
    decisions = fallback.fit([claim], factoring.factor([claim], shape)[1], shape)
    with pytest.warns(JaxtpWarning, match="w: dataflow overrules names"):
        assert review.review([claim], decisions, shape, [], strict=False, budget=1.0)


def test_sources_that_choose_the_same_do_not_disagree():
    """One knows what to take if the first choice fails; or what fails leads to the same dim."""
    shape = MeshShape.of({"tp": 2})
    first, both = vote(Source.NAMES), vote(Source.DATAFLOW, dims=(0, 1))
    odd = Vote("w", Source.DATAFLOW, Role.EXPERT, "", (Placement(1, (3,)), Placement(0, (8,))))
    for strong in (both, odd):
        (claim,) = resolve.decide(PARAM, [strong, first])
        decisions = fallback.fit([claim], factoring.factor([claim], shape)[1], shape)
        assert decisions[0].dim_on(shape.tp) == 0
        assert not review.review([claim], decisions, shape, [], strict=False, budget=1.0)


def test_equal_sources_that_disagree_are_an_error():
    votes = [vote(Source.ANNOTATION), vote(Source.ANNOTATION, dims=(1,), units=(16,))]
    with pytest.raises(ConflictingDecisions, match="TP001 at w: annotation disagree") as err:
        resolve.decide(PARAM, votes)
    assert "overrides=" in err.value.fix


def test_a_source_that_saw_nothing_has_no_say():
    blind = vote(Source.DATAFLOW, dims=(), role=Role.UNKNOWN)
    (claim,) = resolve.decide(PARAM, [vote(Source.NAMES), blind])
    assert claim.vote.source is Source.NAMES


def fit(votes_units, tp, policy="factor"):
    """Ways per member of one group whose members have these units, and the mesh."""
    params = {n: Param(n, (720,), "float32") for n in votes_units}
    votes = [
        Vote(n, Source.NAMES, Role.COLUMN, "", (Placement(0, u),), "group")
        for n, u in votes_units.items()
    ]
    claims = resolve.decide(params, votes)
    mesh, shares = factoring.factor(claims, MeshShape.of({"tp": tp}), policy)
    decisions = fallback.fit(claims, shares, mesh, policy)
    return [mesh.ways(d.spec[0]) for d in decisions], str(mesh)


@pytest.mark.parametrize(
    ("units", "tp", "ways", "mesh"),
    [
        ({"q": (4, 4), "k": (4,)}, 8, [8, 4], "tp_0=4 x tp_1=2"),
        ({"q": (10, 4), "k": (10,)}, 4, [2, 2], "tp_0=2 x tp_1=2"),
        ({"q": (12,), "odd": (5,)}, 4, [1, 1], "tp=4"),  # nothing in common
        ({"q": (12,), "other": (8,)}, 8, [4, 4], "tp_0=4 x tp_1=2"),
        ({"q": (6,), "k": (6,)}, 12, [6, 6], "tp_0=6 x tp_1=2"),
    ],
)
def test_groups_are_fitted_together(units, tp, ways, mesh):
    assert fit(units, tp) == (ways, mesh)


def test_the_order_of_factors_serves_most_bytes():
    # tp=12: 4 units want 2 x 2 first, 9 units want 3 first; 9 carry more.
    params = {n: Param(n, (s,), "float32") for n, s in (("small", 8), ("large", 900))}
    votes = [
        Vote("small", Source.NAMES, Role.COLUMN, "", (Placement(0, (4,)),)),
        Vote("large", Source.NAMES, Role.COLUMN, "", (Placement(0, (9,)),)),
    ]
    mesh, shares = factoring.factor(resolve.decide(params, votes), MeshShape.of({"tp": 12}))
    assert (str(mesh), [share.ways for share in shares]) == ("tp_0=3 x tp_1=4", [1, 3])


@pytest.mark.parametrize("num", [4, 6, 7])
def test_a_group_takes_the_choice_that_leaves_the_fewest_bytes(num):
    """Experts if their number divides, else the width inside each."""
    shapes = {"moe/experts/up": (num, 64, 256), "moe/experts/down": (num, 256, 64)}
    result = plan(shapes | norms(64), 4)
    dims = [result[p].dim_on(result.mesh.tp) for p in sorted(shapes)]
    assert dims == ([0, 0] if num == 4 else [1, 2])


def test_dims_behind_the_annotated_ones_are_replicated():
    """Several axes on one dim are a spec, which has an entry for every dim of the array."""
    param = Param("w", (8, 16, 4), "float32", (("fsdp", "tp"),))
    (vote,) = annotations.annotation_votes({"w": param}, MeshShape.of({"fsdp": 2, "tp": 4}))
    assert vote.spec == (("fsdp", "tp"), (), ())


def test_an_annotated_dim_of_experts_goes_before_the_width_inside_each():
    param = Param("w", (8, 16, 32), "float32", ("expert", "embed", "mlp"))
    (vote,) = annotations.annotation_votes({"w": param}, MeshShape.of({"tp": 4}))
    assert (vote.role, vote.placements) == (Role.EXPERT, (Placement(0, (8,)),))


def test_biases_of_stacked_experts_follow_the_stack_and_inside_it_the_width():
    shapes = {
        "mlp/experts/up_proj/kernel": (8, 256, 512),
        "mlp/experts/up_proj/bias": (8, 512),
        "mlp/experts/down_proj/kernel": (8, 512, 256),
        "mlp/experts/down_proj/bias": (8, 256),
    }
    votes = {v.path: v for v in names.votes(trees.flatten(structs(shapes)), ModelDims())}
    stack = Placement(0, (8,))
    assert votes["mlp/experts/up_proj/bias"].placements == (stack, Placement(1, (512,)))
    assert votes["mlp/experts/down_proj/bias"].placements == (stack, None)
