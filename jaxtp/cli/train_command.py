"""`jaxtp train`: a run from one file of settings, with every setting as a flag on top."""

import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from jaxtp.config.files import load
from jaxtp.config.settings import Config
from jaxtp.train.restarts import supervise
from jaxtp.train.whole_run import run

DESCRIPTION = """Train from one config file, JSON, TOML or YAML, in jaxtp's or DeepSpeed's spelling.

    jaxtp train config.json --mesh.tp 4     every setting is also a flag

    --run.checkpoint_every 500              a run that is killed goes on from there
    --run.max_restarts 10                   and is started again by itself

What it ends with tells a scheduler what to do: 0 complete, 143 saved after SIGTERM, 2 an error that
would come again, anything else worth another start.

Several processes, one per GPU, are started by Slurm, Open MPI or Kubernetes, or by hand, see
`jaxtp.initialize`; all of them see the same files. The first one talks. Where there is no GPU, as
many CPU devices are simulated as the mesh sizes multiply to.
"""


def train(arguments: Sequence[str]) -> int:
    """Train from a file of settings, or flags, and go on where the run folder ends.

    Args:
        arguments: Perhaps a config file first, then flags.
    """
    config = read_arguments(arguments)
    if config.run.max_restarts:
        command = [sys.executable, "-m", "jaxtp.cli.commands", "train", *arguments]
        again = [*command, "--run.max_restarts", "0"]
        return supervise(again, config.run.max_restarts, say=print)
    return run(config).exit_code


def read_arguments(arguments: Sequence[str]) -> Config:
    """The settings of the file, if one is named first, with the flags on top.

    Prints what became of each DeepSpeed key.

    Raises:
        BadConfig: TP020, for a file that cannot be read as settings.
    """
    config, flags = Config(), list(arguments)
    if flags and not flags[0].startswith("-"):
        path = Path(flags.pop(0))
        config, lines = load(path)
        for line in lines:
            print(f"{path.name}: {line}")
    return tyro.cli(Config, args=flags, default=config, description=DESCRIPTION, prog="jaxtp train")
