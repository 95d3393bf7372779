"""Models that nobody wrote for jaxtp, at the widths of Llama-3-8B, for `bench_comm.py`.

    linen_scan    Flax Linen, `nn.scan` over its layers
    nnx_loop      Flax NNX, one layer after the other
    transformers  FlaxLlamaForCausalLM of transformers, unmodified, where that can be imported

None knows a mesh or names an activation. Attention of the first two is cuDNN's, that of the third
its own.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tables import Cell, Section

import jaxtp
from jaxtp.compile.deviceless import preflight
from jaxtp.compile.options import compile_options
from jaxtp.compile.report import Report
from jaxtp.cost.bound import Need
from jaxtp.cost.floor import floor_bytes
from jaxtp.hardware.links import GIB
from jaxtp.train.attention import has_cudnn

Overlap = Literal["auto", "aggressive"]

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, LAYERS = 4096, 32, 8, 128, 14336, 32000, 32
DTYPE = jnp.bfloat16


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention by the kernel that can be compiled here."""
    kernel = "cudnn" if has_cudnn() else "xla"
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """In float32, as most models have it."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * scale.astype(x.dtype)


class LinenBlock(nn.Module):
    """Attention and gated MLP."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        """The residual stream (batch, seq, width) behind it."""
        dense = functools.partial(nn.Dense, use_bias=False, dtype=DTYPE)
        one = nn.initializers.ones
        h = rms_norm(x, self.param("before", one, (WIDTH,)))
        wide = {"one": HEADS, "two": KV_HEADS, "three": KV_HEADS}
        q, k, v = (
            dense(num * HEAD_DIM, name=name)(h).reshape(*x.shape[:2], num, HEAD_DIM)
            for name, num in wide.items()
        )
        x = x + dense(WIDTH, name="four")(attend(q, k, v).reshape(*x.shape[:2], -1))
        h = rms_norm(x, self.param("between", one, (WIDTH,)))
        inner = nn.silu(dense(INNER, name="five")(h)) * dense(INNER, name="six")(h)
        return x + dense(WIDTH, name="seven")(inner), None


class LinenModel(nn.Module):
    """Token ids (batch, seq) -> logits (batch, seq, vocab)."""

    num_layers: int

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        """Logits."""
        x = nn.Embed(VOCAB, WIDTH, dtype=DTYPE, name="table")(ids)
        loop = nn.scan(
            LinenBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.num_layers,
        )
        x, _ = loop(name="layers")(x, None)
        x = rms_norm(x, self.param("after", nn.initializers.ones, (WIDTH,)))
        return nn.Dense(VOCAB, use_bias=False, dtype=DTYPE, name="out")(x)


class NnxBlock(nnx.Module):
    """Attention and gated MLP."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=DTYPE, rngs=rngs)
        self.before, self.between = (nnx.RMSNorm(WIDTH, dtype=DTYPE, rngs=rngs) for _ in range(2))
        self.ask = linear(WIDTH, HEADS * HEAD_DIM)
        self.key, self.value = (linear(WIDTH, KV_HEADS * HEAD_DIM) for _ in range(2))
        self.mix = linear(HEADS * HEAD_DIM, WIDTH)
        self.gate, self.up = linear(WIDTH, INNER), linear(WIDTH, INNER)
        self.down = linear(INNER, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The residual stream (batch, seq, width) behind it."""
        h = self.before(x)
        q, k, v = (
            one(h).reshape(*x.shape[:2], -1, HEAD_DIM) for one in (self.ask, self.key, self.value)
        )
        x = x + self.mix(attend(q, k, v).reshape(*x.shape[:2], -1))
        h = self.between(x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


class NnxModel(nnx.Module):
    """Token ids (batch, seq) -> logits (batch, seq, vocab)."""

    def __init__(self, num_layers: int, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(VOCAB, WIDTH, dtype=DTYPE, rngs=rngs)
        self.layers = nnx.List([NnxBlock(rngs) for _ in range(num_layers)])
        self.after = nnx.RMSNorm(WIDTH, dtype=DTYPE, rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCAB, use_bias=False, dtype=DTYPE, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Logits."""
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.after(x))


