"""What launchers and arguments say about a process."""

import pytest

from jaxtp.errors import BadProcesses
from jaxtp.processes.launch import Launch, count_gpus, read_launch, split_address

EXPLICIT = {
    "JAX_COORDINATOR_ADDRESS": "node1:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def launch(address, num_processes, process_id, *ids):
    return Launch(
        address=address,
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=ids or None,
    )


@pytest.mark.parametrize(
    ("environ", "num_gpus", "expected"),
    [
        ({}, 8, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 8, None),  # any pod has it
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}, 1, Launch()),
        (EXPLICIT, 0, launch("node1:1234", 4, 3)),
        (EXPLICIT, 8, launch("node1:1234", 4, 3)),
        ({**EXPLICIT, "JAX_NUM_PROCESSES": "1"}, 8, None),
        (SLURM, 0, launch("gpu07:61441", 16, 9)),
        (SLURM, 8, launch("gpu07:61441", 16, 9, 1)),
        # --gpus-per-task=1 shows each task one GPU, which is its number 0.
        (SLURM, 1, launch("gpu07:61441", 16, 9, 0)),
        ({**SLURM, "SLURM_STEP_NODELIST": "a1,b[2-3]"}, 0, launch("a1:61441", 16, 9)),
        ({**SLURM, "SLURM_STEP_NODELIST": "solo"}, 0, launch("solo:61441", 16, 9)),
        ({**SLURM, **EXPLICIT}, 8, launch("node1:1234", 4, 3, 1)),
        ({**SLURM, "SLURM_NTASKS": "1"}, 8, None),
        (MPI, 4, launch(None, 8, 5, 1)),
        (MPI, 0, launch(None, 8, 5)),
        ({**SLURM, "JAX_LOCAL_DEVICE_IDS": "0,1"}, 4, launch("gpu07:61441", 16, 9)),
    ],
)
def test_environment_is_read(environ, num_gpus, expected):
    assert read_launch(Launch(), environ, num_gpus=num_gpus) == expected


def test_arguments_win_over_variables_and_those_over_slurm():
    given = Launch(num_processes=2, process_id=1, local_device_ids=(3,))
    found = read_launch(given, {**SLURM, "JAX_COORDINATOR_ADDRESS": "x:99"}, num_gpus=8)
    assert found == launch("x:99", 2, 1, 3)


@pytest.mark.parametrize(
    ("environ", "num_gpus", "message"),
    [
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x16)"},
            8,
            r"TP015: 1 task on this node, and each sees 8 GPUs.*\n.*--ntasks-per-node=8",
        ),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8,4"},
            8,
            "4 tasks on this node, and each sees 8 GPUs",
        ),
        (MPI, 8, "4 tasks on this node, and each sees 8 GPUs"),
        (
            {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"},
            0,
            r"gave this job 16 tasks, but only this process runs\n  fix: start it with srun",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "x:1"},
            0,
            "lacks num_processes and process_id\n.*JAX_PROCESS_ID",
        ),
        ({**EXPLICIT, "JAX_PROCESS_ID": "4"}, 0, r"process_id 4 of 4 processes\n.* 0 to 3"),
        ({**EXPLICIT, "JAX_NUM_PROCESSES": "four"}, 0, "JAX_NUM_PROCESSES='four' is not a number"),
    ],
)
def test_mistakes_are_named_before_a_device_is_touched(environ, num_gpus, message):
    with pytest.raises(BadProcesses, match=message):
        read_launch(Launch(), environ, num_gpus=num_gpus)


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aa"}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cpu"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cuda,cpu"}, 2),
    ],
)
def test_gpus_are_counted_without_a_backend(environ, number):
    assert count_gpus(environ) == number


def test_addresses():
    assert split_address("[::1]:80") == ("::1", 80)
    with pytest.raises(BadProcesses, match="'node1' is not HOST:PORT"):
        split_address("node1")
