"""What the backward pass of stacked layers keeps, and what it recomputes."""

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

import jax

from jaxtp.errors import BadConfig, join

BLOCK_OUTPUT = "block_output"
"""`checkpoint_name` of the values behind row products, where the all-reduces are."""

LAYER_INPUT = "layer_input"
"""`checkpoint_name` of the residual stream in front of each layer of a stage."""

Policy = Callable[..., bool]
POLICIES = jax.checkpoint_policies

MOVES = (
    "broadcast_in_dim",
    "convert_element_type",
    "dynamic_slice",
    "reshape",
    "squeeze",
    "transpose",
)
"""Operations that give a value another type, shape or order, or take a part of it."""


def _computed(prim: Any, *_: Any, **__: Any) -> bool:
    """Whether a value is more than a moved one, as a layer's weights are in every tick."""
    return str(prim) not in MOVES


@dataclasses.dataclass(frozen=True)
class Remat:
    """What the backward pass finds, and what it recomputes.

    Attributes:
        layer: What is kept of a layer beside its input; None: everything.
        chunk: What is kept of all layers that a stage runs in one tick, beside what comes in.
    """

    layer: Policy | None
    chunk: Policy

    @classmethod
    def of_layer(cls, policy: Policy) -> "Remat":
        """Layer by layer, in stages or not."""
        names = POLICIES.save_only_these_names(LAYER_INPUT)
        return cls(policy, POLICIES.save_from_both_policies(names, policy))


REMAT: dict[str, Remat] = {
    "none": Remat(None, _computed),
    "full": Remat.of_layer(POLICIES.nothing_saveable),
    # Saving what comes out of an all-reduce keeps recomputation from running it again: 4
    # all-reduces a layer in the compiled GPU step as without remat, where "full" has 5, at nearly
    # the memory of "full".
    "block_outputs": Remat.of_layer(POLICIES.save_only_these_names(BLOCK_OUTPUT)),
    "dots": Remat.of_layer(POLICIES.dots_with_no_batch_dims_saveable),
    # What enters a stage in each tick. The layers of one chunk are run again in one go, and keep
    # what "block_outputs" keeps until they are through.
    "stage": Remat(POLICIES.save_only_these_names(BLOCK_OUTPUT), POLICIES.nothing_saveable),
}
"""Remat policy name -> what may be kept."""


def remat_of(name: str) -> Remat:
    """The policy of this name.

    Raises:
        BadConfig: TP020, if there is none.
    """
    if name not in REMAT:
        near = difflib.get_close_matches(name, REMAT, n=1) or REMAT
        raise BadConfig(f"no remat policy {name!r}", where="remat", fix=join(near))
    return REMAT[name]
