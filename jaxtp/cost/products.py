"""Seconds of matrix products and of attention on one GPU, from sizes in elements."""

import math

import numpy as np

from jaxtp.cost.strategy import Number
from jaxtp.hardware.gpus import DeviceKind

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.95), (64, 128, 0.6), (128, 64, 0.6))
"""Rows and columns of the output that one core computes at a time, and its rate relative to the
best. The shares are read off XLA's measured H100 table (bfloat16, 4096 x N x 4096: N = 256, 512,
1024 run at 399, 662, 752 TFLOP/s). cuBLAS picks the fastest, and so does the model."""

FILL_DEPTH = 130
"""Contracted elements that starting and ending a tile is worth. Fitted."""

KERNEL_SECONDS = 3e-6
"""Start and end of one kernel on the device: 1024^3 and 2048^3 at 253 and 641 TFLOP/s there."""

MISALIGNED = 1.8
"""Factor on products whose inner dims are no multiple of 8 elements (16 bytes), which tensor cores
load in pieces (NVIDIA, Matrix Multiplication Background, tensor core requirements). Fitted."""

COMPILED_MEMORY_SHARE = 2.6 / 3.35
"""Share of the data sheet's memory bandwidth that the elementwise kernels of a compiled program
reach: 2.6 TB/s on an H100. `DeviceKind.memory_share` is fitted on frameworks whose kernels move
more than is counted."""

BACKWARD_ATTENTION = 0.85
"""Rate of fused attention backward, relative to forward, where a kind has no rates of its own
(Dao 2023, figures 4 to 6)."""


def product_seconds(
    device: DeviceKind, rows: Number, columns: Number, depth: Number, *, count: Number = 1
) -> Number:
    """Seconds of `count` products of (rows, depth) by (depth, columns), all in one kernel.

    The output is cut into tiles, each core computes one at a time, and the last wave of tiles may
    leave cores idle (NVIDIA, Matrix Multiplication Background, tile and wave quantisation). Memory
    bandwidth limits products with little depth or few rows.

    Args:
        device: The GPU.
        rows: Rows of the left operand on one device, in elements.
        columns: Columns of the right operand on one device, in elements.
        depth: The contracted dim on one device, in elements.
        count: Independent products, as in attention.
    """
    per_core = device.matmul_flops / device.cores
    best: Number = math.inf
    for tile_rows, tile_columns, share in TILES:
        tiles = np.ceil(rows / tile_rows) * np.ceil(columns / tile_columns) * count
        waves = np.ceil(tiles / device.cores)
        flops = 2.0 * tile_rows * tile_columns * waves * (depth + FILL_DEPTH)
        best = np.minimum(best, flops / (per_core * share))
    aligned = (np.mod(columns, 8) == 0) & (np.mod(depth, 8) == 0)
    best = best * np.where(aligned, 1.0, MISALIGNED)
    moved = 2.0 * count * (rows * depth + depth * columns + rows * columns)
    return np.maximum(best, moved / memory_rate(device)) + KERNEL_SECONDS


def linear_seconds(
    device: DeviceKind,
    rows: Number,
    columns: Number,
    depth: Number,
    *,
    backward: bool,
    count: Number = 1,
) -> Number:
    """Seconds of a projection: one product forward; two backward, for the input and the weights.

    Args:
        device: The GPU.
        rows: Tokens on one device.
        columns: Width of the result on one device, in elements.
        depth: Width of the input on one device, in elements.
        backward: Whether the backward pass is meant.
        count: Projections of other tokens by other weights, as in experts.
    """
    if not backward:
        return product_seconds(device, rows, columns, depth, count=count)
    inputs = product_seconds(device, rows, depth, columns, count=count)
    return inputs + product_seconds(device, depth, columns, rows, count=count)


def memory_rate(device: DeviceKind) -> float:
    """Bytes/s of elementwise kernels in training."""
    return device.memory_share * device.hbm_bandwidth


def unfused_attention_seconds(
    device: DeviceKind,
    queries: Number,
    keys: Number,
    head_dim: float,
    heads: Number,
    *,
    backward: bool,
    traffic: float = 1.0,
    in_steps: Number = 0,
) -> Number:
    """Seconds of attention whose scores go through memory, as Megatron-LM ran it until 2023.

    Two products a head forward, four backward; between them causal softmax and dropout read and
    write the scores. Forward 8 bytes a score: softmax reads what the mask leaves (1) and writes
    all (2), dropout reads and writes (4) and keeps a mask (1). Backward 9: dropout 5, softmax reads
    two halves and writes (4). Korthikanti et al. 2022, section 4.1, count what is kept of them.
    Softmax in steps, each a kernel in float32: cast (6), scale (8), mask (9), softmax (8) and cast
    back (6) instead of 3 forward; 6, 8, 9, 12 and 6 instead of 4 backward.

    Args:
        device: The GPU.
        queries: Query positions of one sequence on one device.
        keys: Key positions that they see.
        head_dim: Width of one head.
        heads: Heads of all sequences of the micro-batch on one device.
        backward: Whether the backward pass is meant.
        traffic: Bytes relative to those.
        in_steps: Whether softmax is in steps.
    """
    scores = product_seconds(device, queries, keys, head_dim, count=heads)
    values = product_seconds(device, queries, head_dim, keys, count=heads)
    each = (9 + 37 * in_steps) if backward else (8 + 34 * in_steps)
    moved = traffic * heads * queries * keys * each / memory_rate(device)
    return (2 if backward else 1) * (scores + values) + moved


def fused_attention_seconds(
    device: DeviceKind,
    queries: Number,
    keys: Number,
    head_dim: float,
    heads: Number,
    *,
    backward: bool,
    relative: float = 1.0,
    own_kernel: bool = False,
) -> Number:
    """Seconds of causal attention in one kernel that keeps no scores (Dao et al. 2022).

    4 x queries x keys x head_dim FLOPs a head forward, 10 backward because scores are computed
    again; the mask leaves half of both, and the other half of each diagonal tile of 128. Tiles of
    128 queries are the unit of work of a core.

    Args:
        device: The GPU.
        queries: Query positions of one sequence on one device.
        keys: Key positions of the sequence.
        head_dim: Width of one head.
        heads: Heads of all sequences of the micro-batch on one device.
        backward: Whether the backward pass is meant.
        relative: Rate of the kernel relative to what runs on this kind sustained.
        own_kernel: Whether the kernel is written for this kind, as cuDNN's are.
    """
    flops = (10 if backward else 4) * heads * queries * (keys + 128) / 2 * head_dim
    tiles = np.ceil(queries / 128) * heads
    idle = np.ceil(tiles / device.cores) * device.cores / tiles
    rate = _attention_rate(device, head_dim, backward=backward, own_kernel=own_kernel)
    return flops * np.minimum(idle, 2.0) / (relative * rate) + KERNEL_SECONDS


def _attention_rate(
    device: DeviceKind, head_dim: float, *, backward: bool, own_kernel: bool
) -> float:
    """FLOP/s of one kernel of attention, for heads of the nearest width that is known."""
    if not own_kernel or not device.attention_flops:
        share = device.attention_share * (BACKWARD_ATTENTION if backward else 1.0)
        return device.matmul_flops * share
    row = min(device.attention_flops, key=lambda row: abs(row[0] - head_dim))
    return row[2] if backward else row[1]
