"""Agreement of the planner with expert labels, and its speed.

    python scripts/bench_plan.py TREES_DIR                # tp 2, 4 and 8; with and without sizes
    python scripts/bench_plan.py TREES_DIR --tp 8 --json
    python scripts/bench_plan.py --scale --trace

TREES_DIR holds shape listings (`jaxtp.dump_tree`) with an "expected" label for each path:

    {"role": "column", "dim": 1, "units": 8, "group": "layers/0/attn", "soft": true,
     "alternatives": [{"dim": null}], "layout": "fused qkv, contiguous"}

`dim` carries tp or is null; `units` are never divided; members of a `group` may all be as narrow as
the narrowest; `soft` may be replicated; a contiguous `layout` cannot be sharded as stored.
Verdicts:

    agree        the label's dim, as many ways as its units or its group allow
    acceptable   a listed alternative, fewer ways, replicated where soft or fused, or a fused array
                 stored to be taken apart at use
    missed       replicated although it could be sharded
    wrong        sharded where the label says replicated, on another dim, or through a fused array
    harmful      not divisible, or a unit divided

With `--scale`: an unrolled Llama 405B plans in under 1 s, 60 layers of 256 separate experts (about
46,000 arrays) in under 10 s, and the time per array does not grow. With `--trace`, where the plan
is read from the traced program: all 126 layers, one after the other, in under 20 s and 2 GB; as one
scanned layer in under 3 s; and the time per equation does not grow.
"""

import dataclasses
import json
import math
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.extend.core import subjaxprs
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxtp
from jaxtp.models import PRESETS, LlamaConfig, abstract
from jaxtp.models.llama import Llama, LlamaLayer
from jaxtp.plan import trees

