"""jaxtp's plans against other ways to make one, on models that know no mesh.

    python scripts/bench_peers.py
    python scripts/bench_peers.py --json --only "linen encoder" "gpt2, fused qkv"
    python scripts/bench_peers.py --parallax-python other/bin/python

Every plan is compiled by the real GPU compiler on the same step, loss and gradients in bf16 on
h100:1x8, and its program read: wire bytes per device, peak memory, FLOPs per device. The peers:

    expert    specs by hand (`peer_models.py`), on a factored mesh where heads need it
    parallax  google-parallax 0.0.2, on its axis of eight; see `peer_parallax.py`
    redco     the two rules of its paper (arXiv:2310.16355), as we know them; not its code
    largest   every array sharded along its largest dim that eight divides
    fsdp      the same, with the batch along the same axis: parameters gathered, no tensor axis

A peer that leaves work replicated saves wire bytes by doing it eight times; `x FLOPs`,
against jaxtp's, shows it. `x floor` is against the Megatron minimum of the model's column/row
pairs, `x form` against that and what the model's form adds to it (key heads that devices share,
projections in one kernel; see `peer_models.py`).
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from peer_models import BATCH, MODELS, SEQ, TP, Case
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jaxtp
from jaxtp.activations.by_dataflow import parallelize
from jaxtp.compile.deviceless import preflight
from jaxtp.cost.floor import floor_bytes
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import abstract_mesh
from jaxtp.plan import trees

TARGET, SIZE = "h100:1x8", 8
SAME_WORK = 1.1
"""A plan within this of jaxtp's FLOPs per device splits as much work as jaxtp's does."""

REACHED = 1.02
"""A plan within this of the least that its model allows has reached it."""

Result = dict[str, Any]
Flag = tyro.conf.FlagCreatePairsOff[bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a peer puts everything.

    Attributes:
        mesh: Axis name -> size.
        specs: One for each parameter, in the order of the tree.
        batch: Spec of the token ids.
        apply: The model's function, with whatever the peer adds to it.
    """

    mesh: Mapping[str, int]
    specs: Sequence[P]
    apply: Callable[[Any, Any], Any]
    batch: P = dataclasses.field(default_factory=P)


class PeerError(Exception):
    """What a peer says when it cannot plan a model."""


