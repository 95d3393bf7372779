"""How the plan shards what a traced program takes of a parameter."""

from jaxtp.plan.decisions import Plan
from jaxtp.plan.specs import Spec
from jaxtp.rules.jaxpr import Analysis
from jaxtp.rules.jaxpr.walk import Value


def spec_of(analysis: Analysis, plan: Plan, value: Value) -> Spec | None:
    """Mesh axes of each dim of a parameter, its dims in any order; None for anything else."""
    if not value.path:
        return None
    params = analysis.scope.jaxpr.invars[: analysis.num_params]
    known = map(analysis.scope.values.__getitem__, params)
    own = next(v.dims for v in known if v.path == value.path)
    axes = {dim: axes for dim, axes in zip(own, plan[value.path].spec, strict=True) if dim}
    if any(dim and dim not in axes for dim in value.dims):
        return None
    return tuple(tuple(axes.get(dim, ())) for dim in value.dims)
