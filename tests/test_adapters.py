"""Low-rank adapters and quantised weights: they follow their weights, and add no collective."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from planning import structs

import jaxtp
from jaxtp.mesh.build import abstract_mesh

WIDTH, HIDDEN, RANK, LAYERS, EXPERTS, BLOCK = 64, 256, 8, 3, 8, 16
WEIGHTS = {
    "attn/q_proj": (WIDTH, 64),
    "attn/k_proj": (WIDTH, 32),
    "attn/v_proj": (WIDTH, 32),
    "attn/o_proj": (64, WIDTH),
    "mlp/gate_proj": (WIDTH, HIDDEN),
    "mlp/up_proj": (WIDTH, HIDDEN),
    "mlp/down_proj": (HIDDEN, WIDTH),
}
ROWS = ("attn/o_proj", "mlp/down_proj")


def dims_of(shapes):
    plan = jaxtp.make_plan(structs(shapes), {"tp": 4}, heads=8, kv_heads=4)
    return {d.path: d.dim_on(plan.mesh.tp) for d in plan.decisions}


SPELLINGS = {
    "nnx.LoRALinear": ("/kernel", "/lora/lora_a", "/lora/lora_b"),
    "nnx.LoRA": ("/base_module/kernel", "/lora_a", "/lora_b"),
    "qwix": ("/kernel", "/kernel_lora_a", "/kernel_lora_b"),
    "arrays": ("", "_lora_a", "_lora_b"),
    "a module": ("/kernel", "/lora/a", "/lora/b"),
    "modules": ("/kernel", "/lora_down/kernel", "/lora_up/kernel"),
    "around a layer": ("/Dense_0/kernel", "/lora_a/kernel", "/lora_b/kernel"),
    "a module beside it": ("/kernel", "_lora/down/kernel", "_lora/up/kernel"),
    "letters": ("/kernel", "/A", "/B"),
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("stack", [(), (LAYERS,)], ids=["alone", "stacked"])
def test_factors_follow_their_weight(spelling, stack):
    """A its input, B its output; the rank is never sharded."""
    weight, first, second = spelling
    shapes, expected = {"norm/scale": (*stack, WIDTH)}, {"norm/scale": None}
    for name, (inner, outer) in WEIGHTS.items():
        shapes[name + weight] = (*stack, inner, outer)
        shapes[name + first], shapes[name + second] = (*stack, inner, RANK), (*stack, RANK, outer)
        lead, row = len(stack), name in ROWS
        expected[name + weight] = lead if row else lead + 1
        expected[name + first] = lead if row else None
        expected[name + second] = None if row else lead + 1
    assert dims_of(shapes) == expected


@pytest.mark.parametrize(
    ("collection", "first", "second"),
    [("lora_params", "lora_a", "lora_b"), ("lora", "a", "b")],
)
def test_factors_in_a_collection_of_their_own(collection, first, second):
    """Linen keeps what is trained apart from what is frozen in collections."""
    shapes, expected = {"params/norm/scale": (WIDTH,)}, {"params/norm/scale": None}
    for name, (inner, outer) in WEIGHTS.items():
        row = name in ROWS
        shapes[f"params/{name}/kernel"] = (inner, outer)
        shapes[f"{collection}/{name}/{first}"] = (inner, RANK)
        shapes[f"{collection}/{name}/{second}"] = (RANK, outer)
        expected[f"params/{name}/kernel"] = 0 if row else 1
        expected[f"{collection}/{name}/{first}"] = 0 if row else None
        expected[f"{collection}/{name}/{second}"] = None if row else 1
    assert dims_of(shapes) == expected


def test_factors_of_an_einsum_that_has_its_heads_first():
    """Gemma's `NDH` and `CKDH`: the input lies between the heads and their width."""
    shapes = {
        "norm/scale": (WIDTH,),
        "attn/q_einsum/w": (8, WIDTH, 16),
        "attn/q_einsum/w_lora_a": (WIDTH, RANK),
        "attn/q_einsum/w_lora_b": (RANK, 8, 16),
        "attn/kv_einsum/w": (2, 4, WIDTH, 16),
        "attn/kv_einsum/w_lora_a": (WIDTH, RANK),
        "attn/kv_einsum/w_lora_b": (RANK, 2, 4, 16),
        "attn/attn_vec_einsum/w": (8, 16, WIDTH),
    }
    expected = [None, 0, None, 1, 1, None, 2, 0]
    assert dims_of(shapes) == dict(zip(shapes, expected, strict=True))


