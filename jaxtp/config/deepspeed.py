"""DeepSpeed's and AutoTP's spelling of settings: one row a key, in one table.

A key is *mapped* to a setting, *replaced* because something else does its work here, or *refused*
with the reason. A refused key that is switched off is no harm and only gets its line.

Keys are those of DeepSpeed's configuration page and of its AutoTP training guide; what stands for
each of them here is jaxtp's own decision.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

from jaxtp.errors import BadConfig, Problems, join

Settings = Mapping[str, Any]
"""Dotted name of a jaxtp setting -> value."""

Action = Literal["mapped", "replaced", "refused", "default"]


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """What became of one DeepSpeed key.

    Attributes:
        key: Dotted path in the file.
        action: What was done with it; "default" for what DeepSpeed does when the key is absent.
        text: To what it was mapped, or what replaces it, or why it is refused.
    """

    key: str
    action: Action
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.action}; {self.text}"


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One row of the table.

    Attributes:
        action: What is done with the key.
        text: One sentence for the user.
        kinds: JSON types that the value may have.
        convert: Value -> settings, for a mapped key.
    """

    action: Action
    text: str
    kinds: tuple[type, ...] = (object,)
    convert: Callable[[Any], Settings] = lambda _: {}


def _to(setting: str, *kinds: type, note: str = "") -> Key:
    """A key that is a setting by another name."""
    text = f"--{setting}" + (f", {note}" if note else "")
    return Key("mapped", text, kinds, lambda value: {setting: value})


def _as(text: str, kind: type, convert: Callable[[Any], Settings]) -> Key:
    """A key whose value has to be translated too."""
    return Key("mapped", text, (kind,), convert)


def _instead(text: str) -> Key:
    return Key("replaced", text)


def _not(text: str) -> Key:
    return Key("refused", text)


def _compute(dtype: str) -> Callable[[Any], Settings]:
    return lambda on: {"precision.compute": dtype} if on else {}


def _gradients(dtype: str) -> Settings:
    # Sixteen bits are the type of activations, in which gradients come.
    return {"precision.gradients": "float32" if dtype == "fp32" else "compute"}


def _num_bytes(value: Any) -> Settings:
    """`1GB` or a number, in bytes; units are powers of 1024, as AutoTP's examples use them."""
    units = {"": 0, "B": 0, "KB": 1, "MB": 2, "GB": 3}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?B?)\s*", str(value).upper())
    if match is None or match[2] not in units:
        # Left as it is: whoever checks types will name the key.
        return {"communication.gradient_fusion": value}
    return {"communication.gradient_fusion": int(float(match[1]) * 1024 ** units[match[2]])}


def _load_balance(value: Mapping[str, Any]) -> Settings:
    fields = dict(value)
    is_on, strategy = fields.pop("enabled", True), fields.pop("strategy", "COMPUTE_FIRST")
    # Whoever checks names and types will find what is left.
    rest = {f"load_balance.{key}": left for key, left in fields.items()}
    return {"pipeline.load_balance": str(strategy).lower() if is_on else "even", **rest}


def _betas(value: list[Any]) -> Settings:
    return {f"optimizer.options.b{i}": beta for i, beta in enumerate(value, 1)}


def _optimizer(value: str) -> Settings:
    # DeepSpeed's Adam is AdamW unless adam_w_mode is false.
    name = value.lower()
    return {"optimizer.name": "adamw" if name in ("adam", "fusedadam") else name}


def _schedule(value: str) -> Settings:
    known: Mapping[str, Settings] = {
        "WarmupLR": {"optimizer.schedule": "constant"},
        "WarmupDecayLR": {"optimizer.schedule": "linear", "optimizer.end_share": 0.0},
        "WarmupCosineLR": {"optimizer.schedule": "cosine"},
    }
    return known.get(value, {"optimizer.schedule": value})


