"""`jaxtp search`: which mesh, and why not the others."""

import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console

from jaxtp.config.files import load
from jaxtp.config.named_files import check_writable, write_text
from jaxtp.config.settings import Config
from jaxtp.config.write import to_toml
from jaxtp.cost.candidates import describe_fields
from jaxtp.errors import BadUsage, join
from jaxtp.generation.mesh_search import search_generation
from jaxtp.generation.workload import Workload
from jaxtp.hardware.links import GIB
from jaxtp.inspect.pages.search_page import search_html
from jaxtp.io.model_functions import is_model_function
from jaxtp.train.machine_sizes import largest_batch, smallest_machine, tokens_rate
from jaxtp.train.mesh_advice import axes_text, mesh_text
from jaxtp.train.mesh_search import run_of
from jaxtp.train.mesh_search import search as run_search
from jaxtp.train.own_script import script
from jaxtp.train.search_result import Search, settings_text

LIMIT = 12
"""Meshes that are printed, unless said otherwise."""

MOST_GPUS = 4096
"""Where the search for a machine ends without `max_gpus`."""


def search(
    model: Annotated[str, tyro.conf.Positional],
    *,
    target: str = "",
    batch: int = 0,
    seq: int = 0,
    fix: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
    limit: int = LIMIT,
    compiled: int = 3,
    network: str = "",
    max_gpus: int = 0,
    tokens_per_day: float = 0.0,
    largest: bool = False,
    generate: bool = False,
    write: str = "",
    html: str = "",
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    time_limit: float = 900.0,
) -> None:
    """Price every mesh for a run, compile the best few, and say why the others lost.

    Args:
        model: A preset such as llama3-70b, a config file whose other settings are kept, or
            package.module:function, anybody's model, as `jaxtp plan` takes it.
        target: KIND:HOSTSxGPUS; by default the file's, or h100:1x8.
        batch: Sequences of the global batch; by default the file's.
        seq: Tokens of one sequence; by default the file's, or 2048.
        fix: SETTING=VALUE that every candidate has, such as mesh.tp=8; give it several times.
        limit: Meshes to print.
        compiled: Meshes to compile; 0 for prices alone.
        network: What each GPU's NIC carries, such as 100gbps, instead of the data sheet's.
        max_gpus: Look for the smallest machine of the target's kind with at most so many GPUs that
            fits the run, and reaches `tokens_per_day` if that is given.
        tokens_per_day: What that machine has to reach.
        largest: Look for the largest batch, by doubling, whose micro-batch still fits at once.
        generate: Look for the split into tp and dp to generate on instead: `batch` rows of `seq`
            tokens, prompt and answer, by a preset.
        write: Write the best mesh here: a config that scripts/train.py takes, or, for a model of
            one's own, a module that makes mesh and plan.
        html: Draw step time against memory of all candidates here.
        as_json: Print the table as data.
        time_limit: Seconds that the compiler may take for each mesh.
    """
    if generate:
        others = (fix, network, max_gpus, tokens_per_day, largest, write, html, as_json)
        others = (*others, limit != LIMIT)
        _generation(model, target, batch, seq, compiled, time_limit, any(others))
        return
    fixed, carried = _fixed(fix), _bytes_per_second(network)
    for file in filter(None, (html, write)):
        check_writable(file)
    run: Config | str = _named(model)
    if isinstance(run, str) and is_model_function(run):
        _refuse_sizes(model, seq, max_gpus, tokens_per_day, largest)
        _check_module(model, write)
    else:
        run = run_of(run, target=target, batch=batch, seq=seq)
        target, batch = "", 0
        if max_gpus or tokens_per_day:
            most = max_gpus or MOST_GPUS
            run = smallest_machine(
                run, max_gpus=most, tokens_per_day=tokens_per_day, fixed=fixed, network=carried
            )
        if largest:
            run = largest_batch(run, fixed=fixed)
            fixed["batch.accumulation"] = "1"
    with _progress() as show:
        result = run_search(
            run,
            target=target,
            batch=batch,
            fixed=fixed,
            limit=limit,
            compile_best=compiled,
            network=carried,
            time_limit=time_limit,
            on_progress=show,
        )
    print(result.to_json() if as_json else result)
    _answer(result, machine=bool(max_gpus or tokens_per_day), largest=largest)
    _write(result, html, write)
    _ = result.best  # raises where nothing fits


def _write(result: Search, html: str, write: str) -> None:
    """Writes the page and the best mesh, where they are asked for."""
    if html:
        write_text(html, _page(result))
        print(f"wrote {html}", file=sys.stderr)
    if write:
        write_text(write, _written(result, write))
        print(f"wrote {write}: {mesh_text(result.best.candidate)}", file=sys.stderr)


