"""cuDNN's attention over sequences that devices along cp share, in models that never heard of it.

JAX refuses to partition the call along tokens. A causal one is computed as jaxtp's own models do:
tokens dealt so that all devices do equal work, keys and values around the devices. One without a
causal mask is a row block of queries against all keys, its own or another sequence's. A call of
another kind is refused.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxtp.activations.by_name import ActivePlan, in_force
from jaxtp.activations.context.attention import attend_shared
from jaxtp.activations.context.blocks import Scores
from jaxtp.activations.context.dealing import deal_features, undo
from jaxtp.activations.context.kernels import FORWARD
from jaxtp.activations.sequences import GATHERED, Sequences
from jaxtp.errors import IdleDevices, SizeMismatch
from jaxtp.mesh.axes import Axis
from jaxtp.plan.decisions import Plan
from jaxtp.rules.jaxpr.walk import Scope, where

QUERIES, KEYS, VALUES, BIAS, EMPTY = 0, 1, 2, 3, slice(4, None)
"""Operands of the call: an array without elements stands for what is not given."""

RESIDUAL, BESIDE = "its residual", "a mask or bias beside is_causal"
FIXES = {
    RESIDUAL: "without `return_residual`",
    BESIDE: "put the causal part into the mask, without is_causal",
}
"""What to do about an obstacle, where it is not a mask as an array."""


class FusedAttention:
    """Runs the calls of cuDNN's attention whose tokens are shared."""

    def __init__(self, sequences: Sequences, plan: Plan, mesh: Mesh | AbstractMesh) -> None:
        self._sequences, self._plan, self._mesh = sequences, plan, mesh

    def call_in(self, scope: Scope, position: int) -> Any:
        """The kernel's own equation, if an equation is JAX's call of it on shared tokens."""
        equation = scope.jaxpr.eqns[position]
        calls = scope.calls.get(position, [])
        if not self._sequences.axes or not calls or "custom_vjp" not in equation.primitive.name:
            return None
        kernel = next((e for e in calls[0].jaxpr.eqns if e.primitive.name == FORWARD), None)
        queries = None if isinstance(equation.invars[0], Literal) else equation.invars[0]
        value = scope.values.get(queries) if kernel is not None and queries is not None else None
        is_shared = value is not None and any(map(self._sequences.axes_of, value.dims))
        return kernel if is_shared else None

    def run(self, equation: Any, kernel: Any, operands: Sequence[Any]) -> list[Any]:
        """The result of such a call.

        Raises:
            IdleDevices: TP011, for what no device can compute from its own queries.
            SizeMismatch: TP003, if a causal call's tokens do not divide into two pieces a device.
        """
        if why := _obstacle(equation, kernel, operands):
            ways = self._plan.mesh.size_of(Axis.CP)
            raise IdleDevices(
                f"cuDNN's attention with {why} is not shared by {ways} devices along cp",
                where=where(equation),
                fix=f"{FIXES.get(why, 'a mask as an array')}, or without `implementation`; "
                "or give the devices to dp, fsdp or tp",
            )
        if kernel.params["mask_type"].name == "NO_MASK":
            return [self._of_rows(kernel, operands)]
        q, k, v = operands[: VALUES + 1]
        ways = 2 * self._plan.mesh.size_of(Axis.CP)
        if q.shape[1] % ways:
            raise SizeMismatch(
                f"{q.shape[1]} tokens of causal attention do not divide into {ways} pieces",
                where=where(equation),
                fix=f"a multiple of {ways}",
            )
        active = ActivePlan(self._plan.mesh, sequence_parallel=False, mesh=self._mesh)
        scores = Scores(kernel.params["scale"], None, "cudnn")
        with in_force(active):
            q, k, v = (deal_features(x) for x in (q, k, v))
            return [undo(attend_shared(q, k, v, None, None, None, scores, active))]

    def _of_rows(self, kernel: Any, operands: Sequence[Any]) -> Any:
        """Attention without a causal mask: each device's own queries against all keys."""
        axis, shape = self._sequences.axis, self._plan.mesh
        q, k, _, bias = operands[: BIAS + 1]
        batch = shape.batch if q.shape[0] % shape.batch_ways == 0 else ()
        heads = shape.fit((k.shape[2],))
        tokens = PartitionSpec(batch, axis, heads)
        # Keys of another sequence, such as a text's, need not divide over cp.
        are_shared = k.shape[1] % shape.size_of(Axis.CP) == 0
        others = tokens if are_shared else PartitionSpec(batch, None, heads)
        is_biased = bool(bias.size)

        def rows(q: Any, k: Any, v: Any, bias: Any) -> Any:
            if are_shared:
                with jax.named_scope(GATHERED):
                    k, v = (jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in (k, v))
            return jax.nn.dot_product_attention(
                q,
                k,
                v,
                bias if is_biased else None,
                scale=kernel.params["scale"],
                implementation="cudnn",
            )

        spec = PartitionSpec()
        if is_biased:
            spec = PartitionSpec(
                batch if bias.shape[0] > 1 else (), heads if bias.shape[1] > 1 else (), axis
            )
        run = jax.shard_map(
            rows,
            mesh=self._mesh,
            in_specs=(tokens, others, others, spec),
            out_specs=tokens,
            check_vma=False,
        )
        return jax.checkpoint(run)(q, k, operands[VALUES], bias)


def _obstacle(equation: Any, kernel: Any, operands: Sequence[Any]) -> str:
    """What a call has that is not computed here; "" if nothing."""
    params = kernel.params
    has_bias, trains_bias = params["variadic_args"]
    kind = params["mask_type"].name
    queries, keys = operands[QUERIES].shape, operands[KEYS].shape
    found = {
        RESIDUAL: len(equation.outvars) > 1,
        "a layout of heads before tokens": params["layout"] != 0,
        "dropout": params["dropout_rate"] > 0,
        "a sliding window": params["sliding_window_length"] is not None,
        "scores of the caller's own": params.get("score_mod") is not None,
        f"the mask {kind}": kind not in ("CAUSAL", "NO_MASK"),
        BESIDE: has_bias and kind == "CAUSAL",
        "a bias that is trained": trains_bias,
        "lengths of sequences": any(x.size for x in operands[EMPTY]),
        "queries and keys of different lengths": kind == "CAUSAL" and queries[1] != keys[1],
    }
    return next((what for what, is_there in found.items() if is_there), "")
