"""Rotary frequencies of the Llama family."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxtp.models.attention import rotary
from jaxtp.models.llama.config import (
    LinearRopeScaling,
    LlamaConfig,
    RopeScaling,
    YarnRopeScaling,
)


def rotary_frequencies(
    width: int,
    theta: float,
    scaling: RopeScaling | LinearRopeScaling | YarnRopeScaling | None = None,
) -> np.ndarray:
    """Radians per token of each pair of a head, (width / 2,), highest first.

    theta^(-2i/H), section 3.2.2 of Su et al. 2021. Scaling as in the Llama 3.1 reference code: a
    frequency keeps a share that grows linearly with its number of turns in the original context,
    from 0 at `low_freq_factor` to 1 at `high_freq_factor`; the rest is divided by `factor`. Yarn's
    share grows with the pair's number instead, section 3.2 of Peng et al. 2023, from one pair to
    another unless told otherwise.

    Args:
        width: Elements of a head that are rotated.
        theta: Base.
        scaling: How frequencies are stretched to longer contexts.
    """
    frequencies = theta ** (-np.arange(0, width, 2) / width)
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearRopeScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, YarnRopeScaling):
        kept = _kept_by_yarn(width, theta, scaling)
        return frequencies * (kept + (1 - kept) / scaling.factor)
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotary_of(config: LlamaConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """How queries and keys are rotated, a function of them and of angles."""
    return functools.partial(
        rotary, neighbours=config.rope_interleave, magnitude=config.rotary_magnitude
    )


def _kept_by_yarn(width: int, theta: float, scaling: YarnRopeScaling) -> np.ndarray:
    """The share of each pair's frequency that is kept, (width / 2,)."""

    def pair_of(turns: float) -> float:
        """The pair that turns so often in the original context, between two pairs."""
        length = scaling.original_max_position_embeddings / (2 * math.pi)
        return width * math.log(length / turns) / (2 * math.log(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    # As in the reference code where both are one pair.
    ramp = (np.arange(width // 2) - first) / (last - first if last != first else 1e-3)
    return 1 - np.clip(ramp, 0, 1)


def angles(positions_BT: jax.Array, frequencies_H: jax.Array | np.ndarray) -> jax.Array:
    """Radians of every token and pair, float32 (batch or 1, tokens, pairs)."""
    # In fp32: in bf16 the positions 256 and 257 are the same number.
    return positions_BT[:, :, None] * jnp.float32(frequencies_H)[None, None, :]


def layer_frequencies(config: LlamaConfig) -> np.ndarray:
    """Frequencies of every layer, (layers, rotated width / 2); zero where nothing is rotated."""
    plain = rotary_frequencies(config.rotary_width, config.rope_theta, config.rope_scaling)
    rows = np.tile(plain, (config.num_hidden_layers, 1))
    if config.rope_local_theta is not None:
        rows[sliding_layers(config)] = rotary_frequencies(
            config.rotary_width, config.rope_local_theta
        )
    if config.rotary_layers is not None:
        rows[~np.array(config.rotary_layers)] = 0
    return rows


def sliding_layers(config: LlamaConfig) -> np.ndarray:
    """Which layers have the window, bool (layers,)."""
    if config.layer_types is None:
        return np.full(config.num_hidden_layers, config.sliding_window is not None)
    return np.array(config.layer_types) == "sliding_attention"
