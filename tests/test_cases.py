"""Real failures of other tools, as small trees with the right answer.

Rows H are heads, V vocabularies, F fused and confusing layouts, E experts. Each row is the shape of
a public bug report; neighbours of it, other sizes and other names, must come out the same way.
"""

import math
import re

import pytest
from planning import attention, layers, mlp, plan, specs, structs, vocab

import jaxtp
from jaxtp.plan.specs import spec_text


def norm(width, name="norm"):
    return {f"{name}/scale": (width,)}


def heads_3d(hidden, q, kv, width, prefix="attn"):
    """Kernels as Flax stores them: (embed, heads, head_dim) and (heads, head_dim, embed)."""
    return {
        f"{prefix}/query/kernel": (hidden, q, width),
        f"{prefix}/key/kernel": (hidden, kv, width),
        f"{prefix}/value/kernel": (hidden, kv, width),
        f"{prefix}/out/kernel": (q, width, hidden),
    }


def on(dim, rank, axes):
    """The text of a spec with `axes` on one dim."""
    return f"P({', '.join(axes if d == dim else '-' for d in range(rank))})" if axes else "P()"


def qkvo(q, kv, prefix="attn"):
    """Specs of flat kernels: `q` for query and output, `kv` for key and value."""
    return {
        f"{prefix}/q_proj/kernel": on(1, 2, q),
        f"{prefix}/k_proj/kernel": on(1, 2, kv),
        f"{prefix}/v_proj/kernel": on(1, 2, kv),
        f"{prefix}/o_proj/kernel": on(0, 2, q),
    }


def ffn(axes, prefix="mlp"):
    return {
        f"{prefix}/gate_proj/kernel": on(1, 2, axes),
        f"{prefix}/up_proj/kernel": on(1, 2, axes),
        f"{prefix}/down_proj/kernel": on(0, 2, axes),
    }


def einsums(hidden, q, kv, width):
    """Kernels with the heads first, keys and values in one array: the Gemma reference code."""
    return norm(hidden, "pre_attention_norm") | {
        "attn/q_einsum/w": (q, hidden, width),
        "attn/kv_einsum/w": (2, kv, hidden, width),
        "attn/attn_vec_einsum/w": (q, width, hidden),
    }


def mla(hidden, heads, q_rank, kv_rank, nope=128, rope=64, v=128):
    """Multi-head latent attention (DeepSeek): down- and up-projections, one rotary head."""
    return norm(kv_rank, "attn/kv_a_layernorm") | {
        "attn/q_a_proj/kernel": (hidden, q_rank),
        "attn/q_b_proj/kernel": (q_rank, heads * (nope + rope)),
        "attn/kv_a_proj_with_mqa/kernel": (hidden, kv_rank + rope),
        "attn/kv_b_proj/kernel": (kv_rank, heads * (nope + v)),
        "attn/o_proj/kernel": (heads * v, hidden),
    }


LATENT = {
    "attn/q_a_proj/kernel": "P()",
    "attn/q_b_proj/kernel": "P(-, tp)",
    "attn/kv_a_proj_with_mqa/kernel": "P()",
    "attn/kv_b_proj/kernel": "P(-, tp)",
    "attn/o_proj/kernel": "P(tp, -)",
    "attn/kv_a_layernorm/scale": "P()",
}


def table(shape, leaf="relative_attention_bias/embedding"):
    return attention(768, 768, 768) | {f"attn/{leaf}": shape}


def experts(num, hidden, inner, up="up_proj", down="down_proj", leaf=""):
    return {
        f"mlp/experts/{up}{leaf}": (num, hidden, inner),
        f"mlp/experts/{down}{leaf}": (num, inner, hidden),
        "mlp/gate/kernel": (hidden, num),
    }


def stacked(shapes, num_layers):
    """The same arrays of a scanned block, its layer dim second."""
    return {path: (*shape[:1], num_layers, *shape[1:]) for path, shape in shapes.items()}


