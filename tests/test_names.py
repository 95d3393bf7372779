"""How public JAX models name their parameters: each way of naming, planned by names and shapes."""

import pytest
from planning import structs

import jaxtp

LEAVES = ("kernel", "bias")
MLP = {"mlp/gate_proj/kernel": 1, "mlp/up_proj/kernel": 1, "mlp/down_proj/kernel": 0}
MLP_SHAPES = {name: (256, 512) if dim else (512, 256) for name, dim in MLP.items()}


def dims_of(shapes, **options):
    """The dim of each parameter that eight devices share, None where it is replicated."""
    plan = jaxtp.make_plan(structs(shapes), {"tp": 8}, **options)
    return {d.path: d.dim_on(plan.mesh.tp) for d in plan.decisions}


@pytest.mark.parametrize(
    "path",
    [
        "embed_tokens/embedding",
        "embed_tokens/weight/embedding",
        "embed_tokens/weight",
        "token_embed/table",
        "shared/weight/embedding",
        "wte/w",
        "embeddings/word/weight",
        "softmax/emb_var",
        "tok_emb",
        "gpt/~/embed/w",
        "embeddings/token_embeddings/weight",
    ],
)
@pytest.mark.parametrize("config", [None, {"vocab_size": 32768, "hidden_size": 256}])
def test_token_tables(path, config):
    shapes = {path: (32768, 256), **MLP_SHAPES}
    assert dims_of(shapes, config=config) == {path: 0, **MLP}


@pytest.mark.parametrize(
    ("query", "output"),
    [
        ("attn/q_proj/kernel", "attn/attn_out/kernel"),
        ("q_proj/kernel", "attn_out/kernel"),
        ("q/w", "o/w"),
        ("linear_q/w", "linear_o/w"),
        ("attention/input_to_query/weights", "attention/attn_value_to_output/weights"),
        ("attn1/to_q/kernel", "attn1/to_out_0/kernel"),
        ("attn/proj_q/kernel", "attn/proj_out/kernel"),
        ("self_attention/attn_q/kernel", "self_attention/attn_proj/kernel"),
    ],
)
@pytest.mark.parametrize(
    ("entering", "leaving"),
    [("ff_proj", "ff_out"), ("dense_proj", "dense_proj_o"), ("dense_up", "dense_down")],
)
def test_attention_beside_a_feed_forward(query, output, entering, leaving):
    word = "query" if "query" in query else "q"
    kv = [query.replace(word, long if word == "query" else long[0]) for long in ("key", "value")]
    leaf = query.rpartition("/")[2]
    found = dims_of(
        {
            **dict.fromkeys((query, *kv, output), (1024, 1024)),
            f"{entering}/{leaf}": (1024, 4096),
            f"{leaving}/{leaf}": (4096, 1024),
            "norm/scale": (1024,),
        }
    )
    assert found == {
        **dict.fromkeys((query, *kv, f"{entering}/{leaf}"), 1),
        **dict.fromkeys((output, f"{leaving}/{leaf}"), 0),
        "norm/scale": None,
    }


@pytest.mark.parametrize("node", ["mixer/", "mla/", "", "self_attn/"])
@pytest.mark.parametrize("suffix", ["_proj", ""])
def test_latent_attention_whatever_its_module_is_called(node, suffix):
    shapes = {
        f"{node}q_a{suffix}/kernel": (256, 384),
        f"{node}q_a_layernorm/scale": (384,),
        f"{node}q_b{suffix}/kernel": (384, 16 * 48),
        f"{node}kv_a{suffix}/kernel": (256, 144),
        f"{node}kv_a_layernorm/scale": (128,),
        f"{node}kv_b{suffix}/kernel": (128, 16 * 64),
        f"{node}o{suffix}/kernel": (16 * 32, 256),
        **{f"block/{path}": shape for path, shape in MLP_SHAPES.items()},
        "input_layernorm/scale": (256,),
    }
    found = dims_of(shapes, config={"num_attention_heads": 16, "hidden_size": 256})
    split = {path: dim for path, dim in found.items() if dim is not None}
    assert split == {
        f"{node}q_b{suffix}/kernel": 1,
        f"{node}kv_b{suffix}/kernel": 1,
        f"{node}o{suffix}/kernel": 0,
        **{f"block/{path}": dim for path, dim in MLP.items()},
    }


