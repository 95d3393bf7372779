"""Where the inputs of a planned function go: caches, states, tokens, positions."""

import dataclasses
import math
from typing import Any

from jax.sharding import PartitionSpec

from jaxtp.mesh.axes import MeshShape
from jaxtp.plan.specs import Spec, partition_spec, spec_text
from jaxtp.plan.trees import itemsize

STATE, INPUT = "state", "input"
"""Roles of an input: what the function gives back for its next call (a cache), and what it reads
only."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputDecision:
    """What happens to one array that a function takes beside the parameters, and why.

    Attributes:
        path: Name of the argument, then the "/"-joined path inside it: "cache/layers/0/key".
        argument: Name of the argument.
        shape: Global shape in elements of the example; other batches and lengths may follow.
        dtype: NumPy name of the dtype.
        spec: Mesh axes per dim, `()` meaning "not sharded".
        role: "state" for what comes back with the same shape and type, to be given to the next
            call; "input" for anything else.
        reasons: A sentence for each dim that is sharded, and for each that is not.
    """

    path: str
    argument: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    role: str
    reasons: tuple[str, ...]

    @property
    def inner_path(self) -> str:
        """The path inside the argument; "" if the argument is one array."""
        return self.path[len(self.argument) + 1 :]

    @property
    def num_bytes(self) -> int:
        """Bytes of the array, global."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def partition_spec(self) -> PartitionSpec:
        """The spec as JAX spells it."""
        return partition_spec(self.spec)

    def bytes_per_device(self, mesh: MeshShape) -> int:
        """Bytes that one device stores of this array."""
        return self.num_bytes // mesh.pieces(self.spec)

    def explain(self, mesh: MeshShape) -> str:
        """All that is known about it, over several lines."""
        return "\n".join(
            (
                f"{self.path}  {self.dtype}{list(self.shape)}",
                f"  spec     {spec_text(self.spec)} on {mesh}",
                f"  role     {self.role}, in the argument {self.argument!r}",
                f"  bytes    {self.num_bytes:,} in all, {self.bytes_per_device(mesh):,} per device",
                *(f"  because  {reason}" for reason in self.reasons),
            )
        )


def input_decision(data: dict[str, Any]) -> InputDecision:
    """The decision that `dataclasses.asdict` turned into `data`."""
    spec = tuple(map(tuple, data.pop("spec")))
    tuples = {k: tuple(data.pop(k)) for k in ("shape", "reasons")}
    return InputDecision(spec=spec, **tuples, **data)
