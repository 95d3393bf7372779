"""Findings on small models: right, whatever the names and the sizes."""

import dataclasses
import importlib
import random
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from jaxpr_models import DISTINCT, EQUAL, MODELS, SINGLE, Sizes, decoder, f32

from jaxtp.plan import trees
from jaxtp.rules.jaxpr import analyse, analyse_jaxpr

for family in ("fused", "mixer", "expert", "stream", "flax"):
    importlib.import_module(f"jaxpr_{family}_models")  # each fills the table

SIZES = {"distinct": DISTINCT, "equal": EQUAL, "single": SINGLE}


def read(fn, params, inputs, sizes):
    """The analysis; people's models promote ranks, which the harness forbids elsewhere."""
    with jax.numpy_rank_promotion("allow"):
        return analyse(fn, params, *inputs, min_vocab=sizes.vocab)


def found(analysis):
    """What the analysis splits, in the form of `Case.expected`."""
    return {
        path: (f.dim, f.units, f.pieces) if f.pieces else (f.dim, f.units)
        for path, f in analysis.findings.items()
        if f.dim is not None
    }


def scrambled(case, seed):
    """The case with randomly named parameters, and what the names stand for."""
    plain, rebuild = trees.as_pytree(case.params)
    leaves = trees.leaves(plain)
    structure = jax.tree.structure(plain)
    draw = random.Random(seed)
    names = {f"{draw.getrandbits(64):016x}": path for path, _ in leaves}
    flat = dict(zip(names, (leaf for _, leaf in leaves), strict=True))

    def fn(flat, *inputs):
        return case.fn(rebuild(structure.unflatten([flat[name] for name in names])), *inputs)

    return fn, flat, names


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_findings_equal_the_experts(name, size):
    sizes = SIZES[size]
    case = MODELS[name](sizes)
    analysis = read(case.fn, case.params, case.inputs, sizes)
    assert not analysis.unreached
    assert found(analysis) == case.expected, str(analysis)


@pytest.mark.parametrize("name", MODELS)
def test_names_are_not_read(name):
    """Random names give the same findings, groups and classes; only reasons quote names."""
    case = MODELS[name](DISTINCT)
    plain = read(case.fn, case.params, case.inputs, DISTINCT)
    fn, flat, names = scrambled(case, seed=name)
    hidden = read(fn, flat, case.inputs, DISTINCT)
    renamed = {
        names[path]: dataclasses.replace(finding, path=names[path], reasons=())
        for path, finding in hidden.findings.items()
    }
    expected = {
        path: dataclasses.replace(finding, reasons=()) for path, finding in plain.findings.items()
    }
    assert renamed == expected


@pytest.mark.parametrize("name", MODELS)
def test_groups_hold_together(name):
    """Members of a group share classes or a divisor; each finding's group lists it."""
    case = MODELS[name](DISTINCT)
    analysis = read(case.fn, case.params, case.inputs, DISTINCT)
    for path, finding in analysis.findings.items():
        assert (path in analysis.groups.get(finding.group, ())) == (finding.dim is not None)
        assert finding.reasons


def test_reasons_name_partners_sizes_and_lines():
    """What a user reads: who is at the other end, the factors seen, the line of their model."""
    case = MODELS["llama"](DISTINCT)
    findings = read(case.fn, case.params, case.inputs, DISTINCT).findings
    query = " ".join(findings["blocks/0/attn/q"].reasons)
    assert "contracted with `blocks/0/attn/o`" in query
    assert "80 is seen as 2 x 4 x 10" in query
    assert "jaxpr_models.py:" in query
    down = " ".join(findings["blocks/1/mlp/down"].reasons)
    lines = r"a free output of `blocks/1/mlp/gate` at (.*) \(swiglu\), `blocks/1/mlp/up` at \1 "
    assert re.search(lines, down)
    assert "residual stream" in " ".join(findings["norm"].reasons)


ROLES = {
    "pooled_classifier": {
        "words": "vocab",
        "positions": "position",
        "segments": "position",
        "norm/scale": "norm",
        "attn/q": "column",
        "attn/o": "row",
        "in_bias": "column_bias",
        "out_bias": "row_bias",
        "pool": "replicated",
        "labels_bias": "replicated",
    },
    "latent_attention": {
        "q_down": "low_rank",
        "kv_down": "low_rank",
        "kv_norm": "norm",
        "o": "row",
    },
    "moe_dense": {"router": "router", "gate": "expert", "gate_bias": "expert"},
    "fused_split": {"qkv": "fused", "o": "row"},
    "relative_bias": {"table": "follower"},
    "learned_queries": {"q": "column", "q_bias": "follower", "probe": "replicated"},
    "convolutions": {"stem": "conv", "head": "replicated"},
    "mamba": {
        "in": "fused",
        "conv": "follower",
        "x": "row",
        "dt": "column",
        "dt_bias": "column_bias",
    },
}