Apply = Callable[[Any, jax.Array], jax.Array]


def linen_scan(num_layers: int, tokens: Any) -> tuple[Apply, Any]:
    """Logits of parameters and ids, and the parameters as structs."""
    model = LinenModel(num_layers)
    return model.apply, jax.eval_shape(model.init, jax.random.key(0), tokens)  # pyright: ignore


def nnx_loop(num_layers: int, _tokens: Any) -> tuple[Apply, Any]:
    """As `linen_scan`."""
    graph, params = nnx.split(nnx.eval_shape(lambda: NnxModel(num_layers, nnx.Rngs(0))))

    def apply(params: Any, ids: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(ids)

    return apply, params


def published(num_layers: int, tokens: Any) -> tuple[Apply, Any]:
    """As `linen_scan`."""
    import transformers  # pyright: ignore

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=tokens.shape[1],
    )
    model = transformers.FlaxLlamaForCausalLM(config, dtype=DTYPE, _do_init=False)

    def apply(params: Any, ids: jax.Array) -> jax.Array:
        return model(ids, params=params)[0]

    return apply, dict(model.params_shape_tree)


MODELS: Mapping[str, Callable[[int, Any], tuple[Apply, Any]]] = {
    "linen_scan": linen_scan,
    "nnx_loop": nnx_loop,
    "transformers": published,
}


def step(mesh: Mesh, model: str, num_layers: int, batch: int, seq: int, overlap: Overlap) -> Any:
    """Loss and gradients, jitted, and abstract arguments: an entry of `preflight`."""
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    apply, params = MODELS[model](num_layers, tokens)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, DTYPE), params)
    plan = jaxtp.make_plan(params, mesh, fn=apply, inputs=(tokens,))

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        logits = apply(params, ids).astype(jnp.float32)
        hit = jnp.arange(VOCAB)[None, None] == ids[..., None]
        return (jax.nn.logsumexp(logits, -1) - jnp.where(hit, logits, 0).sum(-1)).mean()

    placed = jaxtp.shard(params, mesh, plan=plan)
    places = jax.tree.map(lambda leaf: leaf.sharding, placed)
    own = jax.tree.leaves(places)[0].mesh
    ids = jax.ShapeDtypeStruct(
        tokens.shape, tokens.dtype, sharding=NamedSharding(own, PartitionSpec(plan.mesh.batch))
    )
    fn = jaxtp.parallelize(loss, plan, mesh, overlap=overlap)
    return jax.jit(jax.value_and_grad(fn), out_shardings=(None, places)), (placed, ids)


