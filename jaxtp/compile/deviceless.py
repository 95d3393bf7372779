"""Before anything is rented: compile the real step with the real GPU compiler, and read it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtp.compile.analysis import analyse
from jaxtp.compile.compiler import Program, compile_for, trace
from jaxtp.compile.options import PREFLIGHT, CompileOptions, probe
from jaxtp.compile.report import Report
from jaxtp.cost.bound import Need
from jaxtp.errors import BadMesh, BadOption, BadStep
from jaxtp.errors.arguments import (
    FUNCTION,
    MAPPING,
    NAMES,
    Kind,
    checked,
    instance,
    number,
    several,
)
from jaxtp.hardware.gpus import Target

STEP = Kind(
    lambda value: (":" in value) if isinstance(value, str) else callable(value),
    'a function, as in preflight(step, (state, batch), target=...), or "module:function"',
    BadStep,
)


@checked(
    step=STEP,
    args=instance(list, tuple, takes="a tuple of arguments: (state, batch)", error=BadStep),
    mesh=MAPPING.or_none().raising(BadMesh),
    keywords=MAPPING.or_none(),
    options=instance(
        CompileOptions, takes="what jaxtp.compile_options returns", error=BadOption
    ).or_none(),
    tensor_axes=NAMES,
    floor_bytes=number(0).or_none(),
    model_flops=number(0).or_none(),
    needs=several(instance(Need, takes="a Need"), "a tuple of jaxtp.cost.bound.Need").or_none(),
    idle_share=number(0, 1),
    time_limit=number(above=0).raising(BadOption),
    on_progress=FUNCTION,
)
def preflight(
    step: Callable[..., Any] | str,
    args: Sequence[Any] = (),
    *,
    target: Target | str,
    mesh: Mapping[str, int] | None = None,
    keywords: Mapping[str, Any] | None = None,
    options: CompileOptions | None = None,
    tensor_axes: Sequence[str] = ("tp",),
    floor_bytes: float | None = None,
    model_flops: float | None = None,
    needs: Sequence[Need] | None = None,
    idle_share: float = 0.0,
    time_limit: float = 900.0,
    on_progress: Callable[[float], None] = lambda _: None,
) -> Report:
    """Compiles a step for a machine that is not there, and says what it will do.

    Args:
        step: The function, jitted with its donation or not, or what `jaxtp.jit_step` returns. Or
            `module:function`: that function is called in the compiler's process as
            `function(mesh, **keywords)`, on a mesh of the target's devices, and returns the jitted
            step and its arguments; this is for steps that cannot leave the process that traced
            them.
        args: Positional arguments of `step`: trees of arrays or ShapeDtypeStructs whose shardings
            are on one mesh, of any devices or of none. Without a sharding an array is replicated,
            and those of a `jaxtp.jit_step` lie where the step puts them.
        target: The machine, e.g. `h100:4x8`.
        mesh: Axis name -> size; by default the mesh of the arguments' shardings.
        keywords: For `module:function`, plain JSON values.
        options: Compile options (`compile_options`); preflight adds those that keep the compiler
            from looking for a GPU to tune on.
        tensor_axes: Axes of tensor parallelism.
        floor_bytes: What the model must move at least per device and step (`floor_bytes`).
        model_flops: FLOPs of one step of the whole model without recomputation, for MFU.
        needs: What the strategy has to move (`jaxtp.cost.bound`), to say how far the step is from
            its bound.
        idle_share: Share of its time that a pipeline stage idles.
        time_limit: Seconds that the compiler may take.
        on_progress: Called a few times a second with the seconds so far.

    Raises:
        BadMesh: TP010, if the arguments' shardings name no mesh, or several.
        BadStep: TP133, for a step that cannot be called.
        BadOption: TP110, for options of another kind, or a time limit that is no time.
        BadTarget: TP116, for a malformed target or one of another size than the mesh.
        GpuPluginMissing: TP113, if the GPU compiler is not installed.
        CompilerCrashed: TP111, if it stopped its process.
        CompilerTimeout: TP112, if it took longer than `time_limit`.
        CompileFailed: TP117, if it refuses the step, or the step cannot be traced.
        BadConfig: TP020, for another argument of a wrong kind.
    """
    machine = Target.of(target)
    if isinstance(step, str):
        program = Program(mesh=dict(mesh or {}), entry=step, keywords=dict(keywords or {}))
    else:
        program = trace(step, args, mesh)
    asked = options or CompileOptions(options={}, unknown={})
    used = probe(PREFLIGHT) | asked
    compiled = compile_for(
        program, machine, used.options, time_limit=time_limit, on_progress=on_progress
    )
    return analyse(
        compiled.text,
        compiled.memory,
        machine,
        program.mesh,
        tensor_axes=tensor_axes,
        options=used,
        floor_bytes=floor_bytes,
        model_flops=model_flops,
        needs=needs,
        idle_share=idle_share,
        compile_seconds=compiled.seconds,
        ragged_groups=compiled.ragged_groups,
    )
