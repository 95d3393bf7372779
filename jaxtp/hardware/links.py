"""How long a collective takes inside one NVLink domain.

The bandwidths are the measured tables that XLA ships for its own scheduler, cut out of the CUDA
plugin of jax 0.10.2 (`sm_90`, `sm_100_B200`, `sm_100_GB200`; float32; GB/s of *full* buffer over
time, start-up included).
"""

import bisect
import math
from collections.abc import Mapping, Sequence

MIB, GIB = 2**20, 2**30
TABLE_BYTES = tuple(int(mib * MIB) for mib in (1 / 16, 1 / 4, 1, 4, 16, 64, 256, 1024))
"""Full-buffer sizes, in bytes, at which the tables below list a bandwidth."""

Tables = Mapping[str, Mapping[int, Sequence[float]]]
"""Collective kind -> group size -> GB/s at each of TABLE_BYTES."""

HOPPER: Tables = {
    "all-reduce": {
        2: (4.3, 16.0, 50.0, 97.2, 166, 203, 227, 242),
        4: (3.63, 13.1, 24.1, 70.9, 110, 170, 189, 198),
        8: (1.65, 10.0, 20.2, 61.1, 115, 177, 213, 227),
    },
    "all-gather": {
        2: (5.54, 20.7, 59.8, 137, 278, 417, 489, 538),
        4: (4.73, 12.7, 51.2, 99.4, 240, 343, 403, 434),
        8: (3.52, 7.95, 33.7, 89.0, 204, 314, 368, 393),
    },
    "reduce-scatter": {
        2: (3.61, 8.93, 66.7, 132, 247, 304, 347, 390),
        4: (4.51, 17.0, 36.0, 98.8, 240, 299, 347, 371),
        8: (1.74, 9.17, 51.3, 118, 194, 307, 348, 368),
    },
    "all-to-all": {
        2: (3.78, 5.97, 29.0, 75.1, 211, 396, 519, 624),
        4: (2.17, 6.91, 30.7, 79.1, 191, 289, 400, 450),
        8: (2.76, 10.3, 19.1, 112, 159, 307, 354, 384),
    },
    "collective-permute": {8: (4.71, 9.75, 32.4, 69.7, 70.5, 117, 245, 290)},
}
BLACKWELL: Tables = {
    "all-reduce": {
        2: (1.88, 10.7, 34.2, 68.2, 218, 337, 413, 461),
        4: (2.06, 6.24, 28.4, 85.3, 178, 280, 331, 367),
        8: (1.46, 4.94, 21.4, 50.6, 128, 213, 318, 345),
    },
    "all-gather": {
        2: (3.76, 10.3, 44.8, 102, 328, 586, 749, 852),
        4: (2.56, 6.95, 44.6, 102, 228, 524, 633, 726),
        8: (2.06, 6.92, 29.3, 97.5, 282, 413, 620, 675),
    },
    "reduce-scatter": {
        2: (2.14, 7.11, 34.0, 130, 331, 577, 760, 859),
        4: (2.07, 7.19, 25.1, 115, 198, 529, 642, 767),
        8: (1.6, 6.09, 32.0, 101, 273, 391, 608, 695),
    },
    "all-to-all": {
        2: (2.46, 7.19, 26.9, 92.8, 208, 424, 592, 811),
        4: (1.77, 9.68, 25.7, 77.9, 216, 414, 584, 695),
        8: (1.85, 6.37, 24.5, 78.5, 220, 406, 585, 687),
    },
    "collective-permute": {8: (3.64, 8.16, 30.7, 56.3, 114, 80.9, 294, 528)},
}
RACK: Tables = {
    "all-reduce": {
        16: (1.26, 5.92, 22.3, 69.0, 142, 243, 337, 411),
        32: (1.21, 4.66, 17.4, 60.5, 116, 202, 293, 390),
        64: (1.2, 4.3, 15.8, 54.5, 111, 196, 288, 381),
    },
    "all-gather": {
        16: (2.13, 8.35, 32.9, 113, 209, 367, 662, 679),
        32: (1.51, 5.83, 22.6, 82.8, 180, 292, 462, 676),
        64: (0.7, 2.66, 10.4, 41.5, 137, 346, 521, 678),
    },
    "reduce-scatter": {
        16: (2.13, 8.39, 32.9, 105, 193, 318, 672, 697),
        32: (1.15, 4.36, 17.1, 61.4, 167, 269, 376, 695),
        64: (0.68, 2.62, 10.4, 40.6, 119, 342, 525, 685),
    },
    "all-to-all": {
        16: (5.29, 19.6, 59.1, 107, 310, 485, 618, 678),
        32: (3.1, 12.8, 50.0, 105, 135, 476, 612, 664),
        64: (1.21, 4.85, 19.2, 75.5, 137, 395, 567, 648),
    },
    "collective-permute": {64: (2.92, 4.35, 17.9, 20.9, 22.4, 87.8, 343, 657)},
}


def wire_bytes(kind: str, num_bytes: float, size: int) -> float:
    """Bytes that one device sends for a collective, by the ring formula.

    Args:
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all` or `collective-permute`.
        num_bytes: The *full* buffer in bytes: an all-gather's output, a reduce-scatter's input, and
            for the others the array as one device holds it.
        size: Devices in the group.

    >>> wire_bytes("all-reduce", 800, 8), wire_bytes("all-gather", 800, 8)
    (1400.0, 700.0)
    """
    if kind == "collective-permute":
        return float(num_bytes)
    passes = 2 if kind == "all-reduce" else 1
    return passes * (size - 1) / size * num_bytes


def table_seconds(tables: Tables, kind: str, num_bytes: float, size: int) -> float:
    """Seconds of one collective inside an NVLink domain: full buffer over the listed bandwidth.

    The bandwidth is interpolated linearly in the logarithm of the size. Below the first listed size
    the time stays what it is there, because start-up dominates; a group size between two listed
    ones takes the slower, larger one.
    """
    by_size = tables.get(kind) or tables["all-to-all"]
    listed = by_size[min((n for n in by_size if n >= size), default=max(by_size))]
    clamped = min(max(num_bytes, TABLE_BYTES[0]), TABLE_BYTES[-1])
    right = min(max(bisect.bisect_left(TABLE_BYTES, clamped), 1), len(TABLE_BYTES) - 1)
    low, high = TABLE_BYTES[right - 1], TABLE_BYTES[right]
    share = math.log(clamped / low) / math.log(high / low)
    gigabytes = listed[right - 1] + share * (listed[right] - listed[right - 1])
    return max(num_bytes, TABLE_BYTES[0]) / (gigabytes * 1e9)