def case(row, shapes, tp, want, **options):
    return pytest.param(shapes, tp, want, options, id=row)


HEADS = [
    case("H1", attention(2048, 4096, 512), 8, qkvo("tp_0+tp_1", "tp_0"), heads=32, kv_heads=4),
    case("H1-64-8", attention(512, 4096, 512), 16, qkvo("tp_0+tp_1", "tp_0"), heads=64),
    case("H1-3d", heads_3d(2048, 32, 4, 128), 8, {"attn/key/kernel": "P(-, tp_0, -)"}),
    case("H2-tp4", attention(2048, 2048, 256), 4, qkvo("tp_0+tp_1", "tp_0"), heads=16, kv_heads=2),
    case("H2-tp8", attention(2048, 2048, 256), 8, qkvo("tp_0+tp_1", "tp_0"), heads=16, kv_heads=2),
    case(
        "H3",
        attention(5120, 5120, 1280) | mlp(5120, 17920),
        4,
        qkvo("tp_0", "tp_0") | ffn("tp_0+tp_1"),
        heads=40,
        kv_heads=10,
    ),
    case(
        "H4",
        attention(3584, 3584, 512) | mlp(3584, 18944),
        8,
        qkvo("tp_0", "tp_0") | ffn("tp_0+tp_1"),
        heads=28,
        kv_heads=4,
    ),
    case(
        "H5",
        attention(6656, 6656, 6656) | mlp(6656, 17920),
        8,
        qkvo("tp_0", "tp_0") | ffn("tp_0+tp_1"),
        heads=52,
    ),
    case("H5-unknown", attention(6656, 6656, 6656), 8, qkvo("tp_0", "tp_0")),
    *(
        case(
            f"H6-tp{tp}",
            attention(1600, 1600, 1600) | mlp(1600, 6400),
            tp,
            qkvo("", "") | ffn("tp"),
            heads=25,
        )
        for tp in (2, 4)
    ),
    case("H6-unknown", attention(1600, 1600, 1600), 2, qkvo("", "")),
    case("H7", table((32, 12)), 8, {"attn/relative_attention_bias/embedding": "P(-, tp_0)"}),
    case("H7-square", table((12, 12)), 4, {"attn/relative_attention_bias/embedding": "P(-, tp)"}),
    case("H7-turned", table((12, 32), "rel_embedding"), 8, {"attn/rel_embedding": "P(tp_0, -)"}),
    case("H7-window", table((169, 24), "rel_table"), 8, {"attn/rel_table": "P(-, tp)"}),
    *(
        case(f"H8-tp{tp}", attention(2048, 2048, 256), tp, qkvo("tp", ""), heads=8, kv_heads=1)
        for tp in (2, 8)
    ),
    case(
        "H9",
        einsums(2048, 8, 1, 256),
        8,
        {
            "attn/q_einsum/w": "P(tp, -, -)",
            "attn/kv_einsum/w": "P()",
            "attn/attn_vec_einsum/w": "P(tp, -, -)",
        },
    ),
    case("H9-kv4", einsums(2560, 8, 4, 256), 4, {"attn/kv_einsum/w": "P(-, tp, -, -)"}),
    case(
        "H10",
        layers(5, heads_3d(3072, 32, 16, 128)) | heads_3d(3072, 32, 4, 128, "layers/5/attn"),
        8,
        {
            "layers/0/attn/key/kernel": "P(-, tp_0+tp_1, -)",
            "layers/4/attn/key/kernel": "P(-, tp_0+tp_1, -)",
            "layers/5/attn/key/kernel": "P(-, tp_0, -)",
            "layers/5/attn/query/kernel": "P(-, tp_0+tp_1, -)",
        },
    ),
    case(
        "H11-wide",
        attention(2048, 2048, 2048) | norm(2048, "attn/q_norm") | norm(2048, "attn/k_norm"),
        8,
        qkvo("tp", "tp") | {"attn/q_norm/scale": "P(tp)", "attn/k_norm/scale": "P(tp)"},
        heads=16,
    ),
    case(
        "H11-wide-gqa",
        attention(5120, 5120, 1024) | norm(5120, "attn/q_norm") | norm(1024, "attn/k_norm"),
        16,
        {"attn/q_norm/scale": "P(tp_0)", "attn/k_norm/scale": "P(tp_0)"},
        heads=40,
        kv_heads=8,
    ),
    case(
        "H11-narrow",
        attention(2560, 4096, 1024) | norm(128, "attn/q_norm") | norm(128, "attn/k_norm"),
        8,
        qkvo("tp", "tp") | {"attn/q_norm/scale": "P()", "attn/k_norm/scale": "P()"},
    ),
    case(
        "H12",
        attention(256, 192, 192),
        4,
        qkvo("tp_0", "tp_0"),
        heads=6,
    ),
]