VERDICTS = ("agree", "acceptable", "missed", "wrong", "harmful")
Label = Mapping[str, Any]
Flag = tyro.conf.FlagCreatePairsOff[bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Verdicts for one tree on one tensor size.

    Attributes:
        tree: Name of the listing.
        tp: Devices along the tensor axis.
        config: Whether the sizes beside the tree were used.
        counts: Arrays per verdict.
        num_bytes: Bytes per verdict, global.
        notes: What disagrees: (verdict, path, spec, reason).
    """

    tree: str
    tp: int
    config: bool
    counts: Mapping[str, int]
    num_bytes: Mapping[str, int]
    notes: Sequence[tuple[str, ...]] = ()

    @property
    def ok(self) -> float:
        """Share of arrays that agree or are acceptable."""
        return _share(self.counts)

    @property
    def ok_bytes(self) -> float:
        """Share of bytes that agree or are acceptable."""
        return _share(self.num_bytes)


def _share(counts: Mapping[str, int]) -> float:
    return (counts["agree"] + counts["acceptable"]) / max(1, sum(counts.values()))


def total(scores: Sequence[Score], name: str = "all trees") -> Score:
    """The sum of several scores."""
    first = scores[0]
    return Score(
        tree=name,
        tp=first.tp,
        config=first.config,
        counts={v: sum(s.counts[v] for s in scores) for v in VERDICTS},
        num_bytes={v: sum(s.num_bytes[v] for s in scores) for v in VERDICTS},
    )


def verdict(
    decision: jaxtp.ParamDecision, label: Label, siblings: set[int], sizes: Mapping[str, int]
) -> str:
    """What an expert thinks of one decision.

    Args:
        decision: The plan's.
        label: The expert's.
        siblings: Unit counts of the label's group.
        sizes: Devices per mesh axis.
    """
    tp = math.prod(sizes.values())
    cuts = [(d, math.prod(sizes[a] for a in axes)) for d, axes in enumerate(decision.spec) if axes]
    others = {a.get("dim") for a in label.get("alternatives", ())}
    fused = "contiguous" in label.get("layout", "")
    dim = label["dim"]
    units = label.get("units") or (1 if dim is None else decision.shape[dim])
    wide = {math.gcd(units, tp)} | {math.gcd(units, other, tp) for other in siblings}
    if any(decision.shape[d] % ways for d, ways in cuts):
        return "harmful"
    if not cuts:
        if dim is None or 1 in wide:
            return "agree"
        return "acceptable" if fused or label.get("soft") or None in others else "missed"
    (where, ways), *more = cuts
    if fused:
        return "acceptable" if decision.role == "fused" else "wrong"
    if more or where != dim:
        return "acceptable" if where in others and not more else "wrong"
    if units % ways:
        return "harmful"
    return "agree" if ways in wide else "acceptable"


def score(path: Path, tp: int, *, use_config: bool) -> Score:
    """Plans one listing and compares it with its labels."""
    tree, config = jaxtp.load_tree(path)
    labels: dict[str, Label] = json.loads(path.read_text())["expected"]
    groups: defaultdict[str, set[int]] = defaultdict(set)
    for label in labels.values():
        if label.get("group") and label.get("units"):
            groups[label["group"]].add(label["units"])
    plan = jaxtp.make_plan(tree, {"tp": tp}, config=config if use_config else None)
    counts, num_bytes = dict.fromkeys(VERDICTS, 0), dict.fromkeys(VERDICTS, 0)
    notes: list[tuple[str, ...]] = []
    for d in plan.decisions:
        label = labels[d.path]
        found = verdict(d, label, groups[label.get("group", "")], dict(plan.mesh.sizes))
        counts[found] += 1
        num_bytes[found] += d.num_bytes
        if found not in VERDICTS[:2]:
            notes.append((found, d.path, str(d.partition_spec), d.reasons[-1]))
    return Score(
        tree=path.stem, tp=tp, config=use_config, counts=counts, num_bytes=num_bytes, notes=notes
    )


def table(scores: Sequence[Score], tp: int) -> Table:
    """One row a tree: verdict counts and shares that are ok, with the sizes known, then without."""
    half = ("arrays", "ok", "bytes ok")
    title = f"tp={tp}: arrays that are {'/'.join(VERDICTS)}; with the tree's sizes, then without"
    shown = Table("tree", "arrays", "MB", *half, *half, title=title, box=box.SIMPLE)
    for column in shown.columns:
        column.no_wrap = True
    by_tree: defaultdict[str, list[Score]] = defaultdict(list)
    for s in scores:
        by_tree[s.tree].append(s)
    for use in (True, False):
        by_tree["all trees"].append(total([s for s in scores if s.config is use]))
    for name, pair in by_tree.items():
        num_bytes = sum(pair[0].num_bytes.values())
        cells = [name, str(sum(pair[0].counts.values())), f"{num_bytes / 1e6:,.0f}"]
        for s in pair:
            cells += ["/".join(map(str, s.counts.values())), f"{s.ok:.1%}", f"{s.ok_bytes:.1%}"]
        shown.add_row(*cells)
    return shown


def llama(layers: int) -> dict[str, tuple[int, ...]]:
    """Llama 3.1 405B with one set of kernels per layer."""
    d, f, heads, kv = 16384, 53248, 16384, 1024
    block = {
        "self_attn/q_proj/kernel": (d, heads),
        "self_attn/k_proj/kernel": (d, kv),
        "self_attn/v_proj/kernel": (d, kv),
        "self_attn/o_proj/kernel": (heads, d),
        "mlp/gate_proj/kernel": (d, f),
        "mlp/up_proj/kernel": (d, f),
        "mlp/down_proj/kernel": (f, d),
        "input_layernorm/scale": (d,),
        "post_attention_layernorm/scale": (d,),
    }
    return _model(d, layers, block)


def experts(layers: int, num_experts: int = 256) -> dict[str, tuple[int, ...]]:
    """A mixture of experts with separate kernels for each expert."""
    d, f = 2048, 1024
    block: dict[str, tuple[int, ...]] = {
        f"self_attn/{n}_proj/kernel": (d, d) for n in ("q", "k", "v", "o")
    }
    block |= {"mlp/gate/kernel": (d, num_experts), "input_layernorm/scale": (d,)}
    for e in range(num_experts):
        block |= {f"mlp/experts/{e}/{w}/kernel": (d, f) for w in ("w1", "w3")}
        block[f"mlp/experts/{e}/w2/kernel"] = (f, d)
    return _model(d, layers, block)


def _model(
    width: int, layers: int, block: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    tree = {"embed_tokens/embedding": (128256, width), "lm_head/kernel": (width, 128256)}
    return tree | {f"layers/{i}/{p}": s for i in range(layers) for p, s in block.items()}


def scale_rows() -> Iterator[dict[str, Any]]:
    """Planning time of large trees, and at growing sizes."""
    cases = [
        ("llama 405B, unrolled", llama(126), {"num_attention_heads": 128, "head_dim": 128}),
        *(
            (f"{n} layers x 256 experts", experts(n), {"num_attention_heads": 16})
            for n in (4, 15, 60)
        ),
    ]
    for name, shapes, config in cases:
        tree = {p: jax.ShapeDtypeStruct(s, "bfloat16") for p, s in shapes.items()}
        start = time.perf_counter()
        jaxtp.make_plan(tree, {"tp": 8}, config=config)
        seconds = time.perf_counter() - start
        yield {"tree": name, "arrays": len(tree), "seconds": seconds}


class Unrolled(Llama):
    """The same model with one set of kernels per layer, called one after the other."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        super().__init__(dataclasses.replace(config, num_hidden_layers=1), rngs)
        layers = range(config.num_hidden_layers)
        self.layers = nnx.List([LlamaLayer(config, rngs, has_experts=False) for _ in layers])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits (batch, tokens, vocab)."""
        x, places = self.embed_tokens(tokens), jnp.arange(tokens.shape[1], dtype=jnp.float32)
        # What the angles are does not matter here, where nothing is computed.
        angles = jnp.broadcast_to(
            places[None, :, None], (1, len(places), self.config.head_dim // 2)
        )
        for layer in self.layers:
            x = layer(x, {"angles_BTH": angles, "segment_ids_BT": None})
        return self.logits(self.norm(x))


def trace_rows(depths: Sequence[int] = (16, 63, 126)) -> Iterator[dict[str, Any]]:
    """Tracing and planning of Llama 405B as one scan, and layer by layer at growing depth.

    Seconds of the one core that both take: a busy machine does not count.
    """
    tokens = jax.ShapeDtypeStruct((1, 8192), jnp.int32)
    config = PRESETS["llama3-405b"]
    assert isinstance(config, LlamaConfig)
    models: list[tuple[str, nnx.Module]] = [("scanned, 126 layers", abstract(config))]
    for layers in depths:
        deep = dataclasses.replace(config, num_hidden_layers=layers)
        model = nnx.eval_shape(lambda deep=deep: Unrolled(deep, nnx.Rngs(0)))
        models.append((f"unrolled, {layers} layers", model))
    for name, model in models:
        plain, rebuild = trees.as_pytree(model)
        start = time.process_time()
        call = jax.make_jaxpr(lambda tree, x, rebuild=rebuild: rebuild(tree)(x))
        program = call(plain, tokens)
        traced = time.process_time()
        jaxtp.make_plan(model, {"tp": 8}, inputs=(tokens,))
        yield {
            "tree": name,
            "equations": _equations(program.jaxpr),
            "trace_seconds": traced - start,
            "seconds": time.process_time() - traced,
            "peak_bytes": _peak_bytes(),
        }


def _equations(jaxpr: Any) -> int:
    """Equations of a program and of all programs inside it, each as often as it is called."""
    return len(jaxpr.eqns) + sum(map(_equations, subjaxprs(jaxpr)))


def _peak_bytes() -> int:
    """The most memory that this process has had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    trees: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="TREES_DIR")] = None
    """Folder of labelled listings."""

    tp: int | None = None
    """Devices along the tensor axis; default: 2, 4 and 8."""

    as_json: Annotated[Flag, tyro.conf.arg(name="json")] = False
    """Print JSON instead of tables."""

    scale: Flag = False
    """Time large trees."""

    trace: Flag = False
    """Time plans that are read from the traced program."""


