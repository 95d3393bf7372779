"""The process that runs the GPU compiler: `python -m jaxtp.compile.worker FOLDER`.

It is a process of its own because XLA stops the process it runs in when one of its internal checks
fails; `compile/compiler` starts it.
"""

import importlib
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtp.compile.ragged import ragged_groups


def main(folder: Path) -> None:
    """Compiles the job in `folder`; every Python error becomes a line of `result.json`."""
    job = json.loads((folder / "job.json").read_text())
    stage = "plugin"
    try:
        jax.config.update("jax_enable_x64", job["x64"])
        mesh = _mesh(job)
        stage = "step"
        if job["entry"]:
            step, args = _entry_step(job["entry"], job["keywords"], mesh)
        else:
            step, args = _exported_step((folder / "program.bin").read_bytes(), job, mesh)
        lowered = step.lower(*args)
        stage = "compile"
        begin = time.monotonic()
        compiled = lowered.compile(job["options"])
        result = {
            "seconds": time.monotonic() - begin,
            "memory": device_memory(compiled),
            "ragged_groups": ragged_groups(lowered.as_text()),
        }
        names = getattr(step, "state_paths", ())
        (folder / "program.txt").write_text(name_arguments(compiled.as_text(), "arrays", names))
    except Exception as error:
        result = {"stage": stage, "error": f"{type(error).__name__}: {error}"}
        traceback.print_exc()  # goes to the log, whose last lines a coded error quotes
    (folder / "result.json").write_text(json.dumps(result))


def _mesh(job: Mapping[str, Any]) -> Mesh:
    topology = topologies.get_topology_desc(
        platform="cuda", topology=job["topology"], target_config=job["config"]
    )
    devices = sorted(topology.devices, key=lambda device: device.id)
    names, sizes = tuple(job["mesh"]), tuple(job["mesh"].values())
    axis_types = tuple(AxisType[kind] for kind in job["axis_types"])
    return Mesh(np.array(devices).reshape(sizes), names, axis_types=axis_types)


def _entry_step(entry: str, keywords: Mapping[str, Any], mesh: Mesh) -> tuple[Any, Sequence[Any]]:
    """Calls the user's `module:function` for the jitted step and its abstract arguments."""
    module, _, name = entry.partition(":")
    function: Callable[..., tuple[Any, Sequence[Any]]] = getattr(
        importlib.import_module(module), name
    )
    return function(mesh, **keywords)


def _exported_step(
    blob: bytes, job: Mapping[str, Any], mesh: Mesh
) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """The step that the parent traced, on the devices of the target."""
    exported = jax.export.deserialize(bytearray(blob))
    # Arguments that the step does not use take no memory on the device; neither do they here.
    kept = exported.module_kept_var_idx

    def step(*args: Any) -> Any:
        given = dict(zip(kept, args, strict=True))
        unused = {
            index: jnp.zeros(aval.shape, aval.dtype)
            for index, aval in enumerate(exported.in_avals)
            if index not in given
        }
        return exported.call(*(value for _, value in sorted({**given, **unused}.items())))

    avals, shardings = exported.in_avals, exported.in_shardings_jax(mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())  # what has no sharding, on every device
    structs = [
        jax.ShapeDtypeStruct(avals[i].shape, avals[i].dtype, sharding=shardings[i] or everywhere)
        for i in kept
    ]
    donated = [number for number, donate in enumerate(job["donated"]) if donate]
    out = exported.out_shardings_jax(mesh)
    return jax.jit(step, donate_argnums=donated, out_shardings=tuple(out)), structs


def name_arguments(text: str, variable: str, names: Sequence[str]) -> str:
    """A program's text with the arguments' paths where it says `variable[3]`.

    Args:
        text: The program.
        variable: What the traced function calls the list of its arguments.
        names: One for each of them; none leaves the text as it is.
    """
    if not names:
        return text
    return re.sub(rf"\b{variable}\[(\d+)\]", lambda match: names[int(match[1])], text)


def device_memory(compiled: Any) -> dict[str, int]:
    """Bytes on one device. XLA's own peak leaves out gaps in the block of temporaries."""
    stats = compiled.memory_analysis()
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "alias_bytes": stats.alias_size_in_bytes,
        "temp_bytes": stats.temp_size_in_bytes,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
