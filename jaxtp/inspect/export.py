"""A plan in the forms that other code reads: regex rules, and Flax annotations. No lock-in.

A tree of PartitionSpecs is `plan.partition_specs(tree)`.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxtp.errors import PlanMismatch
from jaxtp.plan.decisions import Plan, check_plan
from jaxtp.plan.trees import PyTree, as_pytree, is_box, spell

Rules = list[tuple[str, PartitionSpec]]
"""Ordered `(regular expression, spec)`; the first that matches a path from end to end counts."""


def export_rules(plan: Plan) -> Rules:
    r"""The plan as an ordered list of regex rules, one for all layers that agree.

    Numbers are wildcards only where they are whole path parts: `experts/0/w1` becomes
    `experts/\d+/w1`. A layer that differs from its siblings comes first, under its own path.

    Args:
        plan: The plan; its specs are on the plan's own mesh, whose tensor axis may be factored.

    Returns:
        Rules that give every path of the plan its spec; see `match_rules`.

    Raises:
        PlanMismatch: TP045, for what is no plan.
    """
    check_plan(plan)
    wild: dict[str, dict[PartitionSpec, list[str]]] = {}
    for d in plan.decisions:
        parts = ("\\d+" if p.isdigit() else re.escape(p) for p in d.path.split("/"))
        wild.setdefault("/".join(parts), {}).setdefault(d.partition_spec, []).append(d.path)
    exceptions: Rules = []
    general: Rules = []
    for pattern, specs in wild.items():
        usual = max(specs, key=lambda spec: len(specs[spec]))
        general.append((f"^{pattern}$", usual))
        exceptions += [
            (f"^{re.escape(path)}$", spec)
            for spec, paths in specs.items()
            if spec != usual
            for path in paths
        ]
    return exceptions + general


def match_rules(rules: Sequence[tuple[str, PartitionSpec]], path: str) -> PartitionSpec:
    """The spec that a rule list gives one path.

    Raises:
        PlanMismatch: TP045, if no rule matches.
    """
    for pattern, spec in rules:
        if re.search(pattern, path):
            return spec
    raise PlanMismatch(
        f"none of {len(rules)} rules matches",
        where=path,
        fix="export the rules of this tree's plan",
    )


def annotate(tree: PyTree, plan: Plan) -> PyTree:
    """The same tree with the plan written on it the way Flax writes shardings.

    NNX variables get `out_sharding` metadata, which `nnx.get_partition_spec` reads. Arrays of a
    Linen dict are put in `nn.Partitioned` boxes, which `nn.get_partition_spec` reads; boxes that
    are there get the plan's names.

    Args:
        tree: An `nnx.Module`, an `nnx.State` or a Linen dict, of arrays or structs.
        plan: Its plan.

    Returns:
        A new tree; the arrays are the same.

    Raises:
        PlanMismatch: TP045, if the plan lacks one of the tree's paths.
    """
    check_plan(plan)
    plain, rebuild = as_pytree(tree)

    def written(path: tuple[Any, ...], leaf: Any) -> Any:
        names = tuple(plan[spell(path)].partition_spec)
        if hasattr(leaf, "get_metadata"):
            changed = leaf.copy()
            changed.set_metadata(out_sharding=names)
            return changed
        from flax.linen import Partitioned

        rank = len((leaf.unbox() if is_box(leaf) else leaf).shape)
        full = names + (None,) * (rank - len(names))
        return Partitioned(leaf.unbox() if is_box(leaf) else leaf, names=full)

    return rebuild(jax.tree_util.tree_map_with_path(written, plain, is_leaf=is_box))
