"""The handler table: primitive name -> what it does to dims."""

from collections.abc import Mapping

from jaxtp.rules.jaxpr import contractions, control, shapes
from jaxtp.rules.jaxpr.walk import Handler


def _table(groups: Mapping[str, Handler]) -> dict[str, Handler]:
    """Spells out a table whose keys list several primitives."""
    return {name: handler for names, handler in groups.items() for name in names.split()}


HANDLERS = _table(
    {
        "reshape": shapes.reshape,
        "transpose": shapes.transpose,
        "broadcast_in_dim": shapes.broadcast_in_dim,
        "squeeze": shapes.squeeze,
        "tile": shapes.tile,
        "slice": shapes.slice_,
        "split": shapes.split,
        "unstack": shapes.unstack,
        "stack": shapes.stack,
        "concatenate": shapes.concatenate,
        "pad": shapes.pad,
        "rev": shapes.reverse,
        "dynamic_slice": shapes.dynamic_slice,
        "dynamic_update_slice": shapes.dynamic_update_slice,
        "copy convert_element_type reduce_precision device_put": shapes.identity,
        "optimization_barrier": shapes.identity,
        "psum psum_invariant pmax pmin ppermute pbroadcast pvary": shapes.identity,
        "reduce reduce_sum reduce_max reduce_min reduce_prod": shapes.reduce,
        "reduce_and reduce_or reduce_xor": shapes.reduce,
        "argmax argmin": shapes.argument,
        "cumsum cumprod cummax cummin cumlogsumexp": shapes.cumulative,
        "sort": shapes.sort,
        "top_k approx_top_k": shapes.top_k,
        "reduce_window reduce_window_sum reduce_window_max reduce_window_min": shapes.window,
        "fft": shapes.fourier,
        "random_seed random_wrap random_unwrap random_bits random_fold_in": shapes.random,
        "random_split random_clone random_gamma rng_bit_generator rng_uniform": shapes.random,
        "threefry2x32": shapes.random,
        "dot_general": contractions.dot_general,
        "ragged_dot_general": contractions.ragged_dot_general,
        "conv_general_dilated": contractions.convolution,
        "gather": contractions.gather,
        "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max": contractions.scatter,
        "scan": control.scan,
        "while": control.while_,
        "cond": control.cond,
        "shard_map": control.shard_map,
    }
)
"""Primitives with a rule of their own. All others go to `control.default`."""

VIEWS = frozenset(
    [
        *("reshape", "transpose", "broadcast_in_dim", "squeeze", "tile", "slice", "split"),
        *("unstack", "stack", "concatenate", "pad", "rev", "dynamic_slice"),
        "dynamic_update_slice",
    ]
)
"""Primitives whose results hold nothing but elements of their operands."""

SIGNATURES: Mapping[str, str] = {
    # jax.nn.dot_product_attention(implementation="cudnn"), (batch, time, heads, width).
    "dot_product_attention_fwd_wrapper": "bthd,bskd,bskv,bhts->bthv",
    # jax.experimental.pallas.ops.gpu.attention.mha
    "mha_forward": "bthd,bshd,bshv->bthv",
}
"""Attention kernels that hold no readable jaxpr, by primitive or kernel name."""
