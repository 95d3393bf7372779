"""The command line, one function a command: `jaxtp plan`, `jaxtp explain`, and so on."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.console import Console

from jaxtp.cli.model_argument import load_subject
from jaxtp.config.files import load
from jaxtp.config.presets import preset
from jaxtp.config.settings import Communication, Config
from jaxtp.errors import BadUsage, JaxtpError, page
from jaxtp.inspect.pages import see_tp_plan
from jaxtp.mesh.axes import Axis
from jaxtp.plan.decisions import Plan
from jaxtp.processes.device_health import probe as run_probe
from jaxtp.processes.startup import initialize
from jaxtp.rules.planner import make_plan
from jaxtp.train.preflight import preflight_config

app = tyro.extras.SubcommandApp()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How to plan a tree."""

    tp: int = 8
    """Devices along the tensor axis."""

    dp: int = 1
    """Replicas; only changes the mesh that is printed."""

    heads: int | None = None
    """Query heads of one layer; read from the file's config if it has one."""

    kv_heads: int | None = None
    """Key/value heads of one layer."""

    head_dim: int | None = None
    """Width of one head, in elements."""

    policy: str = "factor"
    """For units that do not divide: factor, replicate or error."""

    pad_vocab: bool = False
    """Pad a vocabulary that does not divide."""

    use_config: bool = True
    """Whether the sizes in the file may be used."""

    strict: bool = False
    """Refuse a plan that wastes devices or memory."""


def _plan(text: str, options: PlanOptions) -> Plan:
    subject = load_subject(text)
    mesh = {Axis.DP.value: options.dp} if options.dp > 1 else {}
    return make_plan(
        subject.params,
        {**mesh, Axis.TP.value: options.tp},
        config=subject.config if options.use_config else None,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        policy=options.policy,
        pad_vocab=options.pad_vocab,
        strict=options.strict,
        fn=subject.fn,
        inputs=subject.inputs,
    )


Tree = Annotated[str, tyro.conf.Positional]
Options = Annotated[PlanOptions, tyro.conf.arg(name="")]
JSON = tyro.conf.arg(name="json")
DEFAULTS = PlanOptions()
AS_USUAL = Communication()


@dataclasses.dataclass(frozen=True, slots=True)
class PresetSizes:
    """What `jaxtp preflight --model` lets one say about a preset; the flags of the same names."""

    tp: int = 8
    batch: int = 8
    seq: int = 2048
    layers: int = 0
    remat: str = "block_outputs"
    param_dtype: str = "float32"
    attention: str = "xla"
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


@app.command
def plan(
    tree: Tree, options: Options = DEFAULTS, *, as_json: Annotated[bool, JSON] = False
) -> None:
    """Plan a model and print one line a parameter, or JSON.

    Args:
        tree: File written by jaxtp.dump_tree, a preset, or package.module:function, which returns
            (fn, params, inputs).
        options: How to plan.
        as_json: Print mesh sizes, and per path spec, role, reasons and bytes.
    """
    result = _plan(tree, options)
    if not as_json:
        print(result)
        return
    mesh = result.mesh
    params = {
        d.path: {
            "spec": [list(axes) for axes in d.spec],
            "reordered": False,
            "role": d.role,
            "reasons": list(d.reasons),
            "fallback": d.fallback,
            "bytes": d.num_bytes,
            "bytes_per_device": d.bytes_per_device(mesh),
        }
        for d in result.decisions
    }
    tensor = {name: size for name, size in mesh.sizes if name in mesh.tp}
    print(json.dumps({"mesh": tensor, "notes": list(result.notes), "params": params}, indent=1))


@app.command
def explain(tree: Tree, path: Tree, options: Options = DEFAULTS) -> None:
    """Print all that is known about one parameter, with the lines of the model that say so.

    Args:
        tree: File written by jaxtp.dump_tree, a preset, or package.module:function, which returns
            (fn, params, inputs).
        path: The parameter's path.
        options: How to plan.
    """
    print(_plan(tree, options).explain(path))


@app.command
def view(tree: Tree, page: str = "tp_plan.html", options: Options = DEFAULTS) -> None:
    """Write the plan of a model as an HTML page.

    Args:
        tree: File written by jaxtp.dump_tree, a preset, or package.module:function, which returns
            (fn, params, inputs).
        page: The page to write.
        options: How to plan.
    """
    print(see_tp_plan(_plan(tree, options), page))


