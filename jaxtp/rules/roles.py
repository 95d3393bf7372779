"""What a parameter can be, and what a source of evidence says about it."""

import dataclasses
from enum import IntEnum, StrEnum

from jaxtp.plan.specs import Spec
from jaxtp.rules.jaxpr.records import Use


class Role(StrEnum):
    """What a parameter does in the model."""

    COLUMN = "column"
    """Its output dim is sharded; what it produces stays on the device (Megatron's
    column-parallel)."""

    ROW = "row"
    """Its input dim is sharded; its partial products are summed by one all-reduce."""

    COLUMN_BIAS = "column_bias"
    """A vector that follows the output dim of a column matrix."""

    ROW_BIAS = "row_bias"
    """A bias added once, after the all-reduce of a row matrix: replicated."""

    VOCAB = "vocab"
    """A token table, an output head or the head's bias, sharded along the vocabulary."""

    EXPERT = "expert"
    """Stacked experts, sharded along the expert dim, or inside each expert."""

    ROUTER = "router"
    """Chooses experts; every device needs all of its few outputs."""

    ADAPTER = "adapter"
    """A factor of a low-rank adapter: follows its weight's input (A) or output (B)."""

    SCALE = "scale"
    """Scales or zero points of a quantised weight: follow its blocks."""

    CACHE = "cache"
    """Keys and values of earlier tokens: follow the heads that write them."""

    HEAD_TABLE = "head_table"
    """Something with one entry per head, such as a relative position bias."""

    NORM = "norm"
    """Scale or offset of a normalisation."""

    FUSED = "fused"
    """Several projections in one array whose pieces lie one after another: replicated."""

    LOW_RANK = "low_rank"
    """A down-projection to a small shared width (multi-head latent attention): replicated."""

    POSITION = "position"
    """A table of positions or token types: replicated."""

    CONV = "conv"
    """A convolution: replicated."""

    REPLICATED = "replicated"
    """Every device needs all of it, as the dataflow shows."""

    UNKNOWN = "unknown"
    """No evidence: replicated, and listed."""

    GIVEN = "given"
    """The user or an annotation gave the spec."""


class Source(IntEnum):
    """Where a vote comes from; the larger number outranks the smaller.

    docs/design.md#evidence-in-order says why.
    """

    NAMES = 1
    DATAFLOW = 2
    ANNOTATION = 3
    OVERRIDE = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """One dim that may go on the tensor axis.

    Attributes:
        dim: Which dim of the array.
        units: Indivisible pieces of that dim, major to minor; `(4, 7)` is 4 kv heads with 7 query
            heads each. The dim's size is a multiple of their product.
    """

    dim: int
    units: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Fused:
    """Several projections in one dim, one after another.

    Attributes:
        dim: Which dim of the array.
        units: Indivisible pieces of each projection, as in `Placement`.
        use: The products by them.
        replicated: Elements of the dim, in pieces that every device needs all of.
    """

    dim: int
    units: tuple[int, ...]
    use: Use
    replicated: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Vote:
    """What one source says about one parameter.

    Attributes:
        path: The parameter.
        source: Who says so.
        role: What the parameter does.
        reason: One sentence of evidence, with the numbers seen.
        placements: Dims that may be sharded, the preferred first; none means "replicate it".
            Members of a group list them in the same order, since a group takes the same choice
            throughout; None stands for "replicated under this choice".
        group: Parameters that must be decided together; "" if alone.
        spec: A complete spec that is not up to jaxtp: an override or an annotation.
        fused: What `rules.fused` needs to choose how projections in one array are stored.
        stacked_dims: Dims that count the layers of a stack, as far as this source can see.
        assumed: Whether the units are an assumption that holds for most models, no evidence.
    """

    path: str
    source: Source
    role: Role
    reason: str
    placements: tuple[Placement | None, ...] = ()
    group: str = ""
    spec: Spec | None = None
    fused: Fused | None = None
    stacked_dims: tuple[int, ...] = ()
    assumed: bool = False
