"""Stops a run that has diverged, before it overwrites a good checkpoint."""

import collections
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtp.errors import TrainingDiverged, join
from jaxtp.mesh.build import auto_context
from jaxtp.plan.trees import PyTree, leaves, parameters

WINDOW = 64
"""Steps whose median a loss is compared with: long enough to outlast a few unlucky batches."""

FEWEST = 8
"""Steps before a median means anything."""

MOST_SKIPPED = 20
"""Steps in a row that overflow at one loss scale. An adaptive scale halves at each, so this says
that it cannot fall further, and of a fixed one that it never fits; single overflows are usual."""


class Guard:
    """Looks at one run.

    Args:
        where: As below.
        spike_factor: As below.
        lines: Of `metrics.jsonl`, from before a restart.

    Attributes:
        where: What errors name as their place.
        spike_factor: How many times its recent median a loss may be; 0 allows all.
        num_skipped: Steps without an update so far, since their gradients overflowed under a loss
            scale.
    """

    def __init__(
        self, where: str, spike_factor: float = 0, lines: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.where, self.spike_factor = where, spike_factor
        self.num_skipped = lines[-1].get("skipped_steps", 0) if lines else 0
        losses = [line["loss"] for line in lines if isinstance(line.get("loss"), int | float)]
        self._losses = collections.deque(losses, maxlen=WINDOW)
        self._scale, self._in_a_row = math.inf, 0

    def problem(self, step: int, record: Mapping[str, float]) -> TrainingDiverged | None:
        """What is wrong with the numbers of a step, if anything; remembers its loss.

        Args:
            step: Its number.
            record: loss, perhaps grad_norm (of the unscaled gradients) and loss_scale.
        """
        loss, norm = record["loss"], record.get("grad_norm", 0.0)
        before = f"{self._losses[-1]:.4f}" if self._losses else "nothing"
        if not math.isfinite(loss):
            return self._diverged(f"the loss is {loss} at step {step}; it was {before} before")
        # With a loss scale, gradients that overflow are part of the procedure: the step is skipped.
        if not math.isfinite(norm) and "loss_scale" not in record:
            return self._diverged(
                f"the norm of the gradients is {norm} at step {step}, with a loss of {loss:.4f}"
            )
        if problem := self._overflow(step, norm, record.get("loss_scale")):
            return problem
        usual = statistics.median(self._losses) if len(self._losses) >= FEWEST else math.inf
        if self.spike_factor and loss > self.spike_factor * usual:
            return self._diverged(
                f"the loss is {loss:.4f} at step {step}, more than run.spike_factor="
                f"{self.spike_factor:g} times its median of {usual:.4f} over the last "
                f"{len(self._losses)} steps"
            )
        self._losses.append(loss)
        return None

    def _overflow(self, step: int, norm: float, scale: float | None) -> TrainingDiverged | None:
        if math.isfinite(norm) or scale is None:
            self._in_a_row = 0
            return None
        self.num_skipped += 1
        self._in_a_row = self._in_a_row + 1 if scale == self._scale else 1
        self._scale = scale
        if self._in_a_row < MOST_SKIPPED:
            return None
        return TrainingDiverged(
            f"the gradients of {MOST_SKIPPED} steps in a row, up to step {step}, overflowed at a "
            f"loss scale of {scale:g}, so no parameter has changed",
            where=self.where,
            fix="precision.compute=bfloat16, which has the range of float32; or a smaller "
            "precision.loss_scale where it is fixed; or a lower learning rate",
        )

    def check_parameters(self, step: int, state: PyTree) -> None:
        """Refuses to save parameters that the update of this very step has broken.

        The loss of a step is that of the parameters before it.

        Raises:
            TrainingDiverged: TP131, if a parameter is not finite.
        """
        with auto_context():
            broken = [
                path
                for path, leaf in leaves(parameters(state))
                if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) and not _is_finite(leaf)
            ]
        if broken:
            raise self._diverged(f"parameters are not finite after step {step}: {join(broken)}")

    def _diverged(self, what: str) -> TrainingDiverged:
        return TrainingDiverged(
            what,
            where=self.where,
            fix="lower the learning rate, lengthen its warm-up or clip gradients harder",
        )


@jax.jit
def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()
