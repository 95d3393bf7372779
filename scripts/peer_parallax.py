"""What google-parallax plans for one model of `peer_models.py`, as JSON on the last line.

    python scripts/peer_parallax.py "linen encoder"

Runs in an environment of its own: `pip install --no-deps google-parallax==0.0.2` beside jax, flax
and jaxtp. Its automatic strategy wants a mesh of two axes and traces the forward function, as its
`create_sharded_model` does.
"""

import json
import sys

import jax
from parallax.sharding import auto_shard
from peer_models import MODELS


def main(name: str) -> None:
    """Prints one list of axis names or nulls for each parameter, in the order of the tree."""
    case = MODELS[name]()
    try:
        with jax.set_mesh(jax.make_mesh((1, 8), ("data", "model"))):
            (specs, *_), _ = auto_shard.get_shardings(case.apply, case.params, case.tokens)
    except Exception as error:  # whatever it stops with is the result
        at = error.__traceback__
        while at and at.tb_next:
            at = at.tb_next
        where = f" in {at.tb_frame.f_code.co_name}" if at else ""
        print(
            json.dumps({"error": f"{type(error).__name__}{where}: {' '.join(str(error).split())}"})
        )
        return
    flat = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
    print(json.dumps({"specs": [list(spec) for spec in flat]}))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main(sys.argv[1])
