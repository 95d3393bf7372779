"""jaxtp: automatic tensor parallelism for Flax models, proven on the compiled GPU program.

The front door. Models, training and files are imported explicitly: `from jaxtp import models`.
"""

from jaxtp.activations import constrain, use_plan
from jaxtp.apply import shard, shard_batch, unshard
from jaxtp.errors import JaxtpError, JaxtpWarning
from jaxtp.init import init_optimizer, init_sharded
from jaxtp.listing import dump_tree, load_tree
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import make_mesh, plan_mesh
from jaxtp.plan import ParamDecision, Plan
from jaxtp.planner import make_plan
from jaxtp.state import state_specs
from jaxtp.view import see_tp_plan

__all__ = [
    "JaxtpError",
    "JaxtpWarning",
    "MeshShape",
    "ParamDecision",
    "Plan",
    "constrain",
    "dump_tree",
    "init_optimizer",
    "init_sharded",
    "load_tree",
    "make_mesh",
    "make_plan",
    "plan_mesh",
    "see_tp_plan",
    "shard",
    "shard_batch",
    "state_specs",
    "unshard",
    "use_plan",
]
