"""What is priced: the sizes of a model, and how one step of it is spread over GPUs.

A `Strategy` describes runs of Megatron-LM and of PyTorch's FSDP as well as ours, so that published
runs can test the prices. Its fields are numbers, or arrays with one entry a candidate: all formulas
of this room broadcast.
"""

import dataclasses
import enum
from typing import Any

import numpy as np

from jaxtp.mesh.axes import Axis

Number = Any
"""A number or an array of numbers, one a candidate; arrays broadcast against each other."""

AXES = tuple(axis.value for axis in Axis)
"""Axes that are priced, slowest first; Megatron-LM's mesh has the same order."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """A decoder of equal blocks, each of attention and an MLP.

    Attributes:
        layers: Blocks.
        hidden: Width of the residual stream, in elements.
        ffn: Width of the MLP, or of one expert, in elements.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of one head, in elements.
        vocab: Rows of the token table.
        seq: Tokens of one sequence.
        gated: Whether the MLP has a gate besides its up-projection.
        tied: Whether the head is the token table.
        positions: Rows of a learned table of positions; 0 if there is none.
        dropout: Whether residual sums drop elements, whose masks are kept.
        experts: MLPs of a block, of which each token has a few; 0 for a plain MLP.
        chosen: Experts that a token has.
        capacity: Rows that the products of experts have, over tokens that are routed to them.
        shared_ffn: Width of the experts that every token has besides, all together.
        dense_layers: Blocks with a plain MLP where the others have experts.
        dense_ffn: Width of their MLP.
        value_dim: Width of one head's values, where it is not `head_dim`.
        query_latent: Width from which queries are made, in latent attention (DeepSeek-V2, 2024).
        kv_latent: The same for keys and values.
        rotary_dim: Elements of a head's key that all heads share there.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    seq: int
    gated: bool = False
    tied: bool = True
    positions: int = 0
    dropout: bool = False
    experts: int = 0
    chosen: int = 0
    capacity: float = 1.0
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    value_dim: int = 0
    query_latent: int = 0
    kv_latent: int = 0
    rotary_dim: int = 0

    @property
    def width(self) -> int:
        """Elements of all query heads."""
        return self.heads * self.head_dim

    @property
    def values(self) -> int:
        """Elements of all heads' results."""
        return self.heads * (self.value_dim or self.head_dim)

    @property
    def kv_width(self) -> int:
        """Elements of all keys and values."""
        return self.kv_heads * (self.head_dim + (self.value_dim or self.head_dim))

    @property
    def kv_up(self) -> int:
        """Elements of keys and values that are made from their latent."""
        return self.kv_width - self.kv_heads * self.rotary_dim

    @property
    def routed_layers(self) -> int:
        """Blocks with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def plain_ffn(self) -> int:
        """Width of the MLP of blocks without experts."""
        return self.dense_ffn if self.experts else self.ffn

    @property
    def active_ffn(self) -> float:
        """Width that a token's MLPs have together, in the mean over the blocks."""
        routed = self.chosen * self.ffn + self.shared_ffn
        share = self.routed_layers / self.layers
        return share * routed + (1 - share) * self.plain_ffn

    @property
    def attention_params(self) -> int:
        """Elements of the matrices of one block's attention."""
        out = self.hidden * self.values
        if not self.kv_latent:
            return self.hidden * (self.width + self.kv_width) + out
        down = self.query_latent + self.kv_latent + self.rotary_dim
        up = self.query_latent * self.width + self.kv_latent * self.kv_up
        return self.hidden * down + up + out

    def mlp_params(self, width: float) -> float:
        """Elements of the matrices of an MLP of some width."""
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def layer_params(self) -> float:
        """Elements of the matrices of one block, in the mean over the blocks."""
        extra = self.mlp_params(self.experts * self.ffn - self.chosen * self.ffn)
        return self.active_params + extra * self.routed_layers / self.layers

    @property
    def active_params(self) -> float:
        """Elements of those of them that work for a token."""
        return self.attention_params + self.mlp_params(self.active_ffn)

    @property
    def table_params(self) -> int:
        """Elements of the token table."""
        return self.vocab * self.hidden

    @property
    def params(self) -> float:
        """Elements of the model, norms and biases left out (less than 0.1 %)."""
        tables = self.table_params * (1 if self.tied else 2)
        return self.layers * self.layer_params + tables + self.positions * self.hidden


