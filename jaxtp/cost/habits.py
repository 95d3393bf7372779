"""What a framework does the same way in every run: launches, fusions, overlap, types.

The numbers of `HABITS` that are marked fitted come from `scripts/fit_cost.py`, from published runs
of that framework; the others are what its sources and papers say that it does.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How one framework runs a step.

    Attributes:
        launch_seconds: Host time of one forward pass over one block, which hides behind the device
            where that takes longer; 0 where the whole step is one compiled program.
        launches_block: Whether every launch waits for its kernel, so that host time always adds.
        step_seconds: Host time of one step outside the blocks: data, loss scale, bookkeeping.
        traffic: Bytes that elementwise work moves, relative to kernels fused as in Megatron-LM.
        score_traffic: The same of scores that are not fused, relative to `traffic`.
        softmax_multiple: What heads x sequences on one device have to be a multiple of for mask,
            scale and softmax to be one kernel, where scores are not fused.
        kept_copies: Times that what a block keeps is read or written to be stacked and taken out.
        fused_attention: Whether scores stay in the chip.
        attention: Rate of its attention kernel relative to what runs on the device sustained.
        own_attention: Whether that kernel is written for the device (`DeviceKind.attention_flops`).
        overlaps_gradients: Share of the gradients' reduction that may run beside the last backward.
        overlaps_gathers: Share of gathers and scatters under ZeRO 3 that may run beside products.
        overlaps_tensor: Share of tensor-parallel messages that runs beside products.
        gradient_bytes: Bytes of one gradient on the wire.
        accumulate_bytes: Bytes moved per parameter to add one micro-batch's gradients.
        update_bytes: Bytes moved per parameter by the optimizer.
        copy_bytes: Bytes of one parameter as products read it, held all the time; 0 if it is cast
            from the master copy when needed.
        held_gradient_bytes: Bytes of one gradient as it is held while micro-batches follow.
        single_gradient_bytes: The same where there is one micro-batch or stages.
        replica_gradient_bytes: More of it where ZeRO's shards are summed over replicas as well.
        ahead_gradient_bytes: More of it in the backward pass of blocks that are gathered ahead.
        state_bytes: Bytes of moments, and of a master copy beside the parameter, of one parameter.
        kept_streams: Widths of the residual stream that a block keeps, nothing recomputed.
        kept_inner: What it keeps of everything inside attention and MLP, relative to 16 bits each.
        workspace_bytes: What libraries keep for themselves: cuBLAS and NCCL buffers.
        logit_bytes: Bytes held at the peak for one logit.
        staged_logit_bytes: The same in pipeline stages.
        table_bytes: Bytes held beside it for one element of the token table: its dense gradient.
        score_bytes: Bytes kept for one score of attention that is not fused.
        working_score_bytes: Bytes held for one in the backward pass of its own block.
        tiles_from: Tokens of a sequence from which on attention that is not fused works in tiles
            and keeps no scores; 0 if it never does.
        stacked_gradient_bytes: Bytes of one gradient of the blocks, held whole through the backward
            pass because the loop over blocks writes into one array.
        pads_vocab: Whether a vocabulary that tp does not divide is padded.
        pads_alone: Whether it is padded for aligned products where tp is 1, too.
        zero_along_cp: What ZeRO shards along the context axis as well: 0 nothing, 1 optimizer
            state, 3 all that its stage does.
        gpipe: Whether all micro-batches are in flight at once, and not at most one a stage.
        last_stage_head: Whether the last pipeline stage alone runs the head.
        scatters_sends: Whether stages send each other the tp-th part and gather it again.
        returns_again: Whether a recomputed block sends tokens back from their experts once more,
            which nothing needs that weights them where the experts are.
    """

    launch_seconds: float = 0.0
    launches_block: bool = False
    step_seconds: float = 0.0
    traffic: float = 1.0
    score_traffic: float = 1.0
    softmax_multiple: int = 1
    kept_copies: float = 0.0
    fused_attention: bool = True
    attention: float = 1.0
    own_attention: bool = False
    overlaps_gradients: float = 0.0
    overlaps_gathers: float = 0.0
    overlaps_tensor: float = 0.0
    gradient_bytes: float = 2.0
    accumulate_bytes: float = 10.0
    update_bytes: float = 30.0
    copy_bytes: float = 2.0
    held_gradient_bytes: float = 4.0
    single_gradient_bytes: float = 4.0
    replica_gradient_bytes: float = 0.0
    ahead_gradient_bytes: float = 0.0
    state_bytes: float = 12.0
    kept_streams: float = 4.0
    kept_inner: float = 1.0
    workspace_bytes: float = 0.2e9
    logit_bytes: float = 4.0
    staged_logit_bytes: float = 4.0
    table_bytes: float = 0.0
    score_bytes: float = 5.0
    working_score_bytes: float = 5.0
    tiles_from: int = 0
    stacked_gradient_bytes: float = 0.0
    pads_vocab: bool = True
    pads_alone: bool = True
    zero_along_cp: int = 1
    gpipe: bool = False
    last_stage_head: bool = True
    scatters_sends: bool = True
    returns_again: bool = True


