"""A run as what the prices are made from: sizes, a strategy, and how jaxtp runs a step."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtp.config.batch_sizes import is_sequence_parallel
from jaxtp.config.settings import Config
from jaxtp.cost.candidates import POLICIES
from jaxtp.cost.habits import HABITS
from jaxtp.cost.products import COMPILED_MEMORY_SHARE
from jaxtp.cost.step import StepPrice, price
from jaxtp.cost.strategy import AXES, ModelSizes, Strategy
from jaxtp.cost.wire import Wires
from jaxtp.hardware.gpus import Target
from jaxtp.models import Config as ModelConfig
from jaxtp.models import LlamaConfig
from jaxtp.train.attention import choose_attention
from jaxtp.train.planning import model_of

JAXTP = HABITS["jaxtp"]
"""How a step of ours runs."""


def step_price(config: Config, target: Target) -> StepPrice:
    """What one step of a run takes on a machine, modelled.

    Args:
        config: Resolved settings.
        target: The machine.
    """
    sizes = sizes_of(model_of(config), config.seq_len)
    return price(sizes, strategy_of(config), wires_of(target), JAXTP)


def wires_of(target: Target) -> Wires:
    """The links of a machine whose GPUs run compiled programs."""
    device = dataclasses.replace(target.device, memory_share=COMPILED_MEMORY_SHARE)
    return Wires.of(dataclasses.replace(target, device=device))


def sizes_of(model: ModelConfig, seq: int) -> ModelSizes:
    """What the prices need of a model.

    Args:
        model: Its config.
        seq: Tokens of one sequence.
    """
    sizes = ModelSizes(
        layers=model.num_hidden_layers,
        hidden=model.hidden_size,
        ffn=4 * model.hidden_size,
        heads=model.num_attention_heads,
        kv_heads=model.num_attention_heads,
        head_dim=model.hidden_size // model.num_attention_heads,
        vocab=model.vocab_size,
        seq=seq,
    )
    if not isinstance(model, LlamaConfig):
        return dataclasses.replace(sizes, positions=model.max_position_embeddings)
    experts: dict[str, Any] = {"ffn": model.intermediate_size}
    if model.num_experts:
        width = model.moe_intermediate_size or model.intermediate_size
        experts = {
            "ffn": width,
            "experts": model.num_experts,
            "chosen": model.num_experts_per_tok,
            "capacity": model.capacity_factor,
            "shared_ffn": model.n_shared_experts * width,
            "dense_layers": model.first_k_dense_replace,
            "dense_ffn": model.intermediate_size,
        }
    latents: dict[str, int] = {}
    if model.kv_lora_rank is not None:
        latents = {
            "kv_latent": model.kv_lora_rank,
            "query_latent": model.q_lora_rank or 0,
            "rotary_dim": model.rotary_width,
            "value_dim": model.v_head_dim or 0,
        }
    return dataclasses.replace(
        sizes,
        **experts,
        **latents,
        kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        gated=True,
        tied=model.tie_word_embeddings,
    )


def can_fuse(config: Config) -> bool:
    """Whether cuDNN computes attention in the step that `jaxtp preflight` compiles of a run."""
    chosen, _ = choose_attention(config, on_gpu=True, ahead=True)
    return chosen.attention == "cudnn"


def fused_on(config: Config, strategies: Strategy) -> NDArray[np.bool_]:
    """The same for a run on each of many strategies.

    Args:
        config: The run.
        strategies: Arrays of one length.
    """
    s = strategies
    # What it depends on; more replicas and more micro-batches than two change nothing.
    data = np.minimum(np.asarray(s.dp) * s.fsdp * s.ep, 2)
    asked = np.stack([s.tp, s.pp, s.cp, data, np.minimum(s.micro_batches, 2), s.zero], axis=1)
    rows, inverse = np.unique(asked, axis=0, return_inverse=True)
    found: list[bool] = []
    for tp, pp, cp, replicas, accumulation, zero in rows.tolist():
        mesh = dataclasses.replace(config.mesh, tp=tp, pp=pp, dp=replicas, fsdp=1, cp=cp)
        batch = dataclasses.replace(config.batch, accumulation=accumulation)
        stage = dataclasses.replace(config.zero, stage=zero)
        found.append(can_fuse(dataclasses.replace(config, mesh=mesh, batch=batch, zero=stage)))
    return np.asarray(found, np.bool_)[inverse.reshape(-1)]


def strategy_of(config: Config) -> Strategy:
    """The strategy of a resolved config.

    Args:
        config: Settings with all sizes filled in.
    """
    axes = {axis: getattr(config.mesh, axis) for axis in AXES if hasattr(config.mesh, axis)}
    return Strategy(
        **axes,
        rounds=config.pipeline.rounds,
        micro_batch=config.batch.micro_size,
        micro_batches=config.batch.accumulation,
        zero=config.zero.stage,
        recompute=int(POLICIES[config.remat]),
        sequence_parallel=is_sequence_parallel(config),
        interleaved=config.communication.overlap == "aggressive",
        fused=can_fuse(config),
    )
