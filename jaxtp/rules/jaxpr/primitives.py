"""The table of primitives: what each does to dims, and how to run it again if it holds a program.

One row serves both readers: `walk` takes the first half when it reads a model, and
`jaxtp.parallelize` the second when it runs the model again with constraints. A primitive that is
not here is entered for reading if it holds a jaxpr that takes its operands as they are, taken as
elementwise if its shapes allow, and is otherwise opaque (`control.default`); it is run as it
stands. To teach jaxtp a primitive, add one row.
"""

import dataclasses
from collections.abc import Mapping

from jaxtp.rules.jaxpr import contractions, control, reentry, shapes
from jaxtp.rules.jaxpr.reentry import Again
from jaxtp.rules.jaxpr.walk import Handler


@dataclasses.dataclass(frozen=True, slots=True)
class Primitive:
    """One row.

    Attributes:
        dims: What it does to dims.
        again: How to run it with other bodies; None if it holds no program.
        view: Whether its results hold nothing but elements of its operands.
        draws: Whether it makes random numbers of a key.
    """

    dims: Handler
    again: Again | None = None
    view: bool = False
    draws: bool = False


def _view(dims: Handler) -> Primitive:
    return Primitive(dims, view=True)


_ROWS: Mapping[str, Primitive] = {
    "reshape": _view(shapes.reshape),
    "transpose": _view(shapes.transpose),
    "broadcast_in_dim": _view(shapes.broadcast_in_dim),
    "squeeze": _view(shapes.squeeze),
    "tile": _view(shapes.tile),
    "slice": _view(shapes.slice_),
    "split": _view(shapes.split),
    "unstack": _view(shapes.unstack),
    "stack": _view(shapes.stack),
    "concatenate": _view(shapes.concatenate),
    "pad": _view(shapes.pad),
    "rev": _view(shapes.reverse),
    "dynamic_slice": _view(shapes.dynamic_slice),
    "dynamic_update_slice": _view(shapes.dynamic_update_slice),
    "copy convert_element_type reduce_precision device_put": Primitive(shapes.identity),
    "optimization_barrier": Primitive(shapes.identity),
    "psum psum_invariant pmax pmin ppermute pbroadcast pvary": Primitive(shapes.identity),
    "reduce reduce_sum reduce_max reduce_min reduce_prod": Primitive(shapes.reduce),
    "reduce_and reduce_or reduce_xor": Primitive(shapes.reduce),
    "argmax argmin": Primitive(shapes.argument),
    "cumsum cumprod cummax cummin cumlogsumexp": Primitive(shapes.cumulative),
    "sort": Primitive(shapes.sort),
    "top_k approx_top_k": Primitive(shapes.top_k),
    "reduce_window reduce_window_sum reduce_window_max reduce_window_min": Primitive(shapes.window),
    "fft": Primitive(shapes.fourier),
    "random_seed random_wrap random_unwrap random_fold_in": Primitive(shapes.random),
    "random_split random_clone": Primitive(shapes.random),
    "random_bits random_gamma rng_bit_generator rng_uniform threefry2x32": Primitive(
        shapes.random, draws=True
    ),
    "dot_general": Primitive(contractions.dot_general),
    "ragged_dot_general": Primitive(contractions.ragged_dot_general),
    "conv_general_dilated": Primitive(contractions.convolution),
    "gather": Primitive(contractions.gather),
    "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max": Primitive(
        contractions.scatter
    ),
    "jit pjit closed_call core_call": Primitive(control.default, reentry.inline),
    "checkpoint remat remat2": Primitive(control.default, reentry.checkpoint),
    "custom_jvp_call": Primitive(control.default, reentry.custom_jvp),
    "custom_vjp_call custom_vjp_call_jaxpr": Primitive(control.default, reentry.custom_vjp),
    "scan": Primitive(control.scan, reentry.scan),
    "while": Primitive(control.while_, reentry.while_loop),
    "cond": Primitive(control.cond, reentry.cond),
    "shard_map": Primitive(control.shard_map, reentry.shard_map),
}

PRIMITIVES: Mapping[str, Primitive] = {
    name: row for names, row in _ROWS.items() for name in names.split()
}
"""Primitive name -> its row. A key of `_ROWS` lists several that behave alike."""

ELEMENTWISE = frozenset(
    [
        *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2"),
        *("atanh", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos", "cosh"),
        *("digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor"),
        *("ge", "gt", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p"),
        *("logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "nextafter", "not"),
        *("optimization_barrier", "or", "pow", "real", "reduce_precision", "rem", "round"),
        *("rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical"),
        *("sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"),
    ]
)
"""Primitives that work position by position; their dims need no row, see `control.default`."""

SIGNATURES: Mapping[str, str] = {
    # jax.nn.dot_product_attention(implementation="cudnn"), (batch, time, heads, width).
    "dot_product_attention_fwd_wrapper": "bthd,bskd,bskv,bhts->bthv",
    # jax.experimental.pallas.ops.gpu.attention.mha
    "mha_forward": "bthd,bshd,bshv->bthv",
}
"""Attention kernels that hold no readable jaxpr, by primitive or kernel name."""