_MEGATRON = Habits(
    launch_seconds=0.81e-3,
    step_seconds=1e-3,
    traffic=0.95,
    softmax_multiple=4,  # megatron/model/fused_softmax.py, is_kernel_available
    fused_attention=False,
    accumulate_bytes=6,
    logit_bytes=4,
    table_bytes=4,
)
_CORE = Habits(
    launch_seconds=0.3e-3, step_seconds=4.5e-3, gradient_bytes=4, logit_bytes=4, table_bytes=4
)
_FSDP = Habits(
    launch_seconds=0.4e-3,
    step_seconds=5e-3,
    traffic=0.85,
    attention=0.77,
    overlaps_gradients=0.7,
    overlaps_gathers=0.56,
    copy_bytes=0,
    logit_bytes=16,
)
_TITAN = dataclasses.replace(_FSDP, attention=0.75, gradient_bytes=4)
_PAX = Habits(
    traffic=3.5, step_seconds=8e-3, overlaps_gradients=0.7, overlaps_gathers=0.7, copy_bytes=0
)

HABITS: Mapping[str, Habits] = MappingProxyType(
    {
        # One compiled program; parameters are float32 and cast in the layer (`jaxtp.models`).
        "jaxtp": Habits(
            # Fused attention is cuDNN's. XLA puts gathers and reductions over fsdp in front of what
            # needs them.
            own_attention=True, traffic=0.85, step_seconds=1e-3, overlaps_gradients=0.1,
            overlaps_gathers=0.1, accumulate_bytes=12,
            # As compiled for H100s, see scripts/check_cost.py: moments 8 and parameter 4; gradients
            # are summed in float32 beside those of the last micro-batch.
            copy_bytes=4, held_gradient_bytes=6, single_gradient_bytes=0, state_bytes=8,
            replica_gradient_bytes=2, ahead_gradient_bytes=4,
            kept_streams=10.2, kept_inner=3.4, score_bytes=10, working_score_bytes=12.9,
            logit_bytes=4.4, table_bytes=6.4, staged_logit_bytes=4.4, workspace_bytes=0,
            stacked_gradient_bytes=3.8, tiles_from=2048, score_traffic=2.7, kept_copies=3,
            pads_vocab=False, zero_along_cp=3, gpipe=True,
            last_stage_head=False, scatters_sends=False, returns_again=False,
        ),
        "megatron": _MEGATRON,
        # Its head at tp 1 takes what products take whose width is GPT-2's 50,257 tokens.
        "megatron-deepspeed": dataclasses.replace(_MEGATRON, pads_alone=False),
        # ZeRO 1 keeps float32 gradients that each micro-batch's are cast for and added to.
        "megatron-deepspeed-zero": dataclasses.replace(
            _MEGATRON, launch_seconds=1.9e-3, accumulate_bytes=20, launches_block=True,
            held_gradient_bytes=6, single_gradient_bytes=6,
        ),
        "megatron-core": _CORE,
        "megatron-core-overlapped": dataclasses.replace(
            _CORE, overlaps_gradients=0.9, overlaps_tensor=0.5
        ),
        "fsdp": _FSDP,
        "torchtitan-eager": dataclasses.replace(_TITAN, traffic=1.3),
        "torchtitan": _TITAN,
        "torchtitan-async": dataclasses.replace(_TITAN, overlaps_tensor=0.4),
        "pax": _PAX,
        "pax-te": dataclasses.replace(_PAX, traffic=1.2),
        "pax-2023": dataclasses.replace(_PAX, fused_attention=False),
        "pax-2023-te": dataclasses.replace(_PAX, traffic=1.2, fused_attention=False),
    }
)  # fmt: skip
"""Frameworks by name."""