FUSED = [
    case(
        "F1",
        {
            "attn/c_attn/kernel": (768, 2304),
            "attn/c_attn/bias": (2304,),
            "attn/c_proj/kernel": (768, 768),
            "attn/c_proj/bias": (768,),
        },
        4,
        {
            "attn/c_attn/kernel": "P()",
            "attn/c_attn/bias": "P()",
            "attn/c_proj/kernel": "P(tp, -)",
            "attn/c_proj/bias": "P()",
        },
        heads=12,
    ),
    case(
        "F2",
        {
            "self_attention/query_key_value/kernel": (1024, 3072),
            "self_attention/query_key_value/bias": (3072,),
            "self_attention/dense/kernel": (1024, 1024),
        },
        8,
        {
            "self_attention/query_key_value/kernel": "P(-, tp)",
            "self_attention/query_key_value/bias": "P(tp)",
            "self_attention/dense/kernel": "P(tp, -)",
        },
        heads=16,
    ),
    case(
        "F2-grouped",  # q, k, v of each of 2 kv heads, as in Falcon: divides between them
        {
            "self_attention/query_key_value/kernel": (4096, 4608),
            "self_attention/dense/kernel": (4096, 4096),
        },
        4,
        {"self_attention/query_key_value/kernel": "P(-, tp_0)"},
        heads=32,
        kv_heads=2,
    ),
    case(
        "F3",
        {"attn/qkv_proj/kernel": (5120, 7680), "attn/o_proj/kernel": (5120, 5120)},
        4,
        {"attn/qkv_proj/kernel": "P()", "attn/o_proj/kernel": "P(tp, -)"},
    ),
    case(
        "F4",
        norm(3072)
        | {"mlp/gate_up_proj/kernel": (3072, 16384), "mlp/down_proj/kernel": (8192, 3072)},
        4,
        {"mlp/gate_up_proj/kernel": "P()", "mlp/down_proj/kernel": "P(tp, -)"},
    ),
    case(
        "F4-apart",
        norm(3072)
        | {"mlp/gate_up_proj/kernel": (3072, 2, 8192), "mlp/down_proj/kernel": (8192, 3072)},
        4,
        {"mlp/gate_up_proj/kernel": "P(-, -, tp)", "mlp/down_proj/kernel": "P(tp, -)"},
    ),
    case(
        "F4-apart-first",
        norm(3072) | {"mlp/gating_einsum": (2, 3072, 8192), "mlp/linear": (8192, 3072)},
        4,
        {"mlp/gating_einsum": "P(-, -, tp)", "mlp/linear": "P(tp, -)"},
    ),
    case(
        "F4-turned",
        norm(3072) | {"mlp/gating_einsum/w": (2, 8192, 3072), "mlp/linear/w": (8192, 3072)},
        4,
        {"mlp/gating_einsum/w": "P(-, tp, -)", "mlp/linear/w": "P(tp, -)"},
    ),
    case(
        "F5",
        {"h/fc1/kernel": (4, 32, 128), "h/fc2/kernel": (4, 128, 32), "h/norm/scale": (4, 32)},
        4,
        {"h/fc1/kernel": "P(-, -, tp)", "h/fc2/kernel": "P(-, tp, -)", "h/norm/scale": "P()"},
    ),
    case(
        "F5-dim1",
        {"h/fc1/kernel": (32, 4, 128), "h/fc2/kernel": (128, 4, 32), "h/norm/scale": (32, 4)},
        4,
        {"h/fc1/kernel": "P(-, -, tp)", "h/fc2/kernel": "P(tp, -, -)"},
    ),
    case(
        "F5-heads",
        stacked(heads_3d(1024, 16, 4, 64) | norm(1024) | norm(64, "attn/q_norm"), 12),
        4,
        {"attn/query/kernel": "P(-, -, tp, -)", "attn/out/kernel": "P(tp, -, -, -)"},
    ),
    case("F6-layers-or-experts", {"a": (8, 256, 1024)}, 4, {"a": "P()"}),
    case("F6-q-or-o", {"a": (256, 256), "b": (256, 256)}, 4, {"a": "P()", "b": "P()"}),
    case(
        "F7",  # called second, named first: the widths tell
        {"Dense_0/kernel": (1024, 256), "Dense_1/kernel": (256, 1024)},
        4,
        {"Dense_0/kernel": "P(tp, -)", "Dense_1/kernel": "P(-, tp)"},
    ),
    case(
        "F7-square",
        {"Dense_0/kernel": (256, 256), "Dense_1/kernel": (256, 256)},
        4,
        {"Dense_0/kernel": "P()", "Dense_1/kernel": "P()"},
    ),
    case(
        "F8",
        {
            f"block_sparse_moe/experts/{e}/{w}/kernel": shape
            for e in range(3)
            for w, shape in (("w1", (512, 1024)), ("w2", (1024, 512)), ("w3", (512, 1024)))
        }
        | {"block_sparse_moe/gate/kernel": (512, 3)},
        4,
        {
            "block_sparse_moe/experts/0/w1/kernel": "P(-, tp)",
            "block_sparse_moe/experts/1/w2/kernel": "P(tp, -)",
            "block_sparse_moe/experts/2/w3/kernel": "P(-, tp)",
            "block_sparse_moe/gate/kernel": "P()",
        },
    ),
    case(
        "F9",
        {"fc1/kernel": (768, 12288), "fc2/kernel": (12288, 256), "fc3/kernel": (256, 10)},
        4,
        {"fc1/kernel": "P(-, tp)", "fc2/kernel": "P(tp, -)", "fc3/kernel": "P()"},
    ),
    case("F11", mla(2048, 16, 1536, 512), 8, LATENT),
    case("F11-128", mla(7168, 128, 1536, 512), 8, LATENT),
    case(
        "F11-indexer",  # one narrow key beside the latent heads is no set of heads
        mla(2048, 16, 1536, 512)
        | {"attn/indexer/wk/kernel": (2048, 128), "attn/indexer/k_norm/scale": (128,)},
        8,
        LATENT | {"attn/indexer/wk/kernel": "P()", "attn/indexer/k_norm/scale": "P()"},
        heads=16,
    ),
    case("F11-given", mla(2048, 16, 1536, 512), 8, LATENT, heads=16),
    case(
        "F12",
        {
            "encoder/up_proj/kernel": (512, 2048),
            "encoder/down_proj/kernel": (2048, 512),
            "decoder/up_proj/kernel": (512, 2050),
            "decoder/down_proj/kernel": (2050, 512),
        },
        4,
        {
            "encoder/up_proj/kernel": "P(-, tp_0+tp_1)",
            "encoder/down_proj/kernel": "P(tp_0+tp_1, -)",
            "decoder/up_proj/kernel": "P(-, tp_0)",
            "decoder/down_proj/kernel": "P(tp_0, -)",
        },
    ),
]

