"""jaxtp: automatic tensor parallelism for Flax models, proven on the compiled GPU program.

The front door. Models, training and files are imported explicitly: `from jaxtp import models`.
"""

from jaxtp.errors import JaxtpError, JaxtpWarning
from jaxtp.listing import dump_tree, load_tree
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import make_mesh
from jaxtp.plan import ParamDecision, Plan
from jaxtp.planner import make_plan

__all__ = [
    "JaxtpError",
    "JaxtpWarning",
    "MeshShape",
    "ParamDecision",
    "Plan",
    "dump_tree",
    "load_tree",
    "make_mesh",
    "make_plan",
]
