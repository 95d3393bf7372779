"""When a pipeline stage does what.

In stages every device along the pp axis runs one program. At tick t stage s works on unit u = t - s
of its list: with S stages, v rounds and M micro-batches, unit u is round r = u % vS // S of
micro-batch m = u // vS x S + u % S. After each tick the result goes to the next stage, around a
ring; stage 0 gets back what the last stage sent in the tick before it needs it for the next round.
For v = 1 this is GPipe (Huang et al. 2019), m = u; for more it is the interleaved order of
Narayanan et al. 2021, section 2.2, with all forward passes in front of the first backward one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtp.plan.stages import Stages


class Orders(NamedTuple):
    """What a stage does in a tick, or, with a leading dim, in all of them.

    Attributes:
        enters: Whether its input comes from in front of the layers, not from another stage.
        turn: Which of its chunks it runs.
        micro: On which micro-batch.
        layers: How many layers: those of the chunk, or 0 in an idle tick.
    """

    enters: jax.Array
    turn: jax.Array
    micro: jax.Array
    layers: jax.Array


def orders_of(stages: Stages, stage: jax.Array) -> Orders:
    """The schedule of the module's docstring."""
    num_stages, num_units = stages.num_stages, stages.num_rounds * stages.micro_batches
    unit = jnp.arange(stages.num_ticks) - stage
    real = (unit >= 0) & (unit < num_units)
    unit = jnp.clip(unit, 0, num_units - 1)
    group, place = jnp.divmod(unit, stages.num_rounds * num_stages)
    turn = place // num_stages
    layers = jnp.asarray(stages.layers)[turn, stage]
    return Orders(
        enters=(stage == 0) & (turn == 0),
        turn=turn,
        micro=group * num_stages + unit % num_stages,
        layers=jnp.where(real, layers, 0),
    )