def loss(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Mean cross entropy; the hit is masked, so that a split vocabulary is never gathered."""

    def value(params: Any, ids: Any) -> Any:
        logits = apply(params, ids).astype(jnp.float32)
        hit = jnp.arange(logits.shape[-1])[None, None] == ids[..., None]
        return (jax.nn.logsumexp(logits, -1) - jnp.where(hit, logits, 0).sum(-1)).mean()

    return value


def jaxtp_layout(case: Case) -> Layout:
    """The plan read from the model, and constraints by dataflow."""
    plan = jaxtp.make_plan(case.params, TP, fn=case.apply, inputs=(case.tokens,))
    specs = [plan[path].partition_spec for path, _ in trees.leaves(case.params)]
    apply = parallelize(case.apply, plan, abstract_mesh(plan.mesh))
    return Layout(mesh=dict(plan.mesh.sizes), specs=specs, apply=apply)


def expert_layout(case: Case) -> Layout:
    """The rules beside the model."""

    def spec(path: str, leaf: Any) -> P:
        cut = next((cut for rule, cut in case.rules.items() if re.fullmatch(rule, path)), {})
        return P(*(cut.get(dim) for dim in range(leaf.ndim)))

    return _placed(case, spec, mesh=case.mesh)


def redco_layout(case: Case) -> Layout:
    """Alternate the dim of successive products; attention goes out by head and comes back by it.

    Products of one module alternate: all but the last are sharded on their output, the last on its
    input; so q, k and v are sharded by heads, o on what comes from the heads, and tables by
    vocabulary. Modules are taken by name, for that is all that a parameter tree says; what eight
    does not divide stays replicated.
    """
    members: defaultdict[str, list[str]] = defaultdict(list)
    for path, leaf in trees.leaves(case.params):
        if path.endswith("kernel") and leaf.ndim > 1:
            members[_module(path)].append(path)

    def spec(path: str, leaf: Any) -> P:
        stacked = path.startswith(("layers/", "h/"))
        rest = leaf.shape[stacked:]
        if len(rest) < 2 or path.endswith("bias"):
            return P()
        if path.endswith("embedding"):
            dim = 0
        else:
            last = _is_last(path, members[_module(path)])
            # (in, out), (in, heads, head width), or (heads, head width, out)
            dim = 0 if last else len(rest) - 1 if len(rest) == 2 else len(rest) - 2
        dim += stacked
        return P(*([None] * dim), "tp") if leaf.shape[dim] % SIZE == 0 else P()

    return _placed(case, spec)


def _module(path: str) -> str:
    return path.rsplit("/", 2)[0] if path.count("/") > 1 else path


def _is_last(path: str, members: Sequence[str]) -> bool:
    """Whether a product ends its attention or MLP, by the usual names or else by its place."""
    name = path.split("/")[-2]
    if re.fullmatch(r"o|out|o_proj|c_proj|c_out|down|down_proj|wo", name):
        return True
    return len(members) > 1 and path == members[-1] and bool(re.fullmatch(r"Dense_\d+", name))


def largest_layout(case: Case) -> Layout:
    """Every array sharded along its largest dim that divides; activations as XLA likes."""
    return _placed(case, lambda _, leaf: _largest(leaf, "tp"))


def fsdp_layout(case: Case) -> Layout:
    """Parameters and batch along one axis."""
    return dataclasses.replace(
        _placed(case, lambda _, leaf: _largest(leaf, "data"), mesh={"data": SIZE}),
        batch=P("data"),
    )


def _largest(leaf: Any, axis: str) -> P:
    dims = [dim for dim, size in enumerate(leaf.shape) if size % SIZE == 0]
    cut = max(dims, key=lambda dim: leaf.shape[dim], default=None)
    return P(*(axis if dim == cut else None for dim in range(leaf.ndim)))


def _placed(
    case: Case, spec: Callable[[str, Any], P], mesh: Mapping[str, int] | None = None
) -> Layout:
    specs = [spec(path, leaf) for path, leaf in trees.leaves(case.params)]
    return Layout(mesh=mesh or TP, specs=specs, apply=case.apply)


def parallax_layout(case: Case, name: str, python: str) -> Layout:
    """What google-parallax answers in a process, and perhaps an environment, of its own.

    Raises:
        PeerError: If it is not installed, or stops.
    """
    program = str(Path(__file__).with_name("peer_parallax.py"))
    root = str(Path(__file__).parents[1])
    run = subprocess.run(
        [python, program, name],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    if "No module named 'parallax'" in run.stderr:
        raise PeerError("not installed")
    if run.returncode:
        raise PeerError(run.stderr.strip().splitlines()[-1])
    answer = json.loads(run.stdout.splitlines()[-1])
    if "error" in answer:
        raise PeerError(answer["error"])
    specs = [P(*entries) for entries in answer["specs"]]
    return Layout(mesh={"data": 1, "model": SIZE}, specs=specs, apply=case.apply)


def compiled(case: Case, layout: Layout) -> Result:
    """The figures of one compiled program."""
    mesh: AbstractMesh = abstract_mesh(MeshShape.of(layout.mesh, {"tp": next(iter(layout.mesh))}))
    shardings = [NamedSharding(mesh, spec) for spec in layout.specs]
    leaves, structure = jax.tree.flatten(case.params)
    structs = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one)
        for leaf, one in zip(leaves, shardings, strict=True)
    ]
    ids = case.tokens
    batch = jax.ShapeDtypeStruct(ids.shape, ids.dtype, sharding=NamedSharding(mesh, layout.batch))
    out = jax.tree.unflatten(structure, shardings)
    step = jax.jit(jax.value_and_grad(loss(layout.apply)), out_shardings=(None, out))
    args = jax.tree.unflatten(structure, structs), batch
    report = preflight(step, args, target=TARGET, tensor_axes=tuple(layout.mesh))
    kinds: defaultdict[str, int] = defaultdict(int)
    for row in report.collectives:
        kinds[row.kind] += row.count
    return {
        "wire_bytes": report.wire_bytes,
        "peak_bytes": report.peak_bytes,
        "flops_per_device": report.flops_per_device,
        "step_seconds_modelled": report.step_seconds_modelled,
        "collectives": dict(kinds),
        "compile_seconds": report.compile_seconds,
    }


def compare(name: str, parallax_python: str, progress: Callable[[str], None]) -> Result:
    """One model: jaxtp's figures and every peer's, or the error of a peer that cannot.

    Args:
        name: In `MODELS`.
        parallax_python: Interpreter of the environment that has google-parallax.
        progress: Told what is compiled next.
    """
    case = MODELS[name]()
    progress("jaxtp")
    begin = time.perf_counter()
    layout = jaxtp_layout(case)
    seconds = time.perf_counter() - begin
    ours = {**compiled(case, layout), "plan_seconds": seconds}
    makers: Mapping[str, Callable[[], Layout]] = {
        "expert": lambda: expert_layout(case),
        "parallax": lambda: parallax_layout(case, name, parallax_python),
        "redco": lambda: redco_layout(case),
        "largest": lambda: largest_layout(case),
        "fsdp": lambda: fsdp_layout(case),
    }
    peers: dict[str, Result] = {}
    for peer, make in makers.items():
        progress(peer)
        try:
            peers[peer] = compiled(case, make())
        except (PeerError, ValueError, jaxtp.JaxtpError) as error:
            peers[peer] = {"error": str(error)}
    # A dense block is two column/row pairs.
    floor = floor_bytes(
        size=SIZE, message_bytes=BATCH * SEQ * case.width * 2, layers=case.pairs // 2
    )
    return {
        "model": name,
        "floor_bytes": floor,
        "form_bytes": case.form_bytes,
        "jaxtp": ours,
        "peers": peers,
    }


def best_peer(row: Result) -> tuple[str, float]:
    """The peer with the fewest wire bytes among those that split as much work, and its bytes."""
    able = {
        name: peer["wire_bytes"]
        for name, peer in row["peers"].items()
        if "error" not in peer
        and peer["flops_per_device"] <= SAME_WORK * row["jaxtp"]["flops_per_device"]
    }
    return min(able.items(), key=lambda pair: pair[1])


def with_form(row: Result) -> float:
    """The floor in bytes, and what the model's form adds to it."""
    return row["floor_bytes"] + row["form_bytes"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to compile."""

    as_json: Annotated[Flag, tyro.conf.arg(name="json")] = False
    """Print JSON instead of a table."""

    only: tuple[str, ...] = ()
    """Models by name; default: all."""

    parallax_python: str = sys.executable
    """Interpreter of an environment with google-parallax 0.0.2."""


def table(rows: Sequence[Result]) -> Table:
    """All models and peers for a terminal."""
    shown = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("model", no_wrap=True)
    shown.add_column("plan", no_wrap=True)
    for column in ("wire MiB", "x floor", "x form", "peak MiB", "x FLOPs", "modelled ms", "plan s"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("collectives, or what the peer said")
    for row in rows:
        base = row["jaxtp"]["flops_per_device"]
        for index, (name, one) in enumerate({"jaxtp": row["jaxtp"], **row["peers"]}.items()):
            model = row["model"] if index == 0 else ""
            if "error" in one:
                shown.add_row(model, name, *["-"] * 7, one["error"][:160])
                continue
            kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(one["collectives"].items()))
            shown.add_row(
                model,
                name,
                f"{one['wire_bytes'] / 2**20:.2f}",
                f"{one['wire_bytes'] / row['floor_bytes']:.3f}",
                f"{one['wire_bytes'] / with_form(row):.3f}",
                f"{one['peak_bytes'] / 2**20:.1f}",
                f"{one['flops_per_device'] / base:.2f}",
                f"{one['step_seconds_modelled'] * 1e3:.3f}",
                f"{one['plan_seconds']:.2f}" if "plan_seconds" in one else "",
                kinds,
            )
        shown.add_section()
    return shown


def main(options: Options) -> None:
    """Compiles and tabulates, model by model."""
    names = options.only or tuple(MODELS)
    rows: list[Result] = []
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=6 * len(names))
        for name in names:

            def show(peer: str, name: str = name) -> None:
                bar.update(task, advance=1, description=f"{name}: {peer}")

            rows.append(compare(name, options.parallax_python, show))
    if options.as_json:
        print(json.dumps(rows, indent=1))
        return
    console = Console(width=max(Console().width, 150), highlight=False, markup=False)
    console.print(table(rows))
    for row in rows:
        peer, best = best_peer(row)
        ours = row["jaxtp"]["wire_bytes"]
        # Without the expert's plan the best peer would be no measure.
        is_measured = "error" not in row["peers"]["expert"]
        reached = is_measured and ours <= min(best, REACHED * with_form(row))
        console.print(
            f"{'reached    ' if reached else 'NOT REACHED'}  {row['model']}: "
            f"{ours / row['floor_bytes']:.3f}x the floor, {ours / with_form(row):.3f}x of it with "
            f"what the form adds, {ours / best:.3f}x of the best peer, {peer}"
        )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