@pytest.mark.parametrize(
    ("fused", "output"),
    [
        ("attention/wqkv/kernel", "attention/wo/kernel"),
        ("self_attention/query_key_value/kernel", "self_attention/dense/kernel"),
        ("norm_attn_norm/attn/Wqkv/kernel", "norm_attn_norm/attn/out_proj/kernel"),
    ],
)
@pytest.mark.parametrize("config", [None, {"num_attention_heads": 32, "num_key_value_heads": 8}])
def test_queries_beside_their_keys_are_cut_between_kv_heads(fused, output, config):
    """Each of 8 kv heads lies with its 4 queries, so that a split between groups is contiguous."""
    shapes = {fused: (4096, 48 * 128), output: (4096, 4096), "norm/scale": (4096,)}
    plan = jaxtp.make_plan(structs(shapes), {"tp": 4}, config=config)
    assert plan[fused].dim_on(plan.mesh.tp) == 1
    assert plan[output].dim_on(plan.mesh.tp) == 0
    assert plan[fused].units == ((8,) if config else (4,))  # heads of 256 are assumed
    # As many kv heads as heads, or another name: the order is not known.
    for unknown, width in ((fused, 3 * 4096), ("self_attn/qkv_proj/kernel", 48 * 128)):
        if unknown != "self_attention/query_key_value/kernel":  # Megatron's, per head
            rest = output if unknown == fused else "self_attn/o_proj/kernel"
            assert dims_of({unknown: (4096, width), rest: (4096, 4096)})[unknown] is None


@pytest.mark.parametrize("window", [(), (1, 1)])
def test_pointwise_convolutions_are_a_pair(window):
    shapes = {
        "dwconv/kernel": (7, 7, 1, 96),
        "pwconv1/kernel": (*window, 96, 384),
        "pwconv1/bias": (384,),
        "pwconv2/kernel": (*window, 384, 96),
        "pwconv2/bias": (96,),
    }
    rank = len(window)
    assert dims_of(shapes) == {
        "dwconv/kernel": None,
        "pwconv1/kernel": rank + 1,
        "pwconv1/bias": 0,
        "pwconv2/kernel": rank,
        "pwconv2/bias": None,
    }


def test_a_bias_module_beside_its_kernel():
    shapes = {
        "ff/layer1/linear/w": (256, 1024),
        "ff/layer1/bias/b": (1024,),
        "ff/layer2/linear/w": (1024, 256),
        "ff/layer2/bias/b": (256,),
        "softmax/logits_ffn/linear/w": (256, 32768),
        "softmax/logits_ffn/bias/b": (32768,),
    }
    assert dims_of(shapes) == dict(zip(shapes, [1, 0, 0, None, 1, 0], strict=True))


def test_biases_of_queries_keys_and_values_lie_with_their_heads():
    enters = {f"attn/{name}_proj/{leaf}": leaf == "kernel" for name in "qkv" for leaf in LEAVES}
    shapes = {path: (256, 256) if dim else (256,) for path, dim in enters.items()}
    leaves = {"attn/o_proj/kernel": 0, "attn/o_proj/bias": None}
    shapes |= {"attn/o_proj/kernel": (256, 256), "attn/o_proj/bias": (256,)}
    assert dims_of(shapes, heads=8) == {path: int(dim) for path, dim in enters.items()} | leaves


def test_gate_and_up_together_in_pytorchs_order_pair_with_the_way_back():
    shapes = {
        "mlp/gate_up_proj/weight": (1024, 256),
        "mlp/gate_up_proj/bias": (1024,),
        "mlp/down_proj/weight": (256, 512),
        "mlp/down_proj/bias": (256,),
    }
    plan = jaxtp.make_plan(structs(shapes), {"tp": 8})
    assert plan["mlp/gate_up_proj/weight"].role == "fused"
    # Replicated, since names do not say how it is used, at the price of 7/8 of 1024 x 256 bfloat16.
    price = "replicated; costs 0.46 MB and 0.46 MFLOP a token per device; sharded if stored apart"
    assert price in plan["mlp/gate_up_proj/weight"].fallback
    assert plan["mlp/down_proj/weight"].dim_on(plan.mesh.tp) == 1