@pytest.mark.parametrize("name", ROLES)
def test_roles(name):
    case = MODELS[name](DISTINCT)
    findings = read(case.fn, case.params, case.inputs, DISTINCT).findings
    assert {path: findings[path].role for path in ROLES[name]} == ROLES[name]


def test_experts_have_the_width_inside_as_alternative():
    """E2: 6 experts do not divide by 4, the FFN dim inside them does."""
    case = MODELS["moe_top_k"](DISTINCT)
    findings = read(case.fn, case.params, case.inputs, DISTINCT).findings
    spare = {path: f.alternatives for path, f in findings.items() if f.role == "expert"}
    unit = (DISTINCT.ffn,)
    assert {path: (options[0].dim, options[0].units) for path, options in spare.items()} == {
        "moe/gate": (2, unit),
        "moe/up": (2, unit),
        "moe/down": (1, unit),
    }


def test_classes_can_be_printed():
    """Size, members, who makes and who contracts it, where it is from, and why it is replicated."""
    case = MODELS["llama"](DISTINCT)
    analysis = read(case.fn, case.params, case.inputs, DISTINCT)
    known = {info.number: info for info in analysis.classes()}
    query = analysis.findings["blocks/0/attn/q"]
    kv, group = (known[number] for number in query.classes)
    assert (kv.kind, kv.size, group.size) == ("inner", 2, 4)
    assert kv.members == tuple(f"blocks/0/attn/{n}" for n in ("k[1]", "o[0]", "q[1]", "v[1]"))
    assert kv.contracted == ("blocks/0/attn/o",)
    assert set(kv.produced) == {f"blocks/0/attn/{n}" for n in "qkv"}
    assert "jaxpr_models.py:" in kv.origin
    streams = [info for info in known.values() if info.kind == "stream" and info.members]
    assert [info.size for info in streams] == [DISTINCT.width]
    widths = [info for info in known.values() if "summed in a product" in " ".join(info.reasons)]
    assert any(info.size == DISTINCT.head and info.cuts for info in widths)


def test_tiled_heads_share_the_class_but_not_its_place():
    """The kv class is major in k and minor in q: splitting it in q first would be wrong."""
    case = MODELS["grouped_by_tile"](DISTINCT)
    findings = read(case.fn, case.params, case.inputs, DISTINCT).findings
    (kv,), query = findings["blocks/0/attn/k"].classes, findings["blocks/0/attn/q"].classes
    assert query.index(kv) == 1


def test_small_vocabularies_stay_whole():
    case = MODELS["llama_tied"](DISTINCT)
    with jax.numpy_rank_promotion("allow"):
        analysis = analyse(case.fn, case.params, *case.inputs, min_vocab=4096)
    finding = analysis.findings["embed"]
    assert finding.dim is None
    assert "2048 entries, too few" in " ".join(finding.reasons)


def test_positions_that_the_caller_passes_are_no_vocabulary():
    """128 rows beside a token table of 2048 that is 16 times as large."""
    case = MODELS["kv_cache"](DISTINCT)
    with jax.numpy_rank_promotion("allow"):
        findings = analyse(case.fn, case.params, *case.inputs, min_vocab=64).findings
    assert findings["embed"].role == "vocab"
    assert findings["positions"].role == "position"


def test_parameters_the_call_does_not_reach():
    analysis = analyse(lambda p, x: x @ p["used"], {"used": f32(4, 4), "extra": f32(4)}, f32(2, 4))
    assert analysis.unreached == ("extra",)
    assert set(analysis.findings) == {"used"}
    assert "extra: not reached by the traced call" in str(analysis)


def test_activations_have_classes():
    """What `parallelize` needs: stream, positions and regions for every value of the program."""
    case = MODELS["llama"](DISTINCT)
    analysis = read(case.fn, case.params, case.inputs, DISTINCT)
    logits, head = analysis.scope.jaxpr.outvars[0], analysis.findings["head"]
    batch, seq, vocab = analysis.dim_classes(analysis.scope.values[logits])
    assert (batch.kind, seq.kind, vocab.kind) == ("position", "position", "region")
    assert (vocab.group, vocab.units) == (head.group, head.units)
    kinds = {
        tuple((c.kind, c.group) for c in analysis.dim_classes(value))
        for value in analysis.scope.values.values()
    }
    position = ("position", "")
    assert (position, position, ("feature", "")) in kinds
    heads = analysis.findings["blocks/0/attn/q"]
    assert (position, position, ("region", heads.group)) in kinds  # before the reshape to heads
    assert (position, ("region", heads.group), position, position) in kinds  # scores