class Recompute(enum.IntEnum):
    """What the backward pass computes again instead of keeping; what is kept per block."""

    NONE = 0
    """Nothing; everything is kept."""
    ATTENTION = 1
    """Scores and softmax (Korthikanti et al. 2022); nothing, where a fused kernel keeps neither."""
    DOTS = 2
    """Everything but products with parameters, whose results are kept."""
    OPS = 3
    """Every other product, and elementwise work, as torchtitan's selective policy."""
    OUTPUTS = 4
    """The block from its input and the results of its two all-reduces."""
    FULL = 5
    """The block from its input."""
    STAGE = 6
    """All blocks of a pipeline stage from what entered it, and then each as under OUTPUTS."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How one step is spread over GPUs; every field a number or an array, one entry a candidate.

    Attributes:
        dp: Replicas that hold everything whole.
        fsdp: Devices over which `zero` shards.
        tp: Devices along the tensor axis.
        pp: Pipeline stages.
        rounds: Chunks of layers of each stage; more than 1 is interleaved.
        cp: Devices that a sequence is split over.
        ep: Devices that experts are sharded over; for everything else they are data parallel.
        micro_batch: Sequences of one micro-batch on one data-parallel device.
        micro_batches: Micro-batches of one step on one data-parallel device.
        zero: What is sharded over `fsdp`, over `ep` too but for experts, and over `cp` too as
            `Habits.zero_along_cp` says: 0 nothing, 1 optimizer state, 2 gradients too, 3
            parameters too.
        recompute: A `Recompute`.
        sequence_parallel: Whether the residual stream is split along tp.
        interleaved: Whether communication is hidden by hand (`overlap = "aggressive"`): with tp two
            halves of the micro-batch take turns, one's products beside the other's collectives;
            under ZeRO 3 each layer's weights are gathered beside the layer before.
        fused: Whether a kernel that keeps no scores can compute attention on this mesh; it does
            where the framework has one.
    """

    dp: Number = 1
    fsdp: Number = 1
    tp: Number = 1
    pp: Number = 1
    rounds: Number = 1
    cp: Number = 1
    ep: Number = 1
    micro_batch: Number = 1
    micro_batches: Number = 1
    zero: Number = 0
    recompute: Number = Recompute.NONE
    sequence_parallel: Number = False
    interleaved: Number = False
    fused: Number = True

    @property
    def devices(self) -> Number:
        """GPUs in all."""
        return np.asarray(self.dp) * self.fsdp * self.tp * self.pp * self.cp * self.ep

    @property
    def batch(self) -> Number:
        """Sequences of the global batch."""
        return np.asarray(self.dp) * self.fsdp * self.ep * self.micro_batch * self.micro_batches

    def take(self, index: Any) -> "Strategy":
        """The candidates that an index array or a mask selects."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        size = np.broadcast_shapes(*(np.shape(value) for value in fields.values()))
        return Strategy(**{k: np.broadcast_to(v, size)[index] for k, v in fields.items()})


def tokens_of(model: ModelSizes, strategy: Strategy) -> Number:
    """Tokens of one micro-batch on one device."""
    return np.asarray(strategy.micro_batch) * model.seq / strategy.cp


def is_recompute(strategy: Strategy, *policies: Recompute) -> Number:
    """Whether a strategy's recomputation is one of these."""
    return np.isin(strategy.recompute, policies)


def inner_devices(strategy: Strategy, axis: str) -> Number:
    """Devices along all axes that are faster than `axis`: the distance between its neighbours.

    Args:
        strategy: The sizes.
        axis: One of AXES.
    """
    product: Number = np.asarray(1)
    for faster in AXES[AXES.index(axis) + 1 :]:
        product = product * getattr(strategy, faster)
    return product
