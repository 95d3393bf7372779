"""Plans of the published sizes, one line a parameter, reviewed as a diff.

JAXTP_REGOLD=1 rewrites them.
"""

import os
from pathlib import Path

import pytest

import jaxtp
from jaxtp import models
from jaxtp.plan.specs import spec_text

GOLDEN = Path(__file__).parent / "golden" / "plans"
MESHES = ({"tp": 2}, {"tp": 4}, {"tp": 8}, {"pp": 4, "fsdp": 2, "tp": 2})


def text_of(name):
    """The plans of one preset: each mesh once, one line a parameter."""
    model, config = models.abstract(name), models.config_of(name)
    parts = []
    for mesh in MESHES:
        plan = jaxtp.make_plan(model, mesh, config=config)
        rows = [
            (d.path, f"{d.dtype}{list(d.shape)}", spec_text(d.spec), d.role, d.reasons[-1])
            + ((f"[{d.fallback}]",) if d.fallback else ())
            for d in plan.decisions
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = (
            "  ".join((*(c.ljust(w) for c, w in zip(row, widths, strict=False)), *row[4:]))
            for row in rows
        )
        head = f"mesh {plan.mesh}: {plan.bytes_per_device:,} of {plan.num_bytes:,} bytes per device"
        stages = (f"stages {plan.stages}",) if plan.stages else ()
        parts.append("\n".join((head, *stages, *(f"note {n}" for n in plan.notes), *lines)))
    return "\n\n".join(parts) + "\n"


def check_golden(name, text):
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("JAXTP_REGOLD"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} changed; review the diff, then regold"


@pytest.mark.parametrize("name", models.PRESETS)
def test_presets(name):
    check_golden(name, text_of(name))


def test_every_file_is_a_preset():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(models.PRESETS)
