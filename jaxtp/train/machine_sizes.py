"""The other direction: the smallest machine for a run, and the largest batch of a machine."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxtp.config.settings import Config
from jaxtp.errors import BadUsage, DoesNotFit, JaxtpError
from jaxtp.errors.arguments import is_whole
from jaxtp.hardware.gpus import Target
from jaxtp.train.mesh_search import search
from jaxtp.train.search_result import Search

DAY = 86400
"""Seconds."""


def smallest_machine(
    config: Config,
    *,
    max_gpus: int,
    tokens_per_day: float = 0.0,
    fixed: Mapping[str, Any] | None = None,
    network: float = 0.0,
) -> Config:
    """The run on the fewest GPUs of the target's kind that hold it and are fast enough.

    Tried are 1, 2, 4, ... GPUs of one host, then 2, 3, 4, ... hosts, by prices alone.

    Args:
        config: The run; of its target the kind and the GPUs of a host count.
        max_gpus: Where to stop.
        tokens_per_day: Tokens that have to be trained on in a day; 0 if any speed will do.
        fixed: As in `search`.
        network: As in `search`.

    Raises:
        BadUsage: TP132, for no number of GPUs or of tokens.
        DoesNotFit: TP114, if no machine up to `max_gpus` will do; with what the largest one does.
        BadTarget: TP116, for the target.
    """
    if not is_whole(max_gpus) or max_gpus < 1:
        raise BadUsage(f"max_gpus is {max_gpus!r}", where="max_gpus", fix="GPUs, 1 or more")
    if not 0 <= tokens_per_day < math.inf:
        raise BadUsage(
            f"tokens_per_day is {tokens_per_day!r}",
            where="tokens_per_day",
            fix="tokens to train on in a day; 0 if any speed will do",
        )
    given = Target.parse(config.target)
    kind = config.target.rpartition(":")[0]
    hosts = range(1, max(1, max_gpus // given.gpus) + 1)
    shapes = [(1, n) for n in (1, 2, 4) if n < given.gpus] + [(h, given.gpus) for h in hosts]
    tried = ""
    for count, gpus in shapes:
        if count * gpus > max_gpus:
            break
        one = dataclasses.replace(config, target=f"{kind}:{count}x{gpus}")
        try:
            result = search(one, fixed=fixed, compile_best=0, limit=1, network=network)
        except JaxtpError:  # the batch does not divide by these devices
            continue
        first = result.rows[0].candidate
        rate = tokens_rate(result)
        tried = f"{one.target}: {first.reason or f'{rate:,.3g} tokens a day'}"
        if first.fits and rate >= tokens_per_day:
            return one
    raise DoesNotFit(
        f"no machine of up to {max_gpus} {given.device.name} will do; the last was {tried}",
        where="target",
        fix="more GPUs (--max-gpus), fewer tokens a day, or another batch.size",
    )


def tokens_rate(result: Search) -> float:
    """Tokens a day of the first mesh, modelled."""
    return result.batch * result.seq / result.rows[0].candidate.seconds * DAY


def largest_batch(config: Config, *, fixed: Mapping[str, Any] | None = None) -> Config:
    """The run with the largest batch, by doubling, that fits without accumulation.

    More than that always fits with `batch.accumulation`.

    Args:
        config: The run.
        fixed: As in `search`.

    Raises:
        DoesNotFit: TP114, if not even one sequence a GPU fits.
        BadTarget: TP116, for the target.
    """
    once = {**(fixed or {}), "batch.accumulation": 1}
    size, best = 1, None
    devices = Target.parse(config.target).num_devices
    while size <= devices * 2**14:
        one = dataclasses.replace(config, batch=dataclasses.replace(config.batch, size=size))
        try:
            fits = search(one, fixed=once, compile_best=0, limit=1).rows[0].candidate.fits
        except JaxtpError:  # so few sequences do not divide by the devices
            fits = False
        if fits:
            best = one
        elif best is not None:
            break
        size *= 2
    if best is None:
        raise DoesNotFit(
            f"{config.model} does not fit with one sequence of {config.seq_len} tokens a GPU",
            where="batch",
            fix="more GPUs, or a shorter seq_len",
        )
    return best
