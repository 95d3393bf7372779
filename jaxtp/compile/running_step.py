"""The communication of the step that really runs, on whatever backend it runs."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from jaxtp.compile.analysis import analyse
from jaxtp.compile.report import Report
from jaxtp.compile.worker import device_memory, name_arguments
from jaxtp.hardware.gpus import KINDS, Target, kind_of

VARIABLE = "JAXTP_REPORT_COMMUNICATION"
STAND_IN = "h100"
"""The kind whose links and tensor cores price a step on a backend that is no GPU."""


class Steps(Protocol):
    """The part of `jaxtp.train.step.Step` that a report needs."""

    @property
    def mesh(self) -> Mesh:
        """The mesh that the step's state lies on."""
        ...

    @property
    def state_paths(self) -> Sequence[str]:
        """Path of each array of the state."""
        ...

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        """The step lowered for these arrays; nothing runs and nothing is donated."""
        ...


def is_asked() -> bool:
    """Whether the environment asks for the communication of running steps."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def is_gpu(mesh: Mesh) -> bool:
    """Whether a mesh is of GPUs."""
    return mesh.devices.flat[0].platform in ("gpu", "cuda")


def target_of(mesh: Mesh) -> Target:
    """The machine that a mesh stands for: its own GPUs, in hosts as usual, or as many H100s.

    Raises:
        BadTopology: TP012, for a GPU of unknown kind.
    """
    kind = kind_of(mesh.devices.flat[0].device_kind) if is_gpu(mesh) else KINDS[STAND_IN]
    size = mesh.devices.size
    gpus = kind.host_gpus if size % kind.host_gpus == 0 else size
    return Target(device=kind, hosts=size // gpus, gpus=gpus)


def report_step(
    step: Steps, state: Any, batch: Any, *, tensor_axes: Sequence[str] = ("tp",)
) -> Report:
    """What one step moves, on the devices that it runs on; `communication()` is the table.

    The step is compiled once more for it. GPUs are taken to sit in hosts as their kind usually
    does.

    Args:
        step: From `jaxtp.jit_step`.
        state: What the step is called with; not donated here.
        batch: Likewise.
        tensor_axes: Axes of tensor parallelism; `plan.mesh.tp` names the factors.

    Raises:
        BadTopology: TP012, for a GPU of unknown kind.
    """
    compiled = step.lower(state, batch).compile()
    mesh, target = step.mesh, target_of(step.mesh)
    report = analyse(
        name_arguments(compiled.as_text() or "", "arrays", step.state_paths),
        device_memory(compiled),
        target,
        dict(mesh.shape),
        tensor_axes=tensor_axes,
    )
    if is_gpu(mesh):
        return report
    warning = (
        f"this step runs on {mesh.devices.flat[0].platform}, which moves other bytes than a GPU: "
        "float32 instead of bfloat16, no reduce-scatter, nothing beside matrix products. Seconds "
        f"are those of {target}; `jaxtp preflight` compiles the GPU program"
    )
    return dataclasses.replace(report, notes=(warning, *report.notes))
