"""What it costs to import jaxtp and to plan a file of shapes, beside importing jax and flax alone.

    python scripts/bench_startup.py

Prints CPU seconds, the least of five fresh processes each, and their ratio to the first line. Goal:
`jaxtp plan` within 1.3 times, `import jaxtp` within 0.15 s.
"""

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxtp

RUNS = 5


def cpu_seconds(code: str) -> float:
    """User and system seconds of `python -c code`, the least of some runs."""
    seen: list[float] = []
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seen.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seen)


def main() -> None:
    """Measures and prints."""
    layer = {
        name: {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}
        for name, shape in {"q_proj": (512, 512), "up_proj": (512, 2048)}.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree.json"
        jaxtp.dump_tree({f"layers_{i}": layer for i in range(32)}, tree)
        command = f"from jaxtp.cli.commands import main; main(['plan', {str(tree)!r}])"
        base = cpu_seconds("import jax, flax")
        for code, what in (
            ("import jax, flax, jaxtp", "import jax, flax, jaxtp"),
            (command, "jaxtp plan TREE.json"),
        ):
            seconds = cpu_seconds(code)
            print(
                f"{what:24} {seconds:5.2f} s  {seconds / base:4.2f}x  {seconds - base:+.2f} s "
                f"beside import jax, flax ({base:.2f} s)"
            )


if __name__ == "__main__":
    main()
