"""Rotary frequencies of the Llama family."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxtp.models.llama.config import LinearRopeScaling, LlamaConfig, RopeScaling


def rotary_frequencies(
    width: int, theta: float, scaling: RopeScaling | LinearRopeScaling | None = None
) -> np.ndarray:
    """Radians per token of each pair of a head, (width / 2,), highest first.

    theta^(-2i/H), section 3.2.2 of Su et al. 2021. Scaling as in the Llama 3.1 reference code: a
    frequency keeps a share that grows linearly with its number of turns in the original context,
    from 0 at `low_freq_factor` to 1 at `high_freq_factor`; the rest is divided by `factor`.

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
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


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
