"""The clocks, on programs small enough to follow by hand and on real ones."""

from pathlib import Path

import compiled_programs
import pytest

from jaxtp.compile.collectives import find
from jaxtp.compile.hlo import parse
from jaxtp.compile.schedule import simulate
from jaxtp.compile.traffic import traffic
from jaxtp.cost.products import COMPILED_MEMORY_SHARE, product_seconds
from jaxtp.hardware.gpus import Target

DATA = Path(__file__).parent / "data" / "hlo"
TARGET = Target.parse("h100:1x8")
MESH = {"dp": 1, "tp": 8}

# One product of 2 * 4096^3 FLOPs; one all-reduce of 32 MiB.
PRODUCT = float(product_seconds(TARGET.device, 4096, 4096, 4096))
MOVE = TARGET.collective_seconds("all-reduce", 32 * 2**20, [range(8)])
ARRAY = "bf16[4096,4096]"
# Every program ends with a copy, which reads and writes the array.
COPY = 2 * 32 * 2**20 / (COMPILED_MEMORY_SHARE * TARGET.device.hbm_bandwidth)


def dot(name, left="%p0"):
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    return f"  %{name} = {ARRAY} dot({left}, %p0), {dims}"


def start(name, operand="%p0", op_name=""):
    groups = f'replica_groups=[1,8]<=[8], metadata={{op_name="{op_name}"}}'
    return f"  %{name} = (({ARRAY}), {ARRAY}) all-reduce-start({operand}), {groups}"


def done(name, begun):
    return f"  %{name} = {ARRAY} all-reduce-done(%{begun})"


def sync(name, operand="%p0"):
    return f"  %{name} = {ARRAY} all-reduce({operand}), replica_groups=[1,8]<=[8]"


def program(*lines, others=""):
    body = "\n".join([f"  %p0 = {ARRAY} parameter(0)", *lines])
    return (
        f"HloModule test, is_scheduled=true, num_partitions=8\n\n{others}\n"
        f"ENTRY %main (p0: {ARRAY}) -> {ARRAY} {{\n{body}\n  ROOT %out = {ARRAY} copy(%p0)\n}}\n"
    )


def run(text, mesh=MESH, target=TARGET):
    module = parse(text)
    return simulate(module, find(module, mesh), target)


@pytest.mark.parametrize(
    ("lines", "seconds", "exposed"),
    [
        # nothing to hide behind
        ([start("s"), done("d", "s")], MOVE, [MOVE]),
        ([sync("r"), dot("m")], MOVE + PRODUCT, [MOVE]),
        # a product inside the window hides its own length
        ([start("s"), dot("m"), done("d", "s")], MOVE, [MOVE - PRODUCT]),
        # three products outlast the message
        ([start("s"), dot("a"), dot("b"), dot("c"), done("d", "s")], 3 * PRODUCT, [0]),
        # a product before or after the window hides nothing
        ([dot("a"), start("s"), done("d", "s"), dot("b")], MOVE + 2 * PRODUCT, [MOVE]),
        # two messages share one link: the second starts when the first has ended
        (
            [start("s"), start("t"), dot("m"), done("d", "s"), done("e", "t")],
            2 * MOVE,
            [MOVE - PRODUCT, MOVE],
        ),
        # a synchronous message waits for the link too, and the one in front of it is as exposed
        ([start("s"), sync("r"), done("d", "s")], 2 * MOVE, [MOVE, MOVE]),
    ],
)
def test_clocks(lines, seconds, exposed):
    schedule = run(program(*lines))
    assert schedule.seconds == pytest.approx(seconds + COPY)
    assert [one.exposed for one in schedule.windows] == pytest.approx(exposed)


def test_products_in_a_window_are_named():
    schedule = run(program(dot("a"), start("s"), dot("b"), done("d", "s"), dot("c")))
    (window,) = schedule.windows
    assert [one.name for one in window.products] == ["b"]
    assert schedule.flops == 3 * 2 * 4096**3


