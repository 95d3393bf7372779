"""Llama-3-8B on sequences of up to 1,048,576 tokens: the whole step, compiled without a GPU.

    python scripts/bench_long.py

Two tables: what fits and how far the modelled step is from its bound, and the peak of one device
when cp and the length grow together. Attention is cuDNN's where nvidia-cudnn-cu12 can be imported,
else XLA's in tiles. About a quarter of a minute for each row.
"""

import dataclasses
from collections.abc import Sequence

import tyro
from tables import Cell, Flag, Section, tabulate

from jaxtp.compile.report import Report
from jaxtp.config.presets import preset
from jaxtp.hardware.links import GIB
from jaxtp.train.attention import has_cudnn
from jaxtp.train.preflight import preflight_config

MODEL, LAYERS, KV_WIDTH, BYTES = "llama3-8b", 32, 8 * 128, 2

Run = tuple[str, int, int, int]
"""Machine, tokens of the one sequence, cp, tp."""

LONG: Sequence[Run] = (("h100:2x8", 131_072, 4, 4), ("h100:16x8", 1_048_576, 16, 8))
FLAT: Sequence[Run] = tuple((f"h100:{cp}x8", 65_536 * cp, cp, 8) for cp in (2, 8))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to print."""

    as_json: Flag = False
    """Print JSON."""


def compiled(target: str, tokens: int, cp: int, tp: int) -> Report:
    """The step of one sequence, its residual stream sharded over tp as well."""
    settings = {"target": target, "seq_len": tokens, "mesh.cp": cp, "mesh.tp": tp}
    kernel = "cudnn" if has_cudnn() else "xla"
    one = {"batch.size": 1, "communication.sequence_parallel": True, "attention": kernel}
    return preflight_config(preset(MODEL, **settings, **one))[1]


def around(report: Report) -> float:
    """Bytes of keys and values, and of their gradients, that a device sends along cp in a step."""
    return sum(
        row.wire_bytes
        for row in report.collectives
        if row.kind == "collective-permute" and row.source.startswith("attention.py")
    )


def formula(tokens: int, cp: int, tp: int) -> float:
    """The same: forward, recomputed, backward, and gradients; docs/long-sequences.md.

    The first permute of the recomputation is that of the backward pass.
    """
    own = 2 * tokens / cp * KV_WIDTH / tp * BYTES
    return LAYERS * own * (4 * (cp - 1) - 1)


def row_of(target: str, tokens: int, cp: int, tp: int) -> dict[str, Cell]:
    """A line of a table."""
    report = compiled(target, tokens, cp, tp)
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


def long() -> Section:
    """Sequences that no tensor-parallel group holds."""
    rows = [row_of(*run) for run in LONG]
    worst = max(row["x bound"] for row in rows)
    return Section(
        title=f"{MODEL}, one sequence, block outputs kept",
        rows=rows,
        thresholds=[
            ("each fits", all(row["fits"] for row in rows)),
            ("cp sends what the formula says", all(row["x formula"] == 1 for row in rows)),
            ("no collective is unexpected", not any(row["unexpected"] for row in rows)),
            (f"at most 1.15x the bound: {worst}x", worst <= 1.15),
        ],
        notes=["cp GiB are of keys, values and their gradients, per device and step"],
    )


def flat() -> Section:
    """The peak where cp grows with the length."""
    rows = [row_of(*run) for run in FLAT]
    peaks = [row["peak GiB"] for row in rows]
    return Section(
        title="cp and length grow together",
        rows=rows,
        thresholds=[
            (f"peaks within 2%: {min(peaks)} to {max(peaks)} GiB", max(peaks) <= 1.02 * min(peaks)),
            ("cp sends what the formula says", all(row["x formula"] == 1 for row in rows)),
        ],
    )


SECTIONS = {"long": long, "flat": flat}


def main(options: Options) -> None:
    """Compiles and tabulates, section by section."""
    tabulate(SECTIONS, as_json=options.as_json, width=140)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
