"""How this process was started: arguments and environment -> its number, and the devices it takes.

Slurm is read here rather than left to JAX, since the address of process 0 must be known in time for
the processes to sign in with each other. MPI and Kubernetes are left to JAX.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path

from jaxtp.errors import BadProcesses

GPU_FOLDERS = Path("/proc/driver/nvidia/gpus")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What is known of this process and the others.

    Attributes:
        address: HOST:PORT of process 0's service; None where JAX has to find it.
        num_processes: Of the run; None where JAX has to find it.
        process_id: From 0; None where JAX has to find it.
        local_device_ids: GPUs to use, numbered as this process sees them; None for all, or for the
            one that JAX picks.
    """

    address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: tuple[int, ...] | None = None


def read_launch(
    given: Launch, environ: Mapping[str, str] = os.environ, *, num_gpus: int | None = None
) -> Launch | None:
    """The launch by arguments, else by `JAX_*` variables, else by Slurm, MPI or Kubernetes.

    Args:
        given: Arguments; they win.
        environ: Environment variables.
        num_gpus: GPUs that this process sees; counted by default.

    Returns:
        None for a process that runs alone.

    Raises:
        BadProcesses: TP015, for incomplete or contradictory numbers, Slurm tasks started without
            `srun`, or fewer tasks than GPUs on a node.
    """
    slurm = _slurm(environ)
    launch = Launch(
        address=given.address or environ.get("JAX_COORDINATOR_ADDRESS") or slurm.address,
        num_processes=_first(
            given.num_processes,
            _number(environ, "JAX_NUM_PROCESSES"),
            slurm.num_processes,
            _number(environ, "OMPI_COMM_WORLD_SIZE"),
        ),
        process_id=_first(
            given.process_id,
            _number(environ, "JAX_PROCESS_ID"),
            slurm.process_id,
            _number(environ, "OMPI_COMM_WORLD_RANK"),
        ),
        local_device_ids=given.local_device_ids,
    )
    # Indexed Jobs set this number in every pod; other pods run alone.
    is_found_by_jax = "OMPI_COMM_WORLD_SIZE" in environ or "JOB_COMPLETION_INDEX" in environ
    if launch.num_processes == 1 or (launch == Launch() and not is_found_by_jax):
        return None
    if not is_found_by_jax:
        _check_numbers(launch)
    if launch.local_device_ids is None and "JAX_LOCAL_DEVICE_IDS" not in environ:
        num_gpus = count_gpus(environ) if num_gpus is None else num_gpus
        ids = _own_device(environ, num_gpus)
        launch = dataclasses.replace(launch, local_device_ids=ids)
    return launch


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """NVIDIA GPUs that this process sees, without starting a backend."""
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return 0
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return len(list(GPU_FOLDERS.iterdir())) if GPU_FOLDERS.is_dir() else 0


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT.

    Raises:
        BadProcesses: TP015, if it is not one.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536:
        raise BadProcesses(
            f"the coordinator's address {address!r} is not HOST:PORT",
            fix="the host of process 0 and a free port, e.g. node1:12345",
        )
    return host.strip("[]"), int(port)


def _slurm(environ: Mapping[str, str]) -> Launch:
    """A Slurm step's numbers, as JAX takes them; nothing outside of Slurm."""
    tasks = _number(environ, "SLURM_NTASKS")
    if tasks is None or "SLURM_PROCID" not in environ:
        return Launch()
    if tasks == 1:
        return Launch(num_processes=1, process_id=0)
    if "SLURM_STEP_NODELIST" not in environ:
        raise BadProcesses(
            f"Slurm gave this job {tasks} tasks, but only this process runs",
            fix="start it with srun: srun python ...",
        )
    nodes = environ["SLURM_STEP_NODELIST"]  # node7, or node[07-09,12],other3
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    assert first is not None, nodes
    host = first[1] + (first[2] or "")
    # A port for each job, in the range that JAX's own detection uses.
    port = 61440 + int(environ["SLURM_JOB_ID"]) % 4096
    return Launch(
        address=f"{host}:{port}",
        num_processes=tasks,
        process_id=int(environ["SLURM_PROCID"]),
    )


def _own_device(environ: Mapping[str, str], num_gpus: int) -> tuple[int, ...] | None:
    """The GPU of this task among those it sees; None where no launcher says."""
    local = _first(
        _number(environ, "SLURM_LOCALID"), _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
    )
    tasks = _first(_slurm_tasks_here(environ), _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"))
    if local is None or tasks is None or num_gpus == 0:
        return None
    if num_gpus == 1:
        # --gpus-per-task hides the others, and the one that is left is number 0 to every task.
        return (0,)
    if num_gpus != tasks:
        raise BadProcesses(
            f"{tasks} task{'s' * (tasks > 1)} on this node, and each sees {num_gpus} GPUs; one "
            "process per GPU is the rule",
            fix=f"--ntasks-per-node={num_gpus} --gpus-per-node={num_gpus}, or --gpus-per-task=1; "
            "local_device_ids=[...] means what you have",
        )
    return (local,)


def _slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """Tasks of the step on this node, out of a text like `8(x3),4`."""
    node = _number(environ, "SLURM_NODEID")
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if node is None or not text:
        return None
    counts = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        for _ in range(int(times or 1))
    ]
    return counts[node] if node < len(counts) else None


def _check_numbers(launch: Launch) -> None:
    missing = [
        name
        for name, value in (
            ("coordinator_address", launch.address),
            ("num_processes", launch.num_processes),
            ("process_id", launch.process_id),
        )
        if value is None
    ]
    if missing:
        raise BadProcesses(
            f"the start of several processes lacks {' and '.join(missing)}",
            fix="give coordinator_address, num_processes and process_id, or "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID",
        )
    assert launch.num_processes is not None
    assert launch.process_id is not None
    if not 0 <= launch.process_id < launch.num_processes:
        raise BadProcesses(
            f"process_id {launch.process_id} of {launch.num_processes} processes",
            fix=f"number them 0 to {launch.num_processes - 1}",
        )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not text.isdigit():
        raise BadProcesses(f"{name}={text!r} is not a number", fix=f"set {name} to 0, 1, ...")
    return int(text)


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
