"""What a plan says of grouped convolutions, whose gradients XLA alone gets wrong."""

from collections.abc import Iterator

from jaxtp.errors import join
from jaxtp.mesh.axes import MeshShape
from jaxtp.rules.jaxpr import Analysis
from jaxtp.rules.jaxpr.walk import UNKNOWN, Scope, where


def notes(analysis: Analysis | None, shape: MeshShape) -> tuple[str, ...]:
    """A sentence, where a function convolves in groups and some devices share rows.

    Args:
        analysis: Of the function that the plan is for, if there is one.
        shape: The plan's mesh shape.
    """
    if analysis is None or not 1 < shape.batch_ways < shape.num_devices:
        return ()
    lines = dict.fromkeys(_lines(analysis.scope))
    if not lines:
        return ()
    return (
        f"grouped convolutions at {join(lines, 2)}: differentiate in jaxtp.jit_step, or "
        "jaxtp.parallelize the function; under jax.jit alone XLA sums gradients of replicated "
        f"kernels over all {shape.num_devices} devices, {shape.num_devices // shape.batch_ways} "
        "times too large",
    )


def _lines(scope: Scope) -> Iterator[str]:
    for position, equation in enumerate(scope.jaxpr.eqns):
        if equation.params.get("feature_group_count", 1) > 1:
            yield where(equation) or UNKNOWN
        for inner in scope.calls.get(position, ()):
            yield from _lines(inner)
