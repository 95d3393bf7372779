"""jaxtp: automatic tensor parallelism for Flax models, proven on the compiled GPU program.

The front door. Models and training are imported explicitly: `from jaxtp import models`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxtp.activations.by_dataflow import parallelize
from jaxtp.activations.by_name import constrain, use_plan
from jaxtp.compile.deviceless import preflight
from jaxtp.compile.limits import check
from jaxtp.compile.options import compile_options
from jaxtp.errors import JaxtpError, JaxtpWarning
from jaxtp.inspect.export import annotate, export_rules
from jaxtp.inspect.pages import see_tp_plan
from jaxtp.inspect.parity import verify
from jaxtp.io.tree_files import dump_tree, load_tree
from jaxtp.layers.stacked import scan_layers
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import make_mesh, plan_mesh
from jaxtp.placement.arrays import shard, shard_batch, unshard
from jaxtp.placement.init import init_optimizer, init_sharded
from jaxtp.placement.train_state import state_specs
from jaxtp.plan.decisions import ParamDecision, Plan
from jaxtp.plan.stored_form import mask_padding
from jaxtp.processes.device_health import probe
from jaxtp.processes.faults import watchdog
from jaxtp.processes.startup import agree, initialize
from jaxtp.rules.planner import make_plan
from jaxtp.train.step import jit_step

if TYPE_CHECKING:
    from jaxtp.io.checkpoints import Checkpoints
    from jaxtp.io.hf import load_hf, save_hf

LAZY = {"Checkpoints": "io.checkpoints", "load_hf": "io.hf", "save_hf": "io.hf"}
"""Names whose modules bring Orbax or Flax with them, imported when they are first used."""

__all__ = [
    "Checkpoints", "JaxtpError", "JaxtpWarning", "MeshShape", "ParamDecision", "Plan", "agree",
    "annotate", "check", "compile_options", "constrain", "dump_tree", "export_rules",
    "init_optimizer", "init_sharded", "initialize", "jit_step", "load_hf", "load_tree",
    "make_mesh", "make_plan", "mask_padding", "parallelize", "plan_mesh", "preflight", "probe",
    "save_hf", "scan_layers", "see_tp_plan", "shard", "shard_batch", "state_specs", "unshard",
    "use_plan", "verify", "watchdog",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module 'jaxtp' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxtp.{LAZY[name]}"), name)


def __dir__() -> list[str]:
    return __all__
