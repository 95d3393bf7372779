"""Llama-3-8B on sequences of up to 1,048,576 tokens, its whole step compiled for GPUs that are not there.

    python scripts/bench_long.py

Two tables: what fits and how far the modelled step is from its bound, and the peak of one device
when cp and the length grow together. Attention is cuDNN's where nvidia-cudnn-cu12 can be imported,
else XLA's in tiles. About a quarter of a minute for each row.
"""

import dataclasses
import functools

import tyro
from tables import Cell, Flag, Section, tabulate

from jaxtp.compile.report import GIB, Report
from jaxtp.config.presets import preset
from jaxtp.train.attention import has_cudnn
from jaxtp.train.preflight import preflight_config

MODEL, LAYERS, KV_WIDTH, BYTES = "llama3-8b", 32, 8 * 128, 2

RUNS = (
    ("h100:2x8", 131_072, {"mesh.cp": 4, "mesh.tp": 4}),
    ("h100:16x8", 1_048_576, {"mesh.cp": 16, "mesh.tp": 8}),
)
"""Machine, tokens of the one sequence, and what of the mesh is chosen."""

FLAT = ((2, 65_536), (4, 131_072), (8, 262_144))
"""cp and tokens that grow together, with tp 8."""


def compiled(target: str, tokens: int, **changes: int) -> Report:
    """The step of one sequence, its residual stream sharded over tp as well."""
    settings = {"target": target, "seq_len": tokens, "batch.size": 1, **changes}
    settings["communication.sequence_parallel"] = True
    return preflight_config(preset(MODEL, **settings))[1]


def around(report: Report) -> float:
    """Bytes of keys and values, and of their gradients, that a device sends along cp in a step."""
    return sum(
        row.wire_bytes
        for row in report.collectives
        if row.kind == "collective-permute" and "models/attention.py" in row.source
    )


def formula(tokens: int, cp: int, tp: int) -> float:
    """The same: forward, recomputed, backward, and gradients; docs/long-sequences.md.

    The first permute of the recomputation is that of the backward pass.
    """
    own = 2 * tokens / cp * KV_WIDTH / tp * BYTES
    return LAYERS * own * (4 * (cp - 1) - 1)


def row_of(target: str, tokens: int, cp: int, tp: int) -> dict[str, Cell]:
    """A line of a table."""
    report = compiled(target, tokens, **{"mesh.cp": cp, "mesh.tp": tp})
    assert report.bound_ratio is not None
    return {
        "machine": target,
        "tokens": tokens,
        "cp": cp,
        "tp": tp,
        "peak GiB": round(report.peak_bytes / GIB, 2),
        "fits": report.fits,
        "cp GiB": round(around(report) / GIB, 3),
        "x formula": round(around(report) / formula(tokens, cp, tp), 4),
        "unexpected": len(report.unexpected),
        "s": round(report.step_seconds_modelled, 2),
        "x bound": round(report.bound_ratio, 3),
        "compile s": round(report.compile_seconds, 1),
    }