EXPERTS = [
    case(
        "E1",
        {
            "mlp/experts/gate_up_proj": (128, 2048, 1536),
            "mlp/experts/down_proj": (128, 768, 2048),
            "mlp/gate/kernel": (2048, 128),
        },
        4,
        {
            "mlp/experts/gate_up_proj": "P(tp, -, -)",
            "mlp/experts/down_proj": "P(tp, -, -)",
            "mlp/gate/kernel": "P()",
        },
    ),
    *(
        case(
            f"E2-{num}",
            experts(num, 2048, 768),
            4,
            {
                "mlp/experts/up_proj": "P(-, -, tp)",
                "mlp/experts/down_proj": "P(-, tp, -)",
                "mlp/gate/kernel": "P()",
            },
        )
        for num in (5, 6, 10)
    ),
    case("E3", experts(8, 512, 1024), 4, {"mlp/experts/up_proj": "P(tp, -, -)"}),
    case(
        "E3-names",
        {"moe/wi": (8, 512, 1024), "moe/wo": (8, 1024, 512), "moe/router": (512, 8)},
        4,
        {"moe/wi": "P(tp, -, -)", "moe/wo": "P(tp, -, -)", "moe/router": "P()"},
    ),
    case(
        "E3-bias",
        experts(8, 512, 512) | {"mlp/experts/up_proj_bias": (8, 512)},
        4,
        {"mlp/experts/up_proj_bias": "P(tp, -)"},
    ),
    case(
        "E3-shared",  # a shared expert as wide as the others, at the same node
        norm(512)
        | {
            "ffw/w_router": (512, 8),
            "ffw/we_up": (8, 512, 256),
            "ffw/we_down": (8, 256, 512),
            "ffw/ws_up": (512, 256),
            "ffw/ws_down": (256, 512),
        },
        4,
        {
            "ffw/w_router": "P()",
            "ffw/we_up": "P(tp, -, -)",
            "ffw/we_down": "P(tp, -, -)",
            "ffw/ws_up": "P(-, tp)",
            "ffw/ws_down": "P(tp, -)",
        },
    ),
    case(
        "E3-rows",  # experts one after another in rows
        {f"ffn/experts/mlp/{w}": (16 * 384, 256) for w in ("w1", "v1", "w2")}
        | {"ffn/router/layer/kernel": (256, 16)}
        | norm(256),
        32,
        {f"ffn/experts/mlp/{w}": "P(tp_0, -)" for w in ("w1", "v1", "w2")},
    ),
]