MOST_TIME, MOST_WIRE = 1.08, 1.02
"""Of an `aggressive` step, over the longest of its work and its link, and over the floor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One model on hosts of eight H100; batch in sequences, seq in tokens, for each host.

    `limit` is of an `aggressive` step over the longest of its work and its links.
    """

    model: str
    batch: int = 4
    seq: int = 4096
    num_layers: int = LAYERS
    fsdp: int = 1
    tp: int = 8
    limit: float = MOST_TIME

    @property
    def sizes(self) -> dict[str, int]:
        """Of the mesh's axes."""
        return {"fsdp": self.fsdp, "tp": self.tp} if self.fsdp > 1 else {"tp": self.tp}

    @property
    def hosts(self) -> int:
        """Of eight GPUs."""
        return self.fsdp * self.tp // 8

    @property
    def mesh(self) -> str:
        """Its axes and devices, for people."""
        axes = " x ".join(f"{name} {size}" for name, size in self.sizes.items() if size > 1)
        return f"{axes}, h100:{self.hosts}x8"

    def report(self, overlap: Overlap) -> Report:
        """Of its step."""
        item = jnp.dtype(DTYPE).itemsize
        message = self.batch * self.seq * WIDTH * item
        needs: list[Need] = []
        if self.tp > 1:
            # Four all-reduces a layer, and one of the table and of the head each.
            count = 4 * self.num_layers + 2
            needs.append(Need(kind="all-reduce", axes=("tp",), num_bytes=message, count=count))
        if self.fsdp > 1:
            heads = 2 * (HEADS + KV_HEADS) * HEAD_DIM
            layer, table = (WIDTH * n * item / self.tp for n in (heads + 3 * INNER, VOCAB))
            # A layer is gathered once each way, a table once; each gradient is reduced once.
            for kind, size, count in (
                ("all-gather", layer, 2 * self.num_layers),
                ("reduce-scatter", layer, self.num_layers),
                ("all-gather", table, 2),
                ("reduce-scatter", table, 2),
            ):
                needs.append(Need(kind=kind, axes=("fsdp",), num_bytes=size, count=count))
        sizes = {"batch": self.batch * self.hosts, "seq": self.seq, "num_layers": self.num_layers}
        return preflight(
            "comm_others:step",
            target=f"h100:{self.hosts}x8",
            mesh=self.sizes,
            keywords={"model": self.model, **sizes, "overlap": overlap},
            options=compile_options(overlap=overlap),
            floor_bytes=floor_bytes(size=self.tp, message_bytes=message, layers=self.num_layers),
            needs=needs,
        )


CASES = (
    Case(model="linen_scan"),
    Case(model="linen_scan", fsdp=8, limit=1.12),
    Case(model="nnx_loop"),
    Case(model="nnx_loop", fsdp=8, limit=1.12),
    # Its own attention holds every score.
    Case(model="transformers", batch=8, seq=2048),
)


def over_longest(report: Report) -> float:
    """A step over the longest of all its work, elementwise included, and its link's need."""
    exposed = sum(link.exposed_seconds for link in report.links)
    seconds = report.step_seconds_modelled
    return seconds / max(seconds - exposed, report.bound_seconds or 0.0)


def section() -> Section:
    """Steps of models not ours over their bound, by default and by `aggressive`."""
    rows: list[dict[str, Cell]] = []
    thresholds: list[tuple[str, bool]] = []
    found = [c for c in CASES if c.model != "transformers" or find_spec("transformers")]
    for case in found:
        for overlap in ("auto", "aggressive"):
            report = case.report(overlap)
            exposed = sum(link.exposed_seconds for link in report.links)
            seconds, products = report.step_seconds_modelled, report.product_seconds
            ratio, wire = over_longest(report), report.ratio or 0.0
            rows.append(
                {
                    "model": case.model,
                    "mesh": case.mesh,
                    "batch": f"{case.batch} x {case.seq}",
                    "overlap": overlap,
                    "ms": round(seconds * 1e3, 1),
                    "products": round(products * 1e3, 1),
                    "other work": round((seconds - exposed - products) * 1e3, 1),
                    "exposed": round(exposed * 1e3, 1),
                    "hidden": f"{report.hidden_share:.1%}",
                    "x floor": round(wire, 4),
                    "products + exposed": round((products + exposed) / products, 3),
                    "x longest": round(ratio, 3),
                    "peak GiB": round(report.peak_bytes / GIB, 2),
                }
            )
        name = f"{case.model}, {case.mesh}"
        thresholds += [
            (f"{name}: at most {case.limit}x work or link: {ratio:.3f}x", ratio <= case.limit),
            (f"{name}: wire at most {MOST_WIRE}x the floor: {wire:.4f}x", wire <= MOST_WIRE),
        ]
    return Section(
        title=f"models not ours, unmodified, {LAYERS} layers, loss and gradients",
        rows=rows,
        thresholds=thresholds,
        notes=[
            "x longest: over the longest of all work, elementwise included, and the links' needs",
            "batch: of one host",
            "products + exposed: over the products alone",
            "transformers' FlaxLlamaForCausalLM where transformers can be imported, 4.x",
        ],
    )