LOOP = f"""%body (p: {ARRAY}) -> {ARRAY} {{
  %p0 = {ARRAY} parameter(0)
{start("s")}
{dot("m")}
  ROOT %d = {ARRAY} all-reduce-done(%s)
}}

%condition (p: {ARRAY}) -> pred[] {{
  %p0 = {ARRAY} parameter(0)
  ROOT %c = pred[] constant(true)
}}
"""


@pytest.mark.parametrize("trips", [1, 2, 7])
def test_loops_multiply(trips):
    loop = (
        f"  %w = {ARRAY} while(%p0), condition=%condition, body=%body, "
        f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    )
    schedule = run(program(loop, dot("after"), others=LOOP))
    assert schedule.seconds == pytest.approx(trips * MOVE + PRODUCT + COPY)
    assert schedule.communication() == pytest.approx(trips * MOVE)
    assert schedule.exposed() == pytest.approx(trips * (MOVE - PRODUCT))
    assert schedule.hidden_share() == pytest.approx(PRODUCT / MOVE)


def test_the_slowest_branch_counts():
    branches = f"""%quick (p: {ARRAY}) -> {ARRAY} {{
  %p0 = {ARRAY} parameter(0)
  ROOT %m = {ARRAY} copy(%p0)
}}

%slow (p: {ARRAY}) -> {ARRAY} {{
  %p0 = {ARRAY} parameter(0)
{start("s")}
  ROOT %d = {ARRAY} all-reduce-done(%s)
}}
"""
    choose = f"  %c = {ARRAY} conditional(%p0, %p0, %p0), branch_computations={{%quick, %slow}}"
    schedule = run(program(choose, dot("after"), others=branches))
    assert schedule.seconds == pytest.approx(MOVE + PRODUCT + COPY)
    assert len(schedule.windows) == 1


def test_forward_and_backward_apart():
    forward = [start("s", op_name="jit(f)/jvp()/dot_general"), done("d", "s")]
    backward = [start("t", op_name="jit(f)/transpose(jvp())/dot_general"), dot("m"), done("e", "t")]
    schedule = run(program(*forward, *backward))
    assert schedule.hidden_share(lambda one: not one.backward) == pytest.approx(0)
    assert schedule.hidden_share(lambda one: one.backward) == pytest.approx(PRODUCT / MOVE)
    assert schedule.hidden_share(lambda one: one.kind == "all-to-all") == 1


def test_elementwise_work_takes_the_time_of_its_memory_traffic():
    text = program(start("s"), f"  %e = {ARRAY} add(%p0, %p0)", done("d", "s"))
    schedule = run(text)
    moved = 3 * 32 * 2**20 / (2.6 / 3.35 * TARGET.device.hbm_bandwidth)
    assert schedule.exposed() == pytest.approx(MOVE - moved)
    assert schedule.seconds == pytest.approx(MOVE + COPY)
    assert schedule.product_seconds == 0


@pytest.mark.parametrize("rows", [4096, 512, 16])
def test_what_a_program_of_generation_takes_of_a_product(rows):
    """A prompt's by tiles, as in a step; of few rows cuBLAS divides the depth, so by its FLOPs."""
    few = f"bf16[{rows},4096]"
    lines = (dot("m", "%p1").replace(ARRAY, few, 1), f"  %p1 = {few} parameter(1)")
    module = parse(program(*reversed(lines)))
    device = TARGET.device
    by_tiles = float(product_seconds(device, rows, 4096, 4096))
    by_flops = 2 * rows * 4096 * 4096 / device.matmul_flops
    by_bytes = 2 * (2 * rows * 4096 + 4096**2) / (COMPILED_MEMORY_SHARE * device.hbm_bandwidth)
    want = {4096: by_tiles, 512: by_flops, 16: by_bytes}[rows]
    assert want == pytest.approx(max(by_tiles if rows == 4096 else by_flops, by_bytes))
    assert traffic(module, [], TARGET).seconds == pytest.approx(want + COPY)


