"""Terms of prices against sums by hand: a mean over published runs would hide one that is wrong."""

import dataclasses

import pytest

from jaxtp.cost.axis_bytes import axis_bytes
from jaxtp.cost.block import block_seconds
from jaxtp.cost.data_parallel import gather_seconds
from jaxtp.cost.habits import HABITS
from jaxtp.cost.peak_memory import kept_bytes, peak_memory, state_bytes
from jaxtp.cost.products import memory_rate
from jaxtp.cost.strategy import ModelSizes, Recompute, Strategy
from jaxtp.cost.wire import Wires
from jaxtp.hardware.gpus import KINDS
from jaxtp.hardware.links import GIB
from jaxtp.models import PRESETS
from jaxtp.train.pricing import sizes_of

MODEL = ModelSizes(
    layers=24, hidden=2048, ffn=8192, heads=16, kv_heads=16, head_dim=128, vocab=51200, seq=1024
)
BLOCKS, TABLE = MODEL.layers * MODEL.layer_params, MODEL.table_params
MESSAGE = 2 * 1024 * 2048  # bytes of the residual stream of one sequence, in bfloat16
PARAMS = 8.03e9  # of Llama-3-8B
WIRES, JAXTP = Wires(KINDS["h100"], 8), HABITS["jaxtp"]


@pytest.mark.parametrize("split", [False, True])
def test_stages_send_each_tick_both_ways_and_sum_the_tables_gradient(split):
    s = Strategy(pp=2, tp=2, micro_batches=4, sequence_parallel=split)
    # 5 ticks; the batch is gathered over 2 stages in and out, forward and backward; the tied
    # table's float32 gradient, half of it on each tensor device, is summed over them.
    sends = 2 * 5 * MESSAGE + 4 * (4 * MESSAGE / 2)
    assert axis_bytes(MODEL, s)["pp"] == sends / (2 if split else 1) + 4 * TABLE / 2
    assert axis_bytes(MODEL, dataclasses.replace(s, dp=2))["pp"] == sends / (2 if split else 1)


@pytest.mark.parametrize(
    ("micro_batches", "pp", "widths"), [(1, 1, (2, 4)), (4, 1, (4, 4)), (4, 2, (2, 4))]
)
def test_replicas_sum_in_float32_only_what_accumulates_without_stages(micro_batches, pp, widths):
    sent = axis_bytes(MODEL, Strategy(dp=8, pp=pp, micro_batches=micro_batches))["dp"]
    blocks, tables = widths
    assert sent == pytest.approx(2 * 7 / 8 * (blocks * BLOCKS / pp + tables * TABLE))


def test_what_each_policy_keeps_of_a_token():
    def kept(policy):
        return kept_bytes(MODEL, Strategy(tp=2, recompute=int(policy)), JAXTP)

    stream, width, inner = 2 * 2048, 2 * 2048 / 2, 2 * 8192 / 2
    assert kept(Recompute.FULL) == stream
    assert kept(Recompute.OUTPUTS) == 2 * stream
    # Queries, keys, values, and what enters the MLP's activation.
    assert kept(Recompute.DOTS) == 2 * stream + 3 * width + inner
    # Half of those, and the result of attention.
    assert kept(Recompute.OPS) == 2 * stream + (3 * width + inner) / 2 + width


def test_experts_work_on_and_keep_all_rows_that_their_capacity_leaves():
    """Room for twice the tokens doubles everything between dispatch and return."""
    roomy = dataclasses.replace(MODEL, experts=8, chosen=2, capacity=2.0)
    tight = dataclasses.replace(roomy, capacity=1.0)
    kept = [kept_bytes(model, Strategy(), JAXTP) for model in (tight, roomy)]
    assert kept[1] - kept[0] == 2 * 2 * (2 * 2048)  # two streams of two experts
    many = Strategy(micro_batch=8)  # so that products are no longer bound by their weights
    work = [block_seconds(model, many, WIRES, JAXTP)[0].compute for model in (tight, roomy)]
    flops = 8 * 1024 * 2 * 2 * 2 * 2048 * 8192  # of a second set of rows, in both products
    assert work[1] - work[0] > flops / WIRES.device.matmul_flops


def test_recomputed_experts_take_the_way_there_again_and_no_way_back():
    """As many all-to-alls as steps with ep=2 have, compiled for GPUs: two a layer forward."""
    model = dataclasses.replace(MODEL, experts=8, chosen=2)

    def backward(policy, name="jaxtp"):
        s = Strategy(ep=8, pp=2, micro_batches=2, recompute=int(policy))
        both = [float(one.experts) for one in block_seconds(model, s, WIRES, HABITS[name])]
        return 2 * both[1] / both[0]

    assert [backward(policy) for policy in Recompute] == pytest.approx([2, 2, 3, 2, 3, 3, 5])
    assert backward(Recompute.FULL, "megatron") == pytest.approx(4)


@pytest.mark.parametrize("gradient_bytes", [2, 4])
def test_zero_3_gathers_twice_and_scatters_once_a_block(gradient_bytes):
    habits = dataclasses.replace(JAXTP, overlaps_gathers=0, gradient_bytes=gradient_bytes)
    s = Strategy(fsdp=8, zero=3, micro_batches=4)
    gather = WIRES.seconds("all-gather", 2 * MODEL.layer_params, 8, 1)
    scatter = WIRES.seconds("reduce-scatter", gradient_bytes * MODEL.layer_params, 8, 1)
    want = (4 * 24 + 1) * (gather + scatter) + 4 * 24 * gather
    assert gather_seconds(MODEL, s, WIRES, habits, 1, 1) == pytest.approx(want)
    assert gather_seconds(MODEL, dataclasses.replace(s, zero=2), WIRES, habits, 1, 1) == 0


