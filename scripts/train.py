"""Trains from one config file, JSON, TOML or YAML, in jaxtp's or DeepSpeed's spelling.

    python scripts/train.py config.json --mesh.tp 4     every setting is also a flag
    python scripts/train.py --help                      all settings, with their defaults

The same as `jaxtp train`, spelled out as a program of your own would be. `run` is the whole run:
processes, plan, state, checkpoints, the loop. What it is made of can be had in pieces: `prepare`
for mesh, plan, state, step and text, `fit` for the loop.
"""

import sys

import jaxtp
from jaxtp import train
from jaxtp.cli.train_command import read_arguments
from jaxtp.processes.faults import exit_with
from jaxtp.train.restarts import supervise


def main(arguments: list[str]) -> int:
    """The settings of a file with flags on top, the run, and what to end with."""
    config = read_arguments(arguments)
    if config.run.max_restarts:  # a process that starts this one again when it is killed
        again = [sys.executable, *sys.argv, "--run.max_restarts", "0"]
        return supervise(again, config.run.max_restarts, say=print)
    return train.run(config).exit_code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except jaxtp.JaxtpError as error:
        exit_with(error)
