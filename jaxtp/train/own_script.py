"""The mesh that a search chose for a model of one's own, as a module to run and to import."""

from jaxtp.cost.ranking import Candidate
from jaxtp.train.own_search import mesh_sizes

SCRIPT = '''"""{mesh} for {model}: chosen by `jaxtp search`
for a batch of {batch} on {target}.

    python {file}                       prints the plan, on as many devices

Import it to train: `mesh, plan = make()`, then `jaxtp.shard` for parameters, and
`jaxtp.jit_step(step, state, mesh, plan=plan)`. The prices are those of a step that runs
`jaxtp.parallelize(fn, plan, mesh)` on {micro_batches} micro-batches of {rows} rows a device:
`loss, grads = accumulated(jax.value_and_grad(loss_fn))(params, batch)` does, in the step.
"""

import jax
import jax.numpy as jnp
import jaxtp
from {module} import {function}

BATCH = {batch}
MICRO_BATCHES = {micro_batches}


def make():
    """The mesh and the plan."""
    fn, params, inputs = {function}()
    mesh = jaxtp.make_mesh({axes})
    return mesh, jaxtp.make_plan(params, mesh, fn=fn, inputs=inputs, zero={zero})


def accumulated(value_and_grad):
    """`(params, batch) -> (loss, gradients)`, a mean, as the mean over the micro-batches.

    Leaves of the batch are (batch, ...). Sums are float32; activations of one micro-batch live.
    """
    if MICRO_BATCHES == 1:
        return value_and_grad

    def split(x):
        # Strided: every device divides the rows that it has.
        return jnp.moveaxis(x.reshape(-1, MICRO_BATCHES, *x.shape[1:]), 1, 0)

    def mean(params, batch):
        def add(sums, micro):
            return jax.tree.map(jnp.add, sums, value_and_grad(params, micro)), None

        micros = jax.tree.map(split, batch)
        like = jax.eval_shape(value_and_grad, params, jax.tree.map(lambda x: x[0], micros))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
        sums, _ = jax.lax.scan(add, zeros, micros)
        return jax.tree.map(lambda x: x / MICRO_BATCHES, sums)

    return mean


if __name__ == "__main__":
    jaxtp.initialize()
    print(make()[1])
'''
"""What `script` fills in."""


def script(entry: str, target: str, batch: int, chosen: Candidate, file: str) -> str:
    """The text of the module.

    Args:
        entry: "package.module:function", the model.
        target: The machine.
        batch: Rows of the global batch.
        chosen: The mesh and what goes with it.
        file: What the module will be called.
    """
    module, _, function = entry.partition(":")
    sizes = mesh_sizes(chosen)
    return SCRIPT.format(
        mesh=" ".join(f"{axis}={size}" for axis, size in sizes.items()),
        model=entry,
        target=target,
        batch=batch,
        file=file,
        micro_batches=chosen.settings["micro_batches"],
        rows=chosen.settings["micro_batch"],
        module=module,
        function=function,
        axes=", ".join(f"{axis}={size}" for axis, size in sizes.items()),
        zero=chosen.settings["zero"],
    )
