"""What the legs on published models share: a model as data, and the three comparisons.

Models are used as their authors publish them. `tests/data/zoo` holds what experts say about each:
a label for every parameter, and for some models a plan that somebody published.
"""

import dataclasses
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.compile.deviceless import preflight
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import abstract_mesh

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_plan

LABELS = Path(__file__).parents[1] / "data" / "zoo"
TINY = {
    "hidden_size": 64,
    "num_heads": 8,
    "head_dim": 8,
    "intermediate_size": 128,
    "vocab_size": 1024,
}
"""Sizes of the models that are run; key heads stay one, fewer than query heads, or as many."""

SAME_WORK = 1.1
"""A plan within this of another's FLOPs per device splits as much work."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A model by others.

    Attributes:
        call: Parameters by path, then the inputs -> an array.
        params: Shapes by path.
        inputs: Arrays, or structs, batch first.
    """

    call: Callable[..., Any]
    params: Mapping[str, Any]
    inputs: tuple[Any, ...]


def labels(tree: str) -> dict[str, Any]:
    """What experts say about a tree."""
    return json.loads((LABELS / f"{tree}.json").read_text())


def tiny(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a model of the same kind that runs in a second."""
    heads, kv = config["num_heads"], config.get("num_kv_heads")
    small = TINY | {"num_kv_heads": 1 if kv == 1 else 4 if kv != heads else 8}
    return {**config, **{name: size for name, size in small.items() if config.get(name)}}


def verdicts_on_scrambled(model: Published, tree: Mapping[str, Any], tp: int) -> Counter[str]:
    """Verdicts on a plan read from dataflow alone: every name is replaced by a random one.

    Only parameters that the traced call reaches count; about others nobody can say anything.
    """
    draw = random.Random(0)
    names = {f"{draw.getrandbits(64):016x}": path for path in model.params}

    def call(flat: Mapping[str, Any], *inputs: Any) -> Any:
        return model.call({names[key]: leaf for key, leaf in flat.items()}, *inputs)

    params = {key: model.params[path] for key, path in names.items()}
    plan = jaxtp.make_plan(params, {"tp": tp}, fn=call, inputs=model.inputs)
    groups: defaultdict[str, set[int]] = defaultdict(set)
    for label in tree["expected"].values():
        if label.get("group") and label.get("units"):
            groups[label["group"]].add(label["units"])
    found: Counter[str] = Counter()
    for decision in plan.decisions:
        if any(reason.startswith("dataflow") for reason in decision.reasons):
            label = tree["expected"][names[decision.path]]
            siblings = groups[label.get("group", "")]
            found[bench_plan.verdict(decision, label, siblings, dict(plan.mesh.sizes))] += 1
    return found


def labelled_specs(tree: Mapping[str, Any], tp: int) -> dict[str, P]:
    """The plan of the labels, for groups whose units divide."""

    def spec(path: str) -> P:
        label = tree["expected"][path]
        fused = "contiguous" in label.get("layout", "")
        whole = label["dim"] is None or fused or (label.get("units") or tp) % tp
        return P() if whole else P(*[None] * label["dim"], "tp")

    return {path: spec(path) for path in tree["params"]}


def published_specs(tree: Mapping[str, Any], tp: int) -> dict[str, P]:
    """The published plan; an array that it shards where it does not divide is replicated."""

    def spec(path: str, shape: list[int]) -> P:
        entries = tree["expert_plan"][path]
        divides = all(size % tp == 0 for size, e in zip(shape, entries, strict=False) if e)
        return P(*entries) if divides else P()

    return {path: spec(path, shape) for path, shape in tree["params"].items()}


def same(plan: jaxtp.Plan, specs: Mapping[str, P]) -> bool:
    """Whether a plan says what an expert's specs say, on an axis in one piece."""
    return plan.mesh.tp == ("tp",) and all(
        tuple(axes == ("tp",) for axes in d.spec)
        == tuple(e == "tp" for e in (*specs[d.path], *[None] * len(d.shape))[: len(d.shape)])
        for d in plan.decisions
    )


def loss(call: Callable[..., Any]) -> Callable[..., Any]:
    """A number that every output takes part in."""
    return lambda params, *inputs: (call(params, *inputs).astype(jnp.float32) ** 2).mean()


def compiled(
    model: Published, call: Callable[..., Any], shape: MeshShape, specs: Mapping[str, P]
) -> Any:
    """The report of loss and gradients on as many H100 as the mesh has."""
    mesh = abstract_mesh(shape)
    places = {path: NamedSharding(mesh, specs[path]) for path in model.params}
    params = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places[path])
        for path, leaf in model.params.items()
    }
    everywhere = NamedSharding(mesh, P())
    inputs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), model.inputs
    )
    step = jax.jit(jax.value_and_grad(loss(call)), out_shardings=(None, places))
    target = f"h100:1x{shape.num_devices}"
    return preflight(step, (params, *inputs), target=target, tensor_axes=shape.tp)


def check_against_expert(model: Published, tree: Mapping[str, Any], tp: int = 4) -> None:
    """The plan is that of the labels, or its program moves no more than a published plan's.

    One that repeats work on every device to move less is no rival.
    """
    plan = jaxtp.make_plan(dict(model.params), {"tp": tp}, fn=model.call, inputs=model.inputs)
    labelled = labelled_specs(tree, tp)
    if same(plan, labelled):
        return
    specs = published_specs(tree, tp) if tree.get("expert_plan") else labelled
    call = jaxtp.parallelize(model.call, plan, abstract_mesh(plan.mesh))
    ours = compiled(model, call, plan.mesh, plan.specs())
    theirs = compiled(model, model.call, MeshShape.of({"tp": tp}), specs)
    repeats_work = theirs.flops_per_device > SAME_WORK * ours.flops_per_device
    assert ours.wire_bytes <= theirs.wire_bytes or repeats_work


def check_sharded_is_unsharded(
    model: Published, overlap: Literal["auto", "aggressive"] = "auto"
) -> None:
    """Loss and gradients on 2 x 4 simulated devices are those of one device.

    As in `jaxtp.verify`, an array may differ by half of float32's digits, relative to its largest
    element or a hundredth of the largest of all: a key bias has no gradient but rounding, since
    softmax ignores it.
    """
    draw = np.random.default_rng(0)
    params = {
        path: jnp.asarray(draw.normal(size=leaf.shape) / 5, leaf.dtype)
        for path, leaf in model.params.items()
    }
    mesh = jaxtp.make_mesh(dp=2, tp=4)
    plan = jaxtp.make_plan(params, mesh, fn=model.call, inputs=model.inputs)
    assert any(d.dim_on(plan.mesh.tp) is not None for d in plan.decisions)
    fn = jaxtp.parallelize(model.call, plan, mesh, overlap=overlap)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(jax.value_and_grad(loss(model.call)))(params, *model.inputs)
        got = jax.jit(jax.value_and_grad(loss(fn)))(
            jaxtp.shard(params, mesh, plan=plan), *jaxtp.shard_batch(model.inputs, mesh)
        )
    least = max(np.abs(x).max() for x in jax.tree.leaves(want[1])) / 100
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True
    ):
        assert np.isfinite(x).all(), path
        allowed = np.finfo(np.float32).eps ** 0.5 * max(np.abs(x).max(), least)
        assert np.abs(np.asarray(x) - np.asarray(y)).max() <= allowed, path