_XLA_BUFFERS = _instead("XLA plans buffers at compile time")
_FLOAT_KERNELS = _not("training has float kernels; integers are for generation, load_hf(quantize=)")
_XLA_ORDER = _instead("XLA schedules collectives; see --communication.overlap")
_MESSAGES = _instead("messages are combined up to --communication.gradient_fusion bytes")
_PREFETCH = _instead("XLA decides how far ahead the next layer is gathered")
_SCALING = _instead("loss scaling starts at 2**15, halves on overflow and never falls below 1")
_METRICS = _instead("metrics.jsonl holds one object a step")
_PROFILE = _instead("--run.profile traces a few steps and prints the longest operations")
_GIVEN = _instead("the section is on because it is there")
_BOUNDARY = _instead("stage boundaries lie as --zero.partition_activations says")

TABLE: Mapping[str, Key] = {
    "train_batch_size": _to("batch.size", int),
    "train_micro_batch_size_per_gpu": _to("batch.micro_size", int),
    "gradient_accumulation_steps": _to("batch.accumulation", int),
    "gradient_clipping": _to("optimizer.clip", int, float),
    "steps_per_print": _to("run.eval_every", int, note="evaluations are printed too"),
    "sequence_parallel_size": _to("mesh.cp", int),
    "data_parallel_size": _to("mesh.dp", int, note="which ZeRO shards over"),
    "tensor_parallel.enabled": _GIVEN,
    "tensor_parallel.tp_size": _to("mesh.tp", int),
    "tensor_parallel.autotp_size": _to("mesh.tp", int),
    "tensor_parallel.strategy": _instead("jaxtp always plans automatically; see --tensor.policy"),
    "tensor_parallel.tp_grain_size": _instead("heads are never divided"),
    "tensor_parallel.dtype": _instead("see --precision.compute"),
    "tensor_parallel.preset_model": _instead("roles are read from the model"),
    "tensor_parallel.partition_config": _not("give overrides to jaxtp.make_plan"),
    "tensor_parallel.communication.gradient_fusion": _as(
        "--communication.gradient_fusion",
        bool,
        # Beside a fusion_threshold, which says how large.
        lambda on: {} if on else {"communication.gradient_fusion": False},
    ),
    "tensor_parallel.communication.overlap": _as(
        "--communication.overlap", str, lambda value: {"communication.overlap": value.lower()}
    ),
    "tensor_parallel.communication.fusion_threshold": Key(
        "mapped", "--communication.gradient_fusion, in bytes", (str, int), _num_bytes
    ),
    "pipeline_parallel.enabled": _GIVEN,
    "pipeline_parallel.pp_size": _to("mesh.pp", int),
    "moe.enabled": _GIVEN,
    "moe.ep_size": _to("mesh.ep", int),
    "moe.capacity_factor": _to("experts.capacity_factor", int, float),
    "moe.drop_tokens": _to("experts.drop_tokens", bool),
    "moe.eval_capacity_factor": _instead("evaluation has the capacity of training"),
    "moe.min_capacity": _instead("an expert has room for one token at least"),
    "moe.num_experts": _not("the model says how many experts it has"),
    "moe.k": _not("the model says how many experts a token has"),
    "moe.use_rts": _not("tokens are taken in their own order"),
    "moe.noisy_gate_policy": _not("routers have no noise"),
    "allow_heterogeneous": _to("pipeline.allow_heterogeneous", bool),
    "load_balance": _as("--pipeline.load_balance", dict, _load_balance),
    "zero_optimization.stage": _to("zero.stage", int),
    "zero_optimization.partition_activations": _to("zero.partition_activations", bool),
    "zero_optimization.offload_optimizer.device": _to("zero.offload_optimizer", str),
    "zero_optimization.offload_optimizer.pin_memory": _instead("host memory is always pinned"),
    "zero_optimization.offload_optimizer.buffer_count": _XLA_BUFFERS,
    "zero_optimization.offload_optimizer.fast_init": _XLA_BUFFERS,
    "zero_optimization.offload_optimizer.ratio": _instead(
        "all of the optimizer state is offloaded"
    ),
    "zero_optimization.offload_param": _not("parameters stay in device memory; raise fsdp or tp"),
    "zero_optimization.cpu_offload": _not("say offload_optimizer.device, as DeepSpeed now does"),
    "zero_optimization.overlap_comm": _XLA_ORDER,
    "zero_optimization.contiguous_gradients": _XLA_BUFFERS,
    "zero_optimization.reduce_scatter": _instead("stage 2 and 3 reduce-scatter gradients"),
    "zero_optimization.allgather_partitions": _XLA_ORDER,
    "zero_optimization.reduce_bucket_size": _MESSAGES,
    "zero_optimization.allgather_bucket_size": _MESSAGES,
    "zero_optimization.sub_group_size": _XLA_BUFFERS,
    "zero_optimization.round_robin_gradients": _XLA_ORDER,
    "zero_optimization.stage3_prefetch_bucket_size": _PREFETCH,
    "zero_optimization.stage3_max_live_parameters": _PREFETCH,
    "zero_optimization.stage3_max_reuse_distance": _PREFETCH,
    "zero_optimization.stage3_param_persistence_threshold": _instead(
        "arrays below 1/256 of the largest one, per layer, are replicated"
    ),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _instead(
        "checkpoints hold global arrays; jaxtp.unshard brings them to the host"
    ),
    "zero_optimization.ignore_unused_parameters": _instead("JAX gives them zero gradients"),
    "zero_optimization.elastic_checkpoint": _instead("checkpoints restore onto any mesh"),
    "zero_optimization.load_from_fp32_weights": _instead("parameters are stored in float32"),
    "zero_optimization.zero_hpz_partition_size": _not("give --mesh.dp and --mesh.fsdp instead"),
    "zero_optimization.mics_shard_size": _not("give --mesh.dp and --mesh.fsdp instead"),
    "zero_optimization.zero_quantized_weights": _not("collectives are not quantised"),
    "zero_optimization.zero_quantized_gradients": _not("collectives are not quantised"),
    "zero_allow_untested_optimizer": _instead("the state of any optax optimizer is placed"),
    "zero_force_ds_cpu_optimizer": _instead("the optimizer's arithmetic stays on the device"),
    "bf16.enabled": _as("--precision.compute bfloat16", bool, _compute("bfloat16")),
    "bf16.immediate_grad_update": _instead("gradients are summed in float32"),
    "fp16.enabled": _as("--precision.compute float16", bool, _compute("float16")),
    "fp16.auto_cast": _instead("layers cast what they read"),
    "fp16.loss_scale": _to("precision.loss_scale", int, float),
    "fp16.loss_scale_window": _to("precision.loss_scale_window", int),
    "fp16.initial_scale_power": _SCALING,
    "fp16.hysteresis": _SCALING,
    "fp16.consecutive_hysteresis": _SCALING,
    "fp16.min_loss_scale": _SCALING,
    "amp": _not("say bf16 or fp16"),
    "data_types.grad_accum_dtype": _instead("gradients are summed in float32"),
    "communication_data_type": _as("--precision.gradients", str, _gradients),
    "prescale_gradients": _instead("micro-batches are weighted before they are summed"),
    "gradient_predivide_factor": _instead("micro-batches are weighted before they are summed"),
    "optimizer.type": _as("--optimizer.name, Adam being AdamW as in DeepSpeed", str, _optimizer),
    "optimizer.params.lr": _to("optimizer.learning_rate", int, float),
    "optimizer.params.betas": _as("--optimizer.options b1 and b2", list, _betas),
    "optimizer.params.eps": _to("optimizer.options.eps", int, float),
    "optimizer.params.momentum": _to("optimizer.options.momentum", int, float),
    "optimizer.params.nesterov": _to("optimizer.options.nesterov", bool),
    "optimizer.params.weight_decay": _to("optimizer.weight_decay", int, float),
    "optimizer.params.torch_adam": _instead("optax computes it, fused by XLA"),
    "optimizer.params.adam_w_mode": _instead('decay is decoupled; "name": "adam" has none'),
    "optimizer.params.bias_correction": _instead("Adam's moments are always corrected"),
    "optimizer.params.amsgrad": _not('say "optimizer": {"name": "amsgrad"}'),
    "scheduler.type": _as("--optimizer.schedule", str, _schedule),
    "scheduler.params.warmup_num_steps": _to("optimizer.warmup_steps", int),
    "scheduler.params.total_num_steps": _to("steps", int),
    "scheduler.params.warmup_max_lr": _to("optimizer.learning_rate", int, float),
    "scheduler.params.cos_min_ratio": _to("optimizer.end_share", int, float),
    "scheduler.params.warmup_type": _instead("warm-up is linear"),
    "scheduler.params.warmup_min_lr": _not("warm-up starts at zero"),
    "scheduler.params.warmup_min_ratio": _not("warm-up starts at zero"),
    "activation_checkpointing.partition_activations": _to("zero.partition_activations", bool),
    "activation_checkpointing.cpu_checkpointing": _not("activations stay on the device; --remat"),
    "activation_checkpointing.number_checkpoints": _instead("--remat works layer by layer"),
    "activation_checkpointing.contiguous_memory_optimization": _XLA_BUFFERS,
    "activation_checkpointing.synchronize_checkpoint_boundary": _XLA_ORDER,
    "activation_checkpointing.profile": _PROFILE,
    "tensorboard.enabled": _to("run.tensorboard", bool),
    "tensorboard.output_path": _instead("events go to --run.folder"),
    "tensorboard.job_name": _instead("events go to --run.folder"),
    "csv_monitor": _METRICS,
    "wandb": _not("metrics.jsonl and TensorBoard are what a run writes"),
    "comet": _not("metrics.jsonl and TensorBoard are what a run writes"),
    "wall_clock_breakdown": _PROFILE,
    "flops_profiler": _PROFILE,
    "comms_logger": _PROFILE,
    "dump_state": _instead("the resolved settings are printed at the start"),
    "memory_breakdown": _instead("the plan's bytes are printed before the first step"),
    "checkpoint": _instead(
        "see --run.checkpoint_every and --run.checkpoints; Orbax writes sharded checkpoints"
    ),
    "dataloader_drop_last": _instead("every batch is full"),
    "disable_allgather": _XLA_ORDER,
    "sparse_gradients": _not("JAX gradients are dense"),
    "sparse_attention": _not("give the model another attention"),
    "elasticity": _not("--faults.elastic continues on fewer processes by itself"),
    "autotuning": _not("`jaxtp search` finds mesh, ZeRO stage and micro-batch before the run"),
    "compression_training": _FLOAT_KERNELS,
    "quantize_training": _FLOAT_KERNELS,
    "data_efficiency": _not("prepare the data before the run"),
    "curriculum_learning": _not("prepare the data before the run"),
    "progressive_layer_drop": _not("every layer runs"),
    "eigenvalue": _FLOAT_KERNELS,
    "pipeline.stages": _to("mesh.pp", int),
    "pipeline.partition": _instead("layers are assigned by --pipeline.load_balance"),
    "pipeline.seed_layers": _instead("--seed makes every parameter"),
    "pipeline.activation_checkpoint_interval": _instead("--remat works layer by layer"),
    "pipeline.pipe_partitioned": _BOUNDARY,
    "pipeline.grad_partitioned": _BOUNDARY,
    "aio": _not("nothing is offloaded to disks"),
    "hybrid_engine": _not(
        "`jaxtp.generate` answers with training's own arrays; see docs/generate.md"
    ),
}
"""DeepSpeed key -> what it means here."""

