"""Every setting of a training run: one frozen dataclass per concern, read strictly from text.

Text becomes a `Config` in `jaxtp.config.files`; sizes are filled in by `jaxtp.config.batch_sizes`.
"""

import dataclasses
import math
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, get_type_hints

from jaxtp.errors import BadConfig, Problems
from jaxtp.mesh.axes import Axis, Shards

Strict = ClassVar[Mapping[str, object]]
STRICT: Mapping[str, object] = types.MappingProxyType({"extra": "forbid", "strict": True})
"""How pydantic reads these classes: unknown keys and wrong types are errors."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Devices along each axis; the product is the number of devices."""

    __pydantic_config__: Strict = STRICT

    tp: int = 1
    """Devices along the tensor axis, inside the NVLink domain."""

    pp: int = 1
    """Pipeline stages."""

    dp: int = -1
    """Replicas; -1 takes what the other axes leave. With `zero.stage` of 1 to 3 and no `fsdp`,
    these are the devices that ZeRO shards over, with those along `cp` and `ep`, as in DeepSpeed."""

    fsdp: int = 1
    """Devices that the batch and, by `zero.stage`, the train state are sharded over, the state over
    `cp` and `ep` as well; -1 as for `dp`."""

    ep: int = 1
    """Devices that experts are sharded over, and the batch with them."""

    cp: int = 1
    """Devices that share every sequence, each an early and a late piece of it; `seq_len` is a
    multiple of twice as many."""

    @property
    def sizes(self) -> dict[Axis, int]:
        """Devices along each axis that a run may have, in the order of the mesh."""
        settings = {field.name for field in dataclasses.fields(self)}
        return {axis: getattr(self, axis) for axis in Axis if axis.value in settings}

    @property
    def data_ways(self) -> int:
        """Devices that each have other sequences: those along all axes that shard the batch."""
        sizes = self.sizes
        return math.prod(sizes[axis] for axis in Axis.that_shard(Shards.BATCH) if axis in sizes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences per step: size = micro_size x accumulation x data-parallel devices."""

    __pydantic_config__: Strict = STRICT

    size: int = 0
    """Sequences in one optimizer step, over all devices; 0 follows from `micro_size`."""

    micro_size: int = 0
    """Sequences that one data-parallel device works on at a time; 0 follows from `size`."""

    accumulation: int = 1
    """Micro-batches whose mean gradient makes one optimizer step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How layers and micro-batches go through the `mesh.pp` stages."""

    __pydantic_config__: Strict = STRICT

    rounds: int = 1
    """How often a micro-batch goes around the stages: 1 is GPipe, more is the circular, interleaved
    schedule, which idles that many times less and sends that many times more."""

    micro_batches: int = 0
    """Parts of the batch that follow each other; 0 takes `batch.accumulation`, or as many as there
    are stages where that is 1."""

    allow_heterogeneous: bool = False
    """Let stages be of different kinds of GPU, such as `target` `a100-80:1x8+h100:1x8`."""

    load_balance: Literal["even", "compute_first", "memory_first"] = "even"
    """Layers of stages of different kinds: alike, or in proportion to their FLOP/s or memory."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """What is sharded over fsdp, cp and ep together, and where optimizer state lives."""

    __pydantic_config__: Strict = STRICT

    stage: Literal[0, 1, 2, 3] | None = None
    """0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters. Default: 3 where
    `mesh.fsdp` is given, else 0."""

    partition_activations: bool = False
    """Shard the residual stream, and what is saved of it, along the sequence over the tensor axis
    (sequence parallelism)."""

    offload_optimizer: Literal["none", "cpu"] = "none"
    """cpu keeps optimizer state in the host's pinned memory between steps."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """How the planner splits parameters over the tensor axis."""

    __pydantic_config__: Strict = STRICT

    policy: Literal["factor", "replicate", "error"] = "factor"
    """For heads that do not divide: shard less, replicate, or refuse."""

    pad_vocab: bool = False
    """Pad a vocabulary that does not divide, instead of replicating its table."""

    strict: bool = True
    """Refuse a plan that wastes devices or memory, instead of noting it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """What XLA is told about collectives."""

    __pydantic_config__: Strict = STRICT

    overlap: Literal["off", "auto", "aggressive"] = "auto"
    """off makes them synchronous, auto leaves them to XLA, aggressive also makes two halves of the
    batch take turns, gathers each layer's weights one layer ahead, once a micro-batch, and reduces
    gradients one layer behind; pipeline stages gather theirs once a step. See `jaxtp.layers`."""

    gradient_fusion: bool | int = True
    """Whether small reductions and gathers are combined into one message, reduce-scatters less in
    a model with experts; a number is its largest size in bytes."""

    sequence_parallel: bool = False
    """Shard the residual stream along the sequence over the tensor axis: less memory, and norms and
    residual sums once. What it moves more than plain tp is hidden by overlap="aggressive"."""

    donate: bool = True
    """Let the new state use the memory of the old one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Types of what is stored, multiplied and summed."""

    __pydantic_config__: Strict = STRICT

    params: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters and optimizer state."""

    compute: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of activations and matrix products."""

    gradients: Literal["compute", "float32"] = "compute"
    """Type in which replicas sum gradients: that of `compute`, layer by layer during the backward
    pass, or float32, all at once after it. Micro-batches are summed in float32 either way."""

    loss_scale: float = 0.0
    """Under float16, what the loss is multiplied by before the backward pass; 0 adapts it."""

    loss_scale_window: int = 1000
    """Steps without overflow before an adaptive scale doubles."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The optimizer and its schedule."""

    __pydantic_config__: Strict = STRICT

    name: str = "adamw"
    """Any function of optax that takes a learning rate: adamw, lion, adafactor, muon, ..."""

    learning_rate: float = 3e-4
    """Peak of the schedule."""

    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """What follows the linear warm-up: no change, or a fall to `end_share` at the last step."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises from zero."""

    end_share: float = 0.1
    """The last learning rate as a share of the peak."""

    clip: float = 1.0
    """Largest global norm of the gradients; 0 turns clipping off."""

    weight_decay: float = 0.0
    """Decoupled weight decay, for optimizers that know it."""

    no_decay: str = r"(bias|scale)$"
    """Regular expression; parameters whose path it matches do not decay."""

    options: dict[str, float | int | bool | str] = dataclasses.field(
        default_factory=dict[str, float | int | bool | str]
    )
    """More arguments of the optimizer, by optax's names, such as b1 and b2."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Training text."""

    __pydantic_config__: Strict = STRICT

    files: str = ""
    """Folder of text files or a pattern such as `text/**/*.md`; default: the sources of Python's
    standard library."""

    tokenizer: str = ""
    """A Hugging Face `tokenizer.json`; default: that of `weights`, or else bytes."""

    packed: bool = False
    """Keep attention, positions and loss inside each document of a sequence; otherwise documents
    are one long text."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run writes, and how often."""

    __pydantic_config__: Strict = STRICT

    folder: Path = Path("runs/train")
    """Metrics, checkpoints and profiles go here."""

    checkpoints: str = ""
    """Where checkpoints go instead: another folder, or `gs://bucket/run` with `jaxtp[remote]`."""

    eval_every: int = 50
    """Steps between evaluations, and between printed lines."""

    eval_windows: int = 64
    """Sequences of the validation text to judge by."""

    checkpoint_every: int = 0
    """Steps between checkpoints; 0 writes none. SIGTERM and the last step make one too."""

    keep_last: int = 3
    """Checkpoints that are kept, the newest ones."""

    resume: bool = True
    """Continue from the newest checkpoint, on any mesh; otherwise there may be none."""

    max_restarts: int = 0
    """How often a run that was killed, or that lost a peer, is started again by `train.py`."""

    spike_factor: float = 0.0
    """Stop before saving when a loss is this many times its recent median, such as 3; 0 never."""

    tensorboard: bool = False
    """Write TensorBoard events beside `metrics.jsonl`."""

    profile: bool = False
    """Trace steps 3 to 5 with `jax.profiler` and print the operations that took longest."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """When a process gives up on the others or on a device; it then ends with a code."""

    __pydantic_config__: Strict = STRICT

    start_timeout: float = 300.0
    """Seconds until every process must have come."""

    step_timeout: float = 1800.0
    """Seconds for one step with the evaluation and the checkpoint after it; the first one, which
    compiles, may take ten times as long. 0 for no limit."""

    heartbeat_timeout: float = 60.0
    """Seconds after which a process that is not heard of counts as lost."""

    elastic: bool = True
    """Continue with fewer devices than the mesh multiplies to, on the largest mesh that the
    settings accept, with the same batch; a run that starts anew needs all of them."""

    probe: bool = True
    """Test every device at the start, and when a run has diverged."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters, which are then all that is trained."""

    __pydantic_config__: Strict = STRICT

    rank: int = 0
    """Width of the adapters; 0 trains all parameters."""

    alpha: float = 0.0
    """The product of an adapter's factors is multiplied by alpha / rank; 0 takes twice the rank."""

    targets: str = "q_proj,v_proj"
    """Linear maps that get one, by name, with commas between."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """How the experts of a mixture share the tokens."""

    __pydantic_config__: Strict = STRICT

    capacity_factor: float = 0.0
    """Room for tokens that every expert has on a device, over what it needs where all have as many;
    0 takes the model's."""

    drop_tokens: bool = False
    """Drop what finds no room, and count it; otherwise further rounds work on it."""

    load_balance_loss: float = 0.0
    """What the loss for balanced experts is multiplied by; 0 takes the model's."""

    router_z_loss: float = 0.0
    """The same for the loss that keeps the router's scores small."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One training run."""

    __pydantic_config__: Strict = STRICT

    model: str = "llama-tiny"
    """Preset name, see `jaxtp.models.PRESETS`."""

    weights: str = ""
    """Hugging Face folder to begin with: its config.json says what the model is, in place of
    `model`, and its tensors are the first parameters, beside adapters if there are any."""

    layers: int = 0
    """Layers of the model, fewer or more than the preset has; 0 takes the preset's."""

    attention: Literal["auto", "cudnn", "xla"] = "auto"
    """Kernel of attention; auto is cuDNN's on NVIDIA GPUs where type and heads allow it, else
    XLA's, which keeps arrays of tokens x tokens."""

    seq_len: int = 128
    """Tokens that the model reads of a sequence."""

    steps: int = 100
    """Optimizer steps."""

    seed: int = 0
    """Of the parameters and of the order of the data."""

    remat: Literal["none", "full", "block_outputs", "dots", "stage"] = "none"
    """What the backward pass recomputes instead of keeping, layer by layer, or with stage all that
    a pipeline stage does in one tick."""

    target: str = ""
    """The machine to cost the run on, such as `h100:4x8`; default: the GPUs that are there."""

    mesh: Mesh = Mesh()
    batch: Batch = Batch(size=16)
    pipeline: Pipeline = Pipeline()
    zero: Zero = Zero()
    tensor: Tensor = Tensor()
    communication: Communication = Communication()
    experts: Experts = Experts()
    precision: Precision = Precision()
    lora: Lora = Lora()
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    data: Data = Data()
    run: Run = Run()
    faults: Faults = Faults()


AT_LEAST: Mapping[str, float] = {
    "faults.start_timeout": 1, "faults.step_timeout": 0, "faults.heartbeat_timeout": 1,
    "layers": 0, "lora.rank": 0, "lora.alpha": 0, "seq_len": 1, "steps": 1, "seed": 0,
    "mesh.tp": 1, "mesh.pp": 1, "mesh.cp": 1, "batch.size": 0,
    "batch.micro_size": 0, "batch.accumulation": 1, "pipeline.rounds": 1,
    "pipeline.micro_batches": 0, "communication.gradient_fusion": 0,
    "experts.capacity_factor": 0,
    "experts.load_balance_loss": 0, "experts.router_z_loss": 0,
    "precision.loss_scale": 0, "precision.loss_scale_window": 1, "optimizer.learning_rate": 0,
    "optimizer.warmup_steps": 0, "optimizer.end_share": 0, "optimizer.clip": 0,
    "optimizer.weight_decay": 0, "run.eval_every": 1, "run.eval_windows": 1,
    "run.checkpoint_every": 0, "run.keep_last": 1, "run.max_restarts": 0, "run.spike_factor": 0,
}  # fmt: skip
"""Smallest legal value by setting."""


def settings(cls: type = Config, prefix: str = "") -> Iterator[str]:
    """The dotted name of every setting, e.g. `mesh.tp`; also its flag on the command line."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from settings(kind, f"{prefix}{field.name}.")  # pyright: ignore[reportArgumentType]
        else:
            yield prefix + field.name


def check_ranges(config: Config) -> None:
    """Refuses numbers that no run can have; the command line can set any.

    Raises:
        BadConfig: TP020, for every setting below its smallest legal value.
    """
    problems = Problems()
    for key, least in AT_LEAST.items():
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        if not value >= least:
            problems.add(BadConfig(f"is {value}", where=key, fix=f"at least {least}"))
    # These may take what the other axes leave, because more of them means more batch.
    for key in Axis.that_shard(Shards.BATCH):
        if (value := config.mesh.sizes[key]) < 1 and value != -1:
            problems.add(BadConfig(f"is {value}", where=f"mesh.{key}", fix="1 or more, or -1"))
    problems.raise_any()
