"""Plans read from the dataflow against plans by hand, on thirteen kinds of third-party model.

    python scripts/bench_kinds.py
    python scripts/bench_kinds.py --json --only "u-net" "mamba-2"

The models (`tests/kinds_of_models.py`) are written as a stranger would write them. Loss and
gradients in bf16 are compiled by the real GPU compiler for h100:1x8, tp=8: with specs by hand, with
jaxtp's plan, and with jaxtp's plan of the same model whose parameters bear random names.

    bytes/device  parameters on one device, against all of them
    x hand        wire bytes of jaxtp's program against that of the specs by hand
    scrambled     the same for random names; "same plan" where every spec is equal
"""

import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from kinds_of_models import KINDS, TP, Kind

import jaxtp
from jaxtp.compile.deviceless import preflight
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import abstract_mesh
from jaxtp.plan import trees

Row = dict[str, Any]


def compile_step(kind: Kind, apply: Callable[..., Any], specs: Any, mesh: Any) -> Any:
    """The report on the program of loss and gradients with these specs."""

    def loss(params: Any, *inputs: Any) -> jax.Array:
        return (apply(params, *inputs).astype(jnp.float32) ** 2).mean()

    def placed(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(placed, kind.params, specs)
    inputs = [placed(x, P()) for x in kind.inputs]
    places = jax.tree.map(lambda leaf: leaf.sharding, params)
    step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, places))
    return preflight(step, (params, *inputs), target="h100:1x8")


def by_hand(kind: Kind) -> Any:
    """The hand-written specs as a tree."""

    def spec(path: str) -> P:
        return next((s for rule, s in kind.hand.items() if re.fullmatch(rule, path)), P())

    paths = [path for path, _ in trees.leaves(kind.params)]
    return jax.tree.unflatten(jax.tree.structure(kind.params), map(spec, paths))


def planned(kind: Kind) -> tuple[Any, jaxtp.Plan]:
    """The specs of a plan by jaxtp as a tree, and the plan."""
    plan = jaxtp.make_plan(kind.params, {"tp": TP}, fn=kind.apply, inputs=kind.inputs)
    specs = [plan[path].partition_spec for path, _ in trees.leaves(kind.params)]
    return jax.tree.unflatten(jax.tree.structure(kind.params), specs), plan


def scrambled(kind: Kind, seed: int = 0) -> Kind:
    """The same model, its parameters under random names in one flat tree."""
    draw, structure = random.Random(seed), jax.tree.structure(kind.params)
    names = [f"{draw.getrandbits(64):016x}" for _ in range(structure.num_leaves)]
    flat = dict(zip(names, jax.tree.leaves(kind.params), strict=True))

    def apply(params: Any, *inputs: Any) -> Any:
        return kind.apply(structure.unflatten([params[name] for name in names]), *inputs)

    return Kind(apply, flat, kind.inputs, {})


def compare(name: str) -> Row:
    """One row of the table."""
    kind = KINDS[name]()
    specs, plan = planned(kind)
    mesh = abstract_mesh(plan.mesh)
    hand = compile_step(kind, kind.apply, by_hand(kind), abstract_mesh(MeshShape.of({"tp": TP})))
    ours = compile_step(kind, jaxtp.parallelize(kind.apply, plan, mesh), specs, mesh)
    hidden = scrambled(kind)
    hidden_specs, hidden_plan = planned(hidden)
    own = [hidden_plan[name].partition_spec for name in hidden.params]
    same = own == jax.tree.leaves(specs)
    other = ours
    if not same:
        place = abstract_mesh(hidden_plan.mesh)
        apply = jaxtp.parallelize(hidden.apply, hidden_plan, place)
        other = compile_step(hidden, apply, hidden_specs, place)
    return {
        "model": name,
        "bytes": sum(d.bytes_per_device(plan.mesh) for d in plan.decisions),
        "all_bytes": sum(d.num_bytes for d in plan.decisions),
        "hand_bytes": hand.argument_bytes,
        "our_bytes": ours.argument_bytes,
        "hand_wire": hand.wire_bytes,
        "wire": ours.wire_bytes,
        "scrambled_wire": other.wire_bytes,
        "same_plan": same,
        "flops": ours.flops_per_device / hand.flops_per_device,
        "collectives": {kind: count for kind, count in counts(ours).items()},
    }


def counts(report: Any) -> dict[str, int]:
    """Collectives by kind."""
    found: dict[str, int] = {}
    for row in report.collectives:
        found[row.kind] = found.get(row.kind, 0) + row.count
    return found


def show(rows: Sequence[Row]) -> None:
    """Prints the table."""
    table = Table(title=f"tp={TP}, one step of loss and gradients, per device")
    for column in ("model", "bytes/device", "hand MB", "jaxtp MB", "x hand", "FLOPs", "scrambled"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        ratio = row["scrambled_wire"] / row["hand_wire"]
        table.add_row(
            row["model"],
            f"{row['bytes'] / row['all_bytes']:.1%}",
            f"{row['hand_wire'] / 1e6:.2f}",
            f"{row['wire'] / 1e6:.2f}",
            f"{row['wire'] / row['hand_wire']:.2f}",
            f"{row['flops']:.2f}",
            "same plan" if row["same_plan"] else f"{ratio:.2f}",
        )
    Console(width=100).print(table)


def main(
    only: Annotated[tuple[str, ...], tyro.conf.arg(help="models; all by default")] = (),
    json_: Annotated[bool, tyro.conf.arg(name="json", help="figures as JSON")] = False,
) -> None:
    """Compiles every model three times and prints a table."""
    rows = [compare(name) for name in only or KINDS]
    print(json.dumps(rows, indent=1)) if json_ else show(rows)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