def test_factors_that_are_no_adapter_of_their_module_are_no_mlp():
    """A rank is never sharded, whatever the module is called."""
    shapes = {
        "mlp/up_proj/kernel": (WIDTH, HIDDEN),
        "mlp/up_proj/hada_w1_a": (WIDTH, 4),
        "mlp/up_proj/hada_w1_b": (4, HIDDEN),
        "mlp/down_proj/kernel": (HIDDEN, WIDTH),
    }
    assert dims_of(shapes) == dict(zip(shapes, [1, None, None, 0], strict=True))


def test_torch_order_and_magnitudes():
    """PEFT's own names: kernels, A and B turned, and DoRA's vector as long as the output."""
    shapes, expected = {"norm/scale": (WIDTH,)}, {"norm/scale": None}
    for name, (inner, outer) in WEIGHTS.items():
        row = name in ROWS
        for path, shape, dim in (
            ("base_layer/weight", (outer, inner), int(row)),
            ("lora_A/default/weight", (RANK, inner), 1 if row else None),
            ("lora_B/default/weight", (outer, RANK), None if row else 0),
            ("lora_magnitude_vector/default/weight", (outer,), None if row else 0),
        ):
            shapes[f"{name}/{path}"], expected[f"{name}/{path}"] = shape, dim
    assert dims_of(shapes) == expected


def test_factors_of_kernels_with_heads_and_of_experts():
    shapes = {
        "attn/query/kernel": (WIDTH, 8, 16),
        "attn/query/kernel_lora_a": (WIDTH, RANK),
        "attn/query/kernel_lora_b": (RANK, 8, 16),
        "attn/key/kernel": (WIDTH, 4, 16),
        "attn/key/kernel_lora_a": (WIDTH, RANK),
        "attn/key/kernel_lora_b": (RANK, 4 * 16),  # heads and width in one dim
        "attn/value/kernel": (WIDTH, 4, 16),
        "attn/out/kernel": (8, 16, WIDTH),
        "attn/out/kernel_lora_a": (8, 16, RANK),
        "attn/out/kernel_lora_b": (RANK, WIDTH),
        "moe/router/kernel": (WIDTH, EXPERTS),
        "moe/experts/up_proj/kernel": (EXPERTS, WIDTH, HIDDEN),
        "moe/experts/up_proj/lora_a": (EXPERTS, WIDTH, RANK),
        "moe/experts/up_proj/lora_b": (EXPERTS, RANK, HIDDEN),
        "moe/experts/down_proj/kernel": (EXPERTS, HIDDEN, WIDTH),
        "moe/experts/down_proj/lora_a": (EXPERTS, HIDDEN, RANK),
        "moe/experts/down_proj/lora_b": (EXPERTS, RANK, WIDTH),
    }
    expected = [1, None, 1, 1, None, 1, 1, 0, 0, None, None, *[0] * 6]
    assert dims_of(shapes) == dict(zip(shapes, expected, strict=True))


