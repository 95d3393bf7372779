"""What the walker saw and what the solver concluded, as data.

Facts hold dims as they were when seen and are resolved once, at the end: refinement goes on until
the last equation, and a fact about 4096 then speaks about 8 x 4 x 128.
"""

import dataclasses
from typing import Any

from jaxtp.rules.jaxpr.classes import Dim, Dims


@dataclasses.dataclass(frozen=True, slots=True)
class Contraction:
    """An activation meets a weight in a product that sums over dims.

    Attributes:
        path: The parameter that the weight is a view of; "" if it was computed from several.
        summed: The dims summed over.
        free: The weight's dims that appear in the output.
        batch: The weight's dims that pair off with the activation's (stacked experts).
        rows: The activation's dims that appear in the output.
        equation: The jaxpr equation, for its source line.
        source: Number of the value that the activation is, up to elementwise steps.
        before: The contraction that the activation is the output of, up to elementwise steps.
        ragged: Whether rows pick their weight by group sizes (`jax.lax.ragged_dot`), so that the
            last dim of `batch` is the group dim.
    """

    path: str
    summed: Dims
    free: Dims
    batch: Dims
    rows: Dims
    equation: Any = dataclasses.field(repr=False)
    source: int = -1
    before: "Contraction | None" = dataclasses.field(default=None, repr=False)
    ragged: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Mixing:
    """Two activations (or an activation and a constant) meet in a product that sums over dims.

    Attributes:
        summed: The dims summed over: head width in attention scores, positions after the softmax.
        free: The dims of both sides that appear in the output, left side first.
        batch: The dims that pair off: heads, where each has scores of its own.
        scores: Whether each side is itself made of such a product (attention probabilities).
        fixed: Whether each side is a constant (a rotation, a Fourier basis).
        equation: The jaxpr equation.
    """

    summed: Dims
    free: tuple[Dims, Dims]
    batch: Dims
    scores: tuple[bool, bool]
    fixed: tuple[bool, bool]
    equation: Any = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Lookup:
    """Rows of a parameter are picked by index.

    Attributes:
        path: The table.
        rows: The dim that the index runs over.
        features: The dims of one row.
        kind: "tokens" if the index is an integer input of the model as it came in (token ids, or
            positions that the caller passed); "experts" if every index picks a matrix; "computed"
            otherwise (positions, buckets).
        equation: The jaxpr equation.
    """

    path: str
    rows: Dim
    features: Dims
    kind: str
    equation: Any = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Residual:
    """A sum of a value and of something computed from it through a kernel: the residual stream.

    Attributes:
        dims: The dims of the sum.
        inside: Dims of the residual sums inside the branch.
        equation: The jaxpr equation.
    """

    dims: Dims
    inside: tuple[Dims, ...]
    equation: Any = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Offset:
    """A parameter is added to the output of a product: a bias.

    Attributes:
        path: The bias.
        product: The product it is added to.
        equation: The jaxpr equation.
    """

    path: str
    product: Contraction
    equation: Any = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """An operation needs all of a dim on one device, or has no order of its own to split it by.

    Attributes:
        dim: The dim.
        why: What needs it: a primitive's name, "conv", or "layer" for the stacked dim of a scan.
        equation: The jaxpr equation.
        path: The parameter at work, for a convolution.
    """

    dim: Dim
    why: str
    equation: Any = dataclasses.field(repr=False)
    path: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Reduction:
    """Dims are reduced, others are kept: what a norm does to the width of a head or of a group.

    Attributes:
        reduced: The dims that are gone.
        kept: The dims of the result.
        equation: The jaxpr equation.
    """

    reduced: Dims
    kept: Dims
    equation: Any = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """An index is compared with a range along a dim: one-hot tokens or dispatch.

    Attributes:
        dim: The dim of the range.
        tokens: Whether the index is an integer input; see `Lookup.kind`.
        equation: The jaxpr equation.
    """

    dim: Dim
    tokens: bool
    equation: Any = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Opaque:
    """A primitive that gave no information.

    Attributes:
        primitive: Its name; for a kernel call also the kernel's.
        reason: Why nothing could be read from it.
        paths: Parameters that it consumed directly.
        where: "file:line (function)" of the user's code, "" if unknown.
        dims: The dims of its operands.
    """

    primitive: str
    reason: str
    paths: tuple[str, ...]
    where: str
    dims: Dims = dataclasses.field(repr=False)


Fact = Contraction | Mixing | Lookup | Residual | Offset | Whole | Reduction | Choice | Opaque


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One dim of a parameter that may carry the tensor axis.

    Attributes:
        dim: Which array dim.
        units: Factors of the dim that may be separated, major to minor: (8, 4) is 8 kv heads with 4
            query heads each. Their product times an atomic rest is the dim's size (a piece's size
            for a fused dim).
        classes: The class of each unit. Members of a group that split one class must split it the
            same number of ways; a class that is minor here and major elsewhere (`tile`d kv heads)
            must not be split here as if it were major.
        pieces: (start, stop) cuts, in elements, of a dim that holds several projections one after
            another; empty for a plain dim. Each piece is split by `units`.
        replicated: Those of the pieces that every device needs all of (Mamba's B and C).
    """

    dim: int
    units: tuple[int, ...]
    classes: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...] = ()
    replicated: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """The products by a parameter that holds several projections: what it costs to take them apart.

    Attributes:
        inputs: Array dims of the parameter that the products sum over.
        rows: Sizes of the activation's other dims, the batch first; () if the parameter is cut
            before it is multiplied.
        weight_bytes: Of the weight in the type it is multiplied in: one layer, all devices.
        result_bytes: Of the result: one layer, all devices.
    """

    inputs: tuple[int, ...]
    rows: tuple[int, ...]
    weight_bytes: int
    result_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the dataflow says about one parameter.

    Attributes:
        path: As given.
        role: "column", "row", "vocab", "expert", "fused" (contiguous pieces), "column_bias",
            "row_bias", "follower" (goes where its group goes: a relative position table, a per-head
            scale), "router", "norm", "conv", "position", "low_rank", "replicated".
        dim: The array dim that carries the tensor axis; None replicates the array.
        units: See `Option`.
        classes: See `Option`.
        pieces: See `Option`.
        replicated: See `Option`.
        use: For pieces that products put out: what taking them apart costs.
        group: Id of the group that is decided together; "" when replicated.
        alternatives: What to take, in this order, if the group's units do not divide: for a stack
            of experts the dim inside each expert. All members of the group have as many, in the
            same order.
        small: Whether it is replicated only because its outputs or rows are few; a source that
            knows what they are may still shard them.
        stacked_dims: Array dims that a scan runs along: one entry a layer. No axis that a loop
            would gather over belongs there.
        reasons: Sentences of evidence, with sizes and source lines.
    """

    path: str
    role: str
    dim: int | None
    units: tuple[int, ...] = ()
    classes: tuple[int, ...] = ()
    pieces: tuple[tuple[int, int], ...] = ()
    replicated: tuple[tuple[int, int], ...] = ()
    use: Use | None = None
    group: str = ""
    alternatives: tuple[Option, ...] = ()
    small: bool = False
    stacked_dims: tuple[int, ...] = ()
    reasons: tuple[str, ...]
