"""jaxtp: automatic tensor parallelism for Flax models, proven on the compiled GPU program.

The front door: every public name and the module that holds it.
"""

from .activations.by_dataflow import parallelize as parallelize
from .activations.by_name import constrain as constrain
from .activations.by_name import use_plan as use_plan
from .compile.deviceless import preflight as preflight
from .compile.limits import check as check
from .compile.options import compile_options as compile_options
from .errors import JaxtpError as JaxtpError
from .errors import JaxtpWarning as JaxtpWarning
from .generation.decode import jit_decode as jit_decode
from .generation.run import generate as generate
from .inspect.export import annotate as annotate
from .inspect.export import export_rules as export_rules
from .inspect.pages import see_tp_plan as see_tp_plan
from .inspect.parity import verify as verify
from .io.checkpoints import Checkpoints as Checkpoints
from .io.hf import load_hf as load_hf
from .io.hf import save_adapter as save_adapter
from .io.hf import save_hf as save_hf
from .io.tree_files import dump_tree as dump_tree
from .io.tree_files import load_tree as load_tree
from .layers.stacked import scan_layers as scan_layers
from .mesh.axes import MeshShape as MeshShape
from .mesh.build import make_mesh as make_mesh
from .mesh.build import plan_mesh as plan_mesh
from .placement.arrays import shard as shard
from .placement.arrays import shard_batch as shard_batch
from .placement.arrays import unshard as unshard
from .placement.init import init_optimizer as init_optimizer
from .placement.init import init_sharded as init_sharded
from .placement.inputs import shard_inputs as shard_inputs
from .placement.train_state import state_specs as state_specs
from .plan.decisions import ParamDecision as ParamDecision
from .plan.decisions import Plan as Plan
from .plan.stored_form import mask_padding as mask_padding
from .processes.device_health import probe as probe
from .processes.faults import watchdog as watchdog
from .processes.startup import agree as agree
from .processes.startup import initialize as initialize
from .rules.planner import make_plan as make_plan
from .train.mesh_search import search as search
from .train.step import jit_step as jit_step

__version__: str
