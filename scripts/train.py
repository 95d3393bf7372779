"""Trains from one config file, JSON or TOML, in jaxtp's or DeepSpeed's spelling.

    python scripts/train.py config.json --mesh.tp 4     every setting is also a flag
    python scripts/train.py --help                      all settings, with their defaults

Where there is no GPU, as many CPU devices are simulated as the mesh sizes multiply to.
"""

import math
import sys
from pathlib import Path

import jax
import tyro

import jaxtp
from jaxtp.config import Config, load
from jaxtp.io import checkpoint
from jaxtp.train import watch
from jaxtp.train.loop import METRICS_FILE, fit
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


def main(config: Config) -> None:
    """Prepares the run, continues where its folder ends, and trains."""
    sizes = (config.mesh.tp, config.mesh.pp, config.mesh.dp, config.mesh.fsdp)
    # For CPUs only, and before a backend starts.
    jax.config.update("jax_num_cpu_devices", math.prod(abs(size) for size in sizes))
    setup = prepare(config)
    config, folder = setup.config, setup.config.run.folder
    print(f"{setup.plan}\n")
    print(describe(setup))
    watchers = [watch.tensorboard(folder)] if config.run.tensorboard else []
    profiler = watch.Profiler(folder / "profile")
    first, state = resume(folder, setup.state)

    def save(number: int, state: TrainState) -> None:
        checkpoint.save(folder / "checkpoints" / str(number), checkpoint.by_path(state))

    fit(
        setup.step,
        state,
        lambda step: setup.placed(setup.text.train(step)),
        num_steps=config.steps,
        folder=folder,
        first_step=first,
        evaluate=lambda state: setup.validate(state, setup.placed(setup.text.validation)),
        eval_every=config.run.eval_every,
        save=save,
        save_every=config.run.checkpoint_every,
        watchers=[*watchers, profiler] if config.run.profile else watchers,
    )
    if config.run.profile:
        profiler.stop()
        print(watch.table(watch.operations(profiler.folder)))
    print(f"metrics in {folder / METRICS_FILE}, one line a step")


def resume(folder: Path, state: TrainState) -> tuple[int, TrainState]:
    """Steps done and the state after them, from the last checkpoint if there is one."""
    found = [int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdigit()]
    if not found:
        return 0, state
    last = max(found)
    print(f"continuing after step {last}")
    path = folder / "checkpoints" / str(last)
    return last, checkpoint.from_paths(state, checkpoint.restore(path, checkpoint.by_path(state)))


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
        main(read_arguments(sys.argv[1:]))
    except jaxtp.JaxtpError as error:
        sys.exit(str(error))
