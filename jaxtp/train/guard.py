"""Stops a run that has diverged, before it overwrites a good checkpoint."""

import collections
import math
import statistics
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from jaxtp.errors import TrainingDiverged, join
from jaxtp.mesh.build import auto_context
from jaxtp.plan.trees import PyTree, leaves, parameters

WINDOW = 64
"""Steps whose median a loss is compared with: long enough to outlast a few unlucky batches."""

FEWEST = 8
"""Steps before a median means anything."""


class Guard:
    """Looks at one run.

    Attributes:
        where: What errors name as their place.
        spike_factor: How many times its recent median a loss may be; 0 allows all.
    """

    def __init__(self, where: str, spike_factor: float = 0, losses: Iterable[float] = ()) -> None:
        self.where, self.spike_factor = where, spike_factor
        self._losses = collections.deque(losses, maxlen=WINDOW)

    def problem(self, step: int, record: Mapping[str, float]) -> TrainingDiverged | None:
        """What is wrong with the numbers of a step, if anything; remembers its loss.

        Args:
            step: Its number.
            record: loss, perhaps grad_norm and loss_scale.
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
        usual = statistics.median(self._losses) if len(self._losses) >= FEWEST else math.inf
        if self.spike_factor and loss > self.spike_factor * usual:
            return self._diverged(
                f"the loss is {loss:.4f} at step {step}, more than run.spike_factor="
                f"{self.spike_factor:g} times its median of {usual:.4f} over the last "
                f"{len(self._losses)} steps"
            )
        self._losses.append(loss)
        return None

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