@pytest.mark.parametrize("names", [("wi", "wo"), ("gate_proj", "up_proj", "down_proj")])
def test_matrices_that_are_all_stored_alike(names):
    """(inner, hidden) both ways, as some mixtures of experts have them; a norm tells which."""
    shapes = {f"mlp/{name}/kernel": (512, 256) for name in names}
    assert dims_of(shapes | {"norm/scale": (256,)}) == dict.fromkeys(shapes, 0) | {
        "norm/scale": None
    }


def test_one_scale_for_each_output_of_a_quantised_matrix_lies_along_it():
    shapes = {
        "mlp/up_proj/kernel": (256, 512),
        "mlp/up_proj/scale": (512,),
        "mlp/down_proj/kernel": (512, 256),
        "mlp/down_proj/scale": (256,),
    }
    assert list(dims_of(shapes).values()) == [0, None, 1, 0]


@pytest.mark.parametrize(
    ("tokens", "hidden", "is_head"), [(2048, 64, True), (512, 64, False), (2048, 96, False)]
)
def test_an_output_without_a_name_is_a_head_by_its_size_alone(tokens, hidden, is_head):
    """As wide as the table, wider than any number of classes, and from the residual stream."""
    shapes = {"embed/embedding": (tokens, 64), "norm/scale": (64,), "proj/kernel": (hidden, tokens)}
    assert dims_of(shapes)["proj/kernel"] == (1 if is_head else None)


QKVO = {f"attn/{n}_proj/kernel": (256, 1024) for n in "qkv"} | {"attn/o_proj/kernel": (1024, 256)}


@pytest.mark.parametrize(
    ("shapes", "dims"),
    [
        # One head for each codebook.
        ({f"lm_heads/{i}/kernel": (256, 2048) for i in range(2)}, [1, 1]),
        # Keys of relative positions and their two biases, in conformers and Transformer-XL.
        (
            {
                "attn/linear_pos/kernel": (256, 1024),
                "attn/pos_bias_u": (8, 128),
                "attn/pos_bias_v": (8, 128),
                "attn/r_w_bias": (8, 128),
            },
            [1, 0, 0, 0],
        ),
        # One row a distance, as wide as a head.
        ({"attn/rel_pos_h": (127, 128), "attn/rel_pos_w": (127, 128)}, [None, None]),
        # One entry a head, for as many heads as buckets.
        ({"attn/relative_attention_bias/weight": (8, 8)}, [1]),
        # Rows that are looked up are no layer of an MLP; many of them are tokens.
        (
            {"tags/embedding": (4, 512), "marks/embedding": (1, 512), "h/0/kernel": (512, 32)},
            [None, None, None],
        ),
        ({"lut/embedding": (4096, 256)}, [0]),
        ({"x_embedder/weight": (64, 256), "context_embedder/weight": (4096, 256)}, [None, None]),
        # An adapter from one width to another, its second matrix square.
        ({"adapter/fc1/kernel": (1280, 512), "adapter/fc2/kernel": (512, 512)}, [1, 0]),
        # Two streams in one block.
        (
            {f"attn/add_{n}_proj/kernel": (256, 1024) for n in "qkv"}
            | {"attn/to_add_out/kernel": (1024, 256)},
            [1, 1, 1, 0],
        ),
    ],
)
def test_what_lies_beside_attention(shapes, dims):
    rest = {**QKVO, "norm/scale": (256,)}
    assert dims_of({**rest, **shapes}) == {
        **dict.fromkeys(QKVO, 1),
        "attn/o_proj/kernel": 0,
        "norm/scale": None,
        **dict(zip(shapes, dims, strict=True)),
    }


@pytest.mark.parametrize(
    ("first", "second", "taken", "is_pair"),
    [
        ("mlp/layers_0", "mlp/layers_2", (), True),  # Linen's Sequential
        ("net/layers/0", "net/layers/2", (), True),  # NNX's
        ("Mlp_0/Dense_0", "Mlp_0/Dense_1", (), True),
        ("ff/net/0/proj", "ff/net/2", (), True),  # diffusers
        ("heads/0", "heads/1", (), False),  # a list: beside each other
        ("blocks/0", "blocks/2", ("blocks/1/attention/query/kernel",), False),
        ("mlp/layers_0", "mlp/layers_2", ("mlp/layers_4/kernel",), False),  # three
    ],
)
def test_square_layers_that_only_numbers_tell_apart(first, second, taken, is_pair):
    paths = {f"{first}/kernel": 1, f"{second}/kernel": 0}
    dims = dims_of(dict.fromkeys((*paths, *taken), (256, 256)), heads=8)
    assert {path: dims[path] for path in paths} == (paths if is_pair else dict.fromkeys(paths))


