"""Collectives of real compiled programs: kinds, sizes, axes, counts and places."""

import re
from collections import Counter
from pathlib import Path

import compiled_programs
import pytest

from jaxtp.compile.collectives import KINDS, find, site
from jaxtp.compile.hlo import parse

DATA = Path(__file__).parent / "data" / "hlo"
VERSIONS = ("0.10.2", "0.12.0.1")
MIB = 2**20
KIB = 2**10


def load(name, version, dp, tp):
    module = parse((DATA / f"{name}-{version}.txt").read_text())
    return find(module, {"dp": dp, "tp": tp})


# program, (dp, tp), what moves: (kind, axes, full buffer bytes, times per step)
EXPECTED = [
    # [1024, 4096] @ [4096, 1024], contracted over tp
    ("row_product", (1, 8), [("all-reduce", ("tp",), 2 * MIB, 1)]),
    ("row_product_kernel", (1, 8), [("all-reduce", ("tp",), 2 * MIB, 1)]),
    ("row_product_sync", (1, 8), [("all-reduce", ("tp",), 2 * MIB, 1)]),
    # two [1024, 1024] weights in one message
    ("gathered", (4, 2), [("all-gather", ("dp",), 4 * MIB, 1)]),
    # the 1024 rows of one dp shard, gathered and scattered over tp
    (
        "scattered",
        (2, 4),
        [("all-gather", ("tp",), 2 * MIB, 1), ("reduce-scatter", ("tp",), 2 * MIB, 1)],
    ),
    # [256, 256] per device, moved by every collective; the branch counts as taken
    (
        "manual",
        (2, 4),
        [
            ("all-reduce", ("tp",), 128 * KIB, 1),
            ("collective-permute", ("tp",), 128 * KIB, 1),
            ("all-to-all", ("tp",), 128 * KIB, 1),
            ("reduce-scatter", ("dp",), 128 * KIB, 1),
            ("all-gather", ("dp",), 128 * KIB, 1),
            ("all-reduce", ("dp", "tp"), 128 * KIB, 1),
        ],
    ),
    # a [256, 1024] activation and a [1024, 1024] weight in one message, 5 layers
    ("layers", (2, 4), [("all-gather", ("tp",), 2560 * KIB, 5)]),
    # the same, two layers per turn of the loop and one peeled
    ("layers_double", (2, 4), [("all-gather", ("tp",), 2560 * KIB, count) for count in (2, 2, 1)]),
    # [4, 512, 1024] bf16 per dp shard, on a mesh that prints its own device order
    ("embedding", (2, 4), [("all-reduce", ("tp",), 4 * MIB, 1)]),
    # four [512, 512] gradients, fused and not
    ("gradients", (4, 2), [("all-reduce", ("dp",), 2 * MIB, 1)]),
    ("gradients_split", (4, 2), [("all-reduce", ("dp",), 512 * KIB, 1)] * 4),
    ("attention", (1, 8), []),
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "mesh", "expected"), EXPECTED, ids=[row[0] for row in EXPECTED])
def test_what_moves(name, mesh, expected, version):
    found = load(name, version, *mesh)
    assert [(one.kind, one.axes, one.num_bytes, one.count) for one in found] == expected
    assert all(one.dtype == "bf16" for one in found)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["row_product", "row_product_kernel", "scattered", "gathered"])
def test_every_start_finds_its_done(name, version):
    for one in load(name, version, 2, 4):
        assert one.is_async
        assert "start" in one.start
        assert "done" in one.done


@pytest.mark.parametrize("version", VERSIONS)
def test_a_synchronous_collective_is_its_own_done(version):
    (message,) = load("row_product_sync", version, 1, 8)
    assert not message.is_async  # 0.10 prints it as a pair all the same
    assert message.start == message.done
    assert message.num_bytes == 2 * MIB


def test_the_kernel_of_0_12_is_seen_inside_its_fusion():
    (kernel,) = load("row_product_kernel", "0.12.0.1", 1, 8)
    assert kernel.start.startswith("fusion-start")


@pytest.mark.parametrize("version", VERSIONS)
def test_places(version):
    for one in load("manual", version, 2, 4):
        assert re.fullmatch(r"make.py:\d+ body", one.source), one
    (gradients,) = load("gradients", version, 4, 2)
    assert gradients.backward
    assert "loss" in gradients.source  # 0.10 drops the metadata of a combined message
    (product,) = load("row_product", version, 1, 8)
    assert product.site == "dot_general"
    assert not product.backward


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(f)/jvp()/while/body/closed_call/btf,fd->btd/dot_general", "btf,fd->btd/dot_general"),
        ("jit(call)/call_exported/jit(step)/jvp(Model)/layers_0/attn/q/dot_general",
         "Model/layers_0/attn/q/dot_general"),
        ("jit(f)/transpose(jvp(btd,dv->btv))/dot_general", "btd,dv->btv/dot_general"),
        ("jit(body)/shard_map/cond/branch_1_fun/psum", "psum"),
        ("jit(f)/transpose(jvp())/checkpoint/rematted_computation/jit(silu)/mul", "mul"),
        ("jit(f)/transpose(jvp())/while/body/eval_jaxpr/(btf,fd->btd/transpose:btd,df->btf/mul)",
         "btf,fd->btd/transpose + 1 more"),
        ("jit(f)/(transpose(jvp())/scatter-add:transpose(jvp(btd,dv->btv))/transpose)",
         "scatter-add + 1 more"),
        ("(w:v)", "w + 1 more"),
        ("", ""),
    ],
)  # fmt: skip
def test_site(op_name, expected):
    assert site(op_name) == expected


@pytest.fixture(scope="module")
def compiled():
    return compiled_programs.compile_here(1, 8)


def test_megatron_minimum(compiled):
    """Two all-reduces a layer forward and two backward, bfloat16, and nothing else that size."""
    message = compiled_programs.BATCH * compiled_programs.TOKENS * compiled_programs.WIDTH * 2
    found = find(parse(compiled.as_text()), {"dp": 1, "tp": 8})
    layers = [one for one in found if one.count == compiled_programs.LAYERS]
    assert [one.num_bytes for one in layers] == [message] * 4
    assert [one.backward for one in layers] == [False, False, True, True]
    assert {(one.kind, one.dtype, one.axes) for one in layers} == {("all-reduce", "bf16", ("tp",))}
    ends = [one for one in found if one.count == 1 and one.num_bytes >= message]
    assert [(one.kind, one.num_bytes, one.backward) for one in ends] == [
        ("all-reduce", message, False),  # vocab-parallel embedding
        ("all-reduce", message, True),  # column-parallel head
    ]
    assert len(found) == len(layers) + len(ends) + 2  # maximum and sums of the cross entropy
    floor = (4 * compiled_programs.LAYERS + 2) * 2 * 7 / 8 * message
    assert 1 <= sum(one.wire_bytes * one.count for one in found) / floor < 1.02


def test_totals_agree_with_the_compilers_own_objects(compiled):
    theirs: Counter[str] = Counter()
    for computation in compiled.runtime_executable().hlo_modules()[0].computations():
        for instruction in computation.instructions():
            opcode = instruction.opcode.name.removeprefix("k").removesuffix("Start").lower()
            if opcode in [kind.replace("-", "") for kind in KINDS]:
                theirs[opcode] += 1
    found = find(parse(compiled.as_text()), {"dp": 1, "tp": 8})
    assert Counter(one.kind.replace("-", "") for one in found) == theirs
