"""Writes the compiled texts beside this file with the real GPU compiler; needs no GPU.

    JAX_PLATFORMS=cpu python tests/data/hlo/make.py [PROGRAM ...]

Run it under each supported jax; one file is written per program and version. The program
`attention` also needs the package nvidia-cudnn-cu12, for its version number only.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtp.hardware.gpus import KINDS

HERE = Path(__file__).parent
BF16 = jnp.bfloat16
# What the minimal description leaves out; with it, jax 0.12 turns small all-reduces into kernels.
LINKS = "device_interconnect_info { active_links: 18 }"


def main() -> None:
    """Compile every program below and write its text."""
    wanted = sys.argv[1:]
    for name, (build, sizes, options, config) in PROGRAMS.items():
        if wanted and name not in wanted:
            continue
        topology = topologies.get_topology_desc(
            platform="cuda", topology="1x1x8", target_config=config
        )
        devices = np.array(topology.devices).reshape(sizes)
        auto = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.sharding.Mesh(devices, ("dp", "tp"), axis_types=auto)
        fn, shapes = build(mesh)
        args = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
            for shape, dtype, spec in shapes
        ]
        options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0, **options}
        text = jax.jit(fn).lower(*args).compile(options).as_text()
        text = text.replace(str(HERE), "tests/data/hlo")
        (HERE / f"{name}-{jax.__version__}.txt").write_text(text)
        sys.stdout.write(f"{name}: {len(text)} characters\n")


def keep(mesh, x, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


BUSY = (((4096, 2048), BF16, P()), ((2048, 4096), BF16, P()))


def independent(a, b):
    """Products that wait for nothing: what a window may hold. Each needs its own operand."""
    return [(a * scale) @ b for scale in range(1, 6)]


def row_product(mesh):
    """A row-parallel product and an independent one: an asynchronous all-reduce with a window."""

    def fn(x, w, *busy):
        return keep(mesh, x @ w), independent(*busy)

    wide = ((1024, 4096), BF16, P(None, "tp"))
    return fn, [wide, ((4096, 1024), BF16, P("tp")), *BUSY]


def gathered(mesh):
    """Two weights gathered over dp beside another product: one all-gather with tuple results."""

    def fn(x, w, v, *busy):
        return keep(mesh, x @ w, "dp") + keep(mesh, x @ v, "dp"), independent(*busy)

    weight = ((1024, 1024), BF16, P("dp"))
    return fn, [((256, 1024), BF16, P("dp")), weight, weight, *BUSY]


def scattered(mesh):
    """Sequence parallel entry and exit: all-gather, product, reduce-scatter."""

    def fn(x, w, v, *busy):
        return keep(mesh, keep(mesh, x, "dp") @ w @ v, ("dp", "tp")), independent(*busy)

    return fn, [
        ((2048, 1024), BF16, P(("dp", "tp"))),
        ((1024, 1024), BF16, P(None, "tp")),
        ((1024, 1024), BF16, P("tp")),
        *BUSY,
    ]


def manual(mesh):
    """Every collective that a program may write itself, and a branch."""

    def body(x, flags, *busy):
        x = lax.ppermute(x, "tp", [(i, (i + 1) % 4) for i in range(4)])
        x = lax.all_to_all(x, "tp", split_axis=0, concat_axis=1, tiled=True)
        x = lax.psum_scatter(x, "dp", scatter_dimension=0, tiled=True)
        x = lax.all_gather(x, "dp", axis=0, tiled=True)
        x = lax.psum(x, ("dp", "tp"))
        x = lax.cond(flags[0] > 0, lambda a: lax.psum(a, "tp"), lambda a: a * 4, x)
        return x, independent(*busy)

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P("dp", "tp"), P(), P(), P()), out_specs=P(), check_vma=False
    )
    return mapped, [((512, 1024), BF16, P("dp", "tp")), ((1,), jnp.int32, P()), *BUSY]


def attention(mesh):
    """Causal cuDNN attention with grouped kv heads, forward and backward."""

    def loss(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return jnp.sum(out.astype(jnp.float32))

    heads = P("dp", None, "tp")
    shapes = [((2, 1024, n, 128), BF16, heads) for n in (64, 8, 8)]
    return jax.grad(loss, argnums=(0, 1, 2)), shapes


def layers(mesh):
    """A scan over 5 layers inside a loop of unknown length."""

    def layer(x, w):
        return keep(mesh, jnp.tanh(x @ w[0]) @ w[1], "dp"), None

    def fn(x, w, steps):
        def more(state):
            return state[0] < steps[0]

        def once(state):
            return state[0] + 1, lax.scan(layer, state[1], w)[0]

        return lax.while_loop(more, once, (0, x))[1]

    return fn, [
        ((512, 1024), BF16, P("dp")),
        ((5, 2, 1024, 1024), BF16, P(None, None, None, "tp")),
        ((1,), jnp.int32, P()),
    ]


def embedding(mesh):
    """A vocab-parallel embedding: its all-reduce runs over a mesh with its own device order."""

    def fn(table, tokens):
        return keep(mesh, table.astype(BF16)[tokens], "dp")

    return fn, [((8192, 1024), jnp.float32, P("tp")), ((8, 512), jnp.int32, P("dp"))]


def gradients(mesh):
    """Data-parallel gradients of several weights: what the combiner makes of them."""

    def loss(w, x):
        for one in w:
            x = jnp.tanh(x @ one)
        return jnp.mean(x.astype(jnp.float32))

    def fn(x, *w):
        return jax.grad(loss)(w, x)

    return fn, [((512, 512), BF16, P("dp"))] + [((512, 512), BF16, P())] * 4


H100 = KINDS["h100"].config
FULL = H100.replace("\n}\nplatform_name", f"\n  {LINKS}\n}}\nplatform_name")
SPLIT = {"xla_gpu_all_reduce_combine_threshold_bytes": 0}
OFF = {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"}
DOUBLE = {"xla_gpu_enable_while_loop_double_buffering": True}
PROGRAMS = {
    "row_product": (row_product, (1, 8), {}, H100),
    "row_product_kernel": (row_product, (1, 8), {}, FULL),
    "row_product_sync": (row_product, (1, 8), OFF, H100),
    "gathered": (gathered, (4, 2), {}, H100),
    "scattered": (scattered, (2, 4), {}, H100),
    "embedding": (embedding, (2, 4), {}, H100),
    "manual": (manual, (2, 4), {}, H100),
    "layers": (layers, (2, 4), {}, H100),
    "layers_double": (layers, (2, 4), DOUBLE, H100),
    "gradients": (gradients, (4, 2), {}, H100),
    "gradients_split": (gradients, (4, 2), SPLIT, H100),
    "attention": (attention, (1, 8), {}, H100),
}

if __name__ == "__main__":
    main()
