"""Runs the real GPU compiler on a machine without a GPU.

The step is traced here, for any mesh: an AbstractMesh, CPU devices or GPUs. `jax.export` carries
it to a process of its own (`worker`), which puts it on the target's devices and compiles. The
program is the one that a direct `jit(step).lower(...).compile()` gives. What cannot be carried,
such as cuDNN attention outside of `shard_map`, whose partitioning rule is a Python function, is
made in the other process by a `module:function`.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
from jax.sharding import NamedSharding

from jaxtp.compile.options import Value
from jaxtp.compile.worker import name_arguments
from jaxtp.errors import (
    BadMesh,
    BadOption,
    BadTarget,
    CompileFailed,
    CompilerCrashed,
    CompilerTimeout,
    GpuPluginMissing,
)
from jaxtp.hardware.gpus import Target

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
POLL_SECONDS = 0.2
LOG_LINES = 12

_NOISE = re.compile(r"cudart_stub|absl::InitializeLog|cuInit|computation_placer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A step that another process can compile.

    Attributes:
        mesh: Axis name -> size, last axis fastest.
        axis_types: `Auto` or `Explicit` per axis, as the arguments have it; all Auto when empty.
        exported: The traced step, as `jax.export` serialises it; empty when there is an entry.
        arguments: Path of each argument array that the step uses.
        donated: Whether the memory of each of them may be reused.
        entry: `module:function`, called as `function(mesh, **keywords)` for a jitted step and its
            abstract arguments on that mesh.
        keywords: For the entry; plain JSON values.
    """

    mesh: Mapping[str, int]
    axis_types: tuple[str, ...] = ()
    exported: bytes = b""
    arguments: tuple[str, ...] = ()
    donated: tuple[bool, ...] = ()
    entry: str = ""
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler made.

    Attributes:
        text: The scheduled program, with the step's own argument names.
        memory: `argument_bytes`, `output_bytes`, `alias_bytes` and `temp_bytes` on one device.
        seconds: Compile time.
        ragged_groups: See `jaxtp.compile.ragged`.
    """

    text: str
    memory: Mapping[str, int]
    seconds: float
    ragged_groups: int = 0


def trace(
    step: Callable[..., Any], args: Sequence[Any], mesh: Mapping[str, int] | None = None
) -> Program:
    """Traces a step for CUDA without compiling it.

    Args:
        step: A function, jitted or not; a jitted one keeps its donation and shardings, and one
            from `jaxtp.jit_step` its plan.
        args: Its positional arguments: trees of arrays or ShapeDtypeStructs with shardings on one
            mesh, of any devices or of none.
        mesh: Axis name -> size, for arguments without shardings.

    Raises:
        BadMesh: TP010, if the arguments are on several meshes, or on none and `mesh` is not given.
        CompileFailed: TP117, if the step cannot be traced or carried to another process.
    """
    with _jitted(step, args) as (jitted, arguments):
        sizes, axis_types = _mesh_of(arguments, mesh)
        exported, names, donated = _export(jitted, arguments)
    # A step's state is a list of arrays there, which the step knows the paths of.
    paths = getattr(step, "state_paths", ())
    return Program(
        mesh=sizes,
        axis_types=axis_types,
        exported=exported,
        arguments=tuple(name_arguments(name, "arrays", paths) for name in names),
        donated=donated,
    )


@contextlib.contextmanager
def _jitted(step: Any, args: Sequence[Any]) -> Generator[tuple[Any, Sequence[Any]]]:
    """The jitted function and its arguments; those of `jaxtp.jit_step` while its plan is in force.

    What a `Step` says about its own arguments is coded already.
    """
    if hasattr(step, "as_jitted"):
        with step.as_jitted(*args) as jitted_and_arguments:
            yield jitted_and_arguments
    else:
        yield step if hasattr(step, "trace") else jax.jit(step), args


def _export(jitted: Any, args: Sequence[Any]) -> tuple[bytes, list[str], tuple[bool, ...]]:
    """The traced function as bytes, and name and donation of each array that it uses.

    Raises:
        CompileFailed: TP117, if it cannot be traced or carried to another process.
    """
    try:
        traced = jitted.trace(*args)
        lowered = traced.lower(lowering_platforms=("cuda",))
        # The other process runs the same jax, so the guarantees that export asks for do not matter.
        calls = sorted(set(re.findall(r"custom_call @([^\s(]+)", lowered.as_text())))
        checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in calls]
        exported = jax.export.export(jitted, platforms=("cuda",), disabled_checks=checks)(*args)
        infos = jax.tree.leaves(traced.args_info)
        names = traced.jaxpr.jaxpr.debug_info.arg_names
        used = [(names[index], infos[index].donated) for index in exported.module_kept_var_idx]
        # Trees with node types of their own cannot be serialised; flat tuples always can.
        flat = dataclasses.replace(
            exported,
            in_tree=jax.tree.structure(((0,) * len(exported.in_avals), {})),
            out_tree=jax.tree.structure((0,) * len(exported.out_avals)),
        )
        return bytes(flat.serialize()), [n for n, _ in used], tuple(d for _, d in used)
    except Exception as error:
        raise CompileFailed(
            f"the step cannot be traced for the target: {type(error).__name__}: {error}",
            fix="check that the shardings are on one mesh; for a step with custom_partitioning, "
            "such as cuDNN attention outside of shard_map, give 'module:function' instead",
        ) from error


def _mesh_of(
    args: Sequence[Any], given: Mapping[str, int] | None
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Sizes and axis types of the one mesh that the arguments' shardings are on."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    found = {
        (tuple(one.mesh.shape.items()), tuple(kind.name for kind in one.mesh.axis_types))
        for one in shardings
        if isinstance(one, NamedSharding)
    }
    if given is not None and not found:
        found = {(tuple(given.items()), ())}
    if len(found) != 1:
        meshes = " and ".join(str(dict(shape)) for shape, _ in sorted(found)) or "none"
        raise BadMesh(
            f"the arguments' shardings should be on one mesh; found {meshes}",
            fix="give arrays or ShapeDtypeStructs with NamedShardings, or mesh={'dp': 1, 'tp': 8}",
        )
    shape, axis_types = found.pop()
    return dict(shape), axis_types


def compile_for(
    program: Program,
    target: Target,
    options: Mapping[str, Value],
    *,
    time_limit: float = 900.0,
    on_progress: Callable[[float], None] = lambda _: None,
) -> Compiled:
    """Compiles for GPUs that are not there, in a process of its own.

    Args:
        program: The step.
        target: The machine; the mesh must have as many devices.
        options: Compile options that this jaxlib knows.
        time_limit: Seconds after which the process is stopped.
        on_progress: Called a few times a second with the seconds so far.

    Raises:
        BadTarget: TP116, if mesh and target differ in size.
        GpuPluginMissing: TP113, if the CUDA plugin is not installed or not of jax's version.
        CompilerCrashed: TP111, if the compiler stopped its process.
        CompilerTimeout: TP112, if it took too long.
        BadOption: TP110, if it refuses an option.
        CompileFailed: TP117, if it refuses the step.
    """
    devices = 1
    for size in program.mesh.values():
        devices *= size
    if devices != target.num_devices:
        raise BadTarget(
            f"the mesh {dict(program.mesh)} has {devices} devices, {target} has "
            f"{target.num_devices}",
            fix=f"sizes that multiply to {target.num_devices}, or another target",
        )
    _require_plugin()
    with tempfile.TemporaryDirectory(prefix="jaxtp-") as name:
        folder = Path(name)
        job = {
            "topology": target.topology,
            "config": target.device.config,
            "mesh": program.mesh,
            "axis_types": program.axis_types or ["Auto"] * len(program.mesh),
            "options": dict(options),
            "donated": program.donated,
            "entry": program.entry,
            "keywords": program.keywords,
            "x64": bool(jax.config.read("jax_enable_x64")),
        }
        (folder / "job.json").write_text(json.dumps(job))
        (folder / "program.bin").write_bytes(program.exported)
        code = _run(folder, time_limit, on_progress)
        log = _last_lines(folder / "log.txt")
        if not (folder / "result.json").exists():
            raise CompilerCrashed(
                f"its process ended with code {code}; its last lines:\n{log}",
                fix='overlap="off" or the default options; fewer layers; report the lines above',
            )
        result = json.loads((folder / "result.json").read_text())
        if "error" in result:
            raise _refusal(result, log)
        text = (folder / "program.txt").read_text()
    return Compiled(
        text=name_arguments(text, "args", program.arguments),
        memory=result["memory"],
        seconds=result["seconds"],
        ragged_groups=result["ragged_groups"],
    )


def _run(folder: Path, time_limit: float, on_progress: Callable[[float], None]) -> int:
    """Runs the worker; its output goes to a file, because a crash leaves nothing else."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",  # skips the CUDA library check; the compiler is there all the same
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    begin = time.monotonic()
    with (folder / "log.txt").open("wb") as log:
        command = [sys.executable, "-m", "jaxtp.compile.worker", str(folder)]
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            while True:
                try:
                    return process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    passed = time.monotonic() - begin
                    on_progress(passed)
                    if passed > time_limit:
                        raise CompilerTimeout(
                            f"the compiler ran for {passed:.0f} s",
                            fix=f"raise time_limit above {time_limit:g} seconds, scan over layers, "
                            "or compile fewer of them",
                        ) from None
        finally:
            # Also when the caller is interrupted: a compile must not outlive its request.
            process.kill()
            process.wait()


