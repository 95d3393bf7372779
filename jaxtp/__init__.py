"""jaxtp: automatic tensor parallelism for Flax models, proven on the compiled GPU program.

The front door. Models and training are imported explicitly: `from jaxtp import models`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxtp.activations import constrain, use_plan
from jaxtp.apply import shard, shard_batch, unshard
from jaxtp.check import check
from jaxtp.errors import JaxtpError, JaxtpWarning
from jaxtp.export import annotate, export_rules
from jaxtp.init import init_optimizer, init_sharded
from jaxtp.listing import dump_tree, load_tree
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import make_mesh, plan_mesh
from jaxtp.mesh.distributed import agree, initialize
from jaxtp.mesh.faults import watchdog
from jaxtp.mesh.probe import probe
from jaxtp.padding import mask_padding
from jaxtp.parallelize import parallelize
from jaxtp.pipeline import scan_layers
from jaxtp.plan import ParamDecision, Plan
from jaxtp.planner import make_plan
from jaxtp.state import state_specs
from jaxtp.train.step import jit_step
from jaxtp.verify import verify
from jaxtp.view import see_tp_plan
from jaxtp.xla.options import compile_options
from jaxtp.xla.preflight import preflight

if TYPE_CHECKING:
    from jaxtp.io.checkpoint import Checkpoints
    from jaxtp.io.hf import load_hf, save_hf

LAZY = {"Checkpoints": "io.checkpoint", "load_hf": "io.hf", "save_hf": "io.hf"}
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
