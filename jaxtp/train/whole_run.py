"""A whole run from its settings: devices, state, checkpoints, the loop, and what it ends with."""

import contextlib
import dataclasses
import json
import math
import operator
import statistics
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxtp.compile import running_step
from jaxtp.config.settings import Config, settings
from jaxtp.errors import BadCheckpoint, TrainingDiverged
from jaxtp.hardware.clusters import Cluster
from jaxtp.io import stores
from jaxtp.io.checkpoint_metadata import Summary
from jaxtp.io.checkpoints import Checkpoints
from jaxtp.processes.device_health import probe
from jaxtp.processes.faults import watchdog
from jaxtp.processes.launch import Launch, read_launch
from jaxtp.processes.startup import initialize
from jaxtp.train import elastic, run_folder, watch
from jaxtp.train.loop import Hooks, fit
from jaxtp.train.meter import Meter, modelled_line
from jaxtp.train.metrics import METRICS_FILE
from jaxtp.train.preflight import strategies
from jaxtp.train.restarts import Preemption
from jaxtp.train.setup import Setup, prepare
from jaxtp.train.update import TrainState


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Finished:
    """What a run came to.

    Attributes:
        state: The last state, on the devices.
        setup: What the run was made of: mesh, plan, step, text.
        metrics: `metrics.jsonl`, one line a step.
        exit_code: What a program should end with: 0, or 128 + the signal that asked it to stop.
    """

    state: TrainState
    setup: Setup
    metrics: Path
    exit_code: int


def run(config: Config, *, say: Callable[[object], None] = print) -> Finished:
    """Trains as the settings say, and goes on where an earlier run in the same folder ended.

    Starts JAX (`jaxtp.initialize`): one process per GPU under a launcher, or as many simulated CPU
    devices as the mesh sizes multiply to where there is no GPU. With fewer devices than before it
    goes on as `jaxtp.train.elastic` says.

    Args:
        config: The settings, from `jaxtp.config.files.load` or made in Python.
        say: Gets lines of text, in the first process only.

    Raises:
        BadTarget: TP116, for a target that is no machine.
        BadConfig: TP020, for TensorBoard without its writer.
        BadCheckpoint: TP090, if the folder holds checkpoints and `run.resume` is off, or a file
            where they go.
        UnhealthyDevice: TP016, if a device computes wrongly.
        TrainingDiverged: TP131, if the loss or the parameters are not finite, or a loss spikes.
        JaxtpError: whatever `prepare`, `initialize` and the run folder raise.
    """
    if config.target:
        Cluster.parse(config.target)
    if config.run.tensorboard:
        watch.tensorboard_module()
    stores.refuse_address(config.run.folder)
    checkpoints = Checkpoints(
        config.run.checkpoints or config.run.folder / "checkpoints", keep_last=config.run.keep_last
    )
    _check_folder(checkpoints, config)
    found = _adapt(config, checkpoints, say)
    config = found.config
    initialize(
        num_processes=found.num_processes,
        cpu_devices=found.cpu_devices,
        timeout=config.faults.start_timeout,
        heartbeat_timeout=config.faults.heartbeat_timeout,
    )
    speaker = _Speaker(say)
    if found.line:
        speaker(found.line)
    with run_folder.hold(config.run.folder, say=speaker), _held(checkpoints, config, speaker):
        _probe(config, speaker)
        setup = prepare(config, resumes=bool(checkpoints.steps()))
        speaker(f"{setup.plan}\n")
        speaker("\n".join((_describe(setup), *strategies(setup.build, setup.plan))))
        finished = _train(setup, checkpoints, speaker)
    speaker(f"metrics in {finished.metrics}, one line a step")
    if finished.exit_code:
        speaker("stopped because it was asked to; the same command continues")
    return finished


@contextlib.contextmanager
def _held(checkpoints: Checkpoints, config: Config, say: "_Speaker") -> Generator[None]:
    """Owns the folder of checkpoints too where it is not the run's, which another run may name."""
    if not config.run.checkpoints:
        yield
        return
    with run_folder.hold(checkpoints.folder, say=say):
        yield


def _adapt(
    config: Config, checkpoints: Checkpoints, say: Callable[[object], None]
) -> elastic.Elastic:
    """The settings on what is left of the processes; one that no mesh needs ends here with 0."""
    launch = read_launch(Launch())
    before = Summary.of_newest(checkpoints.folder) if config.run.resume else None
    found = elastic.adapt(config, before, launch)
    if launch and launch.process_id and launch.process_id >= (found.num_processes or math.inf):
        say(f"process {launch.process_id} has nothing to do: {found.line}")
        sys.exit(0)
    return found


class _Speaker:
    """Talks in the first process only; the others say nothing as long as all is well."""

    def __init__(self, say: Callable[[object], None]) -> None:
        self._say = say

    def __call__(self, text: object) -> None:
        if jax.process_index() == 0:
            self._say(text)