@pytest.mark.parametrize("blocks", [True, False], ids=["by block", "by channel"])
@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        ("kernel/array/qvalue", "kernel/array/scale"),
        ("kernel", "kernel_scale"),
        ("w", "zeros"),
        ("AqtDotGeneral_0/qrhs/frozen/qvalue", "AqtDotGeneral_0/qrhs/frozen/scale/0"),
    ],
)
def test_scales_follow_the_blocks_of_their_weight(weight, scale, blocks):
    shapes, expected = {"norm/scale": (WIDTH,)}, {"norm/scale": None}
    for name, (inner, outer) in WEIGHTS.items():
        dim = 0 if name in ROWS else 1
        shapes[f"{name}/{weight}"], expected[f"{name}/{weight}"] = (inner, outer), dim
        shapes[f"{name}/{scale}"] = (inner // BLOCK if blocks else 1, outer)
        expected[f"{name}/{scale}"] = dim if blocks or dim == 1 else None
    assert dims_of(shapes) == expected


def test_bytes_in_one_row_are_no_matrix():
    """NF4 as bitsandbytes packs it: two matrices as long as each other are no pair."""
    shapes = {f"mlp/{name}/weight": (8192, 1) for name in ("up_proj", "down_proj")}
    assert set(dims_of(shapes).values()) == {None}


def test_a_block_of_a_scale_is_a_unit():
    """Three blocks of 128 on tp 4: the pair stays together, and no block is divided."""
    shapes = {
        "up/kernel": (64, 384),
        "down/kernel": (384, 64),
        "down/kernel_scale": (3, 64),
    }
    assert set(dims_of(shapes).values()) == {None}
    assert dims_of({**shapes, "down/kernel_scale": (4, 64)})["down/kernel"] == 0


# ------------------------------------------------------------ by dataflow


def product(w, x):
    """`x W` with the adapter that `w` may hold, from weights in blocks of int8 or plain ones."""
    kernel = w["w"]
    if "s" in w:
        rows = kernel.reshape(len(w["s"]), -1, kernel.shape[1]).astype(x.dtype)
        kernel = (rows * w["s"][:, None]).reshape(kernel.shape)
    y = x @ kernel
    return y + (x @ w["a"] @ w["b"]) * 2 if "a" in w else y


def forward(params, x):
    """MLP blocks after a projection of the residual stream to itself; nothing tells them apart."""

    def layer(x, w):
        x = x + product(w["t"], x)
        return x + product(w["u"], jax.nn.gelu(product(w["v"], x))), None

    return jax.lax.scan(layer, x, params)[0]


def tree(adapters=True, quantised=False, width=WIDTH, hidden=HIDDEN):
    def one(inner, outer):
        dtype = jnp.int8 if quantised else jnp.bfloat16
        w = {"w": jax.ShapeDtypeStruct((LAYERS, inner, outer), dtype)}
        if quantised:
            w["s"] = jax.ShapeDtypeStruct((LAYERS, inner // BLOCK, outer), jnp.bfloat16)
        if adapters:
            w["a"] = jax.ShapeDtypeStruct((LAYERS, inner, RANK), jnp.bfloat16)
            w["b"] = jax.ShapeDtypeStruct((LAYERS, RANK, outer), jnp.bfloat16)
        return w

    return {"t": one(width, width), "u": one(hidden, width), "v": one(width, hidden)}


@pytest.mark.parametrize("quantised", [False, True])
def test_the_dataflow_needs_no_names(quantised):
    x = jnp.ones((2, 4, WIDTH), jnp.bfloat16)
    plan = jaxtp.make_plan(tree(quantised=quantised), {"tp": 4}, fn=forward, inputs=(x,))
    found = {d.path: d.dim_on(plan.mesh.tp) for d in plan.decisions}
    scales = {"t/s": None, "u/s": 1, "v/s": 2} if quantised else {}
    assert found == {
        **{"t/w": None, "t/a": None, "t/b": None},  # no rank is split for want of another dim
        **{"u/w": 1, "u/a": 1, "u/b": None},
        **{"v/w": 2, "v/a": None, "v/b": 2},
        **scales,
    }


def collectives(params, width):
    """Collectives of a compiled GPU program by direction: a step that trains the adapters alone."""
    x = jax.ShapeDtypeStruct((4, 32, width), jnp.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = jaxtp.make_plan(params, {"tp": 4}, fn=forward, inputs=(x,))
    mesh = abstract_mesh(plan.mesh)

    def placed(path, leaf):
        spec = plan["/".join(key.key for key in path)].partition_spec
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree_util.tree_map_with_path(placed, params)
    x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))
    base = {k: {n: v for n, v in w.items() if n not in "ab"} for k, w in params.items()}
    adapters = {k: {n: v for n, v in w.items() if n in "ab"} for k, w in params.items()}

    def loss(adapters, x, base):
        whole = {k: base[k] | adapters[k] for k in base}
        return jnp.sum(forward(whole, x).astype(jnp.float32) ** 2)

    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    report = jaxtp.preflight(step, (adapters, x, base), target="h100:1x4")
    return [
        (row.backward, row.kind, row.count, row.num_bytes)
        for row in sorted(report.collectives, key=lambda row: row.backward)
    ]


def test_an_adapter_adds_no_collective():
    """What it sums joins the all-reduces that the weights have, forward and backward."""
    width = 256
    without = collectives(tree(adapters=False, width=width, hidden=1024), width)
    with_adapters = collectives(tree(width=width, hidden=1024), width)
    assert [row[:3] for row in with_adapters] == [row[:3] for row in without]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.LoRALinear(WIDTH, HIDDEN, lora_rank=RANK, rngs=rngs)
        self.down = nnx.LoRALinear(HIDDEN, WIDTH, lora_rank=RANK, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


def test_names_and_dataflow_agree_on_flax_adapters():
    model = nnx.eval_shape(lambda: Block(nnx.Rngs(0)))
    by_names = jaxtp.make_plan(model, {"tp": 4})
    by_dataflow = jaxtp.make_plan(model, {"tp": 4}, inputs=(jnp.ones((2, 4, WIDTH)),))
    assert by_names.specs() == by_dataflow.specs()
    assert not [note for note in by_dataflow.notes if "overrules" in note]
