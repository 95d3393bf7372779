"""jaxtp: automatic tensor parallelism for Flax models, proven on the compiled GPU program.

The front door. Models, training and files are imported explicitly: `from jaxtp import models`.
"""

from jaxtp.activations import constrain, use_plan
from jaxtp.apply import shard, shard_batch, unshard
from jaxtp.check import check
from jaxtp.errors import JaxtpError, JaxtpWarning
from jaxtp.export import annotate, export_rules
from jaxtp.init import init_optimizer, init_sharded
from jaxtp.listing import dump_tree, load_tree
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import make_mesh, plan_mesh
from jaxtp.padding import mask_padding
from jaxtp.parallelize import parallelize
from jaxtp.plan import ParamDecision, Plan
from jaxtp.planner import make_plan
from jaxtp.state import state_specs
from jaxtp.train.step import jit_step
from jaxtp.verify import verify
from jaxtp.view import see_tp_plan
from jaxtp.xla.options import compile_options
from jaxtp.xla.preflight import preflight

__all__ = [
    "JaxtpError",
    "JaxtpWarning",
    "MeshShape",
    "ParamDecision",
    "Plan",
    "annotate",
    "check",
    "compile_options",
    "constrain",
    "dump_tree",
    "export_rules",
    "init_optimizer",
    "init_sharded",
    "jit_step",
    "load_tree",
    "make_mesh",
    "make_plan",
    "mask_padding",
    "parallelize",
    "plan_mesh",
    "preflight",
    "see_tp_plan",
    "shard",
    "shard_batch",
    "state_specs",
    "unshard",
    "use_plan",
    "verify",
]