@pytest.mark.parametrize(("shapes", "tp", "want", "options"), HEADS + FUSED + EXPERTS)
def test_row(shapes, tp, want, options):
    result = plan(shapes, tp, **options)
    found = specs(result)
    assert {path: found[path] for path in want} == want
    assert math.prod(result.mesh.ways([axis]) for axis in result.mesh.tp) == tp


@pytest.mark.parametrize(
    ("tokens", "tp", "padded"),
    [(50257, 8, 50264), (32001, 2, 32002), (49954, 16, 49968), (129280, 24, 129288)],
)
def test_v1_a_vocabulary_that_does_not_divide(tokens, tp, padded):
    shapes = vocab(tokens, 768) | {"lm_head/bias": (tokens,)}
    whole = plan(shapes, tp)
    for path in shapes:
        assert whole[path].spec == ((),) * len(shapes[path])
        assert f"{tokens} units on tp={tp}: replicated" in whole[path].fallback
    assert any(f"embed_tokens/embedding [{tokens}, 768]" in note for note in whole.notes)
    result = plan(shapes, tp, pad_vocab="masked")
    for path, shape in shapes.items():
        decision = result[path]
        (blocks,) = decision.padding
        assert blocks.stored == padded
        assert decision.shape == shape
        assert not decision.fallback
        assert padded in decision.stored
        assert f"padded from {tokens} to {padded}" in decision.reasons[-1]