@pytest.mark.parametrize(
    ("sizes", "apart"),
    [
        ({"fsdp": 4}, 2),
        ({"fsdp": 2, "cp": 2}, 2),
        ({"cp": 4}, 2),
        ({"fsdp": 2, "ep": 2}, 4),
        ({"fsdp": 2, "cp": 2, "ep": 2}, 4),
    ],
    ids=str,
)
def test_experts_are_gathered_from_the_nearest_that_share_them(sizes, apart):
    """Of experts alone: all else is gathered over ep too, from neighbours along tp."""
    model = dataclasses.replace(MODEL, experts=8, chosen=2)
    habits = dataclasses.replace(JAXTP, overlaps_gathers=0)
    s = Strategy(tp=2, zero=3, **sizes)
    ways, ep = sizes.get("fsdp", 1) * sizes.get("cp", 1), sizes.get("ep", 1)
    experts, plain = 8 * model.mlp_params(model.ffn) / ep, model.attention_params
    want = 0.0
    for size, count, inner in ((experts, ways, apart), (plain, ways * ep, 2)):
        gather = WIRES.seconds("all-gather", size, count, inner)  # half of 2 bytes an element
        scatter = WIRES.seconds("reduce-scatter", habits.gradient_bytes * size / 2, count, inner)
        want += 25 * (gather + scatter) + 24 * gather
    assert gather_seconds(model, s, WIRES, habits, 1, 1) == pytest.approx(want)


def test_the_backward_pass_gathers_its_inputs_again_and_repeats_two_reductions():
    def messages(**changes):
        s = Strategy(tp=4, **changes)
        return [float(one.tensor) for one in block_seconds(MODEL, s, WIRES, JAXTP)]

    forward, backward = messages()
    assert backward == forward
    assert messages(recompute=int(Recompute.FULL)) == [forward, 2 * forward]
    forward, backward = messages(sequence_parallel=True)
    gather = float(WIRES.seconds("all-gather", MESSAGE, 4, 1))
    assert backward == pytest.approx(forward + 2 * gather)


def test_gradients_are_held_once_more_where_replicas_or_gathers_ahead_need_them():
    """As compiled for Llama-3-8B on 8 H100s, 4 micro-batches of 2: 27.5, 47.9, 29.0 and 49.5 GiB,
    dp=1 or 2, plain or gathered ahead; modelled within 5 %."""
    sizes = sizes_of(PRESETS["llama3-8b"], 4096)
    usual = Strategy(
        fsdp=8, micro_batch=2, micro_batches=4, zero=3, recompute=int(Recompute.OUTPUTS)
    )

    def gib(**changes):
        return float(peak_memory(sizes, dataclasses.replace(usual, **changes), JAXTP).total) / GIB

    found = [gib(dp=dp, fsdp=8 // dp, interleaved=a) for a in (False, True) for dp in (1, 2)]
    assert found == pytest.approx([27.45, 47.91, 28.97, 49.53], rel=0.05)
    # Two bytes of a quarter of all parameters, where one micro-batch or no replica has none.
    more = state_bytes(sizes, dataclasses.replace(usual, dp=2, fsdp=4), JAXTP)
    assert more - 2 * state_bytes(sizes, usual, JAXTP) == pytest.approx(2 * PARAMS / 4, rel=0.01)


def test_one_process_waits_for_no_other_to_launch():
    habits = HABITS["megatron"]
    alone, two = (block_seconds(MODEL, Strategy(tp=n), WIRES, habits)[0].launch for n in (1, 2))
    assert alone == habits.launch_seconds < two


@pytest.mark.parametrize(
    ("heads", "tp", "in_steps"), [(16, 4, False), (16, 8, True), (24, 4, True)]
)
def test_softmax_is_in_steps_where_heads_do_not_fill_its_blocks(heads, tp, in_steps):
    """4, 2 and 6 heads a device, of one sequence; of four they fill blocks of 4 again."""
    model = dataclasses.replace(MODEL, heads=heads)
    plain = dataclasses.replace(HABITS["megatron"], softmax_multiple=1)

    def more(micro_batch):
        s = Strategy(tp=tp, micro_batch=micro_batch, recompute=int(Recompute.FULL))
        with_it, without = (
            block_seconds(model, s, WIRES, one) for one in (HABITS["megatron"], plain)
        )
        return [
            (a.launch - b.launch, a.compute - b.compute)
            for a, b in zip(with_it, without, strict=True)
        ]

    (launch, compute), (launch_again, compute_again) = more(1)
    scores = heads / tp * 1024**2 * HABITS["megatron"].traffic / memory_rate(WIRES.device)
    assert compute == pytest.approx(34 * scores * in_steps)
    assert compute_again == pytest.approx((34 + 37) * scores * in_steps)
    assert launch_again == pytest.approx(2 * launch)  # recomputed, and backward
    assert (launch > 0) == in_steps
    assert more(4) == [(0, 0), (0, 0)]