def main(options: Options) -> None:
    """Prints agreement, planning times, or both."""
    console = Console(width=max(Console().width, 130))  # a pipe has 80 columns, too few
    result: dict[str, Any] = {}
    if options.trees is not None:
        tensor_sizes = [options.tp] if options.tp else [2, 4, 8]
        files = sorted(options.trees.glob("*.json"))
        jobs = [(tp, f, use) for tp in tensor_sizes for f in files for use in (True, False)]
        scores = [
            score(file, tp, use_config=use)
            for tp, file, use in track(
                jobs, "planning", console=Console(stderr=True), transient=True
            )
        ]
        result["agreement"] = [
            {**dataclasses.asdict(s), "ok": s.ok, "ok_bytes": s.ok_bytes} for s in scores
        ]
        for tp in tensor_sizes if not options.as_json else ():
            console.print(table([s for s in scores if s.tp == tp], tp))
        for s in scores if not options.as_json else ():
            for note in s.notes:
                console.print(f"{s.tree} tp={s.tp} sizes={s.config}: {' | '.join(note)}")
    if options.scale:
        result["scale"] = list(scale_rows())
        shown = Table("tree", "arrays", "seconds", "us per array", title="planning time, tp=8")
        for row in result["scale"]:
            each = row["seconds"] / row["arrays"] * 1e6
            shown.add_row(row["tree"], f"{row['arrays']:,}", f"{row['seconds']:.2f}", f"{each:.0f}")
        if not options.as_json:
            console.print(shown)
    if options.trace:
        result["trace"] = list(trace_rows())
        columns = ("llama 405B", "equations", "trace s", "trace and plan s", "us per equation")
        shown = Table(*columns, "peak GB", title="tracing and planning, tp=8")
        for row in result["trace"]:
            shown.add_row(
                row["tree"],
                f"{row['equations']:,}",
                f"{row['trace_seconds']:.2f}",
                f"{row['seconds']:.2f}",
                f"{row['seconds'] / row['equations'] * 1e6:.0f}",
                f"{row['peak_bytes'] / 1e9:.2f}",
            )
        if not options.as_json:
            console.print(shown)
    if options.as_json:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