@app.command
def preflight(
    config: Tree = "",
    *,
    model: str = "",
    target: str = "",
    tp: int = 8,
    batch: int = 8,
    seq: int = 2048,
    layers: int = 0,
    remat: str = "block_outputs",
    param_dtype: str = "float32",
    attention: str = "xla",
    optimizer: str = "adamw",
    communication: Communication = AS_USUAL,
    as_json: Annotated[bool, JSON] = False,
    html: str = "",
    time_limit: float = 900.0,
) -> None:
    """Compile a train step for GPUs that are not there, and say what it will do.

    The step is that of a config file, as `scripts/train.py` would run it, or that of a preset.

    Args:
        config: A config file, JSON or TOML. It says all about the run; sizes below are for presets.
        model: A preset, such as llama3-70b.
        target: KIND:HOSTSxGPUS or KIND:SLICESxHOSTSxGPUS; by default the file's, or h100:1x8.
        tp: Devices along the tensor axis; what is left is dp.
        batch: Sequences of the global batch.
        seq: Tokens of one sequence.
        layers: Layers to compile; 0 is all of them.
        remat: What to recompute: none, full, block_outputs, dots or stage.
        param_dtype: Type of the stored parameters.
        attention: Kernel of attention: xla or cudnn.
        optimizer: Any function of optax that takes a learning rate; sgd keeps no state.
        communication: How the compiler is to treat communication.
        as_json: Print the report as data.
        html: Also write a page with a heat map and the schedule as a timeline.
        time_limit: Seconds that the compiler may take.
    """
    sizes = PresetSizes(tp, batch, seq, layers, remat, param_dtype, attention, optimizer)
    if bool(config) == bool(model) or (config and (sizes, communication) != USUAL):
        raise BadUsage(
            "a preset with its sizes, or a config file that has them",
            fix="jaxtp preflight CONFIG --target TARGET, or jaxtp preflight --model MODEL --tp 8",
        )
    run = _read(config) if config else sizes.run(model, communication)
    run = dataclasses.replace(run, target=target or run.target or "h100:1x8")
    with _progress(f"compiling {config or model}") as show:
        plan, report = preflight_config(run, time_limit=time_limit, on_progress=show)
    if html:
        see_tp_plan(plan, html, report=report)
    if plan.stages and not as_json:
        print(f"stages        {plan.stages}")
    print(report.to_json() if as_json else report)


def _read(path: str) -> Config:
    """The settings in a file; says what became of foreign keys."""
    config, lines = load(Path(path))
    for line in lines:
        print(f"{Path(path).name}: {line}", file=sys.stderr)
    return config


@app.command
def probe(
    size: int | None = None,
    slow_ratio: float | None = None,
    cpu_devices: int | None = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Test every device of this machine, or of all processes that a launcher starts with it.

    Args:
        size: Rows and columns of the matrices that are multiplied.
        slow_ratio: Times the median from which a device counts as slow.
        cpu_devices: Devices to simulate where there is no GPU.
        as_json: Print all times as data.
    """
    initialize(cpu_devices=cpu_devices)
    health = run_probe(size=size, slow_ratio=slow_ratio)
    if jax.process_index() == 0:
        print(health.to_json() if as_json else health)
    health.refuse_wrong()


@contextlib.contextmanager
def _progress(what: str) -> Generator[Callable[[float], None]]:
    """A line on standard error that counts seconds, where that is a terminal."""
    console = Console(stderr=True)
    with console.status(what) as status:
        yield lambda seconds: status.update(f"{what}: {seconds:.0f} s")


@app.command
def errors(code: Annotated[str, tyro.conf.Positional] = "") -> None:
    """Print the page of an error code, or the list of codes.

    Args:
        code: For example TP003.
    """
    if code:
        print(page(code))
        return
    for known, cls in sorted(JaxtpError.registry.items()):
        print(f"{known}  {cls.__name__}: {(cls.__doc__ or '').splitlines()[0]}")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command; a coded error goes to standard error and gives exit code 2."""
    try:
        app.cli(prog="jaxtp", description=__doc__, args=argv)
    except JaxtpError as err:
        print(err, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