def _train(setup: Setup, checkpoints: Checkpoints, say: _Speaker) -> Finished:
    config, folder = setup.config, setup.config.run.folder
    is_first = jax.process_index() == 0
    watchers: list[watch.Watcher] = []
    if config.run.tensorboard and is_first:
        watchers.append(watch.tensorboard(folder))
    taken: list[float] = []
    profiler = watch.Profiler(folder / "profile") if config.run.profile else None
    if profiler is not None:
        watchers.append(profiler)
    with Preemption() as preemption, checkpoints:
        first, state = _resume(checkpoints, setup, say)
        if running_step.is_asked():
            say(_what_a_step_moves(setup, state))
        with watchdog(config.faults.step_timeout, setup.mesh, first_step=first + 1) as done:
            hooks: Hooks[TrainState] = Hooks(
                evaluate=lambda state: setup.validate(state, setup.placed(setup.text.validation)),
                eval_every=config.run.eval_every,
                save=lambda number, state: _save(checkpoints, setup, number, state),
                save_every=config.run.checkpoint_every,
                stop=preemption,
                measure=Meter(setup),
                watchers=[
                    *watchers,
                    lambda line: done(int(line["step"] or 0)),
                    lambda line: taken.append(float(line["step_seconds"] or 0)),
                ],
                blocking=profiler is not None,
            )
            try:
                state = fit(
                    setup.step,
                    state,
                    lambda step: setup.placed(setup.text.train(step)),
                    steps=range(first, config.steps),
                    folder=folder,
                    hooks=hooks,
                    spike_factor=config.run.spike_factor,
                    console=Console(quiet=not is_first),
                )
            except TrainingDiverged:
                _probe(config, say)  # is it a device?
                raise
    if taken:
        median = statistics.median(taken)
        say(f"step       {median * 1e3:,.3g} ms measured (median); {modelled_line(setup)}")
    if profiler is not None:
        profiler.stop()
        say(watch.table(watch.operations(profiler.folder)))
    return Finished(
        state=state, setup=setup, metrics=folder / METRICS_FILE, exit_code=preemption.exit_code
    )


def _probe(config: Config, say: _Speaker) -> None:
    """Tests every device, if the settings want it, and names the slow ones."""
    if config.faults.probe:
        health = probe()
        say(health)
        health.refuse_wrong()


def _check_folder(checkpoints: Checkpoints, config: Config) -> None:
    """Refuses to start anew over checkpoints, or where none could be written in the end."""
    folder = checkpoints.folder
    if folder.exists() and not folder.is_dir():
        raise BadCheckpoint(
            "is a file, where the run's checkpoints go",
            where=str(folder),
            fix="move it away, or choose another run.folder",
        )
    if isinstance(folder, Path) and folder.is_symlink() and not folder.exists():
        raise BadCheckpoint(
            f"is a link to {folder.readlink()}, which is not there",
            where=str(folder),
            fix="mount the disk or make the folder that it names, or choose another run.folder",
        )
    steps = checkpoints.steps()
    if steps and not config.run.resume:
        raise BadCheckpoint(
            f"there are checkpoints up to step {steps[-1]}, and run.resume is off",
            where=str(folder),
            fix="choose another run.folder, or turn run.resume on",
        )


def _save(checkpoints: Checkpoints, setup: Setup, number: int, state: TrainState) -> None:
    # Batches and random numbers are functions of the seed and the step alone.
    seed = setup.config.seed
    data = {"seed": seed, "step": number, **setup.text.digests}
    extra = {"settings": _flat(setup.config), "data": data}
    checkpoints.save(number, state, plan=setup.plan, extra=extra)


def _resume(checkpoints: Checkpoints, setup: Setup, say: _Speaker) -> tuple[int, TrainState]:
    """Steps done and the state after them, from the newest good checkpoint if there is any."""
    if not checkpoints.steps():
        return 0, setup.state
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), setup.state
    )
    # What was initialised makes room for what is read.
    for leaf in jax.tree.leaves(setup.state):
        leaf.delete()
    restored = checkpoints.restore(like, plan=setup.plan)
    say(f"continuing after step {restored.step}")
    before = restored.extra.get("settings", {})
    for name, value in _flat(setup.config).items():
        if value != before.get(name) and not name.startswith("run."):
            say(f"  {name} was {before.get(name)}, is {value}")
    data = restored.extra.get("data", {})
    for name, value in setup.text.digests.items():
        if value != data.get(name, value):
            say(f"  {name} was {data[name]}, is {value}")
    return restored.step, restored.state


def _what_a_step_moves(setup: Setup, state: TrainState) -> str:
    """The collectives of the compiled step, as a table."""
    batch = setup.placed(setup.text.train(0))
    table = running_step.report_step(setup.step, state, batch, tensor_axes=setup.plan.mesh.tp)
    return f"\nwhat one step moves\n{table.communication()}\n"


def _flat(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name, as JSON can hold it."""
    values = {name: operator.attrgetter(name)(config) for name in settings()}
    return json.loads(json.dumps(values, default=str))


def _describe(setup: Setup) -> str:
    """One line each on batch, precision, attention, text, and what a step should take."""
    config, batch = setup.config, setup.config.batch
    ways = config.mesh.data_ways
    return (
        f"batch      {batch.size} = {batch.micro_size} x {batch.accumulation} accumulated x "
        f"{ways} data-parallel, {config.seq_len} tokens each\n"
        f"precision  {config.precision.compute}, {config.precision.params} parameters; "
        f"ZeRO stage {setup.plan.zero}\n"
        f"attention  {setup.attention}\n"
        f"text       {setup.text.description}\n"
        f"step       {modelled_line(setup)}"
    )
