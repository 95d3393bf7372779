"""The mesh that a search chose for a model of one's own, as a module to run and to import."""

from jaxtp.cost.ranking import Candidate
from jaxtp.train.own_search import mesh_sizes

SCRIPT = '''"""{mesh} for {model}: chosen by `jaxtp search`
for a batch of {batch} on {target}.

    python {file}                       prints the plan, on as many devices

Import it to train: `mesh, plan = make()`, then `jaxtp.shard` for parameters, and
`jaxtp.jit_step(step, state, mesh, plan=plan)`. The prices are those of a step that runs
`jaxtp.parallelize(fn, plan, mesh)` on {micro_batches} micro-batches of {rows} rows a device.
"""

import jaxtp
from {module} import {function}

BATCH = {batch}
MICRO_BATCHES = {micro_batches}


def make():
    """The mesh and the plan."""
    fn, params, inputs = {function}()
    mesh = jaxtp.make_mesh({axes})
    return mesh, jaxtp.make_plan(params, mesh, fn=fn, inputs=inputs, zero={zero})


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
