"""Which mesh a run goes on with when devices are missing; real processes are in the leg."""

import dataclasses

import pytest

from jaxtp.config.batch_sizes import resolve
from jaxtp.config.settings import Batch, Config, Faults, Mesh, Pipeline, Run
from jaxtp.io.checkpoint_metadata import Summary
from jaxtp.processes.launch import Launch
from jaxtp.train.elastic import adapt

FULL = Config(mesh=Mesh(tp=2, dp=4), batch=Batch(size=12), run=Run(eval_windows=48))
BEFORE = Summary(
    step=3,
    mesh={"dp": 4, "tp": 2},
    num_processes=4,
    num_devices=8,
    settings={"batch.size": 12, "batch.micro_size": 3},
)


def on(config, count, *, before=BEFORE, each=2):
    """What goes on with `count` processes of two simulated devices each."""
    launch = Launch(address="a:1", num_processes=count, process_id=0) if count > 1 else None
    environ = {"JAX_NUM_CPU_DEVICES": str(each), "JAX_PLATFORMS": "cpu"}
    return adapt(config, before, launch, environ)


@pytest.mark.parametrize(
    ("config", "count", "takes_part", "mesh", "accumulation"),
    [
        # Four rows for each replica, of which three fit at a time: two and two.
        (FULL, 3, 3, {"tp": 2, "dp": 3}, 2),
        (FULL, 2, 2, {"tp": 2, "dp": 2}, 2),
        # A batch of 8 does not divide over 3 replicas, so the third process has nothing to do.
        (dataclasses.replace(FULL, batch=Batch(size=8)), 3, 2, {"tp": 2, "dp": 2}, 2),
        # Nor do 64 sequences to evaluate on.
        (dataclasses.replace(FULL, run=Run()), 3, 2, {"tp": 2, "dp": 2}, 2),
        # Tensor parallelism stays inside of a host.
        (dataclasses.replace(FULL, mesh=Mesh(tp=4, dp=2)), 3, 3, {"tp": 2, "dp": 3}, 1),
        (dataclasses.replace(FULL, mesh=Mesh(tp=2, fsdp=4)), 3, 3, {"tp": 2, "fsdp": 3}, 2),
        # Two micro-batches go through two stages; eight rows of each need four times as many.
        (
            dataclasses.replace(
                FULL,
                mesh=Mesh(pp=2, dp=4),
                batch=Batch(size=16),
                pipeline=Pipeline(micro_batches=2),
            ),
            2,
            2,
            {"pp": 2, "dp": 2},
            4,
        ),
        # An open axis takes what there is, in micro-batches as large as before.
        (dataclasses.replace(FULL, mesh=Mesh(tp=2, dp=-1)), 2, 2, {"tp": 2, "dp": 2}, 2),
    ],
)
def test_fewer_devices_get_the_largest_mesh_that_is_accepted(
    config, count, takes_part, mesh, accumulation
):
    found = on(config, count)
    resolved = resolve(found.config, 2 * takes_part)
    assert found.num_processes == takes_part
    assert {axis.value: n for axis, n in resolved.mesh.sizes.items() if n > 1} == mesh
    assert resolved.batch.size == config.batch.size
    assert resolved.batch.accumulation == accumulation
    assert f"{2 * count} of 8 devices are there: continuing on {2 * takes_part}, mesh" in found.line
    assert f"the batch stays {config.batch.size} = " in found.line


def test_nothing_changes_where_nothing_has_to():
    alone = dataclasses.replace(FULL, faults=Faults(elastic=False))
    for config, count, before in (
        (FULL, 4, BEFORE),
        (FULL, 5, BEFORE),  # more than it asks for is refused as ever
        (FULL, 3, None),  # a run that begins
        (alone, 3, BEFORE),
    ):
        found = on(config, count, before=before)
        assert (found.config, found.num_processes, found.line) == (config, None, "")
        assert found.cpu_devices is None


def test_simulated_devices_follow_the_mesh_unless_the_environment_says_how_many():
    launch = Launch(address="a:1", num_processes=2, process_id=0)
    for given in (launch, None):
        found = adapt(FULL, BEFORE, given, {"JAX_PLATFORMS": "cpu"})
        assert (found.cpu_devices, found.line) == (8, "")
    three = dataclasses.replace(launch, num_processes=3)
    found = adapt(FULL, BEFORE, three, {"JAX_PLATFORMS": "cpu"})
    assert (found.cpu_devices, found.num_processes) == (6, 3)
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_x=1"}
    found = adapt(FULL, BEFORE, three, {"JAX_PLATFORMS": "cpu", **flags})
    assert (found.cpu_devices, found.num_processes) == (None, 3)
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cuda"}
    assert adapt(FULL, BEFORE, three, gpus).num_processes == 3