@pytest.mark.parametrize("pad", [False, "masked"])
def test_v2_a_tie_is_one_decision(pad):
    tied = plan({"wte/embedding": (50257, 768)}, 8, pad_vocab=pad)
    apart = plan(vocab(50257, 768), 8, pad_vocab=pad)
    sizes = {max(d.stored) for d in (*tied.decisions, *apart.decisions)}
    assert sizes == {50264 if pad else 50257}
    assert len({d.group for d in apart.decisions}) == 1


def test_v3_a_tied_table_is_split_by_tokens():
    # The lookup takes one all-reduce, and logits of the transposed view stay split: none.
    assert specs(plan({"wte/embedding": (50304, 768)}, 8)) == {"wte/embedding": "P(tp, -)"}


@pytest.mark.parametrize("hidden", [768, 1024])
def test_v4_the_hidden_dim_is_no_way_out(hidden):
    assert set(specs(plan(vocab(50257, hidden), 8)).values()) == {"P()"}


def test_h5_the_message_names_the_sizes_that_divide():
    result = plan(attention(6656, 6656, 6656), 8, heads=52)
    assert "divides: tp 1, 2, 4, 13, 26, 52" in result["attn/q_proj/kernel"].fallback


def test_h6_the_price_of_whole_attention_is_printed():
    result = plan(attention(1600, 1600, 1600) | mlp(1600, 6400), 4, heads=25)
    # 1600 x 1600 bf16 is 5.12 MB: whole instead of a quarter costs three quarters of it.
    assert (
        "replicated; costs 3.84 MB and 3.84 MFLOP a token" in result["attn/q_proj/kernel"].fallback
    )
    assert "costs 3.84 MB" in str(result)


@pytest.mark.parametrize("row", ["F1", "F3", "F4"])
def test_fused_arrays_say_what_they_cost(row):
    shapes, tp, want, options = next(c.values for c in FUSED if c.id == row)
    fused = [d for d in plan(shapes, tp, **options).decisions if d.role == "fused"]
    assert fused
    for decision in fused:
        assert re.search(r"replicated; costs [\d.]+ MB", decision.fallback)
        assert want[decision.path] == "P()"


@pytest.mark.parametrize("row", ["F6-layers-or-experts", "F6-q-or-o", "F7-square"])
def test_what_only_dataflow_can_tell_is_whole_and_listed(row):
    shapes, tp, _, options = next(c.values for c in FUSED if c.id == row)
    result = plan(shapes, tp, **options)
    for decision in result.decisions:
        assert decision.role == "unknown"
        assert "no evidence" in decision.reasons[-1]
    assert any("nothing to shard" in note for note in result.notes)


def test_f10_convolutions_have_nothing_to_shard():
    stages = {
        f"stages/{i}/conv{j}/kernel": shape
        for i in range(2)
        for j, shape in enumerate([(1, 1, 256, 64), (3, 3, 64, 64), (1, 1, 64, 256)])
    }
    result = plan(stages | {"classifier/kernel": (256, 1000), "classifier/bias": (1000,)}, 4)
    assert set(specs(result).values()) == {"P()"}
    assert "nothing to shard" in result.notes[0]


def test_unknown_heads_are_said_to_be_assumed():
    result = plan(attention(4096, 4096, 1024), 8)
    assert "head_dim 256 assumed; give heads=" in result["attn/k_proj/kernel"].reasons[-1]


def test_two_towers_of_which_the_config_describes_one():
    # Heads 8 and head_dim 64 are the text tower's; the vision tower has 12 heads.
    shapes = attention(512, 512, 512, "text/attn") | attention(768, 768, 768, "vision/attn")
    result = jaxtp.make_plan(structs(shapes), {"tp": 8}, config={"num_heads": 8, "head_dim": 64})
    assert spec_text(result["text/attn/q_proj/kernel"].spec) == "P(-, tp_0+tp_1)"
    assert spec_text(result["vision/attn/q_proj/kernel"].spec) == "P(-, tp_0)"