DEFAULTS: Mapping[str, tuple[str, Any]] = {
    "gradient_clipping": ("optimizer.clip", 0.0),
    "scheduler.type": ("optimizer.schedule", "constant"),
    "bf16 or fp16": ("precision.compute", "float32"),
}
"""What DeepSpeed does when a key is absent, and jaxtp does not; only for DeepSpeed's files."""


def translate(
    raw: Mapping[str, Any], native: Collection[str]
) -> tuple[dict[str, Any], dict[str, str], tuple[Line, ...]]:
    """Settings in jaxtp's spelling, from either.

    Args:
        raw: The file's object.
        native: Names that jaxtp's own settings begin with.

    Returns:
        Nested settings; setting -> the DeepSpeed key that it came from; one line for each key.

    Raises:
        BadConfig: TP020, for every key that is unknown, refused, of the wrong type, or says
            something else than another key for the same setting; `with_keys`.
    """
    found: dict[str, Any] = {}
    origins: dict[str, str] = {}
    lines: list[Line] = []
    problems = Problems()
    for key, value in _items(raw, native, lines):
        row = TABLE.get(key)
        try:
            if row is None and key.split(".")[0] not in native:
                raise _unknown(key, native)
            new = {key: value} if row is None else _apply(key, row, value, lines)
            for setting, setting_value in new.items():
                if setting in found and found[setting] != setting_value:
                    raise BadConfig(
                        f"wants {setting}={setting_value!r}, but "
                        f"{origins.get(setting, setting)} gave {found[setting]!r}",
                        where=key,
                        fix="keep one of the two",
                    )
                found[setting] = setting_value
                if row is not None:
                    origins.setdefault(setting, key)
        except BadConfig as problem:
            problems.add(problem)
            text = row.text if row and row.action == "refused" else problem.what
            lines[:] = [line for line in lines if line.key != key] + [Line(key, "refused", text)]
    try:
        problems.raise_any()
    except BadConfig as error:
        raise with_keys(error, lines) from None
    if origins:
        for key, (setting, value) in DEFAULTS.items():
            if setting not in found:
                found[setting] = value
                lines.append(Line(key, "default", f"absent, so --{setting} {value}"))
    return _nest(found), origins, tuple(lines)


