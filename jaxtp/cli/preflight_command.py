"""`jaxtp preflight`: a train step compiled for GPUs that are not there."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxtp.cli.progress import seconds_line
from jaxtp.config.files import load
from jaxtp.config.named_files import check_writable
from jaxtp.config.presets import preset
from jaxtp.config.settings import Communication, Config
from jaxtp.errors import BadUsage
from jaxtp.generation.preflight import preflight_generation
from jaxtp.generation.workload import Workload
from jaxtp.inspect.pages import see_tp_plan
from jaxtp.train.preflight import preflight_config

AS_USUAL = Communication()
NEW_TOKENS, CONTEXT = 256, 8192
"""Tokens of an answer, and of a prompt and its answer, unless said otherwise."""


@dataclasses.dataclass(frozen=True, slots=True)
class PresetSizes:
    """What `jaxtp preflight --model` lets one say about a preset; the flags of the same names."""

    tp: int = 8
    batch: int = 8
    seq: int = 2048
    layers: int = 0
    remat: str = "block_outputs"
    param_dtype: str = "float32"
    attention: str = "auto"
    optimizer: str = "adamw"

    def run(self, model: str, communication: Communication) -> Config:
        """The preset of these sizes."""
        return preset(
            model,
            **{
                "mesh.tp": self.tp,
                "batch.size": self.batch,
                "seq_len": self.seq,
                "layers": self.layers,
                "remat": self.remat,
                "precision.params": self.param_dtype,
                "attention": self.attention,
                "optimizer.name": self.optimizer,
                "communication": dataclasses.asdict(communication),
            },
        )


USUAL = (PresetSizes(), AS_USUAL)


def preflight(
    config: Annotated[str, tyro.conf.Positional] = "",
    *,
    model: str = "",
    target: str = "",
    tp: int = 8,
    batch: int = 8,
    seq: int = 2048,
    layers: int = 0,
    remat: str = "block_outputs",
    param_dtype: str = "float32",
    attention: str = "auto",
    optimizer: str = "adamw",
    communication: Communication = AS_USUAL,
    generate: bool = False,
    context: int = CONTEXT,
    new_tokens: int = NEW_TOKENS,
    quantize: Literal["none", "int8", "int4"] = "none",
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    html: Annotated[str, tyro.conf.arg(aliases=("--page",))] = "",
    time_limit: float = 900.0,
) -> None:
    """Compile a train step for GPUs that are not there, and say what it will do.

    The step is that of a config file, as `jaxtp train` would run it, or that of a preset. With
    `--generate` it is generation by a preset instead: prompts into a cache, and tokens out of it.

    Args:
        config: A config file: JSON, TOML or YAML. It says all about the run; sizes below are for
            presets.
        model: A preset, such as llama3-70b.
        target: KIND:HOSTSxGPUS or KIND:SLICESxHOSTSxGPUS; by default the file's, or h100:1x8.
        tp: Devices along the tensor axis; what is left is dp.
        batch: Sequences of the global batch.
        seq: Tokens of one sequence.
        layers: Layers to compile; 0 is all of them.
        remat: What to recompute: none, full, block_outputs, dots or stage.
        param_dtype: Type of the stored parameters.
        attention: Kernel of attention: auto, cudnn or xla.
        optimizer: Any function of optax that takes a learning rate; sgd keeps no state.
        communication: How the compiler is to treat communication.
        generate: Compile generation: memory, largest batch and context, tokens/s against the floor.
        context: With it, tokens of a prompt and its answer.
        new_tokens: With it, how many of them are the answer's.
        quantize: With it, the type of kernels.
        as_json: Print the report as data.
        html: Also write a page with a heat map and the schedule as a timeline.
        time_limit: Seconds that the compiler may take.
    """
    sizes = PresetSizes(tp, batch, seq, layers, remat, param_dtype, attention, optimizer)
    if generate:
        usual = (PresetSizes(tp=tp, batch=batch, layers=layers), AS_USUAL)
        if config or not model or html or (sizes, communication) != usual:
            raise BadUsage(
                "generation is compiled for a preset of these sizes, and has no page",
                where="generate",
                fix="jaxtp preflight --generate --model llama3-70b --tp 8 --batch 16 --context "
                "8192 --target h200:1x8, and --new-tokens, --layers, --quantize",
            )
        work = Workload(
            model=model,
            tp=tp,
            batch=batch,
            context=context,
            new_tokens=new_tokens,
            layers=layers,
            quantize=quantize,
        )
        _generation(work, target or "h100:1x8", time_limit, as_json=as_json)
        return
    _refuse_of_generation(context=context, new_tokens=new_tokens, quantize=quantize)
    if bool(config) == bool(model) or (config and (sizes, communication) != USUAL):
        raise BadUsage(
            "a preset with its sizes, or a config file that has them",
            fix="jaxtp preflight CONFIG --target TARGET, or jaxtp preflight --model MODEL --tp 8",
        )
    if html:
        check_writable(html)
    run = _read(config) if config else sizes.run(model, communication)
    run = dataclasses.replace(run, target=target or run.target or "h100:1x8")
    with seconds_line(f"compiling {config or model}") as show:
        plan, report = preflight_config(run, time_limit=time_limit, on_progress=show)
    if html:
        see_tp_plan(plan, html, report=report)
    if plan.stages and not as_json:
        print(f"stages        {plan.stages}")
    print(report.to_json() if as_json else report)


def _generation(work: Workload, target: str, time_limit: float, *, as_json: bool) -> None:
    with seconds_line(f"compiling {work.model}") as show:
        found = preflight_generation(work, target, time_limit=time_limit, on_progress=show)
    print(found.to_json() if as_json else found)


def _refuse_of_generation(*, context: int, new_tokens: int, quantize: str) -> None:
    """Refuses what a train step does not have.

    Raises:
        BadUsage: TP132, for flags that only mean something with `--generate`.
    """
    changed = {
        "--quantize": (quantize != "none", "training has float kernels"),
        "--context": (context != CONTEXT, "training has --seq"),
        "--new-tokens": (new_tokens != NEW_TOKENS, "training answers nothing"),
    }
    for flag, (given, why) in changed.items():
        if given:
            raise BadUsage(
                f"{flag} without --generate",
                where=flag.removeprefix("--").replace("-", "_"),
                fix=f"--generate; {why}",
            )


def _read(path: str) -> Config:
    """The settings in a file; says what became of foreign keys."""
    config, lines = load(Path(path))
    for line in lines:
        print(f"{Path(path).name}: {line}", file=sys.stderr)
    return config