@pytest.mark.parametrize(
    ("key", "shape", "dim"),
    [
        ("cache/attn/cached_key", (4, 64, 8, 16), 2),  # Linen's collection
        ("params/attn/k_cache", (8, 8, 64, 16), 1),  # as many rows as heads
        ("past_key_values/0/k", (4, 8, 64, 16), 1),
        ("cache/cache_v", (3, 4, 64, 8, 16), 3),  # of all layers
        ("cache/attn/cache_index", (), None),
        ("cache/attn/latents", (4, 64, 32), None),
    ],
)
def test_caches_follow_their_heads(key, shape, dim):
    kernels = {f"params/attn/{n}/kernel": (64, 8, 16) for n in ("query", "key", "value")}
    plan = jaxtp.make_plan(
        structs({**kernels, "params/attn/out/kernel": (8, 16, 64), key: shape}), {"tp": 8}
    )
    assert (plan[key].role, plan[key].dim_on(["tp"])) == ("cache", dim)


@pytest.mark.parametrize("module", ["CachedAttention_0", "self_attn_cache"])
def test_a_module_that_has_a_cache_is_none(module):
    shapes = {f"{module}/{n}_proj/kernel": (64, 64) for n in "qkvo"}
    assert list(dims_of(shapes, heads=8).values()) == [1, 0, 1, 1]


@pytest.mark.parametrize("name", ["adaLN_0", "adaLN_modulation/layers_1", "norm1"])
def test_what_makes_scales_of_norms_is_no_norm(name):
    """Taken for the norms of six stacked layers, it left a diffusion transformer replicated."""
    shapes = {f"block/attn/{n}/kernel": (64, 8, 8) for n in ("query", "key", "value")}
    shapes |= {"block/attn/out/kernel": (8, 8, 64), f"block/{name}/kernel": (64, 384)}
    shapes |= {"block/mlp/fc1/kernel": (64, 256), "block/mlp/fc2/kernel": (256, 64)}
    dims = [1, 1, 1, 0, None, 1, 0]
    assert dims_of(shapes) == dict(sorted(zip(shapes, dims, strict=True)))


def test_what_enters_and_what_leaves_have_the_residual_stream_outside():
    """Of a state-space mixer without a name that says so: 1024 is where both begin and end."""
    shapes = {"in_proj": (1024, 4384), "out_proj": (2048, 1024), "decay": (32,)}
    assert set(dims_of(shapes).values()) == {None}


def test_attention_of_all_layers_without_a_norm():
    """Keys of four dims: nothing but their shapes tells that the first one counts layers."""
    shapes = dict.fromkeys(("attn/q", "attn/k", "attn/v"), (12, 64, 8, 16))
    dims = dims_of({**shapes, "attn/o": (12, 8, 16, 64), "cache/k": (12, 4, 32, 8, 16)})
    assert dims == {"attn/q": 2, "attn/k": 2, "attn/v": 2, "attn/o": 1, "cache/k": 3}


@pytest.mark.parametrize("window", [(1, 1), (3, 3)])
def test_convolutions_that_make_queries_and_keys_count_no_layers(window):
    """Attention of U-Nets and of convolutional transformers, without a bias."""
    shapes = dict.fromkeys(("attn/q", "attn/k", "attn/v", "attn/o"), (*window, 64, 64))
    assert set(dims_of(shapes).values()) == {None}


def test_experts_are_as_narrow_as_they_like():
    """Narrower than a rank would be beside the residual stream, and many."""
    up = dict.fromkeys(("moe/experts/gate", "moe/experts/up"), (64, 512, 16))
    shapes = {**up, "moe/experts/down": (64, 16, 512), "norm/scale": (512,)}
    assert dims_of(shapes) == {**dict.fromkeys(shapes, 0), "norm/scale": None}
