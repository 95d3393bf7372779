"""FLOPs and memory traffic of real compiled programs, against counts by hand."""

from pathlib import Path

import pytest

from jaxtp.compile.hlo import parse
from jaxtp.compile.instruction_work import matmul_flops, memory_bytes

DATA = Path(__file__).parent / "data" / "hlo"
VERSIONS = ("0.10.2", "0.12.0.1")


def total(name, version, cost):
    """A cost summed over what a device runs, loops multiplied."""
    module = parse((DATA / f"{name}-{version}.txt").read_text())

    def walk(computation):
        return sum(
            cost(module, computation, one)
            + (one.trip_count or 1)
            * sum(
                walk(module.computations[called])
                for called in one.calls
                if one.opcode in ("while", "conditional")
            )
            for one in computation
        )

    return walk(module.entry)


BUSY = 5 * 2 * 4096 * 2048 * 4096


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("row_product", BUSY + 2 * 1024 * 4096 // 8 * 1024),
        ("row_product_kernel", BUSY + 2 * 1024 * 4096 // 8 * 1024),
        ("gathered", BUSY + 2 * 2 * 64 * 1024 * 1024),
        ("scattered", BUSY + 2 * 2 * 1024 * 1024 * 256),
        # x @ w0 is column-parallel; XLA gathers w1 and repeats its product on every device
        ("layers", 5 * (2 * 256 * 1024 * 256 + 2 * 256 * 1024 * 1024)),
        ("layers_double", 5 * (2 * 256 * 1024 * 256 + 2 * 256 * 1024 * 1024)),
        # 4 products forward, 4 weight and 3 input gradients; the last input needs none
        ("gradients", 11 * 2 * 128 * 512 * 512),
        # 8 heads: two products forward and five backward on half of the 1024 x 1024 scores
        ("attention", 7 * 0.5 * 2 * 2 * 8 * 1024 * 1024 * 128),
    ],
)
def test_matmul_flops(name, flops, version):
    assert total(name, version, matmul_flops) == flops


@pytest.mark.parametrize("version", VERSIONS)
def test_memory_traffic_counts_slices_not_stacks(version):
    """A layer scan reads each layer's weights once, not the stack once per layer."""
    stack = 5 * 2 * 1024 * 256 * 2
    activations = 256 * 1024 * 2
    traffic = total("layers", version, memory_bytes)
    # Both slices are written out and read by the product; the weight comes back gathered.
    assert stack < traffic < 12 * stack
    per_layer = (traffic - 4 * activations) / 5
    assert per_layer < 3 * stack


@pytest.mark.parametrize("version", VERSIONS)
def test_products_and_collectives_have_no_memory_traffic(version):
    module = parse((DATA / f"manual-{version}.txt").read_text())
    for one in module.entry:
        if "all-" in one.opcode or one.opcode == "custom-call":
            assert memory_bytes(module, module.entry, one) == 0


STACKS = """HloModule stacks, is_scheduled=true

%keep (stack: bf16[8,1024], x: bf16[1024], i: s32[]) -> bf16[8,1024] {
  %stack = bf16[8,1024]{1,0} parameter(0)
  %x = bf16[1024]{0} parameter(1)
  %one = bf16[1,1024]{1,0} bitcast(%x)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %kept = bf16[8,1024]{1,0} dynamic-update-slice(%stack, %one, %i, %zero)
}

%sum (stack: bf16[8,1024], i: s32[]) -> bf16[1,1024] {
  %stack = bf16[8,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %own = bf16[1,1024]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,1024}
  ROOT %twice = bf16[1,1024]{1,0} add(%own, %own)
}

%plus (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %c = bf16[] add(%a, %b)
}

%rows (table: bf16[8,1024], at: s32[1,1], x: bf16[1,1,1024]) -> bf16[8,1024] {
  %table = bf16[8,1024]{1,0} parameter(0)
  %at = s32[1,1]{1,0} parameter(1)
  %x = bf16[1,1,1024]{2,1,0} parameter(2)
  ROOT %more = bf16[8,1024]{1,0} scatter(%table, %at, %x), to_apply=%plus
}

ENTRY %main (stack: bf16[8,1024], x: bf16[1024], i: s32[]) -> bf16[1,1024] {
  %stack = bf16[8,1024]{1,0} parameter(0)
  %x = bf16[1024]{0} parameter(1)
  %i = s32[] parameter(2)
  %row = s32[1,1]{1,0} bitcast(%i)
  %wide = bf16[1,1,1024]{2,1,0} bitcast(%x)
  %rows.1 = bf16[8,1024]{1,0} fusion(%stack, %row, %wide), kind=kInput, calls=%rows
  %keep.1 = bf16[8,1024]{1,0} fusion(%rows.1, %x, %i), kind=kLoop, calls=%keep
  ROOT %sum.1 = bf16[1,1024]{1,0} fusion(%keep.1, %i), kind=kLoop, calls=%sum
}
"""


def test_a_stack_costs_what_is_put_into_it_or_taken_from_it():
    """Rows have 2 KiB: one is read and one written, two read where one is added; 4 the index."""
    module = parse(STACKS)
    found = {one.name: memory_bytes(module, module.entry, one) for one in module.entry}
    assert found["keep.1"] == found["sum.1"] == 2 * 2048 + 4
    assert found["rows.1"] == 3 * 2048 + 4