def with_keys(error: BadConfig, lines: Iterable[Line]) -> BadConfig:
    """A refusal that also says what became of every key of a DeepSpeed file.

    Args:
        error: Why the file is refused.
        lines: One for each key, of `translate`.
    """
    given = [line for line in lines if line.action != "default"]
    if all(line.action == "refused" for line in given):
        return error  # which says it all
    listed = "\n".join(f"    {line}" for line in given)
    fix = f"{error.fix}\n  the DeepSpeed keys of the file:\n{listed}"
    return BadConfig(error.what, where=error.where, fix=fix)


def _items(
    raw: Mapping[str, Any], native: Collection[str], lines: list[Line], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """`(dotted key, value)`; sections with `enabled: false` only leave a line."""
    for name, value in raw.items():
        key = prefix + name
        inner = key.split(".")[0] in native or any(row.startswith(f"{key}.") for row in TABLE)
        if not isinstance(value, Mapping) or key in TABLE or not inner:
            yield key, value
        elif value.get("enabled") is False and f"{key}.enabled" in TABLE:
            lines.append(Line(key, "replaced", "the section is off"))
        elif not value:
            continue
        else:
            yield from _items(value, native, lines, f"{key}.")


def _apply(key: str, row: Key, value: Any, lines: list[Line]) -> Settings:
    """The settings that one DeepSpeed key asks for; adds its line."""
    if value == "auto" and row.action == "mapped":
        lines.append(Line(key, "replaced", "auto: the default stays"))
        return {}
    if row.action == "refused" and _is_off(value):
        lines.append(Line(key, "replaced", f"off; {row.text}"))
        return {}
    if row.action == "refused":
        raise BadConfig("has no meaning here", where=key, fix=row.text)
    # bool is an int to Python, and not to a reader of JSON.
    if row.kinds != (object,) and type(value) not in row.kinds:
        names = " or ".join(kind.__name__ for kind in row.kinds)
        raise BadConfig(f"{value!r} is not {names}", where=key, fix=f"it stands for {row.text}")
    lines.append(Line(key, row.action, row.text))
    return row.convert(value)


def _is_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("enabled") is False or value.get("device") == "none" or not value
    return value in (False, None, 0, "none")


def _unknown(key: str, native: Collection[str]) -> BadConfig:
    near = difflib.get_close_matches(key, (*TABLE, *native), n=1, cutoff=0.6)
    fix = f"did you mean {near[0]}?" if near else f"known: {join(sorted(native), 20)}"
    return BadConfig("unknown key", where=key, fix=fix)


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        place = nested
        for name in path:
            place = place.setdefault(name, {})
        place[last] = value
    return nested
