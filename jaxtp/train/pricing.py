"""A run as what the prices are made from: sizes, a strategy, and how jaxtp runs a step."""

import dataclasses

from jaxtp.config.batch_sizes import is_sequence_parallel
from jaxtp.config.settings import Config
from jaxtp.cost.candidates import POLICIES
from jaxtp.cost.habits import HABITS, Habits
from jaxtp.cost.step import StepPrice, price
from jaxtp.cost.strategy import AXES, ModelSizes, Strategy
from jaxtp.cost.wire import Wires
from jaxtp.errors import BadUsage
from jaxtp.hardware.gpus import Target
from jaxtp.models import Config as ModelConfig
from jaxtp.models import LlamaConfig
from jaxtp.train.planning import model_of


def step_price(config: Config, target: Target) -> StepPrice:
    """What one step of a run takes on a machine, modelled.

    Args:
        config: Resolved settings.
        target: The machine.

    Raises:
        BadUsage: TP132, for experts, which are not priced.
    """
    model = model_of(config)
    sizes = sizes_of(model, config.seq_len)
    return price(sizes, strategy_of(config), Wires.of(target), habits_of(model))


def sizes_of(model: ModelConfig, seq: int) -> ModelSizes:
    """What the prices need of a model.

    Args:
        model: Its config.
        seq: Tokens of one sequence.

    Raises:
        BadUsage: TP132, for experts, which are not priced.
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
    if model.num_experts:
        raise BadUsage("experts are not priced", where="model", fix="a dense model")
    return dataclasses.replace(
        sizes,
        ffn=model.intermediate_size,
        kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        gated=True,
        tied=model.tie_word_embeddings,
    )


def habits_of(model: ModelConfig) -> Habits:
    """How jaxtp runs a model of this config."""
    fused = model.attention_implementation == "cudnn"
    return dataclasses.replace(HABITS["jaxtp"], fused_attention=fused)


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
    )