def _answer(result: Search, *, machine: bool, largest: bool) -> None:
    """Says which machine or which batch was asked for."""
    if machine:
        rate = f"{tokens_rate(result) / 1e9:,.3g} billion tokens a day on its first mesh"
        print(f"{result.target} is the smallest machine that will do: {rate}", file=sys.stderr)
    if largest:
        what = f"{result.batch} sequences, the largest batch, by doubling, that fits at once"
        print(what, file=sys.stderr)


def _generation(
    model: str, target: str, batch: int, seq: int, compiled: int, time_limit: float, others: bool
) -> None:
    """Prints the splits of a machine to generate on.

    Raises:
        BadUsage: TP132, with flags of a search for training.
    """
    if others:
        raise BadUsage(
            "generation is searched over tp and dp alone",
            where="generate",
            fix="model, --target, --batch, --seq, --compiled and --time-limit",
        )
    usual = Workload(model=model)
    asked = dataclasses.replace(usual, batch=batch or usual.batch, context=seq or usual.context)
    with _progress() as show:
        result = search_generation(
            asked,
            target or "h100:1x8",
            compile_best=compiled,
            time_limit=time_limit,
            on_progress=show,
        )
    print(result)
    _ = result.best  # raises where nothing fits


def _named(text: str) -> Config | str:
    """The settings in a file, or a name."""
    if not Path(text).is_file():
        return text
    config, lines = load(Path(text))
    for line in lines:
        print(f"{Path(text).name}: {line}", file=sys.stderr)
    return config


def _refuse_sizes(
    model: str, seq: int, max_gpus: int, tokens_per_day: float, largest: bool
) -> None:
    """Refuses what only models of jaxtp can be asked.

    Raises:
        BadUsage: TP132, for a length, a machine or a batch to look for.
    """
    asked = {
        "--seq": seq,
        "--max-gpus": max_gpus,
        "--tokens-per-day": tokens_per_day,
        "--largest": largest,
    }
    if given := [flag for flag, value in asked.items() if value]:
        raise BadUsage(
            f"{join(given)} for a model of one's own, whose inputs say their length",
            where=model,
            fix="--target and --batch; other inputs, returned by the function",
        )


def _check_module(model: str, write: str) -> None:
    """Refuses a module that would not be called one.

    Raises:
        BadUsage: TP132, for a file to write with another suffix.
    """
    if write and Path(write).suffix != ".py":
        raise BadUsage(
            f"{write} would hold a module: {model} has no config",
            where="write",
            fix=f"--write {Path(write).with_suffix('.py')}",
        )


def _written(result: Search, write: str) -> str:
    """The best mesh as text: a config, or a module for a model that has none."""
    best = result.best
    if best.config is not None:
        return to_toml(best.config)
    name = Path(write).name
    return script(result.model, str(result.target), result.batch, best.candidate, name)


def _fixed(texts: Sequence[str]) -> dict[str, str]:
    """SETTING=VALUE texts.

    Raises:
        BadUsage: TP132, for a text without =.
    """
    pairs = [text.partition("=") for text in texts]
    if wrong := [text for text, (_, sign, _) in zip(texts, pairs, strict=True) if not sign]:
        raise BadUsage(f"{wrong[0]!r} is not SETTING=VALUE", where="fix", fix="--fix mesh.tp=8")
    return {name: value for name, _, value in pairs}


def _bytes_per_second(text: str) -> float:
    """`100gbps` as bytes/s; 0 for "".

    Raises:
        BadUsage: TP132, for anything else.
    """
    if not text:
        return 0.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *gbps", text.lower())
    if not found or not float(found[1]):
        raise BadUsage(f"{text!r} is no bandwidth", where="network", fix="--network 100gbps")
    return float(found[1]) * 1e9 / 8


def _page(result: Search) -> str:
    seconds = [float(value) for value in result.ranking.seconds]
    gib = [
        float(value) / GIB
        for value in np.broadcast_to(np.asarray(result.ranking.memory.total), len(seconds))
    ]
    labels: list[str] = []
    for index, (step, memory) in enumerate(zip(seconds, gib, strict=True)):
        settings = describe_fields(result.ranking.strategies, index)
        what = f"{axes_text(settings)}; {settings_text(settings, own=result.is_own)}"
        labels.append(f"{step:.3f} s, {memory:.1f} GiB: {what}")
    length = f" x {result.seq}" if result.seq else ""
    title = f"{result.model} on {result.target}, batch {result.batch}{length}"
    limit = result.ranking.limit_bytes / GIB
    return search_html(title, str(result), seconds, gib, labels, limit)


@contextlib.contextmanager
def _progress() -> Generator[Callable[[str, float], None]]:
    """A line on standard error that says what is compiled, where that is a terminal."""
    console = Console(stderr=True)
    with console.status("pricing") as status:
        yield lambda what, seconds: status.update(f"compiling {what}: {seconds:.0f} s")
