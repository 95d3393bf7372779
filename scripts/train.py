"""Trains from one config file, JSON or TOML, in jaxtp's or DeepSpeed's spelling.

    python scripts/train.py config.json --mesh.tp 4     every setting is also a flag
    python scripts/train.py --help                      all settings, with their defaults

    --run.checkpoint_every 500                          a run that is killed goes on from there
    --run.max_restarts 10                               and is started again by itself

What it ends with tells a scheduler what to do, see `jaxtp.train.restarts`: 0 complete, 143 saved
after SIGTERM, 2 an error that would come again, anything else worth another start.

Several processes, one per GPU, are started by Slurm (scripts/slurm_train.sbatch), Open MPI or
Kubernetes, or by hand, see `jaxtp.initialize`; all of them see the same files. The first one talks.
Where there is no GPU, as many CPU devices are simulated as the mesh sizes multiply to.
"""

import json
import math
import operator
import sys
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console

import jaxtp
from jaxtp.compile import running_step
from jaxtp.config.files import load
from jaxtp.config.settings import Config, settings
from jaxtp.errors import BadCheckpoint, TrainingDiverged
from jaxtp.io.checkpoints import Checkpoints
from jaxtp.processes.faults import exit_with
from jaxtp.train import run_folder, watch
from jaxtp.train.loop import fit
from jaxtp.train.meter import Meter
from jaxtp.train.metrics import METRICS_FILE
from jaxtp.train.preflight import strategies
from jaxtp.train.restarts import Preemption, supervise
from jaxtp.train.setup import Setup, prepare
from jaxtp.train.update import TrainState


def read_arguments(arguments: list[str]) -> Config:
    """The settings of the file, if one is named first, with the flags on top."""
    config = Config()
    if arguments and not arguments[0].startswith("-"):
        path = Path(arguments.pop(0))
        config, lines = load(path)
        for line in lines:
            print(f"{path.name}: {line}")
    return tyro.cli(Config, args=arguments, default=config, description=__doc__)


def main(config: Config) -> int:
    """Prepares the run, continues where its folder ends, trains, and returns the exit code."""
    folder = config.run.folder
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=config.run.keep_last)
    check_folder(checkpoints, config)
    jaxtp.initialize(
        cpu_devices=math.prod(map(abs, config.mesh.sizes.values())),
        timeout=config.faults.start_timeout,
        heartbeat_timeout=config.faults.heartbeat_timeout,
    )
    with run_folder.hold(folder, say=say):
        return train(config, checkpoints)


def train(config: Config, checkpoints: Checkpoints) -> int:
    """The run, in a folder that is its own; returns the exit code."""
    folder = config.run.folder
    probe(config)
    setup = prepare(config)
    config = setup.config
    say(f"{setup.plan}\n")
    say("\n".join((describe(setup), *strategies(config, setup.plan))))
    is_first = jax.process_index() == 0
    watchers = [watch.tensorboard(folder)] if config.run.tensorboard and is_first else []
    profiler = watch.Profiler(folder / "profile")
    with Preemption() as preemption, checkpoints:
        first, state = resume(checkpoints, setup)
        if running_step.is_asked():
            say(what_a_step_moves(setup, state))

        def save(number: int, state: TrainState) -> None:
            # Batches and random numbers are functions of the seed and the step alone.
            data = {"seed": config.seed, "step": number, **setup.text.digests}
            extra = {"settings": flat(config), "data": data}
            checkpoints.save(number, state, plan=setup.plan, extra=extra)

        with jaxtp.watchdog(config.faults.step_timeout, setup.mesh, first_step=first + 1) as done:
            watchers.append(lambda line: done(int(line["step"])))
            try:
                fit(
                    setup.step,
                    state,
                    lambda step: setup.placed(setup.text.train(step)),
                    num_steps=config.steps,
                    folder=folder,
                    first_step=first,
                    evaluate=lambda state: setup.validate(
                        state, setup.placed(setup.text.validation)
                    ),
                    eval_every=config.run.eval_every,
                    save=save,
                    save_every=config.run.checkpoint_every,
                    stop=preemption,
                    spike_factor=config.run.spike_factor,
                    measure=Meter(setup),
                    watchers=[*watchers, profiler] if config.run.profile else watchers,
                    console=Console(quiet=not is_first),
                )
            except TrainingDiverged:
                probe(config)  # is it a device?
                raise
    if config.run.profile:
        profiler.stop()
        say(watch.table(watch.operations(profiler.folder)))
    say(f"metrics in {folder / METRICS_FILE}, one line a step")
    if preemption.exit_code:
        say("stopped because it was asked to; the same command continues")
    return preemption.exit_code


def say(text: object) -> None:
    """Prints in the first process only; the others say nothing as long as all is well."""
    if jax.process_index() == 0:
        print(text)


def probe(config: Config) -> None:
    """Tests every device, if the settings want it, and names the slow ones.

    Raises:
        UnhealthyDevice: TP016, if one computes wrongly.
    """
    if config.faults.probe:
        health = jaxtp.probe()
        say(health)
        health.refuse_wrong()


def check_folder(checkpoints: Checkpoints, config: Config) -> None:
    """Refuses to start anew over checkpoints.

    Raises:
        BadCheckpoint: TP090.
    """
    steps = checkpoints.steps()
    if steps and not config.run.resume:
        raise BadCheckpoint(
            f"there are checkpoints up to step {steps[-1]}, and run.resume is off",
            where=str(checkpoints.folder),
            fix="choose another run.folder, or turn run.resume on",
        )


def resume(checkpoints: Checkpoints, setup: Setup) -> tuple[int, TrainState]:
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
    for name, value in flat(setup.config).items():
        if value != before.get(name) and not name.startswith("run."):
            say(f"  {name} was {before.get(name)}, is {value}")
    data = restored.extra.get("data", {})
    for name, value in setup.text.digests.items():
        if value != data.get(name, value):
            say(f"  {name} was {data[name]}, is {value}")
    return restored.step, restored.state


def what_a_step_moves(setup: Setup, state: TrainState) -> str:
    """The collectives of the compiled step, as a table."""
    batch = setup.placed(setup.text.train(0))
    table = running_step.report_step(setup.step, state, batch, tensor_axes=setup.plan.mesh.tp)
    return f"\nwhat one step moves\n{table.communication()}\n"


def flat(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name, as JSON can hold it."""
    values = {name: operator.attrgetter(name)(config) for name in settings()}
    return json.loads(json.dumps(values, default=str))


def describe(setup: Setup) -> str:
    """One line each on batch, precision and text."""
    config, batch = setup.config, setup.config.batch
    ways = config.mesh.dp * config.mesh.fsdp
    return (
        f"batch      {batch.size} = {batch.micro_size} x {batch.accumulation} accumulated x "
        f"{ways} data-parallel, {config.seq_len} tokens each\n"
        f"precision  {config.precision.compute}, float32 parameters; ZeRO stage {setup.plan.zero}\n"
        f"text       {setup.text.description}"
    )


if __name__ == "__main__":
    try:
        asked = read_arguments(sys.argv[1:])
        if asked.run.max_restarts:
            again = [sys.executable, *sys.argv, "--run.max_restarts", "0"]
            sys.exit(supervise(again, asked.run.max_restarts, say=print))
        sys.exit(main(asked))
    except jaxtp.JaxtpError as error:
        exit_with(error)
