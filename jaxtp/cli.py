"""`jaxtp plan, explain, errors`: the command line, one function a command.

Stage in: arguments. Stage out: text or JSON on standard output; a coded error and exit code 2.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from jaxtp.errors import JaxtpError, page
from jaxtp.listing import load_tree
from jaxtp.plan import Plan
from jaxtp.planner import make_plan

app = tyro.extras.SubcommandApp()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How to plan a tree."""

    tp: int = 8
    """Devices along the tensor axis."""

    dp: int = 1
    """Replicas; only changes the mesh that is printed."""

    heads: int | None = None
    """Query heads of one layer; read from the file's config if it has one."""

    kv_heads: int | None = None
    """Key/value heads of one layer."""

    head_dim: int | None = None
    """Width of one head, in elements."""

    policy: str = "factor"
    """For units that do not divide: factor, replicate or error."""

    pad_vocab: bool = False
    """Pad a vocabulary that does not divide."""

    use_config: bool = True
    """Whether the sizes in the file may be used."""

    strict: bool = False
    """Refuse a plan that wastes devices or memory."""


def _plan(tree_file: str, options: PlanOptions) -> Plan:
    tree, config = load_tree(tree_file)
    mesh = {"dp": options.dp, "tp": options.tp} if options.dp > 1 else {"tp": options.tp}
    return make_plan(
        tree,
        mesh,
        config=config if options.use_config else None,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        policy=options.policy,
        pad_vocab=options.pad_vocab,
        strict=options.strict,
    )


Tree = Annotated[str, tyro.conf.Positional]
Options = Annotated[PlanOptions, tyro.conf.arg(name="")]
JSON = tyro.conf.arg(name="json")
DEFAULTS = PlanOptions()


@app.command
def plan(
    tree: Tree, options: Options = DEFAULTS, *, as_json: Annotated[bool, JSON] = False
) -> None:
    """Plan a shape listing and print one line a parameter, or JSON.

    Args:
        tree: File written by jaxtp.dump_tree.
        options: How to plan.
        as_json: Print mesh sizes, and per path spec, role, reasons and bytes.
    """
    result = _plan(tree, options)
    if not as_json:
        print(result)
        return
    mesh = result.mesh
    params = {
        d.path: {
            "spec": [list(axes) for axes in d.spec],
            "reordered": False,
            "role": d.role,
            "reasons": list(d.reasons),
            "fallback": d.fallback,
            "bytes": d.num_bytes,
            "bytes_per_device": d.bytes_per_device(mesh),
        }
        for d in result.decisions
    }
    tensor = {name: size for name, size in mesh.sizes if name in mesh.tp}
    print(json.dumps({"mesh": tensor, "notes": list(result.notes), "params": params}, indent=1))


@app.command
def explain(tree: Tree, path: Tree, options: Options = DEFAULTS) -> None:
    """Print all that is known about one parameter of a shape listing.

    Args:
        tree: File written by jaxtp.dump_tree.
        path: The parameter's path.
        options: How to plan.
    """
    print(_plan(tree, options).explain(path))


@app.command
def errors(code: Annotated[str, tyro.conf.Positional] = "") -> None:
    """Print the page of an error code, or the list of codes.

    Args:
        code: For example TP003.
    """
    if code:
        print(page(code))
        return
    for known, cls in sorted(JaxtpError.registry.items()):
        print(f"{known}  {cls.__name__}: {(cls.__doc__ or '').splitlines()[0]}")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command; a coded error goes to standard error and gives exit code 2."""
    try:
        app.cli(prog="jaxtp", description=__doc__, args=argv)
    except JaxtpError as err:
        print(err, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
