"""Optimizers by name, with schedule, clipping and a mask for weight decay."""

import difflib
import inspect
import re
from collections.abc import Callable
from typing import Any

import optax
import optax.contrib

from jaxtp.config.settings import Optimizer
from jaxtp.errors import BadConfig, join
from jaxtp.plan.trees import PyTree, map_with_path

DECAY = ("weight_decay", "weight_decay_rate")
MASK = ("mask", "weight_decay_mask")


def build_optimizer(
    settings: Optimizer, num_steps: int
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optimizer and the learning rate by number of updates.

    Clipping comes first and by the global norm of all gradients, wherever they lie.

    Args:
        settings: Which optimizer, with which numbers.
        num_steps: Steps of the run; where the schedule ends.

    Raises:
        BadConfig: TP020, for an optimizer that optax does not have, an option it does not take, or
            weight decay that it does not know.
    """
    make = _find(settings.name)
    takes = inspect.signature(make).parameters
    schedule = build_schedule(settings, num_steps)
    options: dict[str, Any] = {"learning_rate": schedule}
    for name, value in settings.options.items():
        if name not in takes:
            near = difflib.get_close_matches(name, takes, n=1) or list(takes)
            raise BadConfig(
                f"{settings.name} takes no {name}",
                where=f"optimizer.options.{name}",
                fix=f"it takes {join(near, 20)}",
            )
        options[name] = value
    decay, mask = (next((n for n in names if n in takes), "") for names in (DECAY, MASK))
    if decay:
        # Also zero: what an optimizer decays by default was not asked for.
        options[decay] = settings.weight_decay
    elif settings.weight_decay:
        raise BadConfig(
            f"{settings.name} has no weight decay",
            where="optimizer.weight_decay",
            fix="0, or an optimizer that has: " + join(n for n in _names() if _decays(n)),
        )
    if mask:
        options[mask] = _decay_mask(settings.no_decay)
    clip = [optax.clip_by_global_norm(settings.clip)] if settings.clip else []
    return optax.chain(*clip, make(**options)), schedule


def build_schedule(settings: Optimizer, num_steps: int) -> optax.Schedule:
    """Learning rate by number of updates: a linear rise from zero, then the named curve."""
    peak, warmup = settings.learning_rate, settings.warmup_steps
    rest = max(1, num_steps - warmup)
    curves: dict[str, Callable[[], optax.Schedule]] = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, peak * settings.end_share, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, settings.end_share),
    }
    curve = curves[settings.schedule]()
    if not warmup:
        return curve
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), curve], [warmup])


def _decay_mask(pattern: str) -> Callable[[PyTree], PyTree]:
    """Which parameters decay: those whose path the pattern does not match."""
    try:
        rule = re.compile(pattern)
    except re.error as err:
        raise BadConfig(
            f"{pattern!r} is no regular expression: {err}",
            where="optimizer.no_decay",
            fix=r"such as (bias|scale)$; \ before what is meant literally",
        ) from None
    return lambda params: map_with_path(lambda path, _: not rule.search(path), params)


def _find(name: str) -> Callable[..., optax.GradientTransformation]:
    names = _names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3) or names
        raise BadConfig(
            f"optax has no optimizer {name!r}", where="optimizer.name", fix=join(near, 40)
        )
    return names[name]


def _names() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Functions of optax that make an optimizer from a learning rate, by name."""
    found: dict[str, Callable[..., optax.GradientTransformation]] = {}
    for name, value in (vars(optax.contrib) | vars(optax)).items():
        is_public = inspect.isfunction(value) and name.islower()
        if is_public and "learning_rate" in inspect.signature(value).parameters:
            found[name] = value
    return found


def _decays(name: str) -> bool:
    return not set(DECAY).isdisjoint(inspect.signature(_names()[name]).parameters)