def _require_plugin() -> None:
    try:
        found = any(importlib.util.find_spec(name) for name in PLUGINS)
    except ModuleNotFoundError:  # the namespace package itself is missing
        found = False
    if not found:
        raise _plugin_missing("it is not installed")


def _plugin_missing(what: str) -> GpuPluginMissing:
    packages = " ".join(f"jax-cuda12-{part}=={jax.__version__}" for part in ("plugin", "pjrt"))
    return GpuPluginMissing(
        f"no GPU compiler for jax {jax.__version__}: {what}",
        fix=f'pip install "jaxtp[preflight]" {packages}',
    )


def _refusal(result: Mapping[str, str], log: str) -> Exception:
    error = result["error"]
    if result["stage"] == "plugin":
        if "target_config" in error:
            return BadTarget(error, fix="check `config` in the description file")
        return _plugin_missing(f"{error}\n{log}")
    if "compile option" in error or "While setting option" in error:
        return BadOption(error, fix="see jaxtp.compile_options for what this jaxlib takes")
    return CompileFailed(error, fix="the traceback is above" if not log else f"log:\n{log}")


def _last_lines(file: Path) -> str:
    lines = file.read_text(errors="replace").splitlines()
    return "\n".join([line for line in lines if not _NOISE.search(line)][-LOG_LINES:])