def test_scopes_follow_calls():
    """A jaxpr that is called twice has two scopes, each with its own values."""

    @jax.jit
    def block(p, x):
        return x + jax.nn.relu(x @ p["up"]) @ p["down"]

    layer = {"up": f32(6, 8), "down": f32(8, 6)}
    analysis = analyse(lambda p, x: block(p[1], block(p[0], x)), [layer, layer], f32(2, 6))
    first, second = (scopes[0] for scopes in analysis.scope.calls.values())
    assert first.jaxpr is second.jaxpr
    groups = [
        analysis.dim_classes(scope.values[scope.jaxpr.invars[1]])[1].group
        for scope in (first, second)
    ]
    assert groups == [analysis.findings[f"{i}/up"].group for i in range(2)]


def test_work_grows_linearly_with_layers():
    """Counted in calls of Python functions, which no other load on the machine changes."""

    def calls(num_layers):
        sizes = Sizes(batch=8, seq=64, width=128, heads=8, kv=2, head=16, ffn=512, vocab=32000)
        case = decoder(sizes, sizes.kv, num_layers=num_layers)
        with jax.numpy_rank_promotion("allow"):
            closed = jax.make_jaxpr(case.fn)(case.params, *case.inputs)
        paths = tuple(path for path, _ in trees.leaves(case.params))
        count = 0

        def tick(frame, event, arg):
            nonlocal count
            count += event == "call"

        sys.setprofile(tick)
        try:
            analyse_jaxpr(closed, paths)
        finally:
            sys.setprofile(None)
        return count

    few, more, most = calls(8), calls(16), calls(32)
    assert (most - more) <= 1.02 * 2 * (more - few)


def shapes(params):
    return {name: f32(*shape) for name, shape in params.items()}


def test_what_a_diffusion_model_makes_of_the_time_is_a_pair():
    """Its output is read by kernels alone, which lead into the middle of residual blocks."""

    def unet(params, x, time):
        silu, t = jax.nn.silu, jnp.outer(time, params["waves"])
        t = silu(silu(t @ params["grow"]) @ params["blend"])
        for block in params["blocks"]:
            h = silu(x @ block["near"]) + (t @ block["when"])[:, None]
            x = x + silu(h) @ block["far"]
        return x

    block = {"near": (32, 64), "when": (128, 64), "far": (64, 32)}
    params = shapes({"waves": (32,), "grow": (32, 128), "blend": (128, 128)})
    params["blocks"] = [shapes(block)] * 2
    inputs = (f32(2, 8, 32), f32(2))
    dims = {f.path: f.dim for f in analyse(unet, params, *inputs).findings.values()}
    pairs = {"grow": 1, "blend": 0, "waves": None}
    blocks = {
        f"blocks/{i}/{k}": d for i in (0, 1) for k, d in (("near", 1), ("when", 1), ("far", 0))
    }
    assert dims == pairs | blocks


def test_a_state_of_linear_attention_that_all_channels_share():
    """Its other width is summed with the queries, so each channel could be a head (FLASH)."""

    def unit(params, x):
        z = x @ params["narrow"]
        state = jnp.einsum("bns,bne->bse", z, x @ params["value"])
        return x + (x @ params["gate"] * jnp.einsum("bns,bse->bne", z, state)) @ params["out"]

    params = shapes({"narrow": (32, 8), "value": (32, 64), "gate": (32, 64), "out": (64, 32)})
    findings = analyse(unit, params, f32(2, 16, 32)).findings
    assert {p: f.dim for p, f in findings.items()} == {
        "narrow": None,
        "value": 1,
        "gate": 1,
        "out": 0,
    }


def test_a_scale_of_one_projection_stacks_no_experts():
    """`einsum("bts,ks->btks")` sums nothing: queries and keys of one width, scaled apart."""

    def unit(params, x):
        values, z = jnp.split(x @ params["both"], [64], -1)
        q, k = jnp.moveaxis(jnp.einsum("bts,ks->btks", z, params["scales"]), 2, 0)
        scores = jax.nn.relu(jnp.einsum("bqs,bks->bqk", q, k)) ** 2
        return x + jnp.einsum("bqk,bke->bqe", scores, values) @ params["out"]

    params = shapes({"both": (32, 72), "scales": (2, 8), "out": (64, 32)})
    finding = analyse(unit, params, f32(2, 16, 32)).findings["both"]
    assert (finding.role, finding.dim, finding.replicated) == ("fused", 1, ((64, 72),))