# Two hosts of eight: groups inside each, groups of one GPU of each, and all sixteen.
TWO_HOSTS = Target.parse("h100:2x8")
GROUPS = {"inside": "[2,8]<=[16]", "across": "[8,2]<=[2,8]T(1,0)", "all": "[1,16]<=[16]"}
TIMES = {
    "inside": TWO_HOSTS.collective_seconds("all-reduce", 32 * 2**20, [range(8)]),
    "across": TWO_HOSTS.collective_seconds("all-reduce", 32 * 2**20, [(0, 8)]),
    "all": TWO_HOSTS.collective_seconds("all-reduce", 32 * 2**20, [range(16)]),
}


def begin(name, where):
    return start(name).replace("[1,8]<=[8]", GROUPS[where])


def run_on_two_hosts(*lines):
    text = program(*lines).replace("num_partitions=8", "num_partitions=16")
    return run(text, mesh={"dp": 2, "tp": 8}, target=TWO_HOSTS)


def test_links_move_at_once():
    ends = [done("d", "s"), done("e", "t")]
    schedule = run_on_two_hosts(begin("s", "inside"), begin("t", "across"), *ends)
    inside, across = TIMES["inside"], TIMES["across"]
    assert inside < across
    assert schedule.seconds == pytest.approx(across + COPY)
    assert schedule.busy("NVLink") == schedule.waits("NVLink") == pytest.approx(inside)
    assert schedule.busy("network") == pytest.approx(across)
    assert schedule.waits("network") == pytest.approx(across - inside)


def test_a_collective_across_hosts_with_many_of_each_takes_both_links():
    ends = [done("d", "s"), done("e", "t")]
    schedule = run_on_two_hosts(begin("s", "all"), begin("t", "inside"), *ends)
    # NVLink is free again once the part inside the hosts is done.
    assert TIMES["inside"] < TIMES["all"] < 2 * TIMES["inside"]
    assert schedule.seconds == pytest.approx(2 * TIMES["inside"] + COPY)
    assert schedule.busy("NVLink") == pytest.approx(2 * TIMES["inside"])
    assert schedule.busy("network") == pytest.approx(TIMES["all"])
    assert sum(map(schedule.waits, ("NVLink", "network"))) == pytest.approx(schedule.exposed())


def test_unscheduled_text():
    with pytest.raises(ValueError, match="not a schedule"):
        run(program(dot("m")).replace("is_scheduled=true, ", ""))


@pytest.mark.parametrize("file", sorted(DATA.glob("*.txt")), ids=lambda file: file.stem)
def test_every_second_is_work_or_waiting(file):
    module = parse(file.read_text())
    collectives = find(module, {"dp": 2, "tp": 4})
    schedule = simulate(module, collectives, TARGET)
    work = sum(one.seconds * one.repeat for one in schedule.work)
    assert schedule.seconds == pytest.approx(work + schedule.exposed())
    assert 0 <= schedule.hidden_share() <= 1
    runs = sum(one.repeat for one in schedule.windows)
    assert runs == sum(one.count for one in collectives)


@pytest.fixture(scope="module")
def compiled():
    return compiled_programs.compile_here(1, 8)


def test_a_whole_step(compiled):
    module = parse(compiled.as_text())
    collectives = find(module, MESH)
    schedule = simulate(module, collectives, TARGET)
    assert sum(one.repeat for one in schedule.windows) == sum(one.count for one in collectives)
    programs = compiled_programs
    tokens = programs.BATCH * programs.TOKENS
    heads = programs.HEADS + 2 * programs.KV_HEADS
    attention = programs.WIDTH * programs.HEAD_DIM * (heads + programs.HEADS)
    weights = attention + 3 * programs.WIDTH * programs.HIDDEN
    scores = 2 * programs.TOKENS * programs.HEADS * programs.HEAD_DIM  # plain attention, not halved
    layer = 2 * tokens * (weights + scores)
    head = 2 * tokens * programs.WIDTH * programs.VOCAB
    # Forward once, backward twice, on 8 devices.
    assert schedule.flops == pytest.approx(3 * (programs.LAYERS * layer + head) / 8, rel=0.01)
    # At this size every forward message is far longer than the work beside it.
    assert schedule.hidden_share(lambda one: not one.backward) < 0.2
